"""The ends that a draft model has in a run: engines, drafter processes, RL steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from torch import Tensor, nn

from specactor.config import Config, SpeculationConfig
from specactor.parallel.collective import Collective
from specactor.trainer.drafter.refresh import Distillation
from specactor.weights_sync import draft_push
from specactor.weights_sync.draft_push import LOAD
from specactor.weights_sync.messages import Answer, DraftWeights
from tests.trainer import policy_cases
from tests.trainer.drafter import cases
from tests.trainer.drafter.policy_cases import SEQUENCES

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
        problem = self.refuses or (draft_push.load(self.held, weights) if name == LOAD else "")
        if name == LOAD and not problem:
            self.versions.append(weights.draft_version)
        return [msgspec.msgpack.encode(Answer(problem=problem))]

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


class World:
    """A run's ends of the draft model; seconds pass as they are told to."""

    def __init__(self, collective: Collective, draft_dir: Path, **settings: Any) -> None:
        self.engines, self.processes, self.notes = [Engine()], Processes(), list[str]()
        self.now_s = 0.0
        self.config = config(draft_dir, **settings)
        self.it = Distillation(
            self.config,
            collective,
            recorder_of=lambda layers: None,
            policy=SimpleNamespace(vocab_size=cases.VOCAB),
            engines=lambda: self.engines,
            processes=self.processes,
            note=self.notes.append,
            clock=lambda: self.now_s,
        )

    def step(self, number: int, *, seconds: float = 10.0) -> dict[str, float]:
        return self.it.refresh(SEQUENCES, version=number, step_s=seconds, is_last=number == 10) | self.it.push()

    def weights(self) -> dict[str, list[float]]:
        return {name: value.flatten().tolist() for name, value in self.it.drafter.named_weights()}

    def held(self) -> dict[str, list[float]]:
        return {n: p.detach().flatten().tolist() for n, p in self.engines[0].held.model.named_parameters()}


def config(draft_dir: Path, **settings: Any) -> Config:
    base = policy_cases.config(str(draft_dir), {})
    speculation = SpeculationConfig(mode="coupled", drafters=("model",), draft_model=str(draft_dir))
    refresh = {"refresh": 0.03, "max_updates": UPDATES}
    return replace(
        base,
        rollout=replace(base.rollout, speculation=speculation),
        distillation=cases.config(**refresh | settings),
    )
