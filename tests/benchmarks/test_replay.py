"""The page of replays counts what was equal, and what was not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import replay

FOUND = {"first": 7, "differences": 1.0, "audited": 2000, "audits": 4, "share": 0.009, "steps": 20, "responses": 128}
FOUND |= {"record_ms": 3.0, "record_share": 0.002, "bytes_per_token": 3.5, "ties": 0.0}
FOUND |= {"scored": 90_000, "unpicked": 80, "compared_share": 0.001}


def rows() -> dict[str, list[str]]:
    made = {name: ["a step", "2", "off", "2", "7", "900", "equal", "60"] for name, _ in replay.PARTS["replay"]()}
    return made | {"alarm": ["audits", "2", "coupled", "1-1000", "8000", "9", "0 differ", "9"]}


def test_a_replay_that_differs_is_not_counted_as_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "save_hunt", lambda: None)
    for name in replay.AUDITS:
        found = FOUND if name.startswith("wrong") else FOUND | {"first": 0, "differences": 0.0}
        (tmp_path / f"{replay.file_of(name)}.json").write_text(json.dumps(found))
    (tmp_path / "alarm.json").write_text(json.dumps(FOUND | {"steps": 1000, "differences": 0.0}))
    made = rows()
    verdict = replay.result(made, tmp_path).verdict
    assert verdict.startswith("24 of 24 replays are equal to the bit")
    assert "so are 21 random samples made alone" in verdict
    assert "in step 7, 7, 7 of 3 runs of 20 steps" in verdict
    assert "at most 0.9%" in verdict
    assert "1,000 right steps gave 0 alarms" in verdict
    made["run 1 off 2"][6] = "differ at step 2"
    assert replay.result(made, tmp_path).verdict.startswith("23 of 24 replays")


def test_every_rank_and_speculation_is_tried_from_every_checkpoint() -> None:
    names = [name.split()[1:] for name, _ in replay.PARTS["replay"]() if name.startswith("run ")]
    assert len({tuple(name) for name in names}) == len(names) == 2 * 3 * 3
