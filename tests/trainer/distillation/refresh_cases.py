"""The ends that a draft model has in a run: engines, drafter processes, RL steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
from torch import Tensor, nn

from specactor.config import Config, SpeculationConfig
from specactor.parallel.collective import Collective
from specactor.rollout.draft.counts import Counts
from specactor.trainer.distillation import acceptance
from specactor.trainer.distillation.buffer import Law, lesson_from
from specactor.trainer.distillation.refresh import Distillation
from specactor.trainer.distillation.step import Step
from specactor.trainer.distillation.top_k import LawRecorder
from specactor.types import TrainSequence
from specactor.weights_sync import draft_receiver
from specactor.weights_sync.draft_sender import LOAD
from specactor.weights_sync.messages import CheckReply, DraftWeights
from tests.trainer import policy_cases
from tests.trainer.distillation import cases
from tests.trainer.distillation.policy_cases import SEQUENCES

UPDATES = 2


class Held(nn.Module):
    """A draft model in an engine."""

    def __init__(self) -> None:
        super().__init__()
        self.model = cases.model(seed=9)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            own[name].data.copy_(tensor)


class Engine:
    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.held = Held()
        self.refuses = ""
        self.versions: list[int] = []

    def rank_call(self, name: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        weights = msgspec.msgpack.decode(payload, type=DraftWeights)
        problem = self.refuses or (draft_receiver.load(self.held, weights) if name == LOAD else "")
        if name == LOAD and not problem:
            self.versions.append(weights.draft_version)
        return [msgspec.msgpack.encode(CheckReply(problem=problem))]

    def kill(self) -> None:
        raise AssertionError("a draft model is no reason to")


class Processes:
    """Drafter processes of a host."""

    def __init__(self) -> None:
        self.version = 0

    def want(self, version: int) -> bool:
        return self.version < version

    def renew(self, weights: DraftWeights) -> tuple[list[str], float]:
        self.version = weights.draft_version
        return [], 0.0

    def oldest_version(self) -> int | None:
        return self.version


class Recorder:
    """The laws of a policy that is known."""

    def __init__(self) -> None:
        self._policy = cases.model(seed=3)

    def take(self, sequences: Sequence[TrainSequence]) -> list[Law]:
        made = []
        for sequence in sequences:
            lesson = lesson_from(sequence, None, version=0, reward=0.0, temperature=1.0)
            [known] = acceptance.with_laws(self._policy, [lesson], top_k=cases.VOCAB, storage="float32")
            assert known.law is not None
            made.append(known.law)
        return made


class World:
    """A run's ends of the draft model; seconds pass as they are told to."""

    def __init__(self, collective: Collective, draft_dir: Path, *, laws: bool = False, **settings: Any) -> None:
        self.engines, self.processes, self.notes = [Engine()], Processes(), list[str]()
        self.now_s = 0.0
        self.config = config(draft_dir, **settings)
        self.it = Distillation(
            self.config,
            collective,
            recorder=cast(LawRecorder, Recorder()) if laws else None,
            vocab_size=cases.VOCAB,
            engines=lambda: self.engines,
            processes=self.processes,
            note=self.notes.append,
            clock=lambda: self.now_s,
        )

    def step(self, number: int, *, accepted: float | None = 2.0, seconds: float = 10.0) -> dict[str, float]:
        counts = {} if accepted is None else {"model": Counts(emitted=int(100 * accepted), verifies=100, drafted=400)}
        return self.it.refresh(
            Step(
                sequences=SEQUENCES,
                rewards=[0.5] * len(SEQUENCES),
                version=number,
                counts=counts,
                seconds=seconds,
                rollout_s=5.0,
                steps_left=10 - number,
            )
        )

    def weights(self) -> dict[str, list[float]]:
        return {name: value.flatten().tolist() for name, value in self.it.drafter.named_weights()}

    def held(self) -> dict[str, list[float]]:
        return {n: p.detach().flatten().tolist() for n, p in self.engines[0].held.model.named_parameters()}


def config(draft_dir: Path, **settings: Any) -> Config:
    base = policy_cases.config(str(draft_dir), {})
    speculation = SpeculationConfig(mode="coupled", drafters=("model",), draft_model=str(draft_dir))
    refresh = {"refresh": "every_step", "max_updates": UPDATES, "reward_emphasis": 0.0, "position_emphasis": 0.0}
    return replace(
        base,
        rollout=replace(base.rollout, speculation=speculation),
        distillation=cases.config(**refresh | settings),
    )
