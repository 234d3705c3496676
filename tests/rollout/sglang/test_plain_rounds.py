"""Before a plain round, slots that rounds with drafts have set aside are given back, once and none besides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from specactor.rollout.sglang import verify_batch


class Slots:
    """Of a pool in which requests have 20 slots each."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.freed: list[int] = []

    def free_group_begin(self) -> None:
        self.waiting: list[int] = []

    def free_group_end(self) -> None:
        self.freed += self.waiting

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        self.waiting += [20 * kv.req_pool_idx + column for start, end in ranges for column in range(start, end)]


def request(row: int, committed: int, allocated: int) -> SimpleNamespace:
    return SimpleNamespace(
        kv=SimpleNamespace(req_pool_idx=row, kv_committed_len=committed, kv_allocated_len=allocated), output_ids=[row]
    )


class Algorithm:
    def __init__(self, *, none: bool) -> None:
        self.none = none

    def is_none(self) -> bool:
        return self.none


NONE = Algorithm(none=True)


def make_batch(page_size: int = 1) -> SimpleNamespace:
    slots = Slots(page_size)
    return SimpleNamespace(
        reqs=[request(0, 5, 9), request(1, 7, 7), request(2, 3, 4), request(3, 6, 0)],  # the last one has ended
        tree_cache=SimpleNamespace(token_to_kv_pool_allocator=slots, free_kv_row=slots.free_kv_row),
        spec_algorithm=Algorithm(none=False),
        spec_info=object(),
        seq_lens=torch.tensor([5, 7, 3, 6]),
        orig_seq_lens=torch.tensor([2, 2, 2, 2], dtype=torch.int32),
    )


def test_reserves_are_given_back_once() -> None:
    batch = make_batch()
    for _ in range(2):
        verify_batch.begin_plain_round(batch, NONE)
        assert batch.tree_cache.token_to_kv_pool_allocator.freed == [5, 6, 7, 8, 43]
        assert [req.kv.kv_allocated_len for req in batch.reqs] == [5, 7, 3, 0]


def test_pages_in_use_stay() -> None:
    batch = make_batch(page_size=4)
    batch.reqs[0].kv.kv_allocated_len = 12
    verify_batch.begin_plain_round(batch, NONE)
    assert batch.tree_cache.token_to_kv_pool_allocator.freed == [8, 9, 10, 11]
    assert [req.kv.kv_allocated_len for req in batch.reqs] == [5, 7, 3, 0]


def test_a_plain_round_knows_nothing_of_speculation() -> None:
    batch = make_batch()
    verify_batch.begin_plain_round(batch, NONE)
    assert batch.spec_algorithm is NONE
    assert batch.spec_info is None
    assert batch.orig_seq_lens.tolist() == [5, 7, 3, 6]


def test_a_round_reads_the_last_tokens() -> None:
    assert verify_batch.last_tokens(make_batch()).tolist() == [0, 1, 2, 3]
