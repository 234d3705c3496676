"""A round as a batch of SGLang's: with drafts a row per token, which reads its request's committed tokens and its own
path; or plain.

Invariant: afterwards a request's length counts its tokens with keys, and its slots reach that far; before a plain round
no further.

Shape legend: B requests, R rows, M rows with borrowed page-table rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specactor.rollout.sglang.gpu import on_device
from specactor.rollout.sglang.sampling import kinds_of, know_kinds
from specactor.rollout.speculation.verification import DraftTree, branches

_PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where the rows of each request begin, and what they hold."""

    trees: Sequence[DraftTree]
    starts: list[int]  # first row of each request; one more entry at the end: R
    owners: NDArray[np.int64]  # [R]: the number of each row's request

    @classmethod
    def of(cls, trees: Sequence[DraftTree]) -> Rows:
        num_rows = [1 + len(tree.tokens) for tree in trees]
        return cls(trees, [0, *accumulate(num_rows)], np.repeat(np.arange(len(trees)), num_rows))

    @property
    def total(self) -> int:
        return self.starts[-1]

    @property
    def drafted(self) -> bool:
        return self.total > len(self.trees)

    def plan(self, last_tokens: Sequence[int]) -> NDArray[np.int64]:
        """Return [4, R]: each row's token, request, place among the request's rows, and depth."""
        starts_B = np.array(self.starts[:-1])
        place_R = np.arange(self.total) - starts_B[self.owners]
        tokens_R = np.empty(self.total, dtype=np.int64)
        tokens_R[starts_B] = last_tokens
        tokens_R[place_R > 0] = [token for tree in self.trees if tree.tokens for token in tree.tokens]
        depth_R = place_R.copy()
        for tree, first in zip(self.trees, self.starts, strict=False):
            if tree.tokens and not tree.is_chain:
                depth_R[first : first + tree.num_rows] = tree.depths()
        return np.stack([tokens_R, self.owners, place_R, depth_R])


def num_cached(req: Any) -> int:
    """Return how many tokens have keys: all committed ones but the last."""
    return len(req.origin_input_ids) + len(req.output_ids) - 1


def spread(batch: Any, rows: Rows, *, last_tokens: Sequence[int], cached: Sequence[int], req_to_token: Tensor) -> None:
    """Turn a decode batch of B requests into one of R rows, in place and without asking the device.

    Args:
        last_tokens: of the requests, which SGLang may not have been told yet.
        cached: tokens with keys, per request.
    """
    reqs = batch.reqs
    plan_4R = rows.plan(last_tokens)
    cached_B = np.array(cached)
    plan = on_device(plan_4R, batch.seq_lens.device)  # in one copy
    batch.input_ids, owner_R, place_R, depth_R = plan.unbind(0)
    if rows.drafted:
        owner = rows.owners.tolist()
        batch.seq_lens = batch.seq_lens[owner_R]
        batch.req_pool_indices = batch.req_pool_indices[owner_R]
        batch.sampling_info = _spread_sampling(batch.sampling_info, owner, owner_R)
        batch.reqs = [reqs[i] for i in owner]
        for name in ("top_logprobs_nums", "token_ids_logprobs"):
            values = getattr(batch, name)
            if values:
                setattr(batch, name, [values[i] for i in owner])
    batch.out_cache_loc = req_to_token[batch.req_pool_indices, batch.seq_lens + place_R].to(torch.int64)
    batch.seq_lens = batch.seq_lens + depth_R + 1
    batch.seq_lens_cpu = torch.from_numpy(cached_B[rows.owners] + plan_4R[3] + 1)
    batch.seq_lens_sum = None
    batch.orig_seq_lens = batch.seq_lens.to(batch.orig_seq_lens.dtype)


def _spread_sampling(info: Any, owner: Sequence[int], owner_R: Tensor) -> Any:
    kinds = kinds_of(info)
    spread_info = copy.copy(info)
    for name in _PER_REQUEST:
        value = getattr(info, name)
        if value is not None:
            setattr(spread_info, name, value.index_select(0, owner_R))
    know_kinds(spread_info, [kinds[i] for i in owner])
    return spread_info


class Branches:
    """Page-table rows for the branches of trees, borrowed for one round.

    A request's row r writes to its (r + 1)-th free slot. A row whose ancestors are not in the slots before reads
    through a borrowed row.
    """

    def __init__(self, pool: Any, *, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._borrowed: list[int] = []

    def room(self) -> int:
        """Return how many branches can be had: none with larger pages."""
        return len(self._pool.free_slots) if self._page_size == 1 else 0

    def place(self, batch: Any, rows: Rows) -> None:
        """Give every branch a page-table row. `batch` was `spread` before."""
        homes: list[int] = []
        moves: list[tuple[int, int, int]] = []  # (borrowed row, column, column of the same slot in the request's row)
        readers: list[tuple[int, int]] = []  # (row of the batch, borrowed row)
        for tree, first in zip(rows.trees, rows.starts, strict=False):
            if not tree.tokens or tree.is_chain:
                continue
            base = int(batch.seq_lens_cpu[first]) - 1
            for path in branches(tree):
                row = self._borrow()
                homes.append(batch.reqs[first].kv.req_pool_idx)
                off = [(depth, r) for depth, r in enumerate(path) if depth != r]
                moves += [(row, base + depth, base + r) for depth, r in off]
                readers += [(first + r, row) for _, r in off]
        if not homes:
            return
        table, device = self._pool.req_to_token, self._pool.req_to_token.device
        table[on_device(self._borrowed, device)] = table[on_device(homes, device)]
        row_M, column_M, source_M = on_device(moves, device).unbind(1)
        table[row_M, column_M] = table[row_M, source_M]
        reader_M, borrowed_M = on_device(readers, device).unbind(1)
        batch.req_pool_indices[reader_M] = borrowed_M

    def keep(self, req: Any, base: int, tree: DraftTree, path: Sequence[int]) -> None:
        """Bring an accepted path's slots to where the next tokens are looked for."""
        if path[-1] == len(path) - 1:  # rows 0, 1, ..: they are there already
            return
        table, home = self._pool.req_to_token, req.kv.req_pool_idx
        chosen = set(path)
        order = [*path, *(r for r in range(tree.num_rows) if r not in chosen)]
        span = table[home, base : base + tree.num_rows]
        span.copy_(span[on_device(order, span.device)])

    def give_back(self) -> None:
        self._pool.free_slots.extend(reversed(self._borrowed))
        self._borrowed = []

    def _borrow(self) -> int:
        row: int = self._pool.free_slots.pop()
        self._borrowed.append(row)
        return row


def install_plain_rounds(decode_plainly: Callable[[Any], bool]) -> None:
    """Register the hook; `decode_plainly(scheduler)` is asked before every decoding round."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    def choose(scheduler: Any, batch: Any) -> None:
        if decode_plainly(scheduler) or (batch.reqs and _is_too_long_for_drafts(batch, scheduler)):
            begin_plain_round(batch, SpeculativeAlgorithm.NONE)
            # SGLang's log divides by these, and counts rounds with drafts alone.
            count = batch.batch_size()
            scheduler.metrics_reporter.update_spec_metrics(count, 0, num_accept_tokens=count)
        else:
            batch.spec_algorithm = scheduler.spec_algorithm

    # What the round needs is compared with what is free just after this.
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.update_running_batch", choose, HookType.BEFORE)


def _is_too_long_for_drafts(batch: Any, scheduler: Any) -> bool:
    """Return whether the pool has no room for what a round with drafts reserves behind a text, were it alone: SGLang
    would give it up, though a plain round has room."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    slots = batch.token_to_kv_pool_allocator
    longest = slots.size - slots.page_size + 1 - get_alloc_reserve_per_decode()
    if scheduler.spec_algorithm.is_none() or batch.model_config.context_len <= longest:
        return False
    # The next round of one under way was found to have room.
    return not scheduler.result_queue and max(req.kv.kv_committed_len for req in batch.reqs) > longest


def install_room() -> None:
    """Register the hook that makes page-table rows wide enough for what SGLang reserves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # Two rounds behind a text that may be as long as the context; SGLang makes room for one and four tokens. Its kernel
    # would write the others into the next request's row.
    target = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"
    HookRegistry.register(target, _with_the_reserve, HookType.AROUND)


def _with_the_reserve(original: Callable[[], int]) -> int:
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_spec

    return max(original(), get_alloc_reserve_per_decode() if get_spec().speculative_num_draft_tokens else 0)


def begin_plain_round(batch: Any, none: Any) -> None:
    """Make this batch's next round a plain one. Args: none: SGLang's `SpeculativeAlgorithm.NONE`."""
    if batch.spec_algorithm.is_none():
        return
    batch.spec_algorithm = none  # SGLang asks it wherever plain and speculative rounds differ
    batch.spec_info = None
    batch.orig_seq_lens = batch.seq_lens.to(batch.orig_seq_lens.dtype)
    _give_back_reserves(batch.reqs, batch.tree_cache)


def last_tokens(batch: Any) -> Tensor:
    """Return what the round reads, int64 [requests]."""
    # SGLang carries it over from plain rounds to plain rounds alone.
    tokens = [req.output_ids[-1] for req in batch.reqs]
    return on_device(tokens, batch.seq_lens.device)


def _give_back_reserves(reqs: Iterable[Any], tree_cache: Any) -> None:
    """Give back the slots that speculative rounds reserve."""
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
