"""An EAGLE-3 head beside a draft model of one layer: how often they are right, and what a drafted token costs.

    python -m benchmarks.heads [--target FOLDER] [--updates N] [--turns N]

Both begin at what `specactor drafter init` makes of the target, and learn the same responses with as many updates. A
real engine each then drafts for held-out problems, in turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks.acceptance import requests_of
from benchmarks.results import Result, likely, publish
from benchmarks.trained_models import task_recipe, task_target
from specactor.config import DraftTrainingConfig, EngineConfig, SpeculationConfig
from specactor.data.dataset import build_dataset
from specactor.data.tokenizer import load_tokenizer
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.sglang.model_drafter import ModelDrafter
from specactor.rollout.sglang.speculation_calls import CONFIGURE, REPORT
from specactor.rollout.speculation.counters import Counts
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.trainer.drafter import command, init
from specactor.trainer.drafter.buffer import TrainingExample
from specactor.trainer.drafter.head import Eagle3Start
from specactor.types import RolloutRequest, Trajectory

STARTS: dict[str, init.Start] = {"one layer": init.TargetStart(), "EAGLE-3 head": Eagle3Start()}
RUNNING, WINDOW = 64, 4
TAUGHT, HELD_OUT, GROUP_SIZE = 384, 64, 4  # problems, and responses to each
CPU_S = "drafting_cpu_s"


class Timed(ModelDrafter):
    """Counts the processor time of its drafting, by which it is named in figures."""

    def __init__(self) -> None:
        super().__init__()
        self._cpu_s = 0.0

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        began_s = time.process_time()
        drafts = super().propose(sequences, windows)
        self._cpu_s += time.process_time() - began_s
        return drafts

    def figures(self) -> dict[str, float]:
        told, self._cpu_s = {CPU_S: self._cpu_s}, 0.0
        return told


def speculation(draft: Path, mode: str) -> SpeculationConfig:
    return SpeculationConfig(
        mode=mode,  # type: ignore[arg-type]
        drafters=("benchmarks.heads:Timed",),
        window=WINDOW,
        max_window=WINDOW,
        draft_model=(str(draft),),
    )


def engine_spec(index: int, target: Path, draft: Path, folder: Path) -> EngineSpec:
    return EngineSpec(
        index=index,
        model_dir=str(target),
        dtype="float32",
        devices=(0,),
        config=EngineConfig(max_running_requests=RUNNING, max_total_tokens=16_384),
        speculation=speculation(draft, "coupled"),
        context_length=512,
        log_file=str(folder / f"engine-{index}.log"),
    )


def generated(engine: Engine, draft: Path, mode: str, requests: Sequence[RolloutRequest]) -> tuple[list[float], bool]:
    """Return ([emitted per verify, microseconds of the processor per drafted token, drafted tokens, tokens per second],
    whether anything failed)."""
    engine.rank_call(CONFIGURE, msgspec.json.encode(speculation(draft, mode)), timeout_s=60)
    engine.flush()
    began_s = time.perf_counter()
    done = engine.generate(list(requests))
    tokens = sum(len(trajectory.token_ids) for trajectory in done)
    speed = tokens / (time.perf_counter() - began_s)
    counts = msgspec.json.decode(engine.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts])
    if mode == "off":
        return [1.0, 0.0, 0.0, speed], False
    own = counts["model"]
    cpu_us = 1e6 * own.figures[CPU_S] / own.drafted
    return [own.emitted / own.verifies, cpu_us, float(own.drafted), speed], own.failures > 0


def example_of(trajectory: Trajectory) -> TrainingExample:
    ids = np.array([*trajectory.prompt_ids, *trajectory.token_ids], np.int32)
    return TrainingExample(token_ids=ids, prompt_len=len(trajectory.prompt_ids), version=0)


def learned(target: Path, folder: Path, taught: Sequence[Trajectory], updates: int) -> dict[str, Path]:
    """Folders of both, trained."""
    settings = DraftTrainingConfig(learning_rate=3e-3, tokens_per_update=2048)
    for name, start in STARTS.items():
        place = folder / name
        init.make_draft_model(target, place, start)
        policy = init.read_model(target)
        model = init.read_draft(place, policy)
        examples = [example_of(trajectory) for trajectory in taught if trajectory.token_ids]
        stats = command.learn(policy, model, examples, settings, seed=0, limit_s=1e9, updates=updates)
        print(f"{name}: KL {stats.kl:.3f}, overlap {stats.overlap:.3f}, {stats.seconds:.0f} s", flush=True)
        init.write_model(model, place, tokenizer=target)
    return {name: folder / name for name in STARTS}


def table(found: dict[str, list[list[float]]], plain: list[float], *, updates: int, failed: bool) -> Result:
    """Return the page. Args: of each drafter what `generated` returned, a list per turn; plain tokens per second."""
    rows = []
    for name, turns in found.items():
        lengths, costs, _, speeds = zip(*turns, strict=True)
        ratios = [speed / alone for speed, alone in zip(speeds, plain, strict=True)]
        rows.append([name, f"{lengths[0]:.2f}", likely(costs, "{:.0f}"), likely(ratios)])
    one, head = (row for row in rows)
    return Result(
        title="An EAGLE-3 head beside a draft model of one layer",
        verdict=f"accept_length {head[1]} with the head, {one[1]} with the layer; a drafted token takes {head[2]} us "
        f"of the processor, and {one[2]} us." + (" SOME DRAFTS FAILED." if failed else ""),
        intro=f"Window {WINDOW}, up to {RUNNING} requests at once, {HELD_OUT * GROUP_SIZE} responses to held-out "
        f"problems, in turns. Both learned {TAUGHT * GROUP_SIZE} responses of the target with {updates} updates. "
        "Drafting is what the drafter does in a round, with catching up on accepted tokens.",
        columns=("drafter", "accept_length", "us of drafting per drafted token", "tokens/s over plain"),
        rows=rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", type=Path, default=None)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    init.quiet()
    target, config = options.target or task_target("A"), task_recipe("A")
    tokenizer = load_tokenizer(target)
    problems = build_dataset(config.data.train_source, tokenizer, max_prompt_tokens=256)
    unseen = build_dataset(config.data.eval_sources(HELD_OUT)["eval"], tokenizer, max_prompt_tokens=256)
    held_out = requests_of(config, unseen, group_size=GROUP_SIZE)
    with tempfile.TemporaryDirectory(prefix="heads-") as temporary, ExitStack() as engines:
        folder = Path(temporary)
        first = folder / "first"
        init.make_draft_model(target, first, init.TargetStart())
        with running(engine_spec(9, target, first, folder)) as engine:
            some = [problems[i] for i in range(TAUGHT)]
            taught = engine.generate(requests_of(config, some, group_size=GROUP_SIZE))  # type: ignore[arg-type]
        drafts = learned(target, folder, taught, options.updates)
        started = {
            name: engines.enter_context(running(engine_spec(i, target, draft, folder)))
            for i, (name, draft) in enumerate(drafts.items())
        }
        found: dict[str, list[list[float]]] = {name: [] for name in drafts}
        plain: list[float] = []
        failed = False
        for turn in range(-1, options.turns):  # the first is a rehearsal
            speed = generated(started["one layer"], drafts["one layer"], "off", held_out)[0][3]
            for name in list(drafts)[:: 1 if turn % 2 else -1]:
                figures, wrong = generated(started[name], drafts[name], "coupled", held_out)
                failed |= wrong
                if turn >= 0:
                    found[name].append(figures)
            plain += [speed] if turn >= 0 else []
        publish("heads", table(found, plain, updates=options.updates, failed=failed), options.out)


if __name__ == "__main__":
    main()
