"""Experts of Megatron's local layer spec, without a Python module call per expert and token group.

Parameters, names and checkpoints are those of Megatron's `SequentialMLP`. Shapes: T tokens sorted by expert, I and O
the inner sizes of one linear map, E local experts.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


class GroupedLinear(torch.autograd.Function):
    """y[t] = W[e(t)] x[t], the first ``counts[0]`` tokens going to expert 0, and so on. Arguments of ``apply``: x_TI,
    counts (E ints that sum to T), then E weights of shape (O, I). Returns y_TO."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, counts: list[int], *weights_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, *weights_OI)
        ctx.counts = counts
        y_TO = x_TI.new_empty(x_TI.shape[0], weights_OI[0].shape[0])
        for x, y, weight in zip(torch.split(x_TI, counts), torch.split(y_TO, counts), weights_OI, strict=True):
            torch.mm(x, weight.t(), out=y)
        return y_TO

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, *weights_OI = ctx.saved_tensors
        grad_TO = grad_TO.contiguous()
        grad_TI = torch.empty_like(x_TI)
        grads_OI = []
        tokens = (torch.split(tensor, ctx.counts) for tensor in (x_TI, grad_TI, grad_TO))
        for x, grad_x, grad_y, weight in zip(*tokens, weights_OI, strict=True):
            torch.mm(grad_y, weight, out=grad_x)
            grads_OI.append(grad_y.t() @ x)
        return grad_TI, None, *grads_OI


def grouped_linear(x_TI: Tensor, counts: list[int], weights_OI: list[Tensor]) -> Tensor:
    y_TO: Tensor = GroupedLinear.apply(x_TI, counts, *weights_OI)  # type: ignore[no-untyped-call]
    return y_TO


class GroupedExperts(SequentialMLP):  # type: ignore[misc]
    """Gated experts without biases; anything else is left to `SequentialMLP`."""

    def forward(self, tokens_TI: Tensor, tokens_per_expert: Tensor, probs_T: Tensor) -> tuple[Tensor, None]:
        """tokens_TI sorted by expert, probs_T their router weights -> (outputs_TI, no bias)."""
        config = self.config
        if not config.gated_linear_unit or config.add_bias_linear or config.moe_apply_probs_on_input:
            return super().forward(tokens_TI, tokens_per_expert, probs_T)  # type: ignore[no-any-return]
        counts = tokens_per_expert.tolist()
        both = grouped_linear(tokens_TI, counts, [e.linear_fc1.weight for e in self.local_experts])
        gate, up = both.chunk(2, dim=-1)
        hidden = (config.activation_func(gate) * up * probs_T[:, None]).to(tokens_TI.dtype)
        return grouped_linear(hidden, counts, [e.linear_fc2.weight for e in self.local_experts]), None


def grouped_mlp_modules(self: Any, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> tuple[Any, Any]:
    """Return our experts in place of `LocalSpecProvider.grouped_mlp_modules`'."""
    return GroupedExperts, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
