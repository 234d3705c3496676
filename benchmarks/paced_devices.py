"""Engines and a drafter process that keep the pace of named devices, alike or not, as a benchmark drives them.

Invariants: every response is what plain decoding emitted for that request; a run in which computing took more than half
of the passes' time is no measurement (`Devices.passes` raises `DisturbedError`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.dialled import SCRIPT, Script
from benchmarks.paced_engine import NOTED, PACE, PASSES, DevicePace, Passes
from benchmarks.paced_link import delayed
from benchmarks.paced_turns import Step, Turns, logged
from specactor.config import EngineConfig, SpeculationConfig, TinyModelConfig
from specactor.data.tiny_model import make_tiny_model
from specactor.planning.model_shapes import SHAPES
from specactor.planning.rooflines import Roofline, cost_table, device
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.supervisor import DrafterProcess
from specactor.rollout.decoupled.transport import Address, DrafterAccess, local_endpoint
from specactor.rollout.sglang.engine_client import Engine, EngineSpec
from specactor.rollout.sglang.speculation_calls import CONFIGURE, REPORT, TRACE
from specactor.rollout.speculation.costs import Grid
from specactor.rollout.speculation.counters import Counts
from specactor.trace import Span
from specactor.types import RolloutRequest, SamplingParams

TINY = TinyModelConfig(num_layers=1, hidden_size=64, num_experts=2, expert_size=32)
MAX_WINDOW = 8
PROMPT_TOKENS = 16
TURNS = 3  # of a contestant, of which the first counts that was not disturbed
T = TypeVar("T")
MUCH = 0.05  # share of passes that may have computed for more than half of their time: stalls of the machine
NO_CORE = 4096  # a device that is no core of this machine: the process may run on all


class DisturbedError(Exception):
    """This machine computed for too much of the passes' time: nothing was measured."""


def undisturbed(take: Callable[[], T]) -> T:
    """Take a turn, and again where the machine had too much to do."""
    for _ in range(TURNS - 1):
        with suppress(DisturbedError):
            return take()
    return take()


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is imitated: devices in groups, each with an engine, or the last of them with the drafter instead."""

    name: str
    pace: DevicePace
    batch: int  # requests of all groups
    groups: int = 2  # of devices
    acceptance: float = 0.8
    spread: float = 0.0
    runner_up: float = 0.5
    tokens: int = 96  # per request; with `tail` the most
    tail: bool = False
    paces: tuple[DevicePace, ...] = ()  # of groups that differ; else all have `pace`
    drafter: Grid | None = None  # as `DevicePace.draft`, of a device of its own that drafts: then all groups verify
    link_s: float = 0.0  # between a drafter and its engines, one way, before dilation

    def of_group(self, group: int) -> DevicePace:
        return self.paces[group] if self.paces else self.pace

    @property
    def verifiers(self) -> int:
        """Return how many groups verify where another device drafts."""
        return self.groups - (self.drafter is None)

    def step_s(self, requests: int) -> list[float]:
        """Return the dilated seconds of a drafter's step for 1, 2, .. requests."""
        last = self.of_group(self.groups - 1)
        return (last if self.drafter is None else msgspec.structs.replace(last, draft=self.drafter)).step_s(requests)


def published(
    target: str, draft: str, gpu: str, *, devices: int, context: int, most: int, dilation: float
) -> DevicePace:
    """Return the pace of an engine on `devices` GPUs by the roofline, and of the draft model on as many, for up to
    `most` requests. Keys are read once per request."""
    roofline = Roofline(SHAPES[target], device(gpu), devices=devices, context=context, keys_once=True)
    beside = Roofline(SHAPES[draft], device(gpu), devices=devices, context=context)
    table = cost_table(roofline, {draft: beside}, max_window=MAX_WINDOW, max_requests=most)
    return DevicePace(plain=table.plain, verify=table.verify, draft=table.drafters[draft], dilation=dilation)


def flat(pass_s: float, step_s: float, *, dilation: float = 1.0) -> DevicePace:
    """Return a pace that no number of requests changes."""

    def grid(seconds: Sequence[float]) -> Grid:
        each = tuple(map(float, range(1, len(seconds) + 1)))
        return Grid(requests=(1.0,), per_request=each, seconds=(tuple(seconds),))

    steps = grid([step_s * window for window in range(1, MAX_WINDOW + 1)])
    return DevicePace(plain=grid([pass_s]), verify=grid([pass_s]), draft=steps, dilation=dilation)


@dataclass(kw_only=True)
class Devices:
    """The engines of all groups, and where their drafter listens."""

    setting: Setting
    engines: list[Engine]
    endpoint: str
    folder: Path
    requests: list[list[RolloutRequest]]  # batches
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def of(self, config: SpeculationConfig) -> list[Engine]:
        """Return the engines that verify: all, but for a group that drafts."""
        return self.engines[: self.setting.verifiers] if config.is_decoupled else self.engines

    def begin(self, config: SpeculationConfig) -> None:
        """Engines that verify so know nothing of costs and acceptance; the others decode plainly."""
        for engine in self.engines:
            wanted = config if engine in self.of(config) else SpeculationConfig()
            engine.rank_call(CONFIGURE, msgspec.json.encode(wanted), timeout_s=60)

    def decode(self, requests: Sequence[RolloutRequest], config: SpeculationConfig) -> float:
        """Return the seconds until the last response. SystemExit for one that is not what was decoded before."""
        engines = self.of(config)
        parts = [requests[k :: len(engines)] for k in range(len(engines))]
        for engine in engines:
            engine.flush()
        with ThreadPoolExecutor(len(engines)) as threads:
            began_s = time.perf_counter()
            futures = [threads.submit(engine.generate, part) for engine, part in zip(engines, parts, strict=True)]
            done = [response for future in futures for response in future.result()]
            seconds = time.perf_counter() - began_s
        for response in done:
            token_ids = tuple(response.token_ids)
            expected = self.expected.setdefault(response.request_id, token_ids)
            if token_ids != expected:
                raise SystemExit(f"response {response.request_id} is {token_ids}, expected {expected}")
        return seconds

    def forget_passes(self) -> None:
        with suppress(DisturbedError):
            self.passes()

    def passes(self) -> Passes:
        """Return those of all engines since the last call. Raises DisturbedError where many computed for long."""
        total = Passes()
        for engine in self.engines:
            of = msgspec.json.decode(engine.rank_call(PASSES, b"", timeout_s=60)[0], type=Passes)
            for name in Passes.__struct_fields__:
                setattr(total, name, getattr(total, name) + getattr(of, name))
        if total.over_half > MUCH * total.passes:
            raise DisturbedError(
                f"{self.setting.name}: in {total.over_half} of {total.passes} passes computing took more than half of "
                f"the pass ({1e3 * total.own_s / total.passes:.1f} ms on average). Use more dilation than "
                f"{self.setting.pace.dilation:g}, or wait until the machine is quiet."
            )
        return total

    def turns(self) -> Turns:
        """Return those of all engines since the last call."""
        total = Turns()
        for engine in self.engines:
            of = msgspec.json.decode(engine.rank_call(NOTED, b"", timeout_s=60)[0], type=Turns)
            total = Turns(turns=total.turns + of.turns, empty=total.empty + of.empty)
        return total

    def steps(self, since_s: float) -> list[Step]:
        """Return the drafter's steps since then."""
        return logged(self._script, since_s)

    @property
    def _script(self) -> Path:
        return self.folder / "drafter.json"

    def counts(self) -> Counts:
        """Return those of all drafters and engines since the last call."""
        total = Counts()
        for engine in self.engines:
            report = msgspec.json.decode(engine.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts])
            total = sum(report.values(), total)
        return total

    def trace(self, *, on: bool) -> list[Span]:
        """Return the spans of the first engine since the last call."""
        answer = self.engines[0].rank_call(TRACE, b"on" if on else b"off", timeout_s=60)[0]
        return msgspec.msgpack.decode(answer, type=list[Span])

    @contextmanager
    def drafter(self, script: Script) -> Iterator[DrafterProcess]:
        """Draft so in engines, and start the drafter process."""
        path = self._script
        outputs = {str(r.seed): list(self.expected[r.request_id]) for batch in self.requests for r in batch}
        path.write_bytes(msgspec.json.encode(script := msgspec.structs.replace(script, outputs=outputs)))
        for group in range(self.setting.groups):  # an engine drafts at its own device's pace
            own = msgspec.structs.replace(script, step_s=self.setting.of_group(group).step_s(8 * self.setting.batch))
            script_for(self.folder, group).write_bytes(msgspec.json.encode(own))
        spec = DrafterSpec(
            index=0,
            endpoint=self.endpoint,
            model_dir=str(path),
            dtype="float32",
            device=NO_CORE,
            context_length=4096,
            max_requests=self.setting.batch,
            continuer="benchmarks.paced_turns:Logged",
            log_file=str(self.folder / "drafter.log"),
        )
        process = DrafterProcess(spec)
        try:
            process.wait_ready()
            yield process
        finally:
            process.stop()


def script_for(folder: Path, group: int) -> Path:
    """Return the file that tells an engine how to draft."""
    return folder / f"script-{group}.json"


def script_of(setting: Setting, *, runner_up: float) -> Script:
    """Return what the setting's drafter knows, but for the outputs."""
    return Script(
        acceptance=setting.acceptance,
        spread=setting.spread,
        runner_up=runner_up,
        sleeps=True,
        step_s=setting.step_s(8 * setting.batch),
        outputs={},
    )


@contextmanager
def started(setting: Setting, folder: Path, *, batches: int) -> Iterator[Devices]:
    """Give the devices of a setting, with so many batches of requests that were decoded plainly once."""
    model = folder / "model"
    if not model.exists():
        make_tiny_model(TINY, 0, model)
    endpoint = near = local_endpoint()
    link = ExitStack()
    if setting.link_s:
        near = local_endpoint()
        link.enter_context(delayed(near, endpoint, setting.pace.dilation * setting.link_s))
    access = DrafterAccess(drafters=(Address(endpoint=near),))
    context = PROMPT_TOKENS + setting.tokens + 2 * MAX_WINDOW
    engines: list[Engine] = []
    try:
        for index in range(setting.groups):
            spec = EngineSpec(
                index=index,
                model_dir=str(model),
                dtype="float32",
                devices=(index,),
                config=EngineConfig(
                    max_running_requests=setting.batch,
                    max_total_tokens=setting.batch * (context + 2 * MAX_WINDOW) + 1024,
                ),
                speculation=SpeculationConfig(mode="auto", max_window=MAX_WINDOW),
                context_length=context,
                log_file=str(folder / f"engine-{index}.log"),
                drafters=replace(access, engine=f"engine {index}"),
            )
            pace = folder / f"pace-{index}.json"
            pace.write_bytes(msgspec.json.encode(setting.of_group(index)))
            environment = {PACE: str(pace), SCRIPT: str(script_for(folder, index))}
            engines.append(Engine(spec, run="benchmarks.paced_engine:run", **environment))
        for engine in engines:
            engine.wait_ready(engine.spec.config.start_timeout_s)
        devices = Devices(
            setting=setting,
            engines=engines,
            endpoint=endpoint,
            folder=folder,
            requests=[requests(setting, batch) for batch in range(batches)],
        )
        devices.begin(SpeculationConfig())
        for batch in devices.requests:
            devices.decode(batch, SpeculationConfig())
        devices.forget_passes()  # of a warm-up
        yield devices
    finally:
        for engine in engines:
            engine.stop()
        link.close()


def response_tokens(setting: Setting, draw: random.Random) -> int:
    """Return the tokens of a response: all have one length, or, with a tail, most a quarter of the longest."""
    share = min(1.0, 0.25 * draw.lognormvariate(0.0, 0.7)) if setting.tail else 1.0
    return max(8, round(share * setting.tokens))


def requests(setting: Setting, batch: int) -> list[RolloutRequest]:
    found = []
    for i in range(setting.batch):
        seed = 1 + (batch * 4096 + i) * 7919
        draw = random.Random(seed)
        tokens = response_tokens(setting, draw)
        found.append(
            RolloutRequest(
                request_id=f"{batch}.{i}",
                prompt_ids=tuple(draw.randrange(4, 30) for _ in range(PROMPT_TOKENS)),
                sampling=SamplingParams(temperature=1.0, max_new_tokens=tokens, ignore_eos=True),
                seed=seed,
                group_id=i,
            )
        )
    return found


def shortened(requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
    """Cut requests to a single token, which prefills give."""
    return [
        replace(r, request_id=f"{r.request_id}.short", sampling=replace(r.sampling, max_new_tokens=1)) for r in requests
    ]
