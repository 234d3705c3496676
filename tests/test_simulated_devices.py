"""What a GPU would do with our own tensor code, by devices that are pretended and values that are real."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import specactor
from tests.lib import simulated_cuda
from tests.lib.scripts import found_by

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_cuda.build(tmp_path_factory)


@pytest.fixture(scope="module")
def found(library: Path) -> dict[str, Any]:
    return found_by("tests.lib.simulated_cuda_cases", library, anew=True)


def test_a_round_on_a_device_is_the_same_and_reads_its_samples_alone(found: dict[str, Any]) -> None:
    """Arranging rows of trees, sampling of every kind, keeping what was accepted; how requests are sampled is read when
    the batch changes."""
    assert found["cuda"] == found["cpu"]
    paths = found["cpu"][1]
    assert [len(path) for path in paths] == [2, 3, 1, 2], "a branch, a whole chain, nothing, the first of a chain"
    assert paths[0] != [0, 1]
    assert found["reads of ten rounds"] == 10
    wrong = [i for i, (x, y) in enumerate(zip(found["no wait"], found["cpu"], strict=True)) if x != y]
    assert wrong == [3], "a wrong version that does not wait hands out other log-probabilities"


@pytest.fixture(scope="module")
def of_a_policy(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by("tests.lib.simulated_shards", library, tmp_path_factory.mktemp("policy"), anew=True)


def test_nothing_of_ours_makes_a_second_stream() -> None:
    """The pretended devices have one: what another stream has not waited for would not be seen."""
    package = Path(specactor.__file__).parent
    sources = {f"{file.relative_to(package)}": file.read_text() for file in package.rglob("*.py")}
    sources.pop("cpu/megatron.py")  # Megatron's, on CPUs
    made = re.compile(r"\b(?:cuda\.(?:Stream|Event|stream|ExternalStream)|wait_stream|record_stream)\b")
    assert made.search("torch.cuda.Stream()")
    assert [name for name, text in sources.items() if made.search(text)] == []


def test_experts_of_a_pass_are_copied_without_a_wait(found: dict[str, Any]) -> None:
    """By SGLang's own capturer: left alone it reads slots and experts of every pass."""
    reads, by_slot = found["experts"]["ours"]
    assert reads == 0
    assert by_slot == [0, 5, 3, 5, 0, 3, 0, 0]
    assert found["experts"]["SGLang's"] == [4, by_slot]
    assert found["experts"]["no wait"], "the copies of slots are poison before"


def test_what_learns_on_a_device_is_made_there(found: dict[str, Any]) -> None:
    """Micro-batches, and attention and rotary embedding where there is no TransformerEngine."""
    made, attended = found["learning, cuda"]
    expected, expected_attended = found["learning, cpu"]
    assert made == expected
    for one, other in zip(attended, expected_attended, strict=True):  # torch has another kernel for the CPU's own
        assert one == pytest.approx(other, abs=1e-5)


def test_a_loss_waits_for_no_device(found: dict[str, Any]) -> None:
    """Also where older policies sampled some of the tokens, which agree with no engine."""
    reads, values = found["loss, cuda"]
    assert reads == 0
    assert values == pytest.approx(found["loss, cpu"][1], rel=1e-6)


def test_weights_reach_an_engine_on_another_device(found: dict[str, Any]) -> None:
    """No number of a device travels: each side copies between its own and shared memory. Bytes that change there while
    they are loaded are on the engine's device before, and end an engine that loads them from there."""
    rows = [[3.0 * i, 3.0 * i + 1, 3.0 * i + 2] for i in range(4)]
    assert found["weights"] == [[rows, "cuda:3"]] * 2
    assert found["damaged"] == [rows, "cuda:3"]
    message, killed = found["damaged, cpu"]
    assert killed
    assert "row.0 changed while it was loaded" in message


def test_an_engine_on_another_device_pulls_by_a_plan(found: dict[str, Any]) -> None:
    """After a first push by buckets, in one wait for each device; a byte that changes on the way ends the engine."""
    *pushes, damaged = found["pulls"]
    for i, (weight, num_rounds, note, _) in enumerate(pushes):
        assert weight == [[10.0**i * (row + 4 * column) for column in range(3)] for row in range(4)]
        assert (num_rounds, note) == (int(i == 0), "")
    assert pushes[1][3] == pushes[2][3] == 2, "each side's digests"
    message, killed = damaged
    assert killed
    assert "weight arrived with a wrong digest" in message


@pytest.mark.parametrize("wait", ["of the trainer's copies", "of the engine's copies"])
def test_a_pull_that_lacks_a_wait_is_found(found: dict[str, Any], wait: str) -> None:
    """What was not waited for is poison, or is overwritten before it was read."""
    result = found["pulls that lack a wait"][wait]
    assert result["right before"]
    assert "wrong digest" in result["error"] or "was not waited for" in result["error"]


def test_a_policy_on_a_device_hands_over_what_it_has(of_a_policy: dict[str, Any]) -> None:
    """Megatron's parameters under their Hugging Face names, by buckets and then by a plan from a copy in host memory;
    where that has no room for it, by buckets alone. What an equal rank gives to the host it has on its GPU alone, and
    it says so anew when its memory moves."""
    found = of_a_policy
    assert found["shared"] == 0, "parameters stay on their device"
    assert found["pushes"] == [[rounds, "", [], found["bytes"]] for rounds in (1, 0, 0)]
    assert found["devices"] == ["cuda:3"]
    note = (
        f"rank 0: no memory for copies of a GPU's tensors: {found['bytes']} bytes are needed, and a rank may take 1000"
    )
    assert found["no room"] == [[True, note], [True, ""]]
    assert found["ranks"] == 1
    assert all(found["beside an equal rank"].values()), found["beside an equal rank"]


def test_what_a_run_starts_with_is_recorded_while_the_trainer_has_the_device(of_a_policy: dict[str, Any]) -> None:
    """By the digests that a step's record would have. Later moments are on the host, and a critic's weights nowhere."""
    found = of_a_policy["records"]
    assert found["same"]
    assert found["parameters"] == ["critic.weight", "weight"]
    assert found["too late, without a critic"] == [True, False]
    assert "memory that was freed" in found["too late"]


def test_digests_are_made_on_a_device(found: dict[str, Any]) -> None:
    assert found["digests"] == [True, False]


def test_an_optimizer_that_leaves_the_device_comes_back(found: dict[str, Any]) -> None:
    """Twice, with a step between; who does not wait for the copies finds poison in them."""
    first, second = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    third = [value + 1 for value in second]
    back = [third, [2.5] * 6, [0.0, 1.0, 2.0, 3.0], ["cuda:0", "cuda:0", "cuda:0", "cpu"]]
    assert found["offload"] == [["cpu", first], ["cpu", second], *back]
    assert found["poisoned"][0][1] != first
    assert found["poisoned"][2] != third


def test_devices_are_not_mixed(found: dict[str, Any]) -> None:
    """By the pretended devices themselves: what raises on a GPU raises here."""
    assert all("tensors on" in text for text in found["mixed"])
