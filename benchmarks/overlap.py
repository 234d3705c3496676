"""Plain rounds of an engine that speculates, at the pace of a GPU: with rounds launched ahead, and without.

python -m benchmarks.overlap
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import Result, likely, publish
from specactor.config import EngineConfig, SpeculationConfig, TinyModelConfig
from specactor.data.tiny_model import make_tiny_model
from specactor.planning.model_shapes import SHAPES
from specactor.planning.rooflines import Roofline, device
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.types import RolloutRequest, SamplingParams

MODEL, GPU, CONTEXT = "Qwen3-8B", "H100", 2048
BATCHES = (8, 64, 256)
TURNS = 12
TOKENS, PROMPT_TOKENS = 96, 16
NOBODY = "benchmarks.overlap_engine:Nobody"  # the drafter, which brings the pretended device along
SET = "overlap.set"
"""Rank call of `overlap_engine`: whether rounds overlap, and the seconds of a pass of decoding. Payload: "1 0.008"."""
COLUMNS = (
    "requests",
    "pass, ms",
    "tokens/s without",
    "tokens/s with",
    "with / without",
    "ms per round without",
    "ms per round with",
    "host ms hidden",
)
Pair = tuple[float, float]
"""Seconds of a batch without and with overlap, of one turn."""


def requests(count: int) -> list[RolloutRequest]:
    draw = random.Random(count)
    return [
        RolloutRequest(
            request_id=str(i),
            prompt_ids=tuple(draw.randrange(4, 28) for _ in range(PROMPT_TOKENS)),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=TOKENS, ignore_eos=True),
            seed=1 + i,
            group_id=i,
        )
        for i in range(count)
    ]


def pairs(engine: Engine, count: int, pass_s: float, turns: int) -> list[Pair]:
    """In turns; the first is a warm-up. SystemExit where overlap changed a token."""
    batch, measured = requests(count), []
    expected: list[tuple[int, ...]] = []
    for turn in range(turns + 1):
        seconds = {}
        for overlaps in (False, True) if turn % 2 else (True, False):
            engine.flush()
            engine.rank_call(SET, f"{overlaps:d} {pass_s}".encode(), timeout_s=60)
            began_s = time.perf_counter()
            found = [tuple(t.token_ids) for t in engine.generate(batch)]
            seconds[overlaps] = time.perf_counter() - began_s
            expected = expected or found
            if found != expected:
                raise SystemExit("tokens are not those without overlap")
        measured.append((seconds[False], seconds[True]))
    return measured[1:]


def row_of(count: int, pass_s: float, measured: Sequence[Pair]) -> list[str]:
    without, with_ = zip(*measured, strict=True)
    return [
        str(count),
        f"{1e3 * pass_s:.2f}",
        *(likely([count * TOKENS / s for s in each], "{:.0f}") for each in (without, with_)),
        likely([a / b for a, b in measured]),
        *(likely([1e3 * s / TOKENS for s in each]) for each in (without, with_)),
        likely([1e3 * (a - b) / TOKENS for a, b in measured]),
    ]


def verdict(found: dict[int, list[Pair]]) -> str:
    """What overlap gains, by number of requests."""
    gains = {count: likely([a / b for a, b in measured]) for count, measured in found.items()}
    open_ = [count for count in found if float(gains[count].partition("(")[2].partition("-")[0]) <= 1.0]
    said = "; ".join(f"{gain} times with {count} requests" for count, gain in gains.items())
    return f"Launching plain rounds ahead makes plain decoding this much as fast: {said}. " + (
        f"Not shown to gain, since their intervals hold 1: {', '.join(map(str, open_))}." if open_ else "All gain."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--out", type=Path, help="another folder than docs/results")
    options = parser.parse_args(arguments)
    roofline = Roofline(SHAPES[MODEL], device(GPU), devices=1, context=CONTEXT)
    pass_s = {count: roofline.forward_s(count) for count in options.batches}
    most, length = max(options.batches), PROMPT_TOKENS + TOKENS + 16
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_tiny_model(TinyModelConfig(num_layers=1, hidden_size=64, num_experts=2, expert_size=32), 0, model)
        spec = EngineSpec(
            index=0,
            model_dir=str(model),
            dtype="float32",
            devices=(0,),
            config=EngineConfig(max_running_requests=most, max_total_tokens=most * (length + 16) + 1024),
            speculation=SpeculationConfig(mode="coupled", drafters=(NOBODY,), window=0, max_window=4),
            context_length=length,
            log_file=str(Path(folder) / "engine.log"),
        )
        with running(spec) as engine:
            found = {count: pairs(engine, count, pass_s[count], options.turns) for count in options.batches}
    publish(
        "overlap",
        Result(
            title="Plain rounds launched ahead, at the pace of a GPU",
            verdict=verdict(found),
            intro=(
                "A real engine that speculates, in rounds in which nobody drafts. Its device is pretended: a pass "
                f"takes what the roofline says of {MODEL} on one {GPU} ({CONTEXT} tokens of context, a bound from "
                "below) beside the host, and computes nothing; all else is the shipped software on this machine. "
                f"{TOKENS} tokens per request; medians of {options.turns} turns (95 % interval), and of what is "
                "compared within a turn; tokens are the same in all of them."
            ),
            columns=COLUMNS,
            rows=[row_of(count, pass_s[count], measured) for count, measured in found.items()],
            notes=(
                "What launching costs a processor beside a GPU (attention's plans, graphs, kernels) is not in it: a "
                "pretended device needs none. A host with faster cores has less to hide."
            ),
        ),
        options.out,
    )


if __name__ == "__main__":
    main()
