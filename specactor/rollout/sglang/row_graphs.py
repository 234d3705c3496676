"""What an engine on GPUs prepares for verifications: CUDA graphs and index buffers with room for a row per token.

A verification is a batch of decoding with more rows. So the graphs of plain decoding serve it, up to as many rows as
the largest of them has; more run without a graph. That the same graphs run both is also why tokens are equal.

Left alone, SGLang would capture graphs of requests that bring all their draft tokens in one row. A batch of one decode
row is broadcast into such a graph without an error, and gives wrong tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def install() -> None:
    """Register the hooks with SGLang's plugin registry. Call it from a plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    for method, hook in {
        "_decode_cuda_graph_runner_cls": _graphs_of_rows,
        "max_decode_logits_rows": _of_rows,
        "init_attention_backends": _of_rows,
    }.items():
        HookRegistry.register(f"{runner}.{method}", hook, HookType.AROUND)


@contextmanager
def rows_as_requests(runner: Any) -> Iterator[None]:
    """Within, SGLang's runner takes every row of a verification for a request that is decoded plainly.

    How many requests can run, it reads from the pool of requests: for its buffers of indices, for the sizes of graphs,
    and for the buffer of their logits.
    """
    from sglang.srt.runtime_context import get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    pool, algorithm = runner.req_to_token_pool, runner.spec_algorithm
    requests = pool.size
    pool.size = requests * (get_spec().speculative_num_draft_tokens or 1)
    runner.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        yield
    finally:
        pool.size, runner.spec_algorithm = requests, algorithm


def _of_rows(original: Callable[[Any], Any], runner: Any) -> Any:
    with rows_as_requests(runner):
        return original(runner)


def _graphs_of_rows(original: Callable[[Any], type], runner: Any) -> type:
    return _subclass(original(runner)) if runner.spec_algorithm.is_speculative() else original(runner)


@functools.cache
def _subclass(graph_runner: Any) -> type:
    """Return SGLang's class of graph runners, which captures when an object is made, with rows as requests."""

    class RowGraphs(graph_runner):  # type: ignore[misc]
        def __init__(self, model_runner: Any, **named: Any) -> None:
            with rows_as_requests(model_runner):
                super().__init__(model_runner, **named)

        def can_run_graph(self, forward_batch: Any) -> bool:
            fits = len(forward_batch.input_ids) == forward_batch.batch_size * self.captured_req_width
            return fits and bool(super().can_run_graph(forward_batch))

    return RowGraphs
