"""Save and load: exact under the same layout, equal under others, and clear errors for what cannot be loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specactor.errors import CheckpointError
from specactor.trainer import checkpoint

SAVED = ["save TP2", "save EP2", "save PP2xVPP2", "save DP2"]


@pytest.mark.parametrize("name", SAVED)
def test_resumed_training_is_identical_to_the_last_bit(two_ranks: dict[str, Any], name: str) -> None:
    result = two_ranks[name]
    assert result["resumed"] == result["undisturbed"]
    assert result["resumed"][0]["loss"] != result["resumed"][1]["loss"]
    assert result["same_random_numbers"]


def test_a_rank_keeps_the_random_state_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its number: it is saved by a thread, to which CUDA gives the host's first GPU."""
    own, seen = torch.device("cuda", 3), list[object]()
    tracker = SimpleNamespace(get_states=dict, set_states=lambda states: None)
    random = SimpleNamespace(get_cuda_rng_tracker=lambda: tracker)
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel.random", random)
    monkeypatch.setattr(checkpoint.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    state = torch.zeros(4, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device="the thread's": seen.append(device) or state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device="the thread's": seen.append(device))
    checkpoint._save_rng(tmp_path, own)
    checkpoint._load_rng(tmp_path, own)
    assert seen == [own, own]


@pytest.mark.parametrize("name", SAVED)
def test_every_parameter_counts_its_own_adam_steps(two_ranks: dict[str, Any], name: str) -> None:
    assert two_ranks[name]["shared_steps"] == 0


def test_the_callers_state_comes_back(two_ranks: dict[str, Any]) -> None:
    assert two_ranks["save TP2"]["state"] == {"position": [1, 2.5], "name": "x"}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("save TP2", "TP2 -> PP2"),
        ("save EP2", "EP2 -> TP2xEP2"),
        ("save TP2", "TP2 -> 1"),
        ("save PP2xVPP2", "PP2xVPP2 -> PP2"),
    ],
)
def test_another_layout_goes_on_from_there(
    one_rank: dict[str, Any], two_ranks: dict[str, Any], saved: str, loaded: str
) -> None:
    result = (one_rank if loaded in one_rank else two_ranks)[loaded]
    assert "error" not in result, result
    for got, expected in zip(result["resumed"], two_ranks[saved]["undisturbed"], strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_expert_parallelism_cannot_be_switched_on_or_off(one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    on, off = two_ranks["TP2 -> EP2"]["error"], one_rank["errors"]["EP2"]
    assert "CheckpointError" in on
    assert "parallel.expert = 1 and cannot be loaded with 2" in on
    assert "Layouts with --parallel.expert 1 would work" in on
    assert "parallel.expert = 2 and cannot be loaded with 1" in off
    assert "Layouts with --parallel.expert > 1 (a divisor of 4 experts) would work" in off


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("truncated", "bytes, expected"),
        ("flipped", "its content has changed since it was saved"),
        ("missing file", "is missing. The checkpoint is damaged"),
        ("no state", "a folder without state.json"),
        ("bad json", "is not JSON"),
        ("other format", "got format 99, expected 2"),
        ("no folder", "got no such folder, expected a checkpoint folder named step-<number>"),
    ],
)
def test_damage_is_an_error_that_names_the_file(one_rank: dict[str, Any], damage: str, message: str) -> None:
    error = one_rank["errors"][damage]
    assert error.startswith("CheckpointError: ")
    assert message in error
    assert "step-0000" in error


def test_a_failed_load_leaves_the_trainer_as_it_was(one_rank: dict[str, Any]) -> None:
    assert one_rank["errors"]["afterwards"]["loss"] == one_rank["single"]["grpo"]["loss"]


def test_a_foreign_model_is_an_error_that_names_the_difference(one_rank: dict[str, Any]) -> None:
    assert "is of another model: model_type is qwen3_moe, expected qwen3" in one_rank["foreign"]["error"]


def test_another_attention_backend_is_an_error(one_rank: dict[str, Any]) -> None:
    said = one_rank["other attention"]["error"]
    own, other = {"attention_backend": "torch_native"}, {"attention_backend": "intel_amx"}
    assert f"was saved with {own} for attention, expected {other}" in said


def test_a_run_goes_on_where_it_was_saved(two_ranks: dict[str, Any], tmp_path: Path) -> None:
    """On CPUs or on GPUs, also with an attention backend that both have."""
    on_cpu = json.loads((Path(two_ranks["checkpoints"]["TP2"]) / "state.json").read_text())
    assert on_cpu["device"] == "cpu"
    on_gpu = on_cpu | {"device": "cuda"}
    for same in (on_cpu, on_gpu):
        checkpoint._check_identity(same, same, tmp_path)
    for saved, now in ((on_cpu, on_gpu), (on_gpu, on_cpu)):
        named = {"attention": {"attention_backend": "torch_native"}}
        with pytest.raises(CheckpointError, match=f"on device {saved['device']}, expected {now['device']}: the"):
            checkpoint._check_identity(saved | named, now | named, tmp_path)
    checkpoint._check_identity(on_cpu | {"attention": {}}, on_cpu, tmp_path)  # as once it was kept
    with pytest.raises(CheckpointError, match="with a backend that SGLang chose for attention, expected"):
        checkpoint._check_identity(on_gpu | {"attention": {}}, on_gpu, tmp_path)


def test_only_the_newest_are_kept_and_unfinished_ones_removed(one_rank: dict[str, Any]) -> None:
    assert one_rank["keep"]["left"] == ["step-000002", "step-000003"]
    assert one_rank["keep"]["latest"].endswith("step-000003")


def test_going_on_from_an_earlier_step_leaves_nothing_of_the_later_ones(one_rank: dict[str, Any]) -> None:
    assert one_rank["keep"]["rewound"] == ["step-000002"]


def test_files_that_one_host_does_not_see_yet_have_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS shows a folder as it was for half a minute, but for what the host itself has written."""
    for name in ("a", "b", "c"):
        (tmp_path / name).touch()
    of_ranks, found = (["a", "c"], ["b"]), dict[str, str]()
    for rank, own in enumerate(of_ranks):
        hosts: Any = SimpleNamespace(together=lambda _, work: work(), gather=lambda value, _: [*of_ranks])
        monkeypatch.setattr(checkpoint.dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(checkpoint.dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(Path, "rglob", lambda self, _, own=own: map(self.joinpath, own))
        found |= checkpoint._digests(tmp_path, checkpoint._all_files(tmp_path, hosts, "failed"))
    assert sorted(found) == ["a", "b", "c"]


def test_what_an_interrupted_removal_leaves_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of steps after the one that a run was resumed from."""
    for step in (10, 20, 30, 40):
        (tmp_path / f"step-{step:06}").mkdir()
        (tmp_path / f"step-{step:06}" / "part").touch()
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.shutil, "rmtree", lambda path, **_: None)
        checkpoint.prune(tmp_path, 20, 1)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000020"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000020"]


def test_latest_ignores_what_is_not_a_whole_checkpoint(tmp_path: Path) -> None:
    for name in ("step-000005", "step-000012", "step-000020.tmp", "step-x", "other"):
        (tmp_path / name).mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "step-000012"
    assert not (tmp_path / "step-000020.tmp").exists()
    assert checkpoint.latest(tmp_path / "absent") is None
