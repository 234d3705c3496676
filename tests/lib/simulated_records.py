"""What a run records of its start, and of a step after which nothing has changed, on a pretended device; with a critic.
For `simulated_shards`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer

from specactor import device_memory
from specactor.actor import SpecActor
from specactor.device_memory import DeviceMemory, HostCopies
from specactor.parallel.collective import Collective
from specactor.progress import Progress
from specactor.recipes import load
from specactor.replay.recorder import StepRecorder
from specactor.replay.records import RankWeights, file_of, read
from specactor.trainer.critic import Critic
from specactor.trainer.policy import PolicyTrainer

CONFIG = load(["quickstart_plain", "--algorithm.advantage", "gae", "--model.dtype", "bfloat16"])


class Main:
    """A main weight, as much of it as is looked at."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data


def learner(kind: type[Any], first: float) -> Any:
    """A policy or critic of one parameter in a buffer of Megatron's, with moments of another size."""
    buffer: Any = object.__new__(_ParamAndGradBuffer)
    buffer.param_data = (torch.arange(6.0) + first).to("cuda:0")
    buffer.param_data_cpu = buffer.grad_data = None
    chunk = SimpleNamespace(buffers=[buffer], expert_parallel_buffers=[])
    parameter = buffer.param_data.view(2, 3)
    chunk.module = SimpleNamespace(named_parameters=lambda: [("weight", parameter)])
    chunk.offload_grad_buffers = chunk.restore_grad_buffers = lambda: None
    main = Main(torch.arange(4.0).to("cuda:0"))
    moments = {name: torch.full((4,), first + i).to("cuda:0") for i, name in enumerate(("exp_avg", "exp_avg_sq"))}
    inner = SimpleNamespace(param_groups=[{"params": [main]}], state={main: moments | {"step": torch.tensor(3.0)}})
    made = object.__new__(kind)
    made.config, made.chunks, made.optimizer = CONFIG, [chunk], SimpleNamespace(optimizer=inner)
    made._host_copies = HostCopies()
    return made


class Run:
    def __init__(self, folder: Path, *, has_critic: bool = True) -> None:
        def make() -> PolicyTrainer:
            trainer: PolicyTrainer = learner(PolicyTrainer, 1.5)
            trainer.critic = learner(Critic, 2.5) if has_critic else None
            return trainer

        collective, self.folder = Collective(), folder
        calls = ("wait_ready", "release_memory", "resume_weights")
        engines: Any = SimpleNamespace(**dict.fromkeys(calls, lambda: None))
        rest: Any = dict.fromkeys(("sender", "weights", "distillation", "on_trace", "audit"))
        self.devices = DeviceMemory(collective, engines, is_shared=True)
        self.trainer = self.devices.start(make)
        self.recorder = StepRecorder(CONFIG, folder, trainer=self.trainer, collective=collective)
        self.actor = SpecActor(
            CONFIG,
            trainer=self.trainer,
            devices=self.devices,
            rollouts=SimpleNamespace(digest=lambda: 7),  # type: ignore[arg-type]
            collective=collective,
            progress=Progress(1, quiet=True),
            recorder=self.recorder,
            **rest,
        )

    def records(self, start: Callable[[], Any]) -> list[tuple[RankWeights, ...]]:
        """What is recorded of the start, and of the first step."""
        start()
        self.devices.to_trainer(self.trainer)
        stats: Any = SimpleNamespace(numbers=dict)
        self.recorder.stepped(1, 0, (), (), stats, None)
        return [read(file_of(self.folder, step)).weights for step in (0, 1)]

    def too_late(self) -> None:
        self.devices.to_weights(self.trainer)
        self.recorder.started(0, lambda: 7)


def recorded(folder: Path) -> dict[str, Any]:
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.version, "cuda", None),  # the CUDA build has properties of real devices alone
        patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        patch.object(device_memory, "in_use", lambda: 0),
        patch.object(SpecActor, "sync"),
    ):
        run = Run(folder / "right")
        started, stepped = run.records(run.actor.start)
        alone = Run(folder / "without a critic", has_critic=False)
        [late], [right] = alone.records(alone.too_late)
        found = {
            "same": started == stepped,
            "parameters": sorted(started[0].digests),
            "too late, without a critic": [late.digests == right.digests, late.optimizer == right.optimizer],
        }
        try:
            Run(folder / "too late").too_late()
        except RuntimeError as error:
            found["too late"] = str(error)
    return found
