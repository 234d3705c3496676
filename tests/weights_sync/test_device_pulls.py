"""Engines that read the trainer's parameters on the GPU that both are on: two processes, CUDA's calls by a fake."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.lib import simulated_cuda
from tests.lib.scripts import found_by

pytestmark = pytest.mark.processes

FAKE = Path(simulated_cuda.__file__).with_name("fake_cuda.cpp")
PUSHES = 6
BY_PLAN = [1, 0, 0, 0, 0, 0]
"""Rounds of buckets in each push."""
ANEW = [1, 0, 0, 1, 0, 0]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fake")
    fake = folder / "fake_cuda.so"
    subprocess.run(["c++", "-std=c++17", "-fPIC", "-shared", str(FAKE), "-o", str(fake)], check=True)
    return found_by("tests.lib.device_pulls", simulated_cuda.build(tmp_path_factory), fake, anew=True)


def went_well(run: dict[str, Any], rounds: list[int]) -> None:
    """All values arrived, no error of CUDA was left, and what was opened is closed in the end."""
    assert run["right"] == [True] * PUSHES
    assert run["rounds"] == rounds
    assert run["errors left"] == 0, "PyTorch would find it after its next kernel"
    given, opened, closed, left = run["at the end"]
    assert (given, left, opened - closed) == (0, 0, 0)


def test_an_engine_reads_what_lies_on_its_own_gpu(found: dict[str, Any]) -> None:
    """It knows that GPU by another number. Tensors are parts of two allocations, each opened once; nothing is copied to
    the host."""
    run = found["same GPU"]
    went_well(run, BY_PLAN)
    assert run["opened, closed"] == [[2, 0]] * PUSHES
    assert run["host bytes"] == 0
    assert run["reasons"] == [""] * PUSHES


def test_an_engine_on_another_gpu_reads_host_memory(found: dict[str, Any]) -> None:
    run = found["another GPU"]
    went_well(run, BY_PLAN)
    assert run["opened, closed"] == [[0, 0]] * PUSHES
    assert run["host bytes"] > 0
    assert run["reasons"] == [""] * PUSHES


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("mapped", "Take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF"),
        ("does not open", "cudaIpcOpenMemHandle"),
        ("too small", "has 65536 bytes, expected at least 1071616"),
        ("no UUID", "CUDA does not say which GPU number 0 is: CUDA error: unknown error"),
        ("no UUID of the trainer", "CUDA does not say which GPU number 1 is: CUDA error: unknown error"),
    ],
)
def test_what_cannot_be_opened_is_said_and_goes_through_the_host(found: dict[str, Any], case: str, reason: str) -> None:
    """Once; what had been opened before is closed."""
    run = found[case]
    went_well(run, BY_PLAN)
    assert reason in run["reasons"][0]
    assert run["reasons"][1:] == [""] * (PUSHES - 1)
    assert run["host bytes"] > 0
    opened, closed = run["opened, closed"][0]
    assert opened == closed


def test_only_what_is_read_is_locked(found: dict[str, Any]) -> None:
    """On both sides, in whole pages. The engine takes the last of three tensors."""
    whole, last = 4 * 64 * (48 + 40 + 24), 4 * 64 * 24
    page = 4096
    assert found["same GPU"]["locked"] == [0, 0]
    assert found["another GPU"]["locked"] == [whole, whole]
    run = found["one tensor"]
    went_well(run, BY_PLAN)
    assert all(last <= each < last + 2 * page for each in run["locked"]), run["locked"]
    assert 0 < run["host bytes"] <= last
    assert found["all locked"]["locked"] == [run["locked"][0], whole], "a wrong version of the engine"


def test_pages_that_cannot_be_locked_are_read_all_the_same(found: dict[str, Any]) -> None:
    went_well(found["no lock"], BY_PLAN)
    assert found["no lock"]["locked"] == [found["another GPU"]["locked"][0], 0]


def test_room_is_for_what_is_read(found: dict[str, Any]) -> None:
    """The host has a byte less than all tensors take. Where no engine reads them there, or few, that is enough."""
    for case, host in {"same GPU, no room": False, "one tensor, no room for all": True}.items():
        went_well(found[case], BY_PLAN)
        assert bool(found[case]["host bytes"]) == host
    run = found["no room"]
    went_well(run, [1] * PUSHES)
    [note] = set(run["notes"][:1])
    assert note == "rank 0: no memory for copies of a GPU's tensors: 28672 bytes are needed, and a rank may take 28671"
    assert run["notes"][1:] == [""] * (PUSHES - 1)
    assert (run["host bytes"], run["locked"]) == (0, [0, 0]), "locking would make the pages for which there is no room"


def test_what_an_engine_on_another_gpu_could_not_open_anyway_is_not_said(found: dict[str, Any]) -> None:
    run = found["mapped, another GPU"]
    went_well(run, BY_PLAN)
    assert run["reasons"] == [""] * PUSHES
    assert run["host bytes"] > 0


def test_a_refused_plan_leaves_nothing_open(found: dict[str, Any]) -> None:
    run = found["refused"]
    went_well(run, [1] * PUSHES)
    assert "a would be written twice" in run["notes"][0]
    assert run["opened, closed"] == [[2, 2]] * PUSHES


def test_tensors_that_are_lost_go_through_the_host(found: dict[str, Any]) -> None:
    """CUDA no longer says where the trainer's tensors lie. Engines close what they had open."""
    run = found["lost"]
    went_well(run, ANEW)
    assert "cuMemGetAddressRange" in run["reasons"][3]
    assert run["opened, closed"] == [[2, 0]] * 3 + [[2, 2]] * 3
    assert run["host bytes"] > 0


@pytest.mark.parametrize("case", ["made anew", "made anew in its place"])
def test_an_allocation_that_is_made_anew_is_opened_and_the_old_one_closed(found: dict[str, Any], case: str) -> None:
    """Also where it begins at the same byte, so that no tensor has moved."""
    run = found[case]
    went_well(run, ANEW)
    assert run["opened, closed"] == [[2, 0]] * 3 + [[4, 2]] * 3
    assert run["after checks"] == [[0, 0], [2, 2]], "before anything is loaded, so the old memory is free"
    assert run["host bytes"] == 0


def test_of_equal_ranks_that_on_the_own_gpu_is_read(found: dict[str, Any]) -> None:
    """Each hands over some tensors to the host. An engine on the GPU of one takes all of that rank; one on neither GPU
    takes what each gives to the host."""
    run = found["equal ranks"]
    pushes = [[True, rounds, ""] for rounds in (1, 0, 0)]
    assert run["reports"] == [pushes] * 2
    assert run["host bytes"] == [0, 0]
    assert run["at the end"] == [0, 2, 2, 0]
    run = found["equal ranks, another GPU"]
    assert run["reports"] == [pushes] * 2
    assert all(run["host bytes"])
    assert run["at the end"] == [0, 0, 0, 0]


@pytest.mark.parametrize("case", ["not looked at", "generation ignored"])
def test_digests_find_bytes_of_an_allocation_that_is_gone(found: dict[str, Any], case: str) -> None:
    """Wrong versions of the trainer, which do not ask whether tensors moved, or by their first bytes alone."""
    run = found[case]
    assert run["right"] == [True] * 3
    assert "a arrived with a wrong digest" in run["error"]
    assert run["killed"]


def test_wrong_versions_of_the_engine_are_found(found: dict[str, Any]) -> None:
    """One that takes a tensor for its allocation, one that closes nothing, one that closes late."""
    assert "a arrived with a wrong digest" in found["offset ignored"]["error"]
    assert found["offset ignored"]["killed"]
    assert found["nothing closed"]["at the end"][2] == 0
    assert "already mapped (208)" in found["nothing closed"]["reasons"][3]
    assert found["closed late"]["after checks"] == [[0, 0], [2, 0]]


def test_gpus_that_a_process_does_not_see_are_refused(found: dict[str, Any]) -> None:
    *refusals, current, left = found["ordinals"]
    assert len(refusals) == 2
    assert all("cudaSetDevice: invalid device ordinal (101). Look at CUDA_VISIBLE_DEVICES" in each for each in refusals)
    assert (current, left) == (0, 0)
