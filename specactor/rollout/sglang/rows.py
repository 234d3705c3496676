"""A verification round as an ordinary decode batch: one row per token, each with its own length.

A row reads the keys of its request's committed tokens and of its own path, so the kernels that decode one token at a
time verify a tree, with the same bits, whatever windows the batch mixes. All contact with SGLang's batch that this
needs is in this file.

Shape legend: B requests, R rows of all requests, C columns of the page table (one KV slot per token of a request).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specactor.rollout.draft.verification import DraftTree

_PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")
_PENALTIES = ("acc_additive_penalties", "acc_scaling_penalties")


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of each request begin, and what they hold."""

    trees: Sequence[DraftTree]
    starts: list[int]
    """First row of each request; one more entry at the end: R."""

    @classmethod
    def of(cls, trees: Sequence[DraftTree]) -> Rows:
        return cls(trees, [0, *accumulate(tree.num_rows for tree in trees)])

    @property
    def total(self) -> int:
        return self.starts[-1]


def spread(batch: Any, rows: Rows, *, req_to_token: Tensor) -> None:
    """Turn a decode batch of B requests into one of R rows, in place.

    `batch.seq_lens` counts the tokens whose keys are in the pool: all committed ones but the last, which is the root.
    """
    device = batch.seq_lens.device
    trees, reqs = rows.trees, batch.reqs
    owner = [i for i, tree in enumerate(trees) for _ in range(tree.num_rows)]
    owner_R = torch.tensor(owner, dtype=torch.int64, device=device)
    place_R = torch.tensor([r for tree in trees for r in range(tree.num_rows)], dtype=torch.int64, device=device)
    depth_R = torch.tensor([d for tree in trees for d in tree.depths()], dtype=torch.int64, device=device)
    tokens = [t for req, tree in zip(reqs, trees, strict=True) for t in (req.output_ids[-1], *tree.tokens)]
    base_R = batch.seq_lens[owner_R]
    pool_R = batch.req_pool_indices[owner_R]
    batch.out_cache_loc = req_to_token[pool_R, base_R + place_R].to(torch.int64)
    batch.req_pool_indices = pool_R
    batch.seq_lens = base_R + depth_R + 1
    batch.seq_lens_cpu = batch.seq_lens.cpu()
    batch.seq_lens_sum = None
    batch.orig_seq_lens = batch.seq_lens.to(batch.orig_seq_lens.dtype)
    batch.input_ids = torch.tensor(tokens, dtype=torch.int64, device=device)
    if rows.total > len(reqs):
        batch.sampling_info = _spread_sampling(batch.sampling_info, owner_R)
        batch.reqs = [reqs[i] for i in owner]
        for name in ("top_logprobs_nums", "token_ids_logprobs"):
            values = getattr(batch, name)
            if values:
                setattr(batch, name, [values[i] for i in owner])


def _spread_sampling(info: Any, owner_R: Tensor) -> Any:
    """The requests' sampling parameters, once per row."""
    spread_info = copy.copy(info)
    for name in (*_PER_REQUEST, *_PENALTIES):
        value = getattr(info, name)
        if value is not None:
            setattr(spread_info, name, value.index_select(0, owner_R))
    return spread_info


class Branches:
    """Page-table rows for the branches of trees, borrowed for one round from requests that are not there.

    Rows of the batch that are not on their request's first path read through such a row: the request's committed slots,
    then those of the row's own ancestors.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._borrowed: list[int] = []

    def room(self) -> int:
        """Branches that can be had."""
        return len(self._pool.free_slots)

    def place(self, batch: Any, rows: Rows) -> None:
        """Give every row that is off its request's first path a page-table row. `batch` was `spread` before."""
        table = self._pool.req_to_token
        for i, tree in enumerate(rows.trees):
            if tree.is_chain:
                continue
            first = rows.starts[i]
            base = int(batch.seq_lens_cpu[first]) - 1
            home = int(batch.req_pool_indices[first])
            slots = table[home, base : base + tree.num_rows].clone()
            for path in _paths(tree):
                row = self._borrow()
                table[row, :base] = table[home, :base]
                table[row, base : base + len(path)] = slots[torch.tensor(path, device=slots.device)]
                batch.req_pool_indices[[first + r for r in path if r > 0]] = row

    def keep(self, req: Any, base: int, tree: DraftTree, path: Sequence[int]) -> None:
        """Bring the slots of an accepted path, rows in order, to where the request's next tokens are looked for."""
        if list(path) == list(range(len(path))):
            return
        table, home = self._pool.req_to_token, req.kv.req_pool_idx
        chosen = set(path)
        order = [*path, *(r for r in range(tree.num_rows) if r not in chosen)]
        span = table[home, base : base + tree.num_rows]
        span.copy_(span[torch.tensor(order, device=span.device)])

    def give_back(self) -> None:
        self._pool.free_slots.extend(self._borrowed)
        self._borrowed = []

    def _borrow(self) -> int:
        row: int = self._pool.free_slots.pop()
        self._borrowed.append(row)
        return row


def _paths(tree: DraftTree) -> list[list[int]]:
    """From the root to every leaf. A row that is on several has the same ancestors on all of them."""
    inner = set(tree.parents)
    paths = []
    for leaf in range(1, tree.num_rows):
        if leaf in inner:
            continue
        path = [leaf]
        while path[-1] != 0:
            path.append(tree.parents[path[-1] - 1])
        paths.append(path[::-1])
    return paths


def num_branches(tree: DraftTree) -> int:
    """Page-table rows that the tree needs."""
    return 0 if tree.is_chain else tree.num_rows - len(set(tree.parents) | {0})
