"""Steps of the shipped recipes, in the order in which they are made, on a GPU that refuses what it has no room for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from specactor import actor, device_memory, measurements, run
from specactor.actor import SpecActor
from specactor.device_memory import DeviceMemory
from specactor.planning.memory import PHASES, Memory, memory_of
from specactor.progress import Progress
from specactor.recipes import load
from specactor.weights_sync.sender import SyncReport

T = TypeVar("T")
H100 = 80e9
RECIPES = [
    ("qwen3_30b_a3b_node", 8, ()),
    ("qwen3_30b_a3b", 16, ("--train.optimizer-state", "bfloat16")),
    ("qwen3_30b_a3b", 64, ()),
    ("qwen3_8b", 8, ()),
]
DRAFT_MICRO_BATCH = 4096 * (28 * 32_768 * 4 + 151_936 * 4) + 6 * 2**27
"""Bytes that Qwen3-0.6B takes for 4,096 tokens: of layers, of logits, of a part of the loss."""
ENGINE, CACHES = ("policy, engine", "draft model"), ("keys and values", "logits in graphs")


class OutOfMemoryError(Exception):
    pass


class Gpu:
    """Rows of the prediction that are there, and the most bytes of each phase."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.phase, self.used = memory, "", dict[str, float]()
        self.peaks = dict.fromkeys(PHASES, 0.0)

    def take(self, *rows: str) -> None:
        for row in rows:
            self.used[row] = max(self.memory.rows[row].values())
        if sum(self.used.values()) > H100:
            raise OutOfMemoryError(f"{self.phase}: {self.used}")
        if self.phase:
            self.peaks[self.phase] = max(self.peaks[self.phase], sum(self.used.values()))  # type: ignore[index]

    def give(self, *rows: str) -> None:
        for row in rows:
            self.used.pop(row, None)

    @contextmanager
    def held(self, *rows: str) -> Iterator[None]:
        self.take(*rows)
        yield
        self.give(*rows)


class Engines:
    """The pool of a rank, whose engines have one device of it."""

    engines = ()

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def wait_ready(self) -> None:
        self.resume_memory()

    def release_memory(self) -> None:
        self.gpu.give(*ENGINE, *CACHES)

    def resume_weights(self) -> None:
        self.gpu.take(*ENGINE)

    def resume_memory(self) -> None:
        self.gpu.take(*ENGINE, *CACHES)

    def restart_lost(self, ended: Collection[int] = ()) -> tuple[int, ...]:
        return ()

    def set_version(self, version: int) -> None: ...


class Trainer:
    routes_freely = False

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        gpu.take("policy, trainer", "gradients", "optimizer")

    def offload(self) -> None:
        self.gpu.give("gradients", "optimizer")

    def reload(self) -> None:
        self.gpu.take("gradients", "optimizer")

    def train_step(self, batch: Any, **_: Any) -> None:
        with self.gpu.held("activations", "logits"):
            pass


class DraftModel:
    """As `Distillation`: it has the device while it learns."""

    recorder = None

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        with gpu.held("draft model, trainer"):
            pass

    def load(self, folder: Path) -> None:
        with self.gpu.held("draft model, trainer"):
            pass

    def refresh(self, batch: Any, **_: Any) -> dict[str, float]:
        with self.gpu.held("draft model, trainer"):
            self.gpu.used["its micro-batch"] = DRAFT_MICRO_BATCH
            self.gpu.take()
            self.gpu.give("its micro-batch")
            return {}

    def push(self) -> dict[str, float]:
        return {}


class Sender:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def push(self, *_: Any, **__: Any) -> SyncReport:
        with self.gpu.held("buckets"):
            return SyncReport(num_bytes=1, num_rounds=0, seconds=1.0)


class Alone:
    """A job of one rank."""

    rank, world = 0, 1

    def together(self, phase: str, work: Callable[[], T]) -> T:
        return work()

    def gather(self, value: T, kind: Any) -> list[T]:
        return [value]

    def any(self, flag: bool) -> bool:
        return flag

    def barrier(self) -> None: ...


class Phases(Progress):
    """Tells the GPU which phase of a step it is in."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(1, quiet=True)
        self.gpu = gpu

    @contextmanager
    def phase(self, name: str, **named: Any) -> Iterator[None]:
        self.gpu.phase = {"refresh": "train", "record": "train"}.get(name, name)
        with super().phase(name, **named):
            yield


def steps(
    gpu: Gpu, name: str, words: Sequence[str], monkeypatch: pytest.MonkeyPatch, *, count: int = 3, resumes: bool = False
) -> list[str]:
    """Start and make so many steps; return what the device had at the record of the start, and at checkpoints."""
    config, collective, saved = load([name, *words]), Alone(), list[str]()
    for where, function in ((measurements, "of_step"), (measurements, "of_environments"), (SpecActor, "of_rollout")):
        monkeypatch.setattr(where, function, lambda *_, **__: {})
    monkeypatch.setattr(device_memory, "in_use", lambda: int(sum(gpu.used.values())))
    monkeypatch.setattr(actor.samples, "fetch", lambda batch, *_: batch)
    monkeypatch.setattr(run.checkpoint, "load", lambda *_: gpu.take() or {"steps_done": 7, "version": 7})
    monkeypatch.setattr(run, "changed_settings", lambda *_: [])
    pool, quiet = Engines(gpu), lambda *_, **__: {}

    def look(*_: object) -> None:
        saved.extend(row for row in (*ENGINE, *CACHES, "optimizer") if row in gpu.used)

    gpu.take("rows of rounds", "overhead")
    devices = DeviceMemory(collective, pool, is_shared=True)  # type: ignore[arg-type]
    made: Any = SpecActor(
        config,
        trainer=devices.start(lambda: Trainer(gpu)),  # type: ignore[arg-type]
        devices=devices,
        rollouts=SimpleNamespace(  # type: ignore[arg-type]
            **{"pool": pool, "num_failed": 0, "num_unscored": 0, "state": dict},
            **{"digest": lambda: 0, "open_tokens": 0, "drawn": {}, "restore": quiet},
            take_stats=lambda **_: SimpleNamespace(counts={}, spans={"": ()}),
            collect=lambda step: gpu.take() or [],  # engines generate
        ),
        sender=Sender(gpu),  # type: ignore[arg-type]
        weights=None,  # type: ignore[arg-type]
        collective=collective,  # type: ignore[arg-type]
        progress=Phases(gpu),
        distillation=DraftModel(gpu),  # type: ignore[arg-type]
        on_trace=lambda *_: None,
        recorder=SimpleNamespace(started=look, stepped=quiet),  # type: ignore[arg-type]
        audit=SimpleNamespace(look=quiet, is_suspect=quiet, of_training=quiet),  # type: ignore[arg-type]
    )
    if resumes:
        run._resume(made, Path(), config, made.progress)
    made.start()
    for _ in range(count):
        gpu.phase = "rollout"
        made.step(look)
    gpu.phase = "sync"
    made.sync()  # where an engine that died was started again, it has its keys and values
    return saved


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize(("name", "world", "settings"), RECIPES)
def test_no_step_takes_more_than_is_predicted(
    name: str, world: int, settings: tuple[str, ...], resumes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the run starts with is recorded, and checkpoints are written, while the trainer has the device."""
    words = [*settings, *([] if name == "qwen3_8b" else ["--parallel.engines", str(world // 4)])]
    gpu = Gpu(memory_of(load([name, *words]), world, H100))
    saved = steps(gpu, name, words, monkeypatch, resumes=resumes)
    assert saved == ["optimizer"] * 4, "engines have given theirs"
    for phase in PHASES:
        assert gpu.peaks[phase] == pytest.approx(gpu.memory.of(phase)), "nothing else is there, and nothing lacks"


@pytest.mark.parametrize("wrong", ["the draft model stays", "the optimizer stays", "engines keep theirs"])
def test_wrong_steps_run_out_of_memory(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stays(self: DraftModel, batch: Any, **_: Any) -> dict[str, float]:
        self.gpu.take("draft model, trainer")
        return {}

    kind, method, instead = {
        "the draft model stays": (DraftModel, "refresh", stays),
        "the optimizer stays": (Trainer, "offload", lambda self: None),
        "engines keep theirs": (Engines, "release_memory", lambda self: None),
    }[wrong]
    monkeypatch.setattr(kind, method, instead)
    gpu = Gpu(memory_of(load(["qwen3_8b"]), 8, H100))
    with pytest.raises(OutOfMemoryError):
        steps(gpu, "qwen3_8b", [], monkeypatch)
