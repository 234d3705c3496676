"""The audit sees a verification that emits wrong tokens now and then, and nothing where all is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from examples import quickstart
from specactor.config import EngineConfig
from specactor.errors import AgreementError
from specactor.replay.audit import RESPONSES, Audit, choose, gumbel
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.types import Problem, RolloutRequest, ScoredGroup, Trajectory
from tests.rollout.conftest import request
from tests.rollout.sglang.test_seeded_faults import version
from tests.rollout.sglang.test_verify_worker import configure

GROUP = 4


@dataclass
class Alone:
    """A job of one rank."""

    rank: int = 0

    def together(self, _: str, work: Callable[[], Any]) -> Any:
        return work()

    def gather(self, value: Any, _: type) -> list[Any]:
        return [value]


class Told:
    """Progress of a rollout that took a second; it keeps what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def spent(self) -> dict[str, float]:
        return {"rollout": 1.0}

    def phase(self, _: str) -> nullcontext[None]:
        return nullcontext()

    def note(self, text: str) -> None:
        self.notes.append(text)


def requests() -> list[RolloutRequest]:
    """Sampled as the run's config has it."""
    return [replace(request(i, new=24, ignore_eos=False), request_id=f"0.{i // GROUP}.{i % GROUP}") for i in range(24)]


def groups(responses: list[Trajectory]) -> list[ScoredGroup]:
    problem = Problem(index=0, prompt="", prompt_ids=(1,), answer="", verifier="exact", metadata={})
    parts = [tuple(responses[i : i + GROUP]) for i in range(0, len(responses), GROUP)]
    return [
        ScoredGroup(problem=problem, trajectories=part, scores=(0.0,) * GROUP, rewards=(0.0,) * GROUP) for part in parts
    ]


def audit(engine: Engine, action: str) -> tuple[Audit, Told]:
    base, told = quickstart.recipe(), Told()
    config = replace(
        base,
        rollout=replace(base.rollout, audit=action, speculation=version("right")),  # type: ignore[arg-type]
        parallel=replace(base.parallel, engines=1, expert=1),
    )
    pool = SimpleNamespace(engines=[replaced(engine)])
    return Audit(config, pool=pool, collective=Alone(), progress=told), told  # type: ignore[arg-type]


def replaced(engine: Engine) -> Any:
    """The engine as the job's first one."""
    return SimpleNamespace(index=0, alive=True, generate=engine.generate)


@pytest.fixture(scope="module")
def engine(make_spec: Callable[..., EngineSpec]) -> Iterator[Engine]:
    config = EngineConfig(max_running_requests=32, max_total_tokens=6144)
    with running(make_spec(22, config=config, speculation=version("right"))) as engine:
        engine.generate(requests())  # what is drafted from here on is half of this
        yield engine


def generated(engine: Engine, name: str) -> list[ScoredGroup]:
    engine.flush()
    configure(engine, version(name))
    return groups(engine.generate(requests()))


def test_what_is_right_is_found_right(engine: Engine) -> None:
    own, told = audit(engine, "stop")
    found = own.look(1, 0, generated(engine, "right"), step_s=1000.0)
    assert found["audit/responses"] == min(RESPONSES, len(requests()))
    assert found["audit/tokens"] > found["audit/responses"]
    assert (found["audit/differences"], found["audit/ties"], told.notes) == (0, 0, [])


def test_the_noise_of_a_finding_is_that_of_the_engine(engine: Engine) -> None:
    """The largest of all tokens' scores has a mean of 0.577 (Gumbel); with other noise it is that and log p."""
    responses = [t for group in generated(engine, "right") for t in group.trajectories]
    found = {}
    for off in (-1, 0, 1):
        found[off] = fmean(
            p + gumbel(t.seed, len(t.prompt_ids) + i + off, token)
            for t in responses
            for i, (token, p) in enumerate(zip(t.token_ids, t.logprobs, strict=True))
        )
    assert found[0] == pytest.approx(0.577, abs=0.4)
    assert max(found[-1], found[1]) < -1


def test_wrong_tokens_are_found_and_verification_is_named(engine: Engine) -> None:
    wrong = generated(engine, "emits_the_rejected")
    own, told = audit(engine, "warn")
    found = own.look(7, 0, wrong, step_s=1000.0)
    assert found["audit/differences"] > 0
    assert "--step 7 runs the step again" in told.notes[0]
    assert "speculation or noise: the first run emitted a token that its noise does not pick" in told.notes[0]
    own, _ = audit(engine, "stop")
    with pytest.raises(AgreementError, match=r"rollout\.audit: audit: .* responses of step 7 differ"):
        own.look(7, 0, wrong, step_s=1000.0)


def test_an_audit_takes_a_hundredth_of_the_time(engine: Engine) -> None:
    """Steps whose share pays for few tokens save it up."""
    own, _ = audit(engine, "stop")
    right = generated(engine, "right")
    longest = max(len(t.token_ids) for group in right for t in group.trajectories)
    looks = [bool(own.look(step, 0, right, step_s=30.0 / longest)) for step in range(1, 100)]
    assert not looks[0]
    assert 0 < sum(looks) < len(looks), "each pays for 0.3 tokens at first"


def test_responses_are_drawn_by_the_seed_and_of_one_policy(engine: Engine) -> None:
    own = generated(engine, "right")
    chosen = [part.response.request_id for part in choose(own, seed=1, step=2, version=0)]
    assert chosen == [part.response.request_id for part in choose(own, seed=1, step=2, version=0)]
    assert chosen != [part.response.request_id for part in choose(own, seed=1, step=3, version=0)]
    assert choose(own, seed=1, step=2, version=5) == []
