"""Exchanges over two real gloo ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

SCRIPT = Path(__file__).with_name("collective_script.py")


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, object]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


def test_values_of_any_length_are_gathered_by_rank(ranks: list[dict[str, object]]) -> None:
    assert [r["bytes"] for r in ranks] == [[0, 1000]] * 2
    assert [r["spans"] for r in ranks] == [[0, 1]] * 2


def test_a_flag_on_one_rank_is_seen_by_all(ranks: list[dict[str, object]]) -> None:
    assert [r["any"] for r in ranks] == [[True, False]] * 2


def test_ranks_leave_a_phase_when_the_slowest_is_done(ranks: list[dict[str, object]]) -> None:
    assert [r["together"] for r in ranks] == [0, 1]
    assert all(1.0 <= float(str(r["waited"])) < 5.0 for r in ranks)


def test_a_failure_on_one_rank_reaches_all_with_its_cause_and_the_group_stays_usable(
    ranks: list[dict[str, object]],
) -> None:
    assert ranks[0]["error"] == "PeerFailedError: doomed: rank 1 failed: EngineError: the engine is out of paper"
    assert ranks[1]["error"] == "EngineError: the engine is out of paper"
    assert [r["after"] for r in ranks] == ["goes on"] * 2


def test_what_a_rank_does_meanwhile_lasts_as_long_as_the_slowest_works(ranks: list[dict[str, object]]) -> None:
    (first, pieces, late_s, _), (second, few, *_) = [cast(list[Any], r["meanwhile"]) for r in ranks]
    assert first == second == "done"
    assert 10 < pieces < 200, "a second of pieces of a hundredth"
    assert few < pieces / 2, "the slowest waits for nobody"
    assert late_s < 1.0


def test_an_error_of_what_a_rank_does_meanwhile_reaches_all(ranks: list[dict[str, object]]) -> None:
    caught = [cast(list[Any], r["meanwhile"])[3] for r in ranks]
    assert caught[0] == "EngineError: nobody is idle for free"
    assert "nobody is idle for free" in caught[1]
