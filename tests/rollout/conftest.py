"""Two real engines, on one and on two tensor-parallel ranks, shared by all tests of this folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from specactor.config import EngineConfig
from specactor.cpu import sglang as cpu
from specactor.rollout.process_guard import SHARED_FILES, TEMPORARY, descendants
from specactor.rollout.sglang.engine_client import Engine, EngineSpec
from specactor.rollout.warm_starter import WarmStarter
from specactor.types import RolloutRequest, SamplingParams
from tests.lib.ranks import run_alone

HERE = Path(__file__).parent
VOCAB = 96
CONTEXT = 160


def heed_interrupts() -> None:
    """In a child, before it starts: whoever runs the tests in the background has Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_script(script: str, *args: str) -> subprocess.Popen[str]:
    """A script of this folder in a clean process that can import transformers without a GPU."""
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **cpu.environment()},
    )


def two_ranks_are_deep(fixture: str, one: int = 1, two: int = 2) -> pytest.MarkDecorator:
    """For tests of an engine's fixture that say of two ranks what others do in `make check`.

    Args: the fixture; its parameters for one rank and for two.
    """
    params = [one, pytest.param(two, marks=pytest.mark.deep)]
    return pytest.mark.parametrize(fixture, params, ids=["tp1", "tp2"], indirect=True)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    run_alone("tests.rollout.make_model", folder)
    return str(folder)


@pytest.fixture(scope="session")
def make_spec(
    warm_starter: WarmStarter, model_dir: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., EngineSpec]:
    """A spec of a small engine; arguments override fields of EngineSpec."""
    logs = tmp_path_factory.mktemp("run") / "engines"

    def make(index: int, **overrides: object) -> EngineSpec:
        fields: dict[str, object] = {
            "index": index,
            "model_dir": model_dir,
            "dtype": "float32",
            "devices": (0,),
            "config": EngineConfig(max_running_requests=32, max_total_tokens=4096),
            "context_length": CONTEXT,
            "log_file": str(logs / f"engine-{index}.log"),
        }
        return EngineSpec(**{**fields, **overrides})  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def engines(make_spec: Callable[..., EngineSpec]) -> Iterator[tuple[Engine, Engine]]:
    started = [Engine(make_spec(0)), Engine(make_spec(1, tensor_parallel=2, devices=(0, 1)))]
    try:
        for engine in started:
            engine.wait_ready(300)
        yield started[0], started[1]
    finally:
        footprints = [Footprint.of(engine.pid) for engine in started]
        for engine in started:
            engine.stop()
        for footprint in footprints:
            footprint.assert_gone()


@pytest.fixture
def engine(engines: tuple[Engine, Engine]) -> Engine:
    """One rank; its caches are empty."""
    engines[0].flush()
    return engines[0]


@pytest.fixture
def engine_tp2(engines: tuple[Engine, Engine]) -> Engine:
    """Two tensor-parallel ranks; their caches are empty."""
    engines[1].flush()
    return engines[1]


@pytest.fixture(scope="session")
def reference(
    model_dir: str,
) -> Iterator[Callable[[list[tuple[tuple[int, ...], tuple[int, ...], float]]], list[list[float]]]]:
    """transformers' log-probabilities of (prompt, response, temperature)."""
    with start_script("reference_logprobs.py", model_dir) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(cases: list[tuple[tuple[int, ...], tuple[int, ...], float]]) -> list[list[float]]:
            stdin.write(json.dumps(cases) + "\n")
            stdin.flush()
            answers: list[list[float]] = json.loads(stdout.readline().removeprefix("ANSWERS "))
            return answers

        yield ask
        stdin.close()
        assert process.wait(60) == 0


def request(
    i: int, *, temperature: float = 1.0, new: int = 24, group_size: int = 4, ignore_eos: bool = True, **sampling: object
) -> RolloutRequest:
    """Request i: its group's prompt, and a seed of its own."""
    group = i // group_size
    prompt = tuple(3 + (7 * group + 5 * j * j) % (VOCAB - 3) for j in range(4 + group % 9))
    return RolloutRequest(
        request_id=f"r{i}",
        prompt_ids=prompt,
        sampling=SamplingParams(
            temperature=temperature,
            max_new_tokens=new,
            ignore_eos=ignore_eos,
            **sampling,  # type: ignore[arg-type]
        ),
        seed=1000 + 17 * i,
        group_id=group,
    )


def process_exists(pid: int) -> bool:
    """Zombies, which wait for a parent that may be anybody, count as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


@dataclass(frozen=True)
class Footprint:
    """All that a child has on the machine, noted while it lives."""

    guard_pid: int
    pids: list[int]
    folders: list[Path]
    shared_files: list[Path]

    @classmethod
    def of(cls, guard_pid: int) -> Footprint:
        folders = list(TEMPORARY.glob(f"specactor-child-{guard_pid}-*"))
        lists = [file.read_text().split() for folder in folders for file in folder.glob(SHARED_FILES)]
        shared = [file for names in lists for name in names for file in Path("/dev/shm").glob(Path(name).name)]
        return cls(guard_pid, [guard_pid, *descendants(guard_pid)], folders, shared)

    def left(self) -> list[object]:
        """What of it is still there; processes also by their session, should a new one have been born."""
        pids = [pid for pid in {*self.pids, *_session(self.guard_pid)} if process_exists(pid)]
        return [*pids, *(path for path in [*self.folders, *self.shared_files] if path.exists())]

    def assert_gone(self, *, within_s: float = 40.0) -> None:
        for _ in range(int(within_s / 0.1)):  # looks, and not time: a machine may stand still
            if not (left := self.left()):
                return
            time.sleep(0.1)
        raise AssertionError(f"left behind: {left}")


def _session(leader: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == leader:
            found.append(int(stat.parent.name))
    return found
