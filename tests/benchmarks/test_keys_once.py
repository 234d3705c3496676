"""The benchmark of keys that are read once compares equal work, and its page says where it loses."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks import keys_once


def test_both_ways_compute_the_same_and_one_reads_less() -> None:
    each, once = keys_once.attentions(100, 9, requests=2)
    assert torch.equal(each(), once())
    gathered = [sum(len(part.slots) for part in parts) for parts in keys_once.lists(100, 9, requests=2)]
    assert gathered[0] == 9 * gathered[1]
    [one], [other] = keys_once.lists(100, 1)
    assert torch.equal(one.slots, other.slots), "a plain round"


def test_the_verdict_names_from_which_rows_on_once_is_faster() -> None:
    noisy = [(1.0, 1.1), (1.2, 1.0)] * 3
    said = keys_once.verdict(
        {
            **{(64, 1): noisy, (64, 5): [(4.0, 2.0)] * 6, (64, 9): noisy},
            **{(900, 1): [(3.0, 3.0)] * 6, (900, 5): [(6.0, 4.0)] * 6, (900, 9): [(9.0, 6.0)] * 6},
        }
    )
    assert "by context: 64: never; 900: 5. " in said
    assert "2.00 times as fast (5 rows of 64 tokens)" in said
    assert said.endswith("the same code either way: 1.00 to 1.05.")


def test_a_small_run_writes_its_page(tmp_path: Path) -> None:
    keys_once.main(["--turns", "6", "--contexts", "16", "32", "--out", str(tmp_path)])
    assert (tmp_path / "keys_once.svg").exists()
    assert (tmp_path / "keys_once.md").read_text().startswith("# Keys read once")
