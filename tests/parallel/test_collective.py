"""Exchanges over two real gloo ranks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from specactor.parallel.collective import all_come
from tests.lib.ranks import run_ranks


@pytest.fixture(scope="module", params=["gloo", "fake"])
def ranks(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, object]]:
    """Of ranks whose default group is gloo, and of ranks whose default group exchanges nothing that is told here."""
    return told(tmp_path_factory, request.param)


def told(tmp_path_factory: pytest.TempPathFactory, backend: str) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("collective")
    output = run_ranks(2, "tests.parallel.collective_script", folder / "told", backend, folder=folder)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


def test_values_of_any_length_are_gathered_by_rank(ranks: list[dict[str, object]]) -> None:
    assert [r["bytes"] for r in ranks] == [[0, 1000]] * 2
    assert [r["spans"] for r in ranks] == [[0, 1]] * 2


def test_a_flag_on_one_rank_is_seen_by_all(ranks: list[dict[str, object]]) -> None:
    assert [r["any"] for r in ranks] == [[True, False]] * 2


def test_bytes_are_passed_in_order_in_messages_of_their_own(ranks: list[dict[str, object]]) -> None:
    assert [r["passed"] for r in ranks] == [[True, [5, 6, 7]]] * 2


@pytest.mark.parametrize("kind", ["late", "gone"])
def test_who_waits_for_bytes_that_nobody_sends_waits_no_longer_than_the_group(
    tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    waiting, _ = told(tmp_path_factory, kind)
    assert "ime" in str(waiting["error"]) or "losed" in str(waiting["error"]), waiting
    assert float(str(waiting["s"])) < 9.0


def test_ranks_leave_a_phase_when_the_slowest_is_done(ranks: list[dict[str, object]]) -> None:
    assert [r["together"] for r in ranks] == [0, 1]
    """The slowest needs two seconds; a rank may begin to count later than it."""
    assert all(1.0 <= float(str(r["waited"])) < 60.0 for r in ranks)


def test_a_failure_on_one_rank_reaches_all_with_its_cause_and_the_group_stays_usable(
    ranks: list[dict[str, object]],
) -> None:
    assert ranks[0]["error"] == "PeerFailedError: doomed: rank 1 failed: EngineError: the engine is out of paper"
    assert ranks[1]["error"] == "EngineError: the engine is out of paper"
    assert [r["after"] for r in ranks] == ["goes on"] * 2


def test_nothing_of_it_goes_through_nccl(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The default group stands for NCCL's: it says what it was asked for, and refuses tensors of the host."""
    for rank in told(tmp_path_factory, "rules"):
        assert rank["through NCCL"] == []
        assert rank["refused"] == ["allreduce: No backend type associated with device type cpu", [3.0, 3.0]]
    for rank in told(tmp_path_factory, "rules, wrong"):
        assert rank["through NCCL"] == ["parallel/collective.py"]


@pytest.mark.parametrize("comes", [{0, 1, 2}, {0}, {1}, {0, 2}])
def test_ranks_that_failed_know_whether_all_have(comes: set[int]) -> None:
    """A draft model that raised on some ranks of an engine left the others in its pass."""
    store = HashStore()
    with ThreadPoolExecutor(max_workers=3) as threads:
        answers = [*threads.map(lambda _: all_come(store, "failed/1", 3, within_s=0.2), comes)]
    assert answers == [len(comes) == 3] * len(comes)
