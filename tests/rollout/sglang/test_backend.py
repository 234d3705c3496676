"""The arguments that engines are started with. No engine is started."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

from specactor.config import SpeculationConfig
from specactor.rollout.sglang.backend import server_args
from specactor.rollout.sglang.protocol import EngineSpec

COUPLED = SpeculationConfig(mode="coupled", drafters=("model",), draft_model="d")
BACKUP = "enable_draft_weights_cpu_backup"


def spec(speculation: SpeculationConfig) -> EngineSpec:
    return EngineSpec(
        index=0,
        model_dir="m",
        dtype="float32",
        devices=(0,),
        context_length=64,
        log_file="l",
        speculation=speculation,
    )


@pytest.mark.parametrize("gpu", [True, False])
def test_a_draft_model_in_the_engine_outlives_a_release_of_memory(gpu: bool) -> None:
    """Pushes bring it new versions only; a weight sync brings back the policy alone."""
    arguments = server_args(spec(COUPLED), gpu=gpu, memory_release=gpu)
    assert arguments["speculative_draft_model_path"] == "d"
    assert arguments[BACKUP] is True


def test_the_policy_has_no_backup() -> None:
    for speculation in (SpeculationConfig(), COUPLED):
        arguments = server_args(spec(speculation), gpu=True, memory_release=True)
        assert "enable_weights_cpu_backup" not in arguments
        assert (BACKUP in arguments) == ("speculative_draft_model_path" in arguments)


@pytest.mark.parametrize("gpu", [True, False])
def test_sglang_has_every_argument(gpu: bool) -> None:
    package = find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    order = Path(package.origin).parent / "srt/arg_groups/field_order.py"  # which imports nothing
    known = runpy.run_path(str(order))["POSITIONAL_FIELD_ORDER"]
    assert set(server_args(spec(COUPLED), gpu=gpu, memory_release=gpu)) <= set(known)
