"""Requests that change drafter, mode and window at random rounds emit what plain decoding emits; wrong versions do not.

The target is a toy at temperature 1: a token is where the noise of (seed, position) lies among the probabilities.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor.rollout.speculation.counters import Counts
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.speculator import Speculator
from specactor.rollout.speculation.verification import DraftTree, accepted_path
from specactor.trace import Recorder
from tests.rollout.speculation.forced import Drawn, Switching
from tests.rollout.speculation.world import auto

VOCAB, LENGTH, REQUESTS = 5, 48, 4


def noise(*key: object) -> float:
    return zlib.crc32(repr(key).encode()) / 2**32


def law(prefix: Sequence[int]) -> list[float]:
    """Of the next token, from the last two."""
    weights = [1 + (3 * sum(prefix[-2:]) + 7 * v * (1 + prefix[-1])) % 11 for v in range(VOCAB)]
    return [weight / sum(weights) for weight in weights]


def at(point: float, probabilities: Sequence[float]) -> int:
    for token, p in enumerate(probabilities):
        point -= p
        if point < 0:
            return token
    return VOCAB - 1


def drawn(seed: int, text: Sequence[int]) -> int:
    """The target's token after this text, prompt included."""
    return at(noise(seed, len(text)), law(text))


def plain(seed: int) -> list[int]:
    text = [1]
    while len(text) <= LENGTH:
        text.append(drawn(seed, text))
    return text[1:]


class Toy(Drafter):
    """Drafts by `step`, token by token; `ahead`: as drafters elsewhere do. Now and then it has nothing."""

    def __init__(self, name: str, step: Callable[[DraftSequence, list[int]], int], *, ahead: bool = False) -> None:
        self.name, self._step, self.drafts_ahead = name, step, ahead

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [self._draft(s, w) for s, w in zip(sequences, windows, strict=True)]

    def _draft(self, sequence: DraftSequence, window: int) -> list[int]:
        text = [*sequence.prompt_ids, *sequence.output_ids]
        draft: list[int] = []
        while len(draft) < window and noise(self.name, sequence.seed, len(text) + len(draft)) > 0.1:
            draft.append(self._step(sequence, [*text, *draft]))
        return draft


def toys() -> list[Drafter]:
    return [
        Toy("likeliest", lambda s, text: max(range(VOCAB), key=law(text).__getitem__)),
        Toy("same noise", lambda s, text: at(noise(s.seed, len(text)), [(p + 1 / VOCAB) / 2 for p in law(text)])),
        Toy("target", lambda s, text: drawn(s.seed, text), ahead=True),
        Toy("garbage", lambda s, text: len(text) % VOCAB, ahead=True),
    ]


class Toyland:
    """An engine of the toy target; `path` says what of a tree is kept."""

    def __init__(self, speculator: Speculator) -> None:
        self.speculator = speculator
        self.sequences = [DraftSequence(request_id=str(i), prompt_ids=(1,), seed=i) for i in range(REQUESTS)]
        self.rounds = 0
        self.leads: dict[str, str] = {}
        """Whose draft each request had last."""
        for sequence in self.sequences:
            speculator.open(sequence)

    def path(self, sequence: DraftSequence, tree: DraftTree, texts: list[list[int]], lead: str) -> list[int]:
        return accepted_path(tree, [self.sample(sequence, text) for text in texts])

    def sample(self, sequence: DraftSequence, text: list[int]) -> int:
        return drawn(sequence.seed, text)

    def decode(self) -> list[list[int]]:
        running = list(self.sequences)
        while running:
            limits = [LENGTH - len(s.output_ids) - 1 for s in running]
            decision = self.speculator.decide(running, limits, max_branches=100)
            lists = {decision.drafter: decision.drafts, **decision.beside}
            kept = []
            for i, (sequence, tree) in enumerate(zip(running, decision.trees, strict=True)):
                lead = next((name for name, drafts in lists.items() if drafts[i]), "")
                kept.append(self._verified(sequence, tree, lead))
                self.leads[sequence.request_id] = lead or self.leads.get(sequence.request_id, "")
            self.rounds += 1
            self.speculator.learn(running, [tokens[:-1] for tokens in kept], round_s=1e-3)
            for sequence, tokens in zip(running, kept, strict=True):
                sequence.output_ids += tokens
                if len(sequence.output_ids) >= LENGTH:
                    self.speculator.close(sequence)
            running = [s for s in running if len(s.output_ids) < LENGTH]
        return [s.output_ids for s in self.sequences]

    def _verified(self, sequence: DraftSequence, tree: DraftTree, lead: str) -> list[int]:
        texts = [[*sequence.prompt_ids, *sequence.output_ids]]
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            texts.append([*texts[parent], token])
        path = self.path(sequence, tree, texts, lead)
        return [*(tree.tokens[row - 1] for row in path[1:]), self.sample(sequence, texts[path[-1]])]


class TrustsTheNew(Toyland):
    """Wrong: the first draft token of a drafter that a request was switched to is taken for right."""

    def path(self, sequence: DraftSequence, tree: DraftTree, texts: list[list[int]], lead: str) -> list[int]:
        right = super().path(sequence, tree, texts, lead)
        switched = lead and self.leads.get(sequence.request_id, lead) != lead
        return right if len(right) > 1 or not switched else [0, 1]


class OwnCoins(Toyland):
    """Wrong: a draft token is kept by a coin of its own, as probable as the token is."""

    def path(self, sequence: DraftSequence, tree: DraftTree, texts: list[list[int]], lead: str) -> list[int]:
        path = [0]
        for row, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), start=1):
            if parent == path[-1] and noise("coin", self.rounds, row) < law(texts[parent])[token]:
                path.append(row)
        return path


class NoiseOfTheRound(Toyland):
    """Wrong: switches change how many rounds there are, and so the tokens."""

    def sample(self, sequence: DraftSequence, text: list[int]) -> int:
        return at(noise(sequence.seed, self.rounds, len(text) - len(sequence.output_ids)), law(text))


def forced(kind: type[Toyland], seed: int, keep: float = 0.5) -> tuple[list[list[int]], Toyland, Drawn]:
    drawn = Drawn(seed, keep=keep)
    land = kind(Switching(auto(), toys(), drawn=drawn))
    return land.decode(), land, drawn


PLAIN = [plain(seed) for seed in range(REQUESTS)]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.floats(0, 1))
def test_switches_at_random_rounds_change_no_token(seed: int, keep: float) -> None:
    texts, land, _ = forced(Toyland, seed, keep)
    assert texts == PLAIN
    total = sum(land.speculator.report().values(), Counts())
    assert total.emitted == total.accepted + total.verifies
    assert total.drafted == sum(total.drafted_at)
    assert total.accepted == sum(total.accepted_at)


def test_all_kinds_of_requests_were_there() -> None:
    _, land, drawn = forced(Toyland, 3)
    assert all(drawn.kinds[drafters] > 2 for drafters in range(5))
    counts = land.speculator.report()
    assert sum(of.switches for of in counts.values()) > 5
    assert min(counts[drafter.name].drafted for drafter in toys()) > 3


@pytest.mark.parametrize("wrong", [TrustsTheNew, OwnCoins, NoiseOfTheRound])
def test_wrong_versions_are_caught(wrong: type[Toyland]) -> None:
    assert all(forced(wrong, seed)[0] != PLAIN for seed in range(5))


@settings(deadline=None, max_examples=10)
@given(st.integers(1, 4))
def test_what_costs_decide_changes_no_token(most: int) -> None:
    land = Toyland(Speculator(auto(fastest_of=most), toys(), clock=time.perf_counter))
    assert land.decode() == PLAIN


def test_switches_are_events_of_the_trace() -> None:
    land = Toyland(Switching(auto(), toys(), drawn=Drawn(3)))
    recorder = Recorder(on=True)
    land.speculator.recorder = recorder
    land.decode()
    spans = [span for span in recorder.take() if " from " in span.name]
    switches = sum(int(span.name.split()[0]) for span in spans)
    assert switches == sum(of.switches for of in land.speculator.report().values()) > 0
    assert all(span.details["why"] == "as it was drawn" for span in spans)
