"""Which of Megatron's fused kernels are on. In float32, which is compared with engines, the forward pass is PyTorch's
own. With `train.deterministic` no result depends on which variant of a kernel was faster."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

UNUSED = ("masked_softmax_fusion", "persist_layer_norm", "cross_entropy_loss_fusion")
"""TransformerEngine and the trainer have their own attention, norms and loss."""
GRADIENTS = "fused_weight_gradient_mlp_cuda"
"""apex's module that adds a weight's gradient in one pass. Megatron's output layer asks for it by name, so
TransformerEngine's own does not do."""
NEEDS = {
    "apply_rope_fusion": "transformer_engine",
    "moe_permute_fusion": "transformer_engine",
    "bias_activation_fusion": "transformer_engine",
    "bias_dropout_fusion": "transformer_engine",
    "gradient_accumulation_fusion": GRADIENTS,
}
"""Megatron's field -> the module that it needs."""


def present() -> dict[str, bool]:
    return {name: importlib.util.find_spec(name) is not None for name in sorted({*NEEDS.values()})}


def fields(present: Mapping[str, bool], *, gpu: bool, dtype: str, deterministic: bool) -> dict[str, bool]:
    """Return fields of Megatron's TransformerConfig."""
    fused = gpu and present["transformer_engine"]
    rounds = dtype == "bfloat16"
    return dict.fromkeys(UNUSED, False) | {
        # Computes in float32, as engines do; without it Megatron rounds sines and cosines to bfloat16 first, and reads
        # the lengths of packed sequences from the device in every layer.
        "apply_rope_fusion": fused and rounds,
        # Each token's experts are summed in one order; without it the device sums them as they come.
        "moe_permute_fusion": fused,
        # torch.compile: rounds once. The sum in its backward pass goes by a block size that was measured.
        "bias_activation_fusion": fused and rounds and not deterministic,
        "bias_dropout_fusion": fused,  # without dropout one addition, which is the same
        "gradient_accumulation_fusion": fused and present[GRADIENTS],  # of the backward pass alone, without rounding
    }


def told(on: Mapping[str, bool]) -> tuple[str, str]:
    """Return (on, off) in words."""
    names = {field: field.removesuffix("_fusion").replace("_", " ") for field in NEEDS}
    is_on, is_off = (", ".join(name for field, name in names.items() if on[field] is which) for which in (True, False))
    return is_on or "none", is_off
