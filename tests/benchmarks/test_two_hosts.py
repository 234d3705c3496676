"""The page of two hosts, from runs written by hand."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.two_hosts import LINKS, ONE, PHASES, Run, table


def finished(seconds: float, megabytes: float) -> Run:
    sent = dict.fromkeys(PHASES, 0.0) | {"sync": megabytes * 1e6}
    return Run(seconds=dict.fromkeys(PHASES, seconds), link_bytes=sent, lines=[{"step": 1, "policy/loss": 0.5}])


def test_steps_are_compared_with_those_of_one_host() -> None:
    runs = {ONE: finished(1.0, 0)} | {str(link): finished(1.5 + place, 8) for place, link in enumerate(LINKS)}
    page = table(runs, steps=4, model_bytes=7_000_000)
    assert page.verdict == (
        "A step takes 1.50 times as long as on one host over 1,000 Mbit/s, 0.1 ms, and 4.50 times over 100 Mbit/s, "
        "10 ms; all metrics are those of one host, to the bit. A weight sync sends 1.14 times the model's 7.0 MB over "
        "the link, 0.57 times to each host."
    )
    assert page.rows[0] == [ONE, *["1.00"] * 4, *["-"] * 4]
    assert page.rows[1] == ["1,000 Mbit/s, 0.1 ms", *["1.50"] * 4, "0.00", "0.00", "0.00", "8.00"]
    assert "takes 6.40 ms at 10 Gbit/s, and 0.160 ms at 400 Gbit/s" in page.notes

    runs[str(LINKS[1])] = replace(runs[str(LINKS[1])], lines=[{"step": 1, "policy/loss": 0.25}])
    assert "DIFFERENT metrics: 1,000 Mbit/s, 10 ms." in table(runs, steps=4, model_bytes=1).verdict
