"""What is kept of a draft is what decoding one token at a time emits; wrong versions of the rule are caught."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.rollout.speculation.verification import DraftTree, accepted_path, branches, chain, existing, held, merged

VOCAB = 3
Draw = tuple[int, ...]
Accept = Callable[[DraftTree, Sequence[int]], list[int]]

drafts = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=4), max_size=4)


def target(prefix: Sequence[int]) -> int:
    """A sampled token: with keyed noise it is a function of the prefix."""
    state = 17
    for token in prefix:
        state = (state * 31 + token + 7) % 1009
    return state * state % 1009 % VOCAB


def plain(length: int) -> list[int]:
    out: list[int] = []
    while len(out) < length:
        out.append(target(out))
    return out


def emitted(tree: DraftTree, accept: Accept = accepted_path) -> list[int]:
    """One round from an empty prefix: what every row samples, and what the rule keeps."""
    prefixes: list[list[int]] = [[]]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        prefixes.append([*prefixes[parent], token])
    samples = [target(prefix) for prefix in prefixes]
    return [samples[row] for row in accept(tree, samples)]


@given(drafts)
def test_a_round_emits_a_beginning_of_plain_decoding(several: list[list[int]]) -> None:
    out = emitted(merged(several))
    assert out == plain(len(out))


@given(drafts)
def test_a_tree_accepts_as_much_as_the_best_of_its_chains(several: list[list[int]]) -> None:
    assert len(emitted(merged(several))) == max([len(emitted(chain(d))) for d in several], default=1)


def test_every_position_of_rejection() -> None:
    right = plain(6)
    for length, wrong in itertools.product(range(6), range(6)):
        draft = right[:length]
        if wrong < length:
            draft[wrong] = (draft[wrong] + 1) % VOCAB
        assert emitted(chain(draft)) == right[: min(length, wrong) + 1]


def test_common_beginnings_are_held_once() -> None:
    tree = merged([[1, 2, 0], [1, 2, 1], [2]])
    assert tree == DraftTree((1, 2, 0, 1, 2), (0, 1, 2, 2, 0))
    assert tree.depths() == [0, 1, 2, 3, 3, 1]
    assert not tree.is_chain
    assert chain([5, 6]).is_chain
    assert chain([]).num_rows == 1


@given(drafts, st.integers(0, 9), st.integers(0, 4))
def test_bounded_trees(several: list[list[int]], max_tokens: int, max_branches: int) -> None:
    lengths, num_branches = held(several, max_tokens=max_tokens, max_branches=max_branches)
    tree = merged([draft[:length] for draft, length in zip(several, lengths, strict=True)])
    assert len(tree.tokens) <= max_tokens
    assert len(branches(tree)) <= num_branches <= max_branches
    for draft, length in zip(several, lengths, strict=True):
        assert length == len(draft) or merged([*several, draft]) != tree
    every, _ = held(several, max_tokens=100, max_branches=100)
    assert every == [len(draft) for draft in several]


@given(drafts)
def test_every_row_is_on_the_first_path_or_on_a_branch(several: list[list[int]]) -> None:
    tree = merged(several)
    paths = branches(tree)
    depths = tree.depths()
    for path in paths:
        assert [tree.parents[row - 1] for row in path[1:]] == path[:-1]
    straight = {0}
    for row, parent in enumerate(tree.parents, 1):
        if parent in straight and depths[row] == row:
            straight.add(row)
    assert {row for path in paths for row in path} | straight == set(range(tree.num_rows))
    assert (paths == []) == tree.is_chain


def test_branches_by_hand() -> None:
    tree = merged([[1, 2, 0], [1, 2, 1], [2], [2, 2]])
    assert branches(tree) == [[0, 1, 2, 4], [0, 5, 6]]
    assert held([[1, 2, 0], [1, 2, 1], [2], [2, 2]], max_tokens=9, max_branches=9) == ([3, 3, 1, 2], 2)
    assert held([[1, 2, 0], [1, 2, 1], [2], [1]], max_tokens=9, max_branches=1) == ([3, 3, 0, 1], 1)
    assert held([[1, 2, 0], [1, 2, 1], [2]], max_tokens=2, max_branches=9) == ([2, 2, 0], 0)


@pytest.mark.parametrize(
    ("tokens", "size", "left"),
    [([], 5, []), ([4, 0], 5, [4, 0]), ([4, 5, 1], 5, [4]), ([5], 5, []), ([1, -1, 2], None, [1]), ([9], None, [9])],
)
def test_tokens_before_one_that_does_not_exist(tokens: list[int], size: int | None, left: list[int]) -> None:
    assert existing(tokens, size) == left


def test_rows_come_after_their_parents() -> None:
    tree = merged([[0, 1], [0, 2, 1], [1]])
    assert all(parent < row for row, parent in enumerate(tree.parents, start=1))


def _root_twice(tree: DraftTree, samples: Sequence[int]) -> list[int]:
    return [0, *accepted_path(tree, samples)]


def _one_too_many(tree: DraftTree, samples: Sequence[int]) -> list[int]:
    path = accepted_path(tree, samples)
    return path + [path[-1] + 1] * (path[-1] + 1 < tree.num_rows)


def _skips_a_mismatch(tree: DraftTree, samples: Sequence[int]) -> list[int]:
    return [0] + [r for r, (t, p) in enumerate(zip(tree.tokens, tree.parents, strict=True), 1) if t == samples[p]]


def _wrong_branch(tree: DraftTree, samples: Sequence[int]) -> list[int]:
    path = [0]
    for row, token in enumerate(tree.tokens, start=1):
        if token == samples[path[-1]]:  # forgets to ask whose child it is
            path.append(row)
    return path


@pytest.mark.parametrize("wrong", [_root_twice, _one_too_many, _skips_a_mismatch, _wrong_branch])
def test_wrong_rules_are_caught(wrong: Accept) -> None:
    trees = [merged(several) for several in itertools.product([plain(3), [0, 1, 2], [1, 1], [2, 0, 2], []], repeat=2)]
    assert any(emitted(tree, wrong) != plain(len(emitted(tree, wrong))) for tree in trees)
