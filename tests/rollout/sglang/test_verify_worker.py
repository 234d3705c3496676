"""Speculation on and off: the same tokens, finish reasons and log-probabilities from a real engine."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from specactor.config import EngineConfig, SpeculationConfig
from specactor.config.rollout import DRAFT_ROWS
from specactor.progress import Progress
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.sglang.speculation_calls import CONFIGURE, REPORT
from specactor.rollout.speculation.counters import Counts
from specactor.rollout.speculation.windows import OFF as OFF_NAME
from specactor.types import RolloutRequest, Trajectory
from tests.lib.ranks import run_alone
from tests.rollout.conftest import CONTEXT, request, two_ranks_are_deep
from tests.rollout.sglang import drafters
from tests.rollout.sglang.asking import assert_same

MAX_WINDOW = 16
HERE = "tests.rollout.sglang.drafters"
OFF = SpeculationConfig(mode="off", max_window=MAX_WINDOW)


def speculation(drafter: str, window: int) -> SpeculationConfig:
    name = drafter if drafter == "previous" else f"{HERE}:{drafter}"
    return SpeculationConfig(mode="coupled", drafters=(name,), window=window, max_window=MAX_WINDOW)


def configure(engine: Engine, config: SpeculationConfig) -> None:
    engine.rank_call(CONFIGURE, msgspec.json.encode(config), timeout_s=60)


def report(engine: Engine) -> Counts:
    """Of the only drafter, on rank 0."""
    counts = msgspec.json.decode(engine.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts])
    [name] = set(counts) - {OFF_NAME}
    return counts[name]


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def speculating(request: pytest.FixtureRequest, make_spec: Callable[..., EngineSpec]) -> Iterator[Engine]:
    """An engine whose speculation each test configures."""
    ranks: int = request.param
    spec = make_spec(
        10 + ranks,
        tensor_parallel=ranks,
        devices=tuple(range(ranks)),
        config=EngineConfig(max_running_requests=32, max_total_tokens=6144),
        speculation=replace(OFF, mode="coupled", drafters=(f"{HERE}:Constant",)),
    )
    with running(spec) as engine:
        yield engine


def batch(count: int = 50) -> list[RolloutRequest]:
    """All kinds of sampling side by side; some end by themselves, some at their length."""
    temperatures = (0.0, 0.6, 1.0, 1.3)
    sampling: list[dict[str, object]] = [{}, {"top_p": 0.8}, {"top_k": 7}, {"top_p": 0.9, "top_k": 12}]
    return [
        request(i, temperature=temperatures[i % 4], new=8 + i % 29, ignore_eos=i % 3 != 0, **sampling[i // 4 % 4])
        for i in range(count)
    ]


def facts(trajectories: list[Trajectory]) -> list[tuple[object, ...]]:
    return [(t.token_ids, t.finish_reason, t.logprobs) for t in trajectories]


@pytest.fixture(scope="module")
def plain(speculating: Engine, engines: tuple[Engine, Engine]) -> list[tuple[object, ...]]:
    """What SGLang gives without the plugin's algorithm."""
    engine = engines[len(speculating.spec.devices) - 1]
    engine.flush()
    return facts(engine.generate(batch()))


def run(engine: Engine, config: SpeculationConfig, requests: list[RolloutRequest]) -> list[tuple[object, ...]]:
    engine.flush()
    configure(engine, config)
    return facts(engine.generate(requests))


def test_speculation_off_is_plain_decoding(speculating: Engine, plain: list[tuple[object, ...]]) -> None:
    assert run(speculating, OFF, batch()) == plain


@two_ranks_are_deep("speculating")
@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("drafter", ["previous", "HalfRight"])
def test_drafts_change_no_token(
    speculating: Engine, plain: list[tuple[object, ...]], drafter: str, window: int
) -> None:
    run(speculating, speculation(drafter, window), batch())  # the drafter learns what will come
    report(speculating)
    speculating.flush()
    assert facts(speculating.generate(batch())) == plain
    counts = report(speculating)
    assert counts.drafted > 0
    if drafter == "previous":  # equal weights: it is always right
        assert counts.accepted == counts.drafted > 0
        assert counts.emitted / counts.verifies > 1 + 0.4 * window
    else:
        assert 0 < counts.accepted < counts.drafted


@two_ranks_are_deep("speculating")
def test_the_longest_requests_are_drafted_for_to_their_end(speculating: Engine, engines: tuple[Engine, Engine]) -> None:
    """The page table has room for the slots that SGLang reserves behind their last tokens."""
    ready, engine = speculating.ready, engines[len(speculating.spec.devices) - 1]
    assert ready is not None
    requests = [request(i, new=ready.max_sequence_tokens - len(request(i).prompt_ids)) for i in range(6)]
    engine.flush()
    assert run(speculating, speculation("Constant", MAX_WINDOW), requests) == facts(engine.generate(requests))


def test_requests_that_leave_no_room_for_drafts_are_decoded_plainly(
    make_spec: Callable[..., EngineSpec], engine: Engine
) -> None:
    """The longest that the pool holds, alone and in turns: SGLang would give up what it has no reserve for."""
    spec = make_spec(
        14,
        config=EngineConfig(max_running_requests=4, max_total_tokens=CONTEXT - 40),
        speculation=speculation("Constant", MAX_WINDOW),
    )
    with running(spec) as small:
        assert small.ready is not None
        longest = small.ready.max_sequence_tokens
        assert longest == CONTEXT - 42
        requests = [request(i, new=longest - len(request(i).prompt_ids)) for i in range(3)]
        assert_same(small.generate(requests), engine.generate(requests))
        assert report(small).drafted > 0


def test_text_drafters_are_told_on_rank_0_alone(speculating: Engine) -> None:
    requests = batch(10)
    run(speculating, speculation("Heard", 4), requests)
    reports = speculating.rank_call(REPORT, b"", timeout_s=60)
    first, *others = [msgspec.json.decode(of, type=dict[str, Counts])["heard"].figures for of in reports]
    assert first["opened"] == len(requests)
    assert first["tokens"] > 100
    assert others == [{"opened": 0, "tokens": 0}] * (speculating.spec.tensor_parallel - 1)


GRAPHS = "tests.rollout.sglang.replayed_graphs"


@contextmanager
def in_graphs(engine: Engine, kind: bytes, *, beyond: int) -> Iterator[None]:
    """Rounds run in SGLang's own graphs but for the device, of one row per token, and some in one of more rows than
    `beyond`."""
    sizes, width = json.loads(engine.rank_call("graphs.capture", kind, timeout_s=60)[0])
    try:
        yield
    finally:
        replayed = json.loads(engine.rank_call("graphs.drop", kind, timeout_s=60)[0])
    assert width == 1
    of_verifications = engine.spec.config.max_running_requests * (engine.spec.speculation.max_window + 1)
    assert max(sizes) == (DRAFT_ROWS if b"draft" in kind else of_verifications)
    assert max(map(int, replayed)) > beyond


@two_ranks_are_deep("speculating")
def test_graphs_with_a_row_per_token_change_no_token(speculating: Engine, plain: list[tuple[object, ...]]) -> None:
    """Plain rounds and verifications run in the same; a graph that keeps the lengths of another batch is caught."""
    config = replace(speculation("HalfRight", 5), drafters=(f"{GRAPHS}:Half",))
    run(speculating, config, batch())  # the drafter learns what will come, and its module is there
    with in_graphs(speculating, b"", beyond=32):
        assert run(speculating, config, batch()) == plain
        assert run(speculating, OFF, batch()) == plain
    with in_graphs(speculating, b"stale", beyond=0):
        assert run(speculating, config, batch()) != plain


def test_long_contexts_of_many_query_heads_change_no_token(
    make_spec: Callable[..., EngineSpec], tmp_path: Path
) -> None:
    """Not in company either: eight query heads share a key head, and contexts pass what sums over keys are split at."""
    heads = ("num_attention_heads=8", "num_key_value_heads=1", "max_position_embeddings=512")
    run_alone("tests.rollout.sglang.make_dense", tmp_path / "model", *heads)
    prompts = [tuple(3 + (5 * i + 7 * j * j) % 93 for j in range(n)) for i, n in enumerate((20, 120, 180, 245, 300))]
    asked = [replace(request(i, new=40), prompt_ids=prompt) for i, prompt in enumerate(prompts)]
    spec = make_spec(
        13,
        model_dir=str(tmp_path / "model"),
        context_length=512,
        config=EngineConfig(max_running_requests=8, max_total_tokens=4096),
        speculation=replace(OFF, mode="coupled", drafters=(f"{HERE}:Constant",)),
    )
    with running(spec) as engine:
        alone = [fact for one in asked for fact in run(engine, OFF, [one])]
        assert run(engine, OFF, asked) == alone
        run(engine, speculation("HalfRight", 5), asked)  # the drafter learns what will come
        report(engine)
        engine.flush()
        assert facts(engine.generate(asked)) == alone
        counts = report(engine)
        assert 0 < counts.accepted < counts.drafted


TOO_MANY = "drafted more tokens than it was asked for; they are cut"
DROPPED = "failed 3 times, and is not asked again"
LIARS: dict[str, list[str]] = {
    "Garbage": [],
    "Constant": [],
    "OnlyEos": [],
    "OutOfBounds": ["drafted a token beyond the vocabulary; the draft ends before it", TOO_MANY],
    "Negative": ["drafted a negative token; the draft ends before it"],
    "Fractional": ["drafted a float, which is no token; the draft ends before it"],
    "TooFew": ["ValueError: propose returned 0 drafts for N requests", DROPPED],
    "Raises": ["RuntimeError: a drafter's bug", DROPPED],
}
"""What is told of each."""


@two_ranks_are_deep("speculating")
@pytest.mark.parametrize("drafter", LIARS)
def test_liars_change_no_token_and_are_told_of(
    speculating: Engine, plain: list[tuple[object, ...]], drafter: str
) -> None:
    """On the terminal once, in two steps' worth of its lies."""
    assert run(speculating, speculation(drafter, 4), batch()) == plain
    seen = speculating.speculation_counts()
    [counts] = [of for name, of in seen.items() if name != OFF_NAME]
    assert (counts.failures > 0) == (drafter in ("TooFew", "Raises"))
    assert (counts.drafted == 0) == (drafter in ("TooFew", "Raises"))
    console = Console(file=io.StringIO(), width=200)
    with Progress(2, console=console) as progress:
        progress.drafter_problems(seen)
        assert [len(of) for of in progress.problems.values()] == [len(LIARS[drafter])] * bool(LIARS[drafter])
        progress.problems.clear()
        speculating.flush()
        speculating.generate(batch(10))
        progress.drafter_problems(speculating.speculation_counts())
        assert progress.problems == {}
    told = [re.sub(r"[0-9]+ requests", "N requests", line) for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert sorted(line.partition("drafter ")[2] for line in told) == sorted(
        f"{counts_name(drafter)}: {drafter}: {reason}. That costs speed, and changes no token."
        for reason in LIARS[drafter]
    )


def counts_name(drafter: str) -> str:
    return str(getattr(drafters, drafter).name)


def test_plain_rounds_between_rounds_with_drafts_change_no_token(
    speculating: Engine, plain: list[tuple[object, ...]]
) -> None:
    """The first rounds of mode auto take turns: draft tokens, none on the plain path, and so on."""
    configure(speculating, SpeculationConfig(mode="auto", drafters=(f"{HERE}:HalfRight",), max_window=MAX_WINDOW))
    for _ in range(4):  # in the first, the drafter learns what will come
        speculating.flush()
        assert facts(speculating.generate(batch())) == plain
    counts = msgspec.json.decode(speculating.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts])
    plainly = counts.pop(OFF_NAME)
    [drafted] = counts.values()
    assert plainly.rested > 3
    assert drafted.speculative_rounds > 3
    assert drafted.accepted > 0


def test_batch_mates_and_order_change_nothing(speculating: Engine, plain: list[tuple[object, ...]]) -> None:
    requests = batch()
    run(speculating, speculation("HalfRight", 6), requests)
    for part in (requests[:1], requests[7:9], requests[::-1]):
        speculating.flush()
        assert facts(speculating.generate(part)) == [plain[requests.index(r)] for r in part]


def test_the_counts_add_up(speculating: Engine) -> None:
    requests = batch(20)
    run(speculating, speculation("HalfRight", 8), requests)
    report(speculating)
    speculating.flush()
    emitted = sum(len(t.token_ids) for t in speculating.generate(requests))
    counts = report(speculating)
    assert counts.drafted == sum(counts.drafted_at)
    assert counts.accepted == sum(counts.accepted_at)
    assert counts.emitted == counts.accepted + counts.verifies
    assert counts.emitted <= emitted + 8 * len(requests)  # a chain may run past a request's end
    assert counts.draft_s > 0 < counts.verify_s
    assert all(a <= d for a, d in zip(counts.accepted_at, counts.drafted_at, strict=True))
    assert report(speculating) == Counts()
