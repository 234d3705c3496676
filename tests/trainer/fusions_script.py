"""Script: what Megatron says of our settings where TransformerEngine seems to be. Prints JSON."""

# ruff: noqa: E402
from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.lib import gpu_packages

gpu_packages.stand_in("transformer-engine")  # before Megatron looks

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3MoeConfig

from specactor.config import TrainConfig
from specactor.trainer import fusions, model

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, Any] = {
    "dense": Qwen3Config(**SIZES, num_key_value_heads=2, intermediate_size=64),
    "mixture": Qwen3MoeConfig(**SIZES, num_key_value_heads=2, **EXPERTS),
}
ON = tuple(fusions.NEEDS)


def bridge_of(hf_config: Any, folder: Path, **settings: bool) -> Any:
    """Return mbridge's bridge of a model as the trainer has it on a GPU with TransformerEngine, without apex."""
    hf_config.save_pretrained(folder)
    fields, present = fusions.fields, {name: name == "transformer_engine" for name in fusions.NEEDS.values()}

    def on_a_gpu(_: object, *, gpu: bool, **named: Any) -> dict[str, bool]:
        return fields(present, gpu=True, **named) | settings

    with mock.patch.object(fusions, "fields", on_a_gpu):
        return model._make_bridge(folder, "bfloat16", False, TrainConfig(), scalar=False)


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def main() -> None:
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.moe import moe_utils

    holder = tempfile.TemporaryDirectory()  # which goes with the process
    folder = Path(holder.name)
    bridges = {family: bridge_of(config, folder / family) for family, config in MODELS.items()}
    layers = {
        family: str(get_gpt_decoder_block_spec(bridge.config, use_transformer_engine=True).layer_specs[-1])
        for family, bridge in bridges.items()
    }
    fused = bridge_of(MODELS["dense"], folder / "dense", gradient_accumulation_fusion=True).config
    refused = {
        "gradients without apex": refusal(
            lambda: ColumnParallelLinear(
                8, 8, config=fused, init_method=torch.nn.init.zeros_, bias=False, skip_weight_param_allocation=True
            )
        ),
    }
    with mock.patch.object(moe_utils, "fused_permute", None):
        refused["without TransformerEngine"] = refusal(lambda: bridge_of(MODELS["mixture"], folder / "mixture"))
    taken = {family: {name: getattr(bridge.config, name) for name in ON} for family, bridge in bridges.items()}
    print(
        json.dumps({"taken": taken, "layer": layers["dense"], "mixture's layer": layers["mixture"], "refused": refused})
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
