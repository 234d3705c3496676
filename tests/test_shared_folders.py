"""Hosts that see a shared folder as it was: rank 0 alone looks and cleans, others wait for what it has chosen."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.lib.ranks import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By two ranks. The second knows a checkpoint before the newest, and a folder that is being written."""
    base = tmp_path_factory.mktemp("hosts")
    for rank, names in enumerate([("step-000020", "step-000030.tmp"), ("step-000010", "step-000030.tmp")]):
        for name in names:
            (base / f"rank-{rank}" / "runs" / "x" / "checkpoints" / name).mkdir(parents=True)
    for name in ("made", "never"):
        (base / "rank-0" / name).mkdir()
    (base / "rank-1" / "unmade").mkdir()
    run_ranks(2, "tests.shared_folders_script", base, folder=base)
    return [json.loads((base / f"found-{rank}.json").read_text()) for rank in range(2)]


def test_all_ranks_go_on_from_the_checkpoint_that_rank_0_sees(found: list[dict[str, Any]]) -> None:
    assert [each["resumes"] for each in found] == ["runs/x/checkpoints/step-000020"] * 2
    assert [each["owns"] for each in found] == [True, False]


def test_rank_0_alone_removes_what_was_not_finished(found: list[dict[str, Any]]) -> None:
    assert found[0]["left"] == ["step-000020"]
    assert found[1]["left"] == ["step-000010", "step-000020", "step-000030.tmp"]


def test_rank_0_alone_says_whether_a_model_is_made(found: list[dict[str, Any]]) -> None:
    assert [each["made"] for each in found] == [[True, True]] * 2
    assert [each["unmade"] for each in found] == [False, False]


def test_a_rank_that_never_sees_it_is_named(found: list[dict[str, Any]]) -> None:
    said = f"never: got 'nothing there on {os.uname().nodename} (rank 1) after 0.5 s', expected what rank 0 sees there."
    told = f"ConfigError: {said} All hosts need the same file system at that path."
    assert found[1]["never"] == told
    assert found[0]["never"] == f"PeerFailedError: warm-up: rank 1 failed: {told}"


def test_ranks_that_read_other_problems_end_the_run(found: list[dict[str, Any]]) -> None:
    """A file that a host knows as it was, or a function that returns its rows in another order each time."""
    here = os.uname().nodename
    told = (
        f"data: rank 1 on {here} has other problems than rank 0 on {here}. A function has to return the same rows on "
        "every rank, and all hosts have to see the same files."
    )
    assert [(each["same problems"], each["other problems"]) for each in found] == [("", told)] * 2


def test_a_folder_that_cannot_be_written_to_is_refused_with_the_way_out(found: list[dict[str, Any]]) -> None:
    told = (
        "ConfigError: output_dir: got 'file', expected a folder that can be written to ([Errno 20] Not a directory: "
        "'file/x'). Give this user the right to, free disk space, or choose another --output-dir."
    )
    assert found[0]["unwritable"] == told
    assert found[1]["unwritable"] == f"PeerFailedError: run folder: rank 0 failed: {told}"
