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
from specactor.errors import SpecActorError
from specactor.replay.audit import Audit, choose, gumbel
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


def audit(engine: Engine | None, action: str, dtype: str = "float32", **rollout: Any) -> tuple[Audit, Told]:
    base, told = quickstart.plain(), Told()
    config = replace(
        base,
        model=replace(base.model, dtype=dtype),  # type: ignore[arg-type]
        rollout=replace(base.rollout, audit=action, speculation=version("right"), **rollout),  # type: ignore[arg-type]
        parallel=replace(base.parallel, engines=1, expert=1),
    )
    pool = SimpleNamespace(engines=[replaced(engine)] if engine is not None else [])
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
    assert found["audit/responses"] == min(64, len(requests()))
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
    with pytest.raises(SpecActorError, match=r"rollout\.audit: audit: .* responses of step 7 differ"):
        own.look(7, 0, wrong, step_s=1000.0)


def test_an_audit_takes_its_share_of_the_time(engine: Engine) -> None:
    """Steps whose share pays for few tokens save it up."""
    own, _ = audit(engine, "stop")
    right = generated(engine, "right")
    longest = max(len(t.token_ids) for group in right for t in group.trajectories)
    looks = [bool(own.look(step, 0, right, step_s=60.0 / longest)) for step in range(1, 100)]
    assert not looks[0]
    assert 0 < sum(looks) < len(looks), "each pays for 0.3 tokens at first"


def test_responses_are_drawn_by_the_seed_and_of_one_policy(engine: Engine) -> None:
    own = generated(engine, "right")
    chosen = [response.request_id for response, _ in choose(own, 16, seed=1, step=2, version=0)]
    assert chosen == [response.request_id for response, _ in choose(own, 16, seed=1, step=2, version=0)]
    assert chosen != [response.request_id for response, _ in choose(own, 16, seed=1, step=3, version=0)]
    assert choose(own, 16, seed=1, step=2, version=5) == []


def trained(scored: int, unpicked: int) -> Any:
    return SimpleNamespace(scored=scored, unpicked=unpicked)


def test_tokens_that_their_noise_does_not_pick_are_told_or_end_the_run() -> None:
    own, told = audit(None, "warn")
    assert own.of_training(1, trained(10_000, 0)) == {"audit/scored": 10_000, "audit/unpicked": 0}
    assert (own.is_suspect({}, trained(10_000, 0)), told.notes) == (False, [])
    assert own.of_training(3, trained(10_000, 1))["audit/unpicked"] == 1
    assert own.is_suspect({}, trained(10_000, 1))
    assert told.notes[0].startswith("audit: 1 of 10000 tokens of step 3 are not those that their noise picks")
    assert "--step 3 runs the step again" in told.notes[0]
    own, _ = audit(None, "stop")
    with pytest.raises(SpecActorError, match=r"rollout\.audit: audit: 1 of 10000 tokens"):
        own.of_training(3, trained(10_000, 1))


def test_in_bfloat16_one_token_in_ten_thousand_may_be_another() -> None:
    own, _ = audit(None, "stop", "bfloat16")
    own.of_training(1, trained(10_000, 1))
    with pytest.raises(SpecActorError, match=r"rollout\.audit: audit: 2 of"):
        own.of_training(2, trained(10_000, 2))


def test_what_of_a_response_the_trainer_compares() -> None:
    of_agent = Problem(index=0, prompt="", prompt_ids=(1,), answer="", verifier="examples.agent:Critical", metadata={})
    response = Trajectory(
        request_id="0.0.0",
        group_id=0,
        prompt_ids=(1,),
        token_ids=(5,) * 6,
        logprobs=(0.0,) * 6,
        finish_reason="stop",
        spans=(),
        loss_mask=(True, True, False, True, True, True),
    )
    alone = ScoredGroup(problem=of_agent, trajectories=(response,), scores=(0.0,), rewards=(0.0,))
    own, _ = audit(None, "warn")
    assert own.num_seeded(alone, response) == 2, "an agent's later turns have seeds of their own"
    other = replace(alone, problem=replace(of_agent, verifier="exact"))
    assert own.num_seeded(other, response) == 6
    for without in (audit(None, "off"), audit(None, "warn", top_k=5)):
        assert without[0].num_seeded(other, response) == 0
