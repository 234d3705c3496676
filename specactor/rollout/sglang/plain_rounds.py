"""Rounds without drafts on SGLang's own path, in an engine that can speculate.

SGLang asks a batch for its speculative algorithm wherever plain and speculative rounds differ: when slots are taken
for the round, in the forward pass, and when tokens are handed out. A batch that has none for a round is decoded as in
an engine without speculation, at the same cost.

Invariants: between two rounds both kinds leave the same state: the length of a request counts the tokens whose keys are
in the pool, and its slots reach at least that far. Before a plain round they reach just that far, so no slot is lost.
All contact with SGLang that this needs is in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def install(decode_plainly: Callable[[Any], bool]) -> None:
    """Registers the hook with SGLang's plugin registry; `decode_plainly` is asked, with the scheduler, before every
    round of decoding. Call it from a plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    def choose(scheduler: Any, batch: Any) -> None:
        if decode_plainly(scheduler):
            begin(batch, SpeculativeAlgorithm.NONE)
            # SGLang's log divides by these, and counts rounds with drafts alone.
            count = batch.batch_size()
            scheduler.metrics_reporter.update_spec_metrics(count, 0, num_accept_tokens=count)
        else:
            batch.spec_algorithm = scheduler.spec_algorithm

    # What the round needs is compared with what is free just after this.
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.update_running_batch", choose, HookType.BEFORE)


def begin(batch: Any, none: Any) -> None:
    """The next round of this batch is a plain one. `none`: SGLang's name for no speculative algorithm."""
    sampling = batch.sampling_info  # forward passes with drafts, and prefills, leave their sums of penalties there
    sampling.acc_additive_penalties = sampling.acc_scaling_penalties = None
    if batch.spec_algorithm.is_none():
        return
    batch.spec_algorithm = none
    batch.spec_info = None
    batch.orig_seq_lens = batch.seq_lens.to(batch.orig_seq_lens.dtype)
    _give_back_reserves(batch.reqs, batch.tree_cache)


def last_tokens(batch: Any) -> torch.Tensor:
    """int64 [requests]: what the round reads. SGLang carries it over from plain rounds to plain rounds alone."""
    tokens = [req.output_ids[-1] for req in batch.reqs]
    return torch.tensor(tokens, dtype=torch.int64, device=batch.seq_lens.device)


def _give_back_reserves(reqs: Iterable[Any], tree_cache: Any) -> None:
    """Slots beyond what is committed, which speculative rounds reserve."""
    allocator = tree_cache.token_to_kv_pool_allocator
    page = allocator.page_size
    allocator.free_group_begin()
    for req in reqs:
        kv = req.kv
        if kv.kv_allocated_len > kv.kv_committed_len:  # a request that has ended has no slots
            start = -(-kv.kv_committed_len // page) * page  # a page that is in use stays
            if start < kv.kv_allocated_len:
                tree_cache.free_kv_row(kv, [(start, kv.kv_allocated_len)])
            kv.kv_allocated_len = kv.kv_committed_len
    allocator.free_group_end()
