"""Drafts that fill windows: tokens of the prompt, over and over. To measure what verification costs; rarely right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

from specactor.rollout.draft.drafter import Drafter, DraftSequence


class Filler(Drafter):
    """Always drafts as many tokens as it may."""

    name = "filler"

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [
            list(islice(cycle(sequence.prompt_ids), window))
            for sequence, window in zip(sequences, windows, strict=True)
        ]
