"""What verification emits follows the target's law exactly, whatever drafts: all outcomes of a toy target, counted.

The noise of one draw is a point of [0, 1), and a token is where it lies among the probabilities. A key names the draw:
with the position as key, all that is sampled at a position shares one point, also what a drafter samples there. Points
are never drawn; each question about one splits its interval, depth first, so probabilities are exact fractions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, combinations

import pytest

from specactor.rollout.speculation.verification import DraftTree, accepted_path, chain, merged

Text = tuple[int, ...]
Law = dict[Text, Fraction]
EOS, VOCAB, LENGTH = 0, 3, 3


def target(prefix: Text) -> list[Fraction]:
    """Probabilities of the next token: all tokens likely or not, one of them impossible at some prefixes."""
    salt = sum((token + 1) * (5 + 6 * i) for i, token in enumerate(prefix))
    weights = [(3 * salt + 2) % 5 + 1, (salt * salt + 4) % 9 + 1, (7 * salt + 3) % 8]
    return [Fraction(weight, sum(weights)) for weight in weights]


def flatter(prefix: Text) -> list[Fraction]:
    """A drafter's idea of the target."""
    return [(p + Fraction(1, VOCAB)) / 2 for p in target(prefix)]


def cut(text: Text) -> Text:
    """Up to the end of text, and no longer than wanted."""
    return text[: text.index(EOS) + 1][:LENGTH] if EOS in text else text[:LENGTH]


def over(text: Text) -> bool:
    return EOS in text or len(text) >= LENGTH


def exact_law() -> Law:
    law: Law = {(): Fraction(1)}
    for _ in range(LENGTH):
        longer: Law = {}
        for text, p in law.items():
            follow = {text: p} if over(text) else {(*text, v): p * q for v, q in enumerate(target(text)) if q}
            longer |= follow
        law = longer
    return law


class Coins:
    """Decisions of one outcome: those of `script`, then the first option of each further one."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.taken: list[tuple[int, int]] = []
        """Option and number of options, per decision."""
        self.probability = Fraction(1)

    def choose(self, weights: Sequence[Fraction]) -> int:
        """Index of one of the weights above 0. They need not add up to 1."""
        options = [i for i, weight in enumerate(weights) if weight > 0]
        step = len(self.taken)
        option = self._script[step] if step < len(self._script) else 0
        self.taken.append((option, len(options)))
        self.probability *= weights[options[option]] / sum(weights)
        return options[option]


def enumerated(trial: Callable[[Coins], Text]) -> Law:
    """The law of a trial's text, over all decisions that it asks for."""
    law: Law = defaultdict(Fraction)
    script: list[int] | None = []
    while script is not None:
        coins = Coins(script)
        law[trial(coins)] += coins.probability
        taken = coins.taken
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        script = [option for option, _ in taken[:-1]] + [taken[-1][0] + 1] if taken else None
    return dict(law)


class Noise:
    """One point of [0, 1) per key, known as far as was asked."""

    def __init__(self, coins: Coins) -> None:
        self._coins = coins
        self._known: dict[Hashable, tuple[Fraction, Fraction]] = {}

    def draw(self, key: Hashable, weights: Sequence[Fraction]) -> int:
        """The token in whose share of [0, 1) the point lies."""
        low, high = self._known.get(key, (Fraction(0), Fraction(1)))
        ends = list(accumulate(weights))
        shares = [(max(low, end - w), min(high, end)) for end, w in zip(ends, weights, strict=True)]
        token = self._coins.choose([max(Fraction(0), top - bottom) for bottom, top in shares])
        self._known[key] = shares[token]
        return token


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What a drafter may look at: even at the noise that the target will use."""

    text: Text
    coins: Coins
    noise: Noise

    def drawn(self, step: Callable[[Text], int]) -> list[int]:
        """A chain as long as may be, token by token."""
        draft: list[int] = []
        while len(self.text) + len(draft) < LENGTH - 1:
            draft.append(step((*self.text, *draft)))
        return draft


Draft = Callable[[Situation], list[int]]


def shy(s: Situation) -> list[int]:
    """Its window depends on the noise of the tokens it does not draft."""
    draft = s.drawn(lambda prefix: s.noise.draw(len(prefix), flatter(prefix)))
    return draft[: s.noise.draw(LENGTH - 1, [Fraction(1, 3)] * 3)]


DRAFTERS: dict[str, Draft] = {
    "nothing": lambda s: [],
    "garbage": lambda s: s.drawn(lambda prefix: (7 * sum(prefix) + 5 * len(prefix) + 1) % VOCAB),
    "constant": lambda s: s.drawn(lambda prefix: 1),
    "only-eos": lambda s: s.drawn(lambda prefix: EOS),
    "most-likely": lambda s: s.drawn(lambda prefix: max(range(VOCAB), key=target(prefix).__getitem__)),
    "own-coins": lambda s: s.drawn(lambda prefix: s.coins.choose(target(prefix))),
    "same-noise": lambda s: s.drawn(lambda prefix: s.noise.draw(len(prefix), flatter(prefix))),
    "knows-all": lambda s: s.drawn(lambda prefix: s.noise.draw(len(prefix), target(prefix))),
    "shy": shy,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a verification round."""

    round: int
    index: int
    prefix: Text


Key = Callable[[Row], Hashable]


def by_position(row: Row) -> Hashable:
    return len(row.prefix)


def by_prefix(row: Row) -> Hashable:
    """Also a law: no two branches share noise."""
    return row.prefix


@dataclass(kw_only=True)
class Request:
    """A request that is decoded with drafts."""

    coins: Coins
    noise: Noise
    drafts: Sequence[Draft]
    """One: its chain is verified. Several: the tree of them all."""
    key: Key = by_position
    text: Text = ()
    rounds: int = 0
    accepted: int = 0
    drafted: int = 0
    rows: list[Row] = field(default_factory=list)

    def decode(self) -> Text:
        while not over(self.text):
            self.text += self._round()
            self.rounds += 1
        return cut(self.text)

    def tokens(self, tree: DraftTree, samples: list[int]) -> list[int]:
        """What a round emits."""
        return [samples[row] for row in accepted_path(tree, samples)]

    def _round(self) -> Text:
        chains = [draft(Situation(text=self.text, coins=self.coins, noise=self.noise)) for draft in self.drafts]
        tree = chain(chains[0]) if len(chains) == 1 else merged(chains)
        prefixes = [self.text]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            prefixes.append((*prefixes[parent], token))
        self.rows = [Row(round=self.rounds, index=i, prefix=prefix) for i, prefix in enumerate(prefixes)]
        emitted = self.tokens(tree, [self.noise.draw(self.key(row), target(row.prefix)) for row in self.rows])
        self.drafted += tree.num_rows - 1
        self.accepted += len(emitted) - 1
        return tuple(emitted)


def law_of(kind: type[Request], drafts: Sequence[Draft], key: Key = by_position) -> Law:
    return enumerated(lambda coins: kind(coins=coins, noise=Noise(coins), drafts=drafts, key=key).decode())


def test_the_toy_is_a_law_with_something_to_get_wrong() -> None:
    law = exact_law()
    assert sum(law.values()) == 1
    assert len(law) > 10
    assert {len(text) for text in law} == {1, 2, 3}
    assert min(law.values()) < Fraction(1, 50)
    assert any(0 in target(text[:-1]) for text in law)
    assert law_of(Request, [DRAFTERS["nothing"]]) == law


@pytest.mark.parametrize("name", DRAFTERS)
def test_chains_follow_the_law(name: str) -> None:
    assert law_of(Request, [DRAFTERS[name]]) == exact_law()


@pytest.mark.parametrize("names", combinations(DRAFTERS, 2), ids="+".join)
def test_trees_follow_the_law(names: tuple[str, str]) -> None:
    assert law_of(Request, [DRAFTERS[name] for name in names]) == exact_law()


SEVERAL = ["same-noise", "constant", "most-likely", "garbage"]


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_the_fastest_of_n_in_one_tree_follows_the_law(most: int) -> None:
    assert law_of(Request, [DRAFTERS[name] for name in SEVERAL[:most]]) == exact_law()


class Switching(Request):
    """Which drafters draft, and how many of them, depends on the tokens so far and on what was accepted."""

    def _round(self) -> Text:
        kept = self.drafts
        first = (sum(self.text) + self.accepted) % len(kept)
        self.drafts = [*kept[first:], *kept[:first]][: 1 + (self.rounds + self.accepted) % len(kept)]
        emitted = super()._round()
        self.drafts = kept
        return emitted


@pytest.mark.parametrize("names", [SEVERAL, ["knows-all", "only-eos", "nothing"]], ids="+".join)
def test_requests_that_switch_follow_the_law(names: Sequence[str]) -> None:
    assert law_of(Switching, [DRAFTERS[name] for name in names]) == exact_law()


@pytest.mark.parametrize("names", [("own-coins",), ("garbage", "most-likely"), ("constant", "only-eos")], ids="+".join)
def test_rows_that_share_no_noise_follow_the_law(names: Sequence[str]) -> None:
    assert law_of(Request, [DRAFTERS[name] for name in names], by_prefix) == exact_law()


def test_a_drafter_that_knows_all_is_always_right() -> None:
    def trial(coins: Coins) -> Text:
        request = Request(coins=coins, noise=Noise(coins), drafts=[DRAFTERS["knows-all"]])
        text = request.decode()
        assert request.accepted == request.drafted
        return text

    assert enumerated(trial) == exact_law()


def distance(law: Law) -> Fraction:
    """Total variation."""
    exact = exact_law()
    return sum((abs(law.get(t, Fraction(0)) - exact.get(t, Fraction(0))) for t in {*law, *exact}), Fraction(0)) / 2


def fastest(names: Sequence[str], *, noise_is_shared: bool) -> Law:
    """Replicas of one request race; the one with the fewest rounds is kept."""

    def trial(coins: Coins) -> Text:
        noise = Noise(coins)
        requests = [
            Request(coins=coins, noise=noise if noise_is_shared else Noise(coins), drafts=[DRAFTERS[name]])
            for name in names
        ]
        texts = [request.decode() for request in requests]
        rounds = [request.rounds for request in requests]
        return texts[rounds.index(min(rounds))]

    return enumerated(trial)


RACES = [("most-likely", "constant"), ("most-likely", "most-likely"), ("garbage", "only-eos")]


@pytest.mark.parametrize("names", RACES, ids="+".join)
def test_the_fastest_of_several_follows_the_law(names: Sequence[str]) -> None:
    assert fastest(names, noise_is_shared=True) == exact_law()


@pytest.mark.parametrize("names", RACES, ids="+".join)
def test_independent_coins_keep_what_was_easy_to_draft(names: Sequence[str]) -> None:
    law = fastest(names, noise_is_shared=False)
    assert sum(law.values()) == 1
    assert distance(law) > Fraction(1, 100)


class AcceptsTheLikely(Request):
    """A draft token counts as right when its probability is above a half."""

    def tokens(self, tree: DraftTree, samples: list[int]) -> list[int]:
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            if target(self.rows[parent].prefix)[token] > Fraction(1, 2):
                samples[parent] = token
        return super().tokens(tree, samples)


class DrawsAgain(Request):
    """After a rejection the token is drawn anew, and not the one that rejected it."""

    def tokens(self, tree: DraftTree, samples: list[int]) -> list[int]:
        emitted = super().tokens(tree, samples)
        prefix = (*self.text, *emitted[:-1])
        if len(emitted) <= max(tree.depths()):
            emitted[-1] = self.noise.draw(("again", self.rounds), target(prefix))
        return emitted


class CoinsOfItsOwn(Request):
    """A draft token is kept by a coin that is not the target's noise, as probable as the token is."""

    def tokens(self, tree: DraftTree, samples: list[int]) -> list[int]:
        path = [0]
        for row, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), start=1):
            p = target(self.rows[parent].prefix)[token]
            if parent == path[-1] and self.coins.choose([p, 1 - p]) == 0:
                path.append(row)
        return [*(tree.tokens[row - 1] for row in path[1:]), samples[path[-1]]]


WRONG: dict[str, Callable[[Draft], Law]] = {
    "noise-per-round": lambda draft: law_of(Request, [draft], lambda row: row.round),
    "noise-per-row": lambda draft: law_of(Request, [draft], lambda row: row.index),
    "accepts-the-likely": lambda draft: law_of(AcceptsTheLikely, [draft]),
    "draws-again": lambda draft: law_of(DrawsAgain, [draft]),
    "coins-of-its-own": lambda draft: law_of(CoinsOfItsOwn, [draft]),
}


@pytest.mark.parametrize("drafter", ["most-likely", "own-coins"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_versions_are_caught(wrong: str, drafter: str) -> None:
    law = WRONG[wrong](DRAFTERS[drafter])
    assert sum(law.values()) == 1
    assert distance(law) > Fraction(1, 100)


def test_several_with_coins_of_their_own_are_caught() -> None:
    """The more drafts, the more often one of them is kept."""
    distances = [distance(law_of(CoinsOfItsOwn, [DRAFTERS[name] for name in SEVERAL[1 : 1 + n]])) for n in (1, 2, 3)]
    assert min(distances) > Fraction(1, 100)
