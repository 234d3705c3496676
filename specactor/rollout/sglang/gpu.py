"""Graphs with a row per token, and the attention backend `tiles`, for engines on GPUs.

A verification is a decode batch with more rows: the CUDA graphs of plain decoding serve it, which keeps tokens equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specactor.config.rollout import DRAFT_ROWS, SPLIT, TILES
from specactor.cpu.sglang_hooks import allow_seeded_sampling
from specactor.errors import EngineError


def install() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if torch.cuda.is_available():
        allow_seeded_sampling(TILES)
        ATTENTION_BACKENDS[TILES] = lambda runner: backend_class()(runner)
        _keep_graphs_releasable()
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    for method, hook in {
        "_decode_cuda_graph_runner_cls": _graphs_of_rows,
        "max_decode_logits_rows": _of_rows,
        "init_attention_backends": _of_rows,
    }.items():
        HookRegistry.register(f"{runner}.{method}", hook, HookType.AROUND)


def graph_sizes(most_rows: int) -> list[int]:
    """Return numbers of rows to capture CUDA graphs of, at most an eighth, or eight, apart."""
    # SGLang would capture none for more rows than requests may run. Without one a verification of 64 requests and 4
    # draft tokens each took 18 ms on an H100, and a plain round 2 (docs/results/gpu.md).
    most = most_rows if most_rows <= 4 else -(-most_rows // 8) * 8
    sizes = [size for size in (1, 2, 4, *range(8, 257, 8)) if size < most]
    while sizes[-1:] != [most]:
        last = sizes[-1] if sizes else 0
        sizes.append(min(most, max(last + 8, last * 9 // 8 // 8 * 8)))
    return sizes


def on_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers of the host on the device, without waiting."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu":
        return host
    # A copy from ordinary memory waits until the device has done all that it was given before.
    locked = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
    return locked.copy_(host).to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """Begin to copy to the host. The copy holds once the device was waited for."""
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def _keep_graphs_releasable() -> None:
    """Undo Megatron's mode, set when SGLang's dumper imports it, which cannot release graphs."""
    import sglang.srt.debug_utils.dumper  # noqa: F401  (before, not after)
    from sglang.srt.utils import torch_memory_saver_adapter as adapter

    if saver := getattr(adapter, "_memory_saver", None):  # there is none where the package is missing
        saver.hook_mode = "preload"


@contextmanager
def rows_as_requests(runner: Any) -> Iterator[None]:
    """Have SGLang's runner decode every row like a request."""
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    # The pool's size gives the sizes of graphs, of their logits and of the buffers of indices.
    pool, algorithm = runner.req_to_token_pool, runner.spec_algorithm
    requests, per_request = pool.size, get_spec().speculative_num_draft_tokens
    if runner.is_draft_worker or not per_request:
        pool.size = max(requests, DRAFT_ROWS)
    else:
        pool.size = requests * per_request
    runner.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        # With a number of drafts attention has page tables, or a mask of all keys, for verifications of SGLang's kind.
        with get_spec().override(speculative_num_draft_tokens=None):
            yield
    finally:
        pool.size, runner.spec_algorithm = requests, algorithm


def _of_rows(original: Callable[[Any], Any], runner: Any) -> Any:
    if not runner.spec_algorithm.is_speculative():
        return original(runner)
    with rows_as_requests(runner):
        return original(runner)


def _graphs_of_rows(original: Callable[[Any], type], runner: Any) -> type:
    return _subclass(original(runner)) if runner.spec_algorithm.is_speculative() else original(runner)


@functools.cache
def _subclass(graph_runner: Any) -> type:
    class RowGraphs(graph_runner):  # type: ignore[misc]
        def __init__(self, model_runner: Any, **named: Any) -> None:  # captures graphs
            with rows_as_requests(model_runner):
                super().__init__(model_runner, **named)

        def can_run_graph(self, forward_batch: Any) -> bool:
            # A batch of one row per request is broadcast into a wider graph without an error, and gives wrong tokens.
            fits = len(forward_batch.input_ids) == forward_batch.batch_size * self.captured_req_width
            return fits and bool(super().can_run_graph(forward_batch))

    return RowGraphs


def backend_class() -> type:
    """Return SGLang's Triton backend, decoding by `kernels`. Imports CUDA's kernels."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from specactor.rollout.sglang import kernels

    class TiledAttention(TritonAttnBackend):  # type: ignore[misc]
        def __init__(self, model_runner: Any, **named: Any) -> None:
            super().__init__(model_runner, **named)
            _check(self, model_runner, room=self.max_kv_splits * SPLIT)
            # A graph reads it where it was when the graph was captured.
            self._sizes = self.kv_indptr.new_zeros(len(self.kv_indptr) - 1)
            self.decode_attention_fwd = self._attend

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self._arrange(forward_batch)

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            self._arrange(forward_batch)

        def _arrange(self, batch: Any) -> None:
            if batch.forward_mode.is_decode_or_idle():
                kernels.size_tiles(batch.req_pool_indices[: batch.batch_size], self._sizes)

        def _attend(
            self,
            q: Tensor,
            keys: Tensor,
            values: Tensor,
            out: Tensor,
            kv_indptr: Tensor,
            kv_indices: Tensor,
            parts: Tensor,
            log_totals: Tensor,
            num_splits: Tensor,
            max_splits: int,
            scale: float,
            key_scale: float,
            value_scale: float,
            **changes: Any,
        ) -> None:
            _check_scores(**changes)
            lists = (kv_indptr, kv_indices, self._sizes, parts, log_totals)
            kernels.tile_attention(q, keys, values, out, *lists, scale * key_scale, value_scale)

    return TiledAttention


def _check(backend: Any, runner: Any, *, room: int) -> None:
    """Raise EngineError for what `tiles` has not."""
    refused = {
        "latent attention": backend.use_mla,
        "a sliding window": bool(backend.sliding_window_size),
        "pages of several tokens": backend.page_size != 1,
        f"keys in {runner.kv_cache_dtype}": runner.kv_cache_dtype != runner.dtype,
        "keys spread over ranks": backend.dcp_size > 1,
        f"a context of more than {room} tokens": backend.max_context_len > room,
    }
    if found := [what for what, is_so in refused.items() if is_so]:
        raise _refused(", ".join(found))


def _check_scores(
    *, logit_cap: float = 0.0, sinks: Any = None, xai_temperature_len: int = -1, score_mod: Any = None, **_: Any
) -> None:
    if logit_cap or sinks is not None or xai_temperature_len > 0 or score_mod is not None:
        raise _refused("a model that changes attention's scores")


def _refused(what: str) -> EngineError:
    return EngineError(
        f"rollout.engine.extra_args attention_backend=tiles: got {what}, expected attention over all keys of one token "
        "per page. Use another attention_backend, such as triton."
    )
