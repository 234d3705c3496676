"""What a drafter that is gone costs: speed of rollouts with a killed or a stopped drafter process, over plain decoding.

    python -m benchmarks.dead_drafter [--batches 1 16 64] [--repetitions N] [--processor-time]

The model is small, so that an engine's rounds take few milliseconds and whatever it does for a drafter shows. The
drafter drafts first, and is then stopped (SIGSTOP), and later killed. Ways to speculate take turns, and each is
compared with mode `off` just before and just after it, since the machine's pace drifts. All emit the same tokens, which
is checked.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks import speculation_speed_server as server
from benchmarks.draft_protocol import Null
from benchmarks.results import Result, likely, publish
from benchmarks.speculation_speed import processor_s
from specactor.config import EngineConfig, SpeculationConfig, TinyModelConfig
from specactor.data.tiny_model import make_tiny_model
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.supervisor import DrafterProcess
from specactor.rollout.decoupled.transport import Address, DrafterAccess, local_endpoint
from specactor.rollout.process_guard import descendants
from specactor.rollout.sglang.engine_client import Engine, EngineSpec
from specactor.types import RolloutRequest, SamplingParams

BATCHES = (1, 16, 64)
REPETITIONS = 31
ROLLOUT_S = 0.4
"""One measurement takes about that long: as many rollouts as fit. The shorter, the closer is what is compared."""
MAX_NEW_TOKENS = 96
CONTEXT = 160
AIM = 0.97
LIMIT_S = 300.0
REMOTE = SpeculationConfig(mode="decoupled", drafters=("decoupled",), draft_model=("with the drafter",))
WAYS = {
    "off": SpeculationConfig(),
    "window 4": replace(REMOTE, window=4),
    "chosen windows": REMOTE,
    "auto": replace(REMOTE, mode="auto"),
}
"""Of one engine. Each but the first asks the drafter process."""


def null(spec: DrafterSpec) -> Null:
    """What the drafter process drafts with."""
    return Null()


@contextmanager
def players(folder: Path, batch: int) -> Iterator[tuple[Engine, DrafterProcess]]:
    """An engine and its drafter process, both ready."""
    make_tiny_model(TinyModelConfig(), 0, folder / "model")
    drafter = DrafterProcess(
        DrafterSpec(
            index=0,
            endpoint=local_endpoint(),
            model_dir="",
            dtype="float32",
            device=1,
            context_length=CONTEXT,
            max_requests=batch,
            continuer="benchmarks.dead_drafter:null",
            log_file=str(folder / "drafter.log"),
        )
    )
    try:
        spec = EngineSpec(
            index=0,
            model_dir=str(folder / "model"),
            dtype="float32",
            devices=(0,),
            config=EngineConfig(
                max_running_requests=batch,
                max_total_tokens=batch * CONTEXT + 1024,
                extra_args={"disable_radix_cache": True},
            ),
            speculation=WAYS["auto"],
            drafters=DrafterAccess(drafters=(Address(endpoint=drafter.spec.endpoint),)),
            context_length=CONTEXT,
            log_file=str(folder / "engine.log"),
        )
        engine = Engine(spec, run=f"{server.__name__}:run")
        try:
            engine.wait_ready(spec.config.start_timeout_s)
            drafter.wait_ready()
            yield engine, drafter
        finally:
            engine.stop()
    finally:
        drafter.kill()


def requests_of(batch: int) -> list[RolloutRequest]:
    """Random prompts; all responses are equally long."""
    return [
        RolloutRequest(
            request_id=f"request {i}",
            prompt_ids=tuple(3 + (31 * i + 7 * j * j) % 20 for j in range(24)),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True),
            seed=1 + 7919 * i,
            group_id=i,
        )
        for i in range(batch)
    ]


def switch(engine: Engine, way: str) -> None:
    """What this way has learned is still there."""
    message = server.Switch(name=way, config=WAYS[way])
    engine.rank_call(server.SWITCH, msgspec.json.encode(message), timeout_s=60)


class Contest:
    """Of one batch size; its clock gives seconds of an engine."""

    def __init__(self, engine: Engine, batch: int, clock: Callable[[Engine], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._requests = requests_of(batch)
        self._rollouts = 1
        self._expected: list[tuple[int, ...]] = []
        switch(engine, "off")
        self._rollout()
        self._rollouts = max(1, round(ROLLOUT_S / self._rollout()))

    def _rollout(self) -> float:
        """Seconds of one. Raises SystemExit when it emits other tokens than the first."""
        began = self._clock(self._engine)
        tokens = [tuple(t.token_ids) for t in self._engine.generate(self._requests)]
        seconds = self._clock(self._engine) - began
        self._expected = self._expected or tokens
        if tokens != self._expected:
            raise SystemExit("dead_drafter: the responses are not those of plain decoding")
        return seconds

    def drafted(self, way: str) -> int:
        """Draft tokens that were verified in one rollout."""
        switch(self._engine, way)
        self._engine.speculation_counts()
        self._rollout()
        return sum(counts.drafted for counts in self._engine.speculation_counts().values())

    def shares(self, repetitions: int) -> dict[str, list[float]]:
        """Way -> per repetition, its speed over that of `off` before and after it."""
        shares: dict[str, list[float]] = {way: [] for way in WAYS if way != "off"}
        before_s = self._timed("off")
        for repetition in range(-1, repetitions):
            for way in list(shares)[:: 1 if repetition % 2 else -1]:
                own_s, after_s = self._timed(way), self._timed("off")
                if repetition >= 0:
                    shares[way].append((before_s + after_s) / 2 / own_s)
                before_s = after_s
        return shares

    def _timed(self, way: str) -> float:
        switch(self._engine, way)
        return sum(self._rollout() for _ in range(self._rollouts))


def measure(batches: Sequence[int], repetitions: int, clock: Callable[[Engine], float]) -> list[list[str]]:
    """Rows of the table. Args: seconds, of an engine."""
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="dead-drafter-") as temporary,
        players(Path(temporary), max(batches)) as (engine, drafter),
    ):
        contests = {batch: Contest(engine, batch, clock) for batch in batches}
        deadline = time.monotonic() + LIMIT_S
        while not contests[batches[0]].drafted("window 4"):
            if time.monotonic() > deadline:
                raise SystemExit("dead_drafter: the living drafter drafted nothing")
        (pid,) = descendants(drafter.pid)
        for state, by in (("stopped", signal.SIGSTOP), ("killed", signal.SIGKILL)):
            os.kill(pid, by)
            for batch, contest in contests.items():
                shares = contest.shares(repetitions)
                if lost := [way for way in shares if contest.drafted(way)]:
                    raise SystemExit(f"dead_drafter: a {state} drafter drafted for {lost}")
                rows.append([state, str(batch), *(likely(values, "{:.3f}") for values in shares.values())])
                print(*rows[-1], sep="  ", flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument(
        "--processor-time", action="store_true", help="of the scheduler, not of the clock: for a machine that is busy"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the engine is stopped
    clock = processor_s if options.processor_time else lambda engine: time.perf_counter()
    rows = measure(options.batches, options.repetitions, clock)
    cells = [cell for row in rows for cell in row[2:]]
    medians = [float(cell.split()[0]) for cell in cells]
    missed = [cell for cell, ratio in zip(cells, medians, strict=True) if ratio < AIM]
    publish(
        "dead_drafter",
        Result(
            title="Speed with a dead drafter",
            verdict=(
                f"With a dead drafter process an engine decodes {min(medians):.2f} to {max(medians):.2f} times as fast "
                f"as without speculation, in the median. The aim of {AIM} is missed in {len(missed)} of {len(cells)} "
                f"cells: {', '.join(missed) or 'none'}."
            ),
            intro=(
                "Tokens per second of an engine whose only drafter process was stopped or killed after it had drafted, "
                "over those of mode `off` just before and just after: median (and its 95 % interval) "
                f"of {options.repetitions} repetitions of about {ROLLOUT_S:g} s; "
                f"responses of {MAX_NEW_TOKENS} tokens; a small mixture of experts, whose "
                "rounds take few milliseconds. `window 4` and `chosen windows` are mode `decoupled`."
            ),
            columns=("Drafter", "Requests", *(way for way in WAYS if way != "off")),
            rows=rows,
            notes=(f"Seconds are of {'the scheduler as processor time' if options.processor_time else 'the clock'}."),
        ),
    )


if __name__ == "__main__":
    main()
