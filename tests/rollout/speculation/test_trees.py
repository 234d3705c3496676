"""What one tree holds of several drafts: bounded, a tree, and the tokens that most probably bring something."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.estimates import Estimates
from specactor.rollout.speculation.fastest_of_n import candidates, fitted, survivals
from specactor.rollout.speculation.verification import Drafts, accepted_path, branches, common, credits_of, merged


class Nobody(Drafter):
    """Drafts nothing."""

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [[] for _ in sequences]


draft = st.lists(st.integers(0, 2), max_size=5)
several = st.lists(draft, min_size=1, max_size=4)


@st.composite
def of_requests(draw: st.DrawFn) -> Drafts:
    requests = draw(st.integers(1, 4))
    names = "abc"[: draw(st.integers(1, 3))]
    return {name: [draw(draft) for _ in range(requests)] for name in names}


def per_request(drafts: Drafts) -> list[tuple[list[int], ...]]:
    return list(zip(*drafts.values(), strict=True))


def falling(draw: st.DrawFn, length: int) -> list[float]:
    return sorted((draw(st.floats(0, 1)) for _ in range(length)), reverse=True)


@given(of_requests(), st.integers(0, 8), st.integers(0, 5))
def test_trees_keep_their_bounds(drafts: Drafts, max_tokens: int, max_branches: int) -> None:
    trees = [
        merged(of_request)
        for of_request in per_request(fitted(drafts, max_tokens=max_tokens, max_branches=max_branches))
    ]
    assert all(len(tree.tokens) <= max_tokens for tree in trees)
    assert sum(len(branches(tree)) for tree in trees) <= max_branches


@given(of_requests())
def test_without_bounds_everything_is_held(drafts: Drafts) -> None:
    held = fitted(drafts, max_tokens=100, max_branches=100)
    assert held == {name: lists for name, lists in drafts.items() if any(lists)}


@given(of_requests(), st.integers(1, 8))
def test_without_room_the_first_draft_stays_alone(drafts: Drafts, max_tokens: int) -> None:
    for i, of_request in enumerate(per_request(drafts)):
        first = next((d for d in of_request if d), [])
        held = fitted(drafts, max_tokens=max_tokens, max_branches=0)
        tree = merged([lists[i] for lists in held.values()])
        assert tree.is_chain
        assert list(tree.tokens[: len(first)]) == first[:max_tokens]


@given(several, st.randoms(use_true_random=False))
def test_credits_add_up(drafts: list[list[int]], coins: random.Random) -> None:
    tree = merged(drafts)
    samples = [coins.randrange(3) for _ in range(tree.num_rows)]
    accepted = [tree.tokens[row - 1] for row in accepted_path(tree, samples)[1:]]
    credits = credits_of(drafts, accepted)
    assert sum(credit.drafted for credit in credits) == len(tree.tokens)
    assert sum(credit.accepted for credit in credits) == len(accepted)
    assert max(credit.agreed for credit in credits) == len(accepted)
    for credit, one in zip(credits, drafts, strict=True):
        assert credit.agreed == common(one, accepted)
        assert 0 <= credit.accepted <= credit.drafted == len(one) - credit.first
        assert credit.reached or not credit.accepted


def test_a_draft_is_put_to_the_test_where_earlier_ones_fail() -> None:
    drafts = [[1, 2, 3], [1, 4, 5], [6]]
    assert [c.reached for c in credits_of(drafts, [1, 2])] == [True, False, False]
    assert [c.reached for c in credits_of(drafts, [1])] == [True, True, False]
    assert [c.reached for c in credits_of(drafts, [1, 4])] == [True, True, False]
    assert [c.reached for c in credits_of(drafts, [])] == [True, False, True]
    assert [c.accepted for c in credits_of(drafts, [1, 4])] == [1, 1, 0]


@given(several, st.data())
def test_probabilities_are_those_of_a_tree(drafts: list[list[int]], data: st.DataObject) -> None:
    alone, after = ([falling(data.draw, len(d)) for d in drafts] for _ in range(2))  # type: ignore[arg-type]
    own = survivals(drafts, alone, after)
    tree = merged(drafts)
    probability = {0: 1.0}
    for one, credit, chances in zip(drafts, credits_of(drafts, []), own, strict=True):
        assert len(chances) == credit.drafted
        probability |= {row_of(drafts, one[: credit.first + j]): p for j, p in enumerate(chances, 1)}
    assert len(probability) == tree.num_rows
    for row, p in probability.items():
        children = [probability[r] for r, parent in enumerate(tree.parents, 1) if parent == row]
        assert sum(children) <= p + 1e-9
        assert 0 <= p <= 1


def row_of(drafts: Sequence[Sequence[int]], prefix: Sequence[int]) -> int:
    tree, row = merged(drafts), 0
    for token in prefix:
        row = next(r for r in range(1, tree.num_rows) if tree.parents[r - 1] == row and tree.tokens[r - 1] == token)
    return row


def test_probabilities_by_hand() -> None:
    own = survivals(
        [[1, 2], [1, 3], [4, 5], [1, 2, 6]], [[0.8, 0.4], [], [], [0.8, 0.4, 0.3]], [[], [0.5], [0.25, 0.1], []]
    )
    assert own[0] == pytest.approx([0.8, 0.4])
    assert own[1] == pytest.approx([0.4 * 0.5])
    assert own[2] == pytest.approx([0.2 * 0.25, 0.2 * 0.1])
    assert own[3] == pytest.approx([0.4 * 0.3 / 0.4])


def of_estimates(
    estimates: Estimates, drafts: Drafts, *, max_branches: int
) -> tuple[list[list[float]], Callable[[Sequence[int]], Drafts]]:
    """Of requests 0, 1, .."""
    ids = [str(i) for i in range(len(per_request(drafts)))]
    alone, after = (
        {name: model.survivals(ids, covered=True) for name, model in models.items()}
        for models in (estimates.acceptance, estimates.after)
    )
    return candidates(drafts, alone, after, max_tokens=5, max_branches=max_branches)


@given(of_requests(), st.integers(0, 4), st.data())
def test_chosen_tokens_are_the_likeliest(drafts: Drafts, max_branches: int, data: st.DataObject) -> None:
    requests = len(per_request(drafts))
    estimates = Estimates(dict.fromkeys(drafts, Nobody()), max_window=5)
    estimates.acceptance = {n: AcceptanceModel(max_window=5, prior_rate=0.4 + 0.1 * i) for i, n in enumerate(drafts)}
    all_chances, tokens_of = of_estimates(estimates, drafts, max_branches=max_branches)
    windows = [data.draw(st.integers(0, len(chances))) for chances in all_chances]
    assert all(a >= b for chances in all_chances for a, b in pairwise(chances))
    chosen = tokens_of(windows)
    held = per_request(chosen) if chosen else [()] * requests
    assert [len(merged(of_request).tokens) for of_request in held] == windows
    assert sum(len(branches(merged(of_request))) for of_request in held) <= max_branches


def test_drafters_that_err_together_are_worth_less() -> None:
    estimates = Estimates(dict.fromkeys("ab", Nobody()), max_window=5)
    drafts: Drafts = {"a": [[1, 2]], "b": [[3]]}

    def chance() -> float:
        return min(of_estimates(estimates, drafts, max_branches=1)[0][0])

    before = chance()
    for _ in range(50):
        estimates.tree_verified("0", zip("ab", credits_of([[1, 2], [3]], []), strict=True))
    worse = chance()
    for _ in range(200):
        estimates.tree_verified("0", zip("ab", credits_of([[1, 2], [3]], [3]), strict=True))
    assert worse < before / 2
    assert chance() > before
