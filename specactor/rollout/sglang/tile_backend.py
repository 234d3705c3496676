"""The attention backend `tiles` of engines on GPUs: SGLang's Triton backend, which decodes by `kernels`.

Prefills, the lists of keys and the buffers of CUDA graphs are SGLang's. Not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specactor.cpu.sglang_hooks import TILES, allow_seeded_sampling
from specactor.errors import EngineError


def install() -> None:
    """Register the backend with SGLang. Call it from a plugin."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    allow_seeded_sampling(TILES)
    ATTENTION_BACKENDS[TILES] = lambda runner: backend_class()(runner)


def backend_class() -> type:
    """Return a subclass of SGLang's backend, which imports CUDA's kernels."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from specactor.rollout.sglang import kernels

    class TiledAttention(TritonAttnBackend):  # type: ignore[misc]
        def __init__(self, model_runner: Any, **named: Any) -> None:
            super().__init__(model_runner, **named)
            room = self.max_kv_splits * kernels.SPLIT
            refused = {
                "latent attention": self.use_mla,
                "a sliding window": bool(self.sliding_window_size),
                "pages of several tokens": self.page_size != 1,
                "keys spread over ranks": self.dcp_size > 1,
                f"a context of more than {room} tokens": self.max_context_len > room,
            }
            if found := [what for what, is_so in refused.items() if is_so]:
                raise _refused(", ".join(found))
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
                readers_R = batch.req_pool_indices[: batch.batch_size]
                self._sizes[: len(readers_R)] = kernels.tile_sizes(readers_R)

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
            *,
            logit_cap: float = 0.0,
            sinks: Any = None,
            xai_temperature_len: int = -1,
            score_mod: Any = None,
            **_: Any,
        ) -> None:
            """Attend as SGLang calls its own."""
            if logit_cap or sinks is not None or xai_temperature_len > 0 or score_mod is not None:
                raise _refused("a model that changes attention's scores")
            lists = (kv_indptr, kv_indices, self._sizes, parts, log_totals)
            kernels.tile_attention(q, keys, values, out, *lists, scale * key_scale, value_scale)

    return TiledAttention


def _refused(what: str) -> EngineError:
    return EngineError(
        f"rollout.engine.extra_args attention_backend=tiles: got {what}, expected attention over all keys of one token "
        "per page. Use another attention_backend, such as triton."
    )
