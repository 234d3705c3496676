"""Page-table rows of trees: a row reads its own ancestors' slots, and no slot is ever lost."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from specactor.rollout.sglang.verify_batch import Branches, Rows
from specactor.rollout.speculation.verification import DraftTree, branches, chain, merged

BASE = 5
COLUMNS = 24
several = st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=4)


class Pool:
    """Of eight rows; row i holds slots 100 i, 100 i + 1, .."""

    def __init__(self, taken: int) -> None:
        self.req_to_token = torch.arange(COLUMNS)[None, :] + 100 * torch.arange(20)[:, None]
        self.free_slots = list(range(taken, 20))


def spread_batch(trees: list[DraftTree]) -> SimpleNamespace:
    """As `spread` leaves it, of requests with rows 0, 1, .. and BASE tokens in the pool each."""
    owner = [i for i, tree in enumerate(trees) for _ in range(tree.num_rows)]
    lengths = [BASE + depth + 1 for tree in trees for depth in tree.depths()]
    return SimpleNamespace(
        reqs=[SimpleNamespace(kv=SimpleNamespace(req_pool_idx=i)) for i in owner],
        req_pool_indices=torch.tensor(owner),
        seq_lens_cpu=torch.tensor(lengths),
    )


def ancestors(tree: DraftTree, row: int) -> list[int]:
    path = [row]
    while path[-1]:
        path.append(tree.parents[path[-1] - 1])
    return path[::-1]


@given(several, several)
def test_rows_read_the_text_and_their_ancestors(one: list[list[int]], two: list[list[int]]) -> None:
    trees = [merged(one), chain([1, 2]), merged(two), DraftTree()]
    pool, batch = Pool(taken=len(trees)), spread_batch(trees)
    free = sorted(pool.free_slots)
    page_table = Branches(pool, page_size=1)
    page_table.place(batch, Rows.of(trees))
    assert len(pool.free_slots) == len(free) - sum(len(branches(tree)) for tree in trees)
    rows = iter(range(len(batch.reqs)))
    for i, tree in enumerate(trees):
        for own in range(tree.num_rows):
            row = next(rows)
            read = pool.req_to_token[batch.req_pool_indices[row], : batch.seq_lens_cpu[row]].tolist()
            text = list(range(BASE)) + [BASE + r for r in ancestors(tree, own)]
            assert read == [100 * i + column for column in text]
    page_table.give_back()
    assert sorted(pool.free_slots) == free


@given(several, st.data())
def test_an_accepted_path_comes_first_and_no_slot_is_lost(drafts: list[list[int]], data: st.DataObject) -> None:
    tree, pool = merged(drafts), Pool(taken=1)
    path = ancestors(tree, data.draw(st.integers(0, tree.num_rows - 1)))
    before = pool.req_to_token[0].tolist()
    req = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=0))
    Branches(pool, page_size=1).keep(req, BASE, tree, path)
    after = pool.req_to_token[0].tolist()
    assert after[:BASE] == before[:BASE]
    assert after[BASE : BASE + len(path)] == [before[BASE + row] for row in path]
    assert sorted(after) == before
    assert after[BASE + tree.num_rows :] == before[BASE + tree.num_rows :]


def test_pages_of_several_slots_have_no_branches() -> None:
    assert Branches(Pool(taken=4), page_size=1).room() == 16
    assert Branches(Pool(taken=4), page_size=16).room() == 0
