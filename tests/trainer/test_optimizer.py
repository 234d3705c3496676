"""Where Adam keeps its state: the same updates up to what is rounded, in checkpoints bit for bit, and never mixed."""

from __future__ import annotations

import os
from typing import Any, Literal

import pytest
import torch

from specactor.config import TrainConfig
from specactor.trainer import optimizer
from specactor.trainer.optimizer import set_rates
from tests.trainer.conftest import OPTIMIZER_STATES, OVERLAPPING


def of(two_ranks: dict[str, Any], state: str) -> dict[str, Any]:
    found: dict[str, Any] = two_ranks[f"optimizer {state}"]
    return found


@pytest.mark.parametrize("state", OPTIMIZER_STATES)
def test_updates_are_those_of_adam_in_float64_with_the_same_rounding(two_ranks: dict[str, Any], state: str) -> None:
    """Three updates of 1e-2 on two ranks. Moments of the other precision move a weight by 7e-5; in bfloat16 float32
    and float64 may round one to neighbours, which is worth 3e-6 to 1.2e-5."""
    found = of(two_ranks, state)
    right, wrong = ("bfloat16", "float32") if state == "bfloat16" else ("float32", "bfloat16")
    assert found["away"][right] < (2e-5 if state == "bfloat16" else 1e-6)
    assert found["away"][wrong] > 3e-5
    classes = {"float32": "AdamW", "bfloat16": "RoundedAdamW", "host": "HybridDeviceOptimizer"}
    assert found["classes"] == [classes[state]]
    assert ("torch.bfloat16 cpu" in found["types"]) == (state == "bfloat16")


@pytest.mark.parametrize("state", OPTIMIZER_STATES)
def test_a_resumed_run_goes_on_bit_for_bit(two_ranks: dict[str, Any], state: str) -> None:
    """In moments, main weights and metrics. Wrong: moments that stay float32 when loaded; main weights that do not
    come back."""
    found = of(two_ranks, state)
    assert found["loaded"] == found["resumed"] == [True, True]
    if state != "float32":
        assert found["wrong"] == [False, False]
    assert found["reset"] == [True, True], "moments are forgotten, main weights are not"


def test_what_a_checkpoint_remembers_of_settings_is_set_again() -> None:
    """Wrong: betas of the run that saved it."""
    saved = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], betas=(0.8, 0.99), weight_decay=0.3)
    now = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    now.load_state_dict(saved.state_dict())
    set_rates(now, 0.5, TrainConfig(adam_betas=(0.9, 0.95), weight_decay=0.1))
    [group] = now.param_groups
    assert (group["betas"], group["lr"], group["weight_decay"]) == ((0.9, 0.95), 0.5, 0.1)


@pytest.mark.parametrize("state", OPTIMIZER_STATES)
def test_another_precision_or_place_is_refused(two_ranks: dict[str, Any], state: str) -> None:
    now = "host" if state == "float32" else "float32"
    assert f"was saved with train.optimizer_state = {state}, expected {now}" in of(two_ranks, state)["refused"]
    assert of(two_ranks, state)["refused"].startswith("CheckpointError: ")


@pytest.mark.parametrize("name", [*OVERLAPPING[:2], pytest.param(OVERLAPPING[2], marks=pytest.mark.deep)])
def test_gradients_that_are_summed_meanwhile_have_the_same_bits(two_ranks: dict[str, Any], name: str) -> None:
    """After three updates. Wrong: sums that begin after the first of several micro-batches, which Megatron notices
    only because it waits for each bucket once."""
    for rank in two_ranks[f"overlap {name}"]["ranks"]:
        assert rank["in buckets"] == rank["at the end"]
        assert rank["micro-batches, in buckets"] > 1
        assert "AssertionError" in rank["wrong"]
    assert two_ranks[f"overlap {name}"]["ranks"][0]["buckets, in buckets"] > 5
    assert two_ranks[f"overlap {name}"]["ranks"][0]["buckets, at the end"] <= 2


@pytest.mark.parametrize(("state", "on_gpu", "threads"), [("host", True, 6), ("host", False, 1), ("float32", True, 1)])
def test_adam_on_the_host_has_this_ranks_share_of_the_cores(
    state: Literal["host", "float32"], on_gpu: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 24 cores and 4 ranks. On a CPU all of a rank's work has one thread."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    before, during = torch.get_num_threads(), []

    class Adam:
        def step(self) -> tuple[bool, float, None]:
            during.append(torch.get_num_threads())
            return True, 2.0, None

    assert optimizer.step(Adam(), TrainConfig(optimizer_state=state)) == 2.0
    assert during == [max(before, threads)]
    assert torch.get_num_threads() == before
