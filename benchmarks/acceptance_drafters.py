"""The draft model in its three ways of sampling, each writing down what it drafts. Engines load them by import path."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from specactor.rollout.draft.drafter import DraftSequence
from specactor.rollout.sglang.model_drafter import DraftModel

LOG = "SPECACTOR_BENCHMARK_DRAFTS"
"""Environment variable that names the file: per draft a JSON list [request id, tokens emitted before, draft, beta]."""


class _Recorded(DraftModel):
    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        drafts = super().propose(sequences, windows)
        lines = [
            json.dumps([sequence.request_id, len(sequence.output_ids), draft, self.beta])
            for sequence, draft in zip(sequences, drafts, strict=True)
            if draft
        ]
        with Path(os.environ[LOG]).open("a") as log:
            log.write("".join(line + "\n" for line in lines))
        return drafts


class Greedy(_Recorded):
    def __init__(self) -> None:
        super().__init__("greedy")


class Shared(_Recorded):
    def __init__(self) -> None:
        super().__init__("shared")


class Fitted(_Recorded):
    def __init__(self) -> None:
        super().__init__("fitted")
