"""Drafters whose drafts make trees, and wrong versions of what engines do with trees.

As in `wrong_versions`: loading a name breaks the process that loads it, and undoes what the name before broke. All
draft what `wrong_versions.right` saw; `Second` and `Third` are wrong at other places, so branches are accepted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from specactor.rollout.sglang import verify_batch as spreading
from specactor.rollout.sglang import verify_worker
from specactor.rollout.sglang.verify_batch import Branches, Rows
from specactor.rollout.sglang.verify_worker import Worker
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.drafter_set import DrafterSet
from specactor.rollout.speculation.speculator import Speculator
from specactor.rollout.speculation.verification import Decision, DraftTree, branches
from tests.rollout.sglang.drafters import Memory
from tests.rollout.sglang.wrong_versions import Function, Rehearsed, _Round, heal, in_place_of, patch
from tests.rollout.speculation.forced import together

WITNESS = "SPECACTOR_TEST_WITNESS"
"""Environment variable: file in which `witnessed` counts; a rank's number is added. Also in `test_trees`."""


_room = [0]
"""Branches that the trees of this round may have."""
_decide, _fixed = Speculator.decide, DrafterSet.fixed


def _with_room(self: Speculator, *arguments: Any, max_branches: int) -> Decision:
    _room[0] = max_branches
    return _decide(self, *arguments, max_branches=max_branches)


def _all_in_trees(self: DrafterSet, sequences: Any, windows: list[int], *, turn: int = 0) -> Decision:
    """With a fixed window, a tree of what all have drafted that draft first."""
    if self.config.window is None or not any(windows):
        return _fixed(self, sequences, windows, turn=turn)
    drafts = self.first(sequences, windows)
    return together(drafts, depth=max(windows), max_tokens=self.config.max_window, max_branches=_room[0])


Speculator.decide = _with_room  # type: ignore[method-assign]
DrafterSet.fixed = _all_in_trees  # type: ignore[method-assign]


class Second(Rehearsed):
    name = "second"
    every = 3

    def __init__(self) -> None:
        super().__init__(learns=False)

    def _draft(self, sequence: DraftSequence, window: int) -> list[int]:
        return Memory._draft(self, sequence, window)


class Third(Second):
    name = "third"
    every = 4


def witnessed() -> Rehearsed:
    """The right version, counting what happens."""
    seen = {"drafted": 0, "trees": 0, "branches": 0, "moved": 0, "mixed": 0}
    file = Path(f"{os.environ[WITNESS]}.{get_parallel().tp_rank}")
    file.write_text(json.dumps(seen))

    def place(right: Function, self: Branches, batch: Any, rows: Rows) -> None:
        kinds = {"tree" if not tree.is_chain else "chain" if tree.tokens else "plain" for tree in rows.trees}
        seen["drafted"] += rows.total - len(rows.trees)
        seen["trees"] += sum(not tree.is_chain for tree in rows.trees)
        seen["branches"] += sum(len(branches(tree)) for tree in rows.trees)
        seen["mixed"] += len(kinds) == 3
        right(self, batch, rows)

    def keep(right: Function, self: Branches, req: Any, base: int, tree: DraftTree, path: Sequence[int]) -> None:
        seen["moved"] += list(path) != list(range(len(path)))
        file.write_text(json.dumps(seen))
        right(self, req, base, tree, path)

    heal()
    patch(Branches, "place", place)
    patch(Branches, "keep", keep)
    return Rehearsed(learns=False)


def turns() -> Rehearsed:
    """Every second round the draft model drafts in place of the others, two tokens."""
    rounds = iter(range(10**6))

    def fixed(right: Function, self: DrafterSet, sequences: Any, windows: list[int], *, turn: int = 0) -> Decision:
        if next(rounds) % 2 == 0 or not any(windows):
            return right(self, sequences, windows, turn=turn)
        windows = [min(window, 2) for window in windows]
        nothing: list[list[int]] = [[] for _ in windows]
        return Decision(drafter="model", windows=windows, depth=max(windows), drafts=nothing, to_draft=windows)

    heal()
    patch(DrafterSet, "fixed", fixed)
    return Rehearsed(learns=False)


# Wrong: slots of the page table.


@in_place_of(Branches, "keep")
def keeps_nothing(right: Function, self: Branches, req: Any, base: int, tree: DraftTree, path: Sequence[int]) -> None:
    """After a branch was accepted, the keys of the first path are read."""


@in_place_of(Branches, "keep")
def keeps_the_next_row(right: Function, self: Branches, req: Any, base: int, tree: DraftTree, path: Any) -> None:
    """The last accepted token's keys are another row's."""
    wrong = (path[-1] + 1) % tree.num_rows
    right(self, req, base, tree, [*path[:-1], wrong] if wrong not in path else path)


@in_place_of(Branches, "keep")
def keeps_a_slot_twice(right: Function, self: Branches, req: Any, base: int, tree: DraftTree, path: Any) -> None:
    """Accepted slots are copied to where they belong, and not exchanged: what lay there is lost."""
    home = self._pool.req_to_token[req.kv.req_pool_idx]
    home[base : base + len(path)] = home[[base + r for r in path]]


@in_place_of(Branches, "place")
def branches_read_the_first_path(right: Function, self: Branches, batch: Any, rows: Rows) -> None:
    """No row gets a page-table row of its own."""


@in_place_of(spreading, "branches")
def wrong_parents(right: Function, tree: DraftTree) -> list[list[int]]:
    """The first own row of a branch is seen as a child of the row before it."""
    return [
        [min(depth, r - 1) if 0 < depth < len(path) - 1 else r for depth, r in enumerate(path)] for path in right(tree)
    ]


@in_place_of(Branches, "place")
def branches_forget_the_text(right: Function, self: Branches, batch: Any, rows: Rows) -> None:
    """A borrowed row of the page table is not given the committed slots."""
    table = self._pool.req_to_token
    free = list(self._pool.free_slots)
    before = table[free].clone()
    right(self, batch, rows)
    for tree, first in zip(rows.trees, rows.starts, strict=False):
        base = int(batch.seq_lens_cpu[first]) - 1
        for path in branches(tree):
            row = int(batch.req_pool_indices[first + path[-1]])
            table[row, :base] = before[free.index(row), :base]


# Wrong: positions and the rule.


@in_place_of(Sampler, "_sample_from_probs")
def noise_of_the_place(right: Function, sampler: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool) -> Any:
    """A row's noise is that of its place in the tree, and not of its depth."""
    root_R = _Round.root(len(positions))
    return right(sampler, probs, info, positions[root_R] + torch.arange(len(positions)) - root_R, simple)


@in_place_of(verify_worker, "accepted_path")
def forgets_whose_child_it_is(right: Function, tree: DraftTree, samples: Sequence[int]) -> list[int]:
    path = [0]
    for row, token in enumerate(tree.tokens, start=1):
        if token == samples[path[-1]]:
            path.append(row)
    return path


@in_place_of(Worker, "_drafts")
def parents_are_lost(right: Function, worker: Any, reqs: Sequence[Any], running: Sequence[Any]) -> list[DraftTree]:
    """Trees are taken for chains."""
    return [DraftTree(tree.tokens, tuple(range(len(tree.tokens)))) for tree in right(worker, reqs, running)]
