"""Which of Megatron's joined kernels are on: a table, and Megatron's own opinion of each row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specactor.doctor import joined_kernels
from specactor.recipes import load
from specactor.trainer.fusions import GRADIENTS, NEEDS, UNUSED, fields
from tests.lib.scripts import found_by
from tests.trainer.conftest import environment

MODULES = sorted({*NEEDS.values()})
CASES = {
    "bfloat16": ({*MODULES}, "bfloat16", False, "rope permute activation dropout gradients"),
    "bfloat16, no apex": ({"transformer_engine"}, "bfloat16", False, "rope permute activation dropout"),
    "bfloat16, deterministic": ({*MODULES}, "bfloat16", True, "rope permute dropout gradients"),
    "float32": ({*MODULES}, "float32", False, "permute dropout gradients"),
    "float32, deterministic": ({*MODULES}, "float32", True, "permute dropout gradients"),
    "apex alone": ({GRADIENTS}, "bfloat16", False, ""),
    "nothing": (set[str](), "bfloat16", False, ""),
}
"""What is present, dtype, deterministic -> what is on where there is a GPU."""
SHORT = {
    "rope": "apply_rope_fusion",
    "permute": "moe_permute_fusion",
    "activation": "bias_activation_fusion",
    "dropout": "bias_dropout_fusion",
    "gradients": "gradient_accumulation_fusion",
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_on(case: str) -> None:
    modules, dtype, deterministic, on = CASES[case]
    present = {name: name in modules for name in MODULES}
    found = fields(present, gpu=True, dtype=dtype, deterministic=deterministic)
    assert {name for name, value in found.items() if value} == {SHORT[name] for name in on.split()}
    assert set(found) == {*SHORT.values(), *UNUSED}
    assert not any(fields(present, gpu=False, dtype=dtype, deterministic=deterministic).values())


def test_the_doctor_says_what_is_missing() -> None:
    config = load(["quickstart_plain"])
    told = joined_kernels(replace(config, model=replace(config.model, dtype="bfloat16")), transformer_engine=True)
    assert told.found == "apply rope, moe permute, bias activation, bias dropout"
    assert told.used == "separate kernels for gradient accumulation"
    assert joined_kernels(config, transformer_engine=False).found == "none"


@pytest.mark.processes
def test_megatron_takes_these_settings() -> None:
    """Its own checks, in its branch for TransformerEngine, which a stand-in with that package's names lets it take; of
    the configurations that mbridge makes of models. Settings that it must refuse are refused."""
    found = found_by("tests.trainer.fusions_script", anew=True, **environment())
    assert set(found["taken"]) == {"dense", "mixture"}
    for family, on in found["taken"].items():
        assert on == {name: name != "gradient_accumulation_fusion" for name in NEEDS}, family
    assert "TELayerNormColumnParallelLinear" in found["layer"]
    assert "TEGroupedMLP" in found["mixture's layer"]
    assert "fused_weight_gradient_mlp_cuda" in found["refused"]["gradients without apex"]
    assert "Please install TE" in found["refused"]["without TransformerEngine"]
