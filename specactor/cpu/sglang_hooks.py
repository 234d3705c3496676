"""Hooks that let SGLang run without a GPU. Their arithmetic is in `sglang_ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specactor.cpu import gloo, sglang_ops


def install() -> None:
    """Register the hooks. Call it from a plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    gloo.share_device()
    allow_seeded_sampling("torch_native")
    _install_attention()
    _allow_capture_of_experts()
    layers = "sglang.srt.layers"
    replacements: dict[str, Callable[..., Any]] = {
        # The batch-invariant kernels of the deterministic mode are Triton's; `sglang_ops` is invariant by itself.
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode": lambda _: None,
        # SGLang's has the same bits, and compiles itself with a C++ compiler on first use.
        f"{layers}.sampler.multinomial_with_seed": sglang_ops.sample_with_noise,
    }
    wrappers: dict[str, Callable[..., Any]] = {
        f"{layers}.moe.fused_moe_native.moe_forward_native": _experts,
        f"{layers}.quantization.unquant.UnquantizedLinearMethod.apply": _linear,
        f"{layers}.logits_processor.LogitsProcessor._compute_lm_head": _lm_head,
    }
    for target, replacement in replacements.items():
        HookRegistry.register(target, replacement, HookType.REPLACE)
    for target, wrapper in wrappers.items():
        HookRegistry.register(target, wrapper, HookType.AROUND)


def allow_seeded_sampling(*backends: str) -> None:
    """Add attention backends to those that the deterministic mode trusts with seeds per request."""
    from sglang.srt.arg_groups import choices

    for names in (
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        names.extend(name for name in backends if name not in names)


def _allow_capture_of_experts() -> None:
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

    # SGLang's own is registered with CUDA, on a CPU too.
    ALLOC_MEMORY_FUNCS["cpu"] = lambda shape, dtype, **_: torch.empty(shape, dtype=dtype)


def _install_attention() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.runtime_context import get_parallel

    class BatchedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
        """Attends to all requests in one kernel call per layer."""

        def __init__(self, model_runner: Any) -> None:
            super().__init__(model_runner)
            config, ranks = model_runner.model_config, get_parallel().attn_tp_size
            self._queries = config.num_attention_heads // ranks // config.get_num_kv_heads(ranks)

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self._batched = forward_batch.forward_mode.is_decode() and forward_batch.encoder_lens is None
            if self._batched:
                table, readers = self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices
                self._keys = sglang_ops.shared_keys(table, readers, forward_batch.seq_lens, queries=self._queries)

        def _run_sdpa_forward_decode(
            self, query: Any, output: Any, k_cache: Any, v_cache: Any, *args: Any, **kw: Any
        ) -> Any:
            window = kw["sliding_window_size"]
            if not self._batched or window is not None or query.dtype != k_cache.dtype:
                return super()._run_sdpa_forward_decode(query, output, k_cache, v_cache, *args, **kw)
            sglang_ops.decode_attention(query, k_cache, v_cache, self._keys, kw["scaling"], output)
            return output

    ATTENTION_BACKENDS["torch_native"] = BatchedAttention


def _experts(original: Callable[..., Any], layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
    # Upstream cannot skip ids of -1, which are other ranks' experts under expert parallelism.
    weights, ids, _ = topk_output
    plain = (
        config.activation == "silu"
        and not config.apply_router_weight_on_input
        and config.gemm1_alpha is None
        and getattr(layer, "w13_weight_bias", None) is None
    )
    if not plain:
        return original(layer, x, topk_output, config)
    return sglang_ops.experts(x, weights, ids, layer.w13_weight, layer.w2_weight)


def _linear(original: Callable[..., Any], method: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    if x.numel() >= sglang_ops.min_rows(layer.weight) * x.shape[-1]:
        return original(method, layer, x, bias)
    return sglang_ops.linear(x, layer.weight, bias)


def _lm_head(original: Callable[..., Any], processor: Any, hidden: Any, head: Any, *args: Any, **kwargs: Any) -> Any:
    rows, needed = hidden.shape[0], sglang_ops.min_rows(head.weight)
    if rows >= needed:
        return original(processor, hidden, head, *args, **kwargs)
    kwargs.pop("out", None)  # a buffer for as many rows as there are
    return original(processor, sglang_ops.fill_rows(hidden, needed), head, *args, **kwargs)[:rows]
