"""Wrong versions, put into a running engine one after the other: comparing with plain decoding catches every one."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specactor.config import EngineConfig, SpeculationConfig
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.types import RolloutRequest, Trajectory
from tests.rollout.conftest import VOCAB, request
from tests.rollout.sglang.test_verify_worker import OFF, configure, report

FILE = Path(__file__).parent / "wrong_versions.py"
WINDOW = 6

WRONG_TOKENS = [
    "noise_of_the_root",
    "noise_off_by_one",
    "noise_of_the_batch",
    "noise_of_the_row",
    "likeliest",
    "likeliest_for_drafts",
    "accepts_the_likely",
    "parameters_of_the_first",
    "one_too_many",
    "skips_a_mismatch",
    "accepts_all",
    "emits_the_rejected",
    "bonus_of_the_row_before",
    "accepted_of_the_neighbour",
    "tokens_of_the_neighbour",
    "looks_at_the_last_token",
    "overruns",
    "slots_swapped",
    "keys_of_the_neighbour",
    "drafts_unseen",
    "keeps_keys_of_the_rejected",
    "counts_a_rejected",
]
WRONG_LOGPROBS = [
    "logprobs_of_the_row_before",
    "logprobs_filled_in",
    "logprobs_at_temperature_one",
    "logprobs_after_top_p",
]
WRONG_CACHE = ["caches_too_much"]
HARMLESS = ["without_bonus", "drafts_of_the_neighbour", "windows_without_end"]


def batch(count: int = 40) -> list[RolloutRequest]:
    """All kinds of sampling side by side; every third ends by itself, at one of many stop tokens, or at its length."""
    temperatures = (0.0, 0.6, 1.0, 1.3)
    filters: list[dict[str, object]] = [{}, {"top_p": 0.8}, {"top_k": 7}, {"top_p": 0.9, "top_k": 12}]
    ends: list[dict[str, object]] = [{"ignore_eos": False, "stop_token_ids": tuple(range(3, VOCAB, 9))}, {}, {}]
    return [
        request(i, temperature=temperatures[i % 4], new=8 + i % 29, **filters[i // 4 % 4], **ends[i % 3])
        for i in range(count)
    ]


def continued(trajectories: list[Trajectory]) -> list[RolloutRequest]:
    """Requests that go on where responses ended."""
    return [
        replace(wanted, prompt_ids=trajectory.prompt_ids + trajectory.token_ids)
        for wanted, trajectory in zip(batch(), trajectories, strict=True)
    ]


def version(name: str) -> SpeculationConfig:
    drafter = f"tests.rollout.sglang.wrong_versions:{name}"
    return replace(OFF, mode="coupled", drafters=(drafter,), window=WINDOW)


def run(engine: Engine, config: SpeculationConfig, requests: list[RolloutRequest] | None = None) -> list[Trajectory]:
    engine.flush()
    configure(engine, config)
    return engine.generate(requests or batch())


def differing(some: list[Trajectory], others: list[Trajectory]) -> set[str]:
    """Which facts about responses are not the same."""
    return {
        fact
        for fact in ("token_ids", "finish_reason", "logprobs")
        for a, b in zip(some, others, strict=True)
        if getattr(a, fact) != getattr(b, fact)
    }


@pytest.fixture(scope="module")
def engine(make_spec: Callable[..., EngineSpec]) -> Iterator[Engine]:
    """Speculates; what `right` drafts of `batch()` is rehearsed."""
    spec = make_spec(
        21,
        config=EngineConfig(max_running_requests=32, max_total_tokens=6144),
        speculation=version("right"),
    )
    with running(spec) as engine:
        engine.generate(batch())
        yield engine


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[Trajectory]:
    return run(engine, OFF)


def check_right(engine: Engine, plain: list[Trajectory]) -> None:
    assert differing(run(engine, version("right")), plain) == set()
    counts = report(engine)
    assert 0 < counts.accepted < counts.drafted
    assert counts.failures == 0


def test_the_batch_has_what_faults_need(plain: list[Trajectory]) -> None:
    assert sum(t.finish_reason == "stop" for t in plain) >= 8
    assert sum(t.finish_reason == "length" for t in plain) >= 20
    assert len({t.token_ids for t in plain}) > len(plain) / 2


def test_the_right_version_is_plain_decoding(engine: Engine, plain: list[Trajectory]) -> None:
    check_right(engine, plain)


@pytest.mark.parametrize("name", WRONG_TOKENS)
def test_wrong_tokens_are_caught(engine: Engine, plain: list[Trajectory], name: str) -> None:
    wrong = run(engine, version(name))
    assert "token_ids" in differing(wrong, plain)
    assert report(engine).failures == 0


@pytest.mark.parametrize("name", WRONG_LOGPROBS)
def test_wrong_logprobs_are_caught(engine: Engine, plain: list[Trajectory], name: str) -> None:
    assert differing(run(engine, version(name)), plain) == {"logprobs"}


def cached_error(engine: Engine, plain: list[Trajectory], name: str) -> float:
    """Largest error of a log-probability on top of what a version left in the prefix cache; inf: of a token."""
    configure(engine, version("right"))
    fresh = run(engine, OFF, continued(plain))
    run(engine, version(name))
    cached = engine.generate(continued(plain))
    if differing(cached, fresh) - {"logprobs"}:
        return math.inf
    return max(
        abs(a - b)
        for one, other in zip(cached, fresh, strict=True)
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
    )


def test_the_cache_holds_keys_of_committed_tokens(engine: Engine, plain: list[Trajectory]) -> None:
    assert cached_error(engine, plain, "right") < 1e-4


@pytest.mark.parametrize("name", WRONG_CACHE)
def test_wrong_keys_in_the_cache_are_caught(engine: Engine, plain: list[Trajectory], name: str) -> None:
    assert cached_error(engine, plain, name) > 1e-2


@pytest.mark.parametrize("name", HARMLESS)
def test_slower_is_not_wrong(engine: Engine, plain: list[Trajectory], name: str) -> None:
    assert differing(run(engine, version(name)), plain) == set()
    assert report(engine).drafted > 0


def test_the_right_version_is_still_plain_decoding(engine: Engine, plain: list[Trajectory]) -> None:
    """No wrong version left anything behind."""
    check_right(engine, plain)


def test_every_wrong_version_is_tried() -> None:
    names = [node.name for node in ast.parse(FILE.read_text()).body if isinstance(node, ast.FunctionDef)]
    framework = ["patch", "heal", "in_place_of", "right"]
    tried = [*WRONG_TOKENS, *WRONG_LOGPROBS, *WRONG_CACHE, *HARMLESS]
    assert sorted(name for name in names if not name.startswith("_") and name not in framework) == sorted(tried)
