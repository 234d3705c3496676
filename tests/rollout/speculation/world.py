"""An engine that knows only costs and true tokens, for tests of what is decided."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from specactor.config import SpeculationConfig
from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.speculator import Speculator
from specactor.rollout.speculation.verification import accepted_path

STEP_S, ROW_S = 1e-3, 1e-4


class Coin(Drafter):
    """Right with a probability, per token."""

    name = "coin"

    def __init__(self, right: float) -> None:
        self.right = right
        self.coins = random.Random(0)

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [self._draft(s, w) for s, w in zip(sequences, windows, strict=True)]

    def _draft(self, sequence: DraftSequence, window: int) -> list[int]:
        start = len(sequence.output_ids)
        return [truth(sequence, start + j) + (self.coins.random() >= self.right) for j in range(window)]


def truth(sequence: DraftSequence, position: int) -> int:
    return 2 * ((7 * position + sequence.seed) % 40)


class World:
    """An engine that knows only costs and true tokens, on a clock of its own."""

    def __init__(
        self,
        config: SpeculationConfig,
        *drafters: Drafter,
        requests: int = 4,
        row_s: float = ROW_S,
        max_branches: int = 0,
    ) -> None:
        self.now = 0.0
        self.rows = 0
        self.row_s = row_s
        self.max_branches = max_branches
        self.promised = 0
        self.requests_come = False
        """Whether another request takes a place of one in every round."""
        self.look_s = 0.0
        """Between two looks at the clock."""
        self.speculator = Speculator(config, drafters, clock=self.clock)
        self.sequences = [DraftSequence(request_id=str(i), prompt_ids=(1,), seed=i) for i in range(requests)]
        for sequence in self.sequences:
            self.speculator.open(sequence)

    def clock(self) -> float:
        self.now += self.look_s
        return self.now

    def play(self, rounds: int) -> float:
        """Tokens per second."""
        started, tokens = self.now, 0
        for _ in range(rounds):
            if self.requests_come:
                ended = self.sequences.pop(0)
                self.speculator.close(ended)
                self.sequences.append(replace(ended, request_id=f"{int(ended.request_id) + 100}", output_ids=[]))
                self.speculator.open(self.sequences[-1])
            decision = self.speculator.decide(
                self.sequences, [100] * len(self.sequences), max_branches=self.max_branches
            )
            if decision.together:
                self.speculator.draft(decision.drafter, self.sequences, decision.to_draft)
            lists = [decision.drafts, *decision.beside.values()]
            assert all(len(d) <= w for drafts in lists for d, w in zip(drafts, decision.windows, strict=True))
            emitted = []
            for sequence, tree in zip(self.sequences, decision.trees, strict=True):
                start = len(sequence.output_ids)
                samples = [truth(sequence, start + depth) for depth in tree.depths()]
                fresh = [samples[row] for row in accepted_path(tree, samples)]
                emitted.append(fresh)
                sequence.output_ids += fresh
                tokens += len(fresh)
            rows = sum(tree.num_rows for tree in decision.trees)
            self.rows += rows
            verify_s = STEP_S + self.row_s * rows
            self.now += verify_s
            self.promised = self.speculator.plain_rounds_ahead
            self.speculator.learn(
                self.sequences, [fresh[:-1] for fresh in emitted], round_s=decision.draft_s + verify_s
            )
        return tokens / (self.now - started)

    def plain_speed(self) -> float:
        return len(self.sequences) / (STEP_S + self.row_s * len(self.sequences))


def auto(**fields: object) -> SpeculationConfig:
    return SpeculationConfig(**{"mode": "auto", "max_window": 8, **fields})  # type: ignore[arg-type]


def survival(model: AcceptanceModel, request_id: str, *, covered: bool = False) -> list[float]:
    """P(the first j draft tokens are proposed and accepted), by j; `covered`: where they are proposed."""
    probabilities: list[float] = model.survivals([request_id], covered=covered)[0].tolist()
    return probabilities
