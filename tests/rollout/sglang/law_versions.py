"""A drafter that knows the noise and half the law, and engines with a mistake that draft with it, by import path.

What it drafts is correlated with what the target samples in the closest way that there is, so a verification that
prefers what was drafted changes the law of what is emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from specactor.cpu.sglang_ops import sample_with_noise
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from tests.rollout.sglang import wrong_versions
from tests.rollout.sglang.make_dense import FIELDS

VOCAB = FIELDS["vocab_size"]


class Bigrams(Drafter):
    """Draws with the target's noise from how often a token followed the one before."""

    name = "bigrams"
    sharpness = 1.0

    def __init__(self) -> None:
        self._counts_VV = torch.full((VOCAB, VOCAB), 0.05)

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        text = [*sequence.prompt_ids[-1:], *sequence.output_ids][-len(tokens) - 1 :]
        for token, following in pairwise(text):
            self._counts_VV[token, following] += 1

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        last_B = torch.tensor([s.output_ids[-1] for s in sequences])
        position_B = torch.tensor([len(s.prompt_ids) + len(s.output_ids) - 1 for s in sequences])
        seed_B = torch.tensor([s.seed for s in sequences])
        columns: list[list[int]] = []
        for depth in range(max(windows)):
            logq_BV = self.sharpness * self._counts_VV[last_B].log()
            last_B = sample_with_noise(logq_BV, seed_B, position_B + depth).view(-1)
            columns.append(last_B.tolist())
        return [list(draft)[:window] for draft, window in zip(zip(*columns, strict=True), windows, strict=True)]


class Greedy(Bigrams):
    """Drafts what most often followed, whatever the noise."""

    name = "greedy"
    sharpness = 100.0


def right() -> Bigrams:
    wrong_versions.right()
    return Bigrams()


def _drafted(version: Callable[[], Drafter], drafter: type[Bigrams]) -> Callable[[], Bigrams]:
    """The mistake of `version`, with other drafts."""

    def load() -> Bigrams:
        version()
        return drafter()

    return load


likeliest = _drafted(wrong_versions.likeliest, Bigrams)
likeliest_for_drafts = _drafted(wrong_versions.likeliest_for_drafts, Bigrams)
emits_the_rejected = _drafted(wrong_versions.emits_the_rejected, Bigrams)
noise_of_the_batch = _drafted(wrong_versions.noise_of_the_batch, Bigrams)
noise_of_the_row = _drafted(wrong_versions.noise_of_the_row, Bigrams)
accepts_the_likely = _drafted(wrong_versions.accepts_the_likely, Greedy)
