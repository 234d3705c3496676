"""A draft model equal to its target is right always, and any other one changes no token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from specactor.config import EngineConfig, SpeculationConfig
from specactor.errors import EngineError
from specactor.rollout.child_process import ChildDied
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.sglang.speculation_calls import REPORT
from specactor.rollout.speculation.counters import Counts
from specactor.rollout.speculation.drafter_set import FAILURES
from specactor.types import RolloutRequest, Trajectory
from specactor.weights_sync.draft_push import DraftSender, push_to_engine
from tests.lib.ranks import run_alone
from tests.rollout.conftest import request, two_ranks_are_deep
from tests.rollout.sglang.asking import assert_same
from tests.rollout.sglang.pushes import DAMAGES, Pushes
from tests.rollout.sglang.test_verify_worker import GRAPHS, configure, facts, in_graphs, report
from tests.rollout.sglang.test_verify_worker import batch as batch_of_all_kinds
from tests.rollout.sglang.wrong_pushes import INTO_POLICY

WRONG = "tests.rollout.sglang.wrong_model_drafters"
WRONG_PUSHES = "tests.rollout.sglang.wrong_pushes"
MAX_WINDOW = 8
OFF = SpeculationConfig(mode="off", max_window=MAX_WINDOW)


@pytest.fixture(scope="module")
def dense_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dense(tmp_path_factory.mktemp("other"), "seed=5", "num_hidden_layers=1")


def make_dense(folder: Path, *fields: str) -> str:
    run_alone("tests.rollout.sglang.make_dense", folder, *fields)
    return str(folder)


def speculation(draft_dir: str, window: int | None, *, drafter: str = "model", **fields: object) -> SpeculationConfig:
    return SpeculationConfig(
        mode="coupled",
        drafters=(drafter,),
        window=window,
        max_window=MAX_WINDOW,
        draft_model=draft_dir,
        **fields,  # type: ignore[arg-type]
    )


def shared(draft_dir: str, window: int) -> SpeculationConfig:
    """The target's own noise, at its own temperature."""
    return speculation(draft_dir, window, drafter=f"{WRONG}:Shared")


def fields_of(ranks: int, draft_dir: str) -> dict[str, object]:
    return {
        "tensor_parallel": ranks,
        "devices": tuple(range(ranks)),
        "config": EngineConfig(max_running_requests=32, max_total_tokens=6144),
        "speculation": speculation(draft_dir, 3),
    }


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def twins(request: pytest.FixtureRequest, make_spec: Callable[..., EngineSpec], dense_dir: str) -> Iterator[Engine]:
    """An engine whose draft model has the target's weights."""
    with running(make_spec(20 + request.param, model_dir=dense_dir, **fields_of(request.param, dense_dir))) as engine:
        yield engine


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def strangers(request: pytest.FixtureRequest, make_spec: Callable[..., EngineSpec], other_dir: str) -> Iterator[Engine]:
    """A mixture of experts, and a draft model that has nothing to do with it."""
    with running(make_spec(30 + request.param, **fields_of(request.param, other_dir))) as engine:
        yield engine


def batch(temperature: float, count: int = 40) -> list[RolloutRequest]:
    """More requests than run at once, of several lengths."""
    return [request(i, temperature=temperature, new=20 + i % 23) for i in range(count)]


def counts_of(engine: Engine, config: SpeculationConfig, requests: list[RolloutRequest]) -> Counts:
    configure(engine, config)
    report(engine)
    engine.generate(requests)
    return report(engine)


def accept_rate(counts: Counts) -> float:
    assert counts.drafted > 100
    return counts.accepted / counts.drafted


def assert_always_right(engine: Engine, config: SpeculationConfig, requests: list[RolloutRequest]) -> None:
    """Every draft of a full window is accepted and changes no token, from empty caches and those of plain rounds."""
    configure(engine, OFF)
    engine.flush()
    plain = facts(engine.generate(requests))
    for fresh in (True, False):
        configure(engine, config)
        if fresh:
            engine.flush()
        report(engine)
        assert facts(engine.generate(requests)) == plain
        counts = report(engine)
        assert accept_rate(counts) >= 0.999
        assert config.window is not None
        assert counts.accepted_at[config.window - 1] > 0
        assert counts.failures == 0


def assert_changes_no_token(engine: Engine, config: SpeculationConfig) -> None:
    """Drafts of a window are accepted now and then; where the engine chooses it, drafting is tried three times."""
    requests = batch_of_all_kinds()
    configure(engine, OFF)
    engine.flush()
    plain = engine.generate(requests)
    configure(engine, config)
    for _ in range(3 if config.window is None else 1):
        engine.flush()
        assert_same(engine.generate(requests), plain)  # prompts in parts, which may be others, round differently
    if config.window is not None:
        counts = report(engine)
        assert 0 < counts.accepted < counts.drafted
        assert counts.failures == 0


@two_ranks_are_deep("twins")
@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_as_drafter_is_always_right(
    twins: Engine, dense_dir: str, temperature: float, window: int
) -> None:
    config = shared(dense_dir, window)
    for _ in range(2):  # the second time, prompts are in the prefix cache
        counts = counts_of(twins, config, batch(temperature))
        assert accept_rate(counts) >= 0.999
        assert counts.accepted_at[window - 1] > 0
        assert counts.failures == 0
    twins.flush()
    assert accept_rate(counts_of(twins, config, batch(temperature))) >= 0.999


@pytest.mark.deep
def test_a_draft_model_that_fails_on_one_rank_alone_ends_its_engine(
    make_spec: Callable[..., EngineSpec], dense_dir: str
) -> None:
    """The other rank waits in the pass. Where both fail, drafts end."""
    config, requests, break_on = speculation(dense_dir, 3), batch(1.0, 8), f"{WRONG}:fail_to_draft"
    with running(make_spec(29, model_dir=dense_dir, **fields_of(2, dense_dir))) as engine:
        configure(engine, OFF)
        plain = facts(engine.generate(requests))
        configure(engine, config)
        engine.rank_call(break_on, b"[0, 1]", timeout_s=60)
        assert facts(engine.generate(requests)) == plain
        assert report(engine).failures == FAILURES
        configure(engine, config)
        engine.rank_call(break_on, b"[1]", timeout_s=60)
        began_s = time.monotonic()
        with pytest.raises(ChildDied):
            engine.generate(requests)
        assert time.monotonic() - began_s < engine.spec.config.request_timeout_s / 2


@two_ranks_are_deep("twins")
def test_a_draft_model_in_graphs_drafts_the_same(twins: Engine, dense_dir: str) -> None:
    """Its passes over what it has not seen, and over one row per text; a graph that keeps the lengths of another batch
    is caught."""
    counts_of(twins, speculation(dense_dir, 3, drafter=f"{GRAPHS}:Half"), batch(1.0))  # the module is there
    config = speculation(dense_dir, 3, drafter=f"{WRONG}:InRows")
    with in_graphs(twins, b"draft", beyond=16):
        assert accept_rate(counts_of(twins, config, batch(1.0))) >= 0.999
    with in_graphs(twins, b"draft, stale", beyond=0):
        stale = counts_of(twins, config, batch(1.0))
    assert stale.failures or accept_rate(stale) < 0.9


@two_ranks_are_deep("twins")
def test_tokens_of_rounds_without_a_draft_are_shown_later(twins: Engine, dense_dir: str) -> None:
    twins.flush()
    config = speculation(dense_dir, 3, drafter=f"{WRONG}:Rests")
    assert accept_rate(counts_of(twins, config, batch(1.0))) >= 0.999


@two_ranks_are_deep("twins")
def test_texts_are_read_a_pass_per_round_while_others_draft(twins: Engine, dense_dir: str) -> None:
    found = {}
    for drafter in ("Rests", "ReadsSlowly"):
        twins.flush()
        found[drafter] = counts_of(twins, speculation(dense_dir, 3, drafter=f"{WRONG}:{drafter}"), batch(1.0))
        assert accept_rate(found[drafter]) >= 0.999
        assert found[drafter].failures == 0
    assert found["ReadsSlowly"].drafted < 0.95 * found["Rests"].drafted
    # Of texts that were never read. (What was once computed for others would still lie there.)
    others = [request(200 + i, new=20 + i % 23) for i in range(40)]
    wrong = counts_of(twins, speculation(dense_dir, 3, drafter=f"{WRONG}:ReadsTooFar"), others)
    assert accept_rate(wrong) < 0.99


@two_ranks_are_deep("twins")
@pytest.mark.parametrize(
    "mistake", ["SkipsTheFirstToken", "SeesTheLastTokenAlone", "TakesTheNextNoise", "ReadsThoseOfOthers"]
)
def test_mistakes_are_noticed(twins: Engine, dense_dir: str, mistake: str) -> None:
    twins.flush()
    counts = counts_of(twins, speculation(dense_dir, 3, drafter=f"{WRONG}:{mistake}"), batch(1.0))
    assert counts.failures == 0
    assert accept_rate(counts) < 0.99


@two_ranks_are_deep("twins")
@pytest.mark.parametrize(("drafter", "right"), [("Errs", True), ("ErrsAndKeeps", False)])
def test_what_was_rejected_is_forgotten(twins: Engine, dense_dir: str, drafter: str, right: bool) -> None:
    twins.flush()
    requests = batch(1.0)
    counts = counts_of(twins, speculation(dense_dir, 8, drafter=f"{WRONG}:{drafter}"), requests)
    assert counts.failures == 0
    assert (counts.accepted >= 0.998 * accepted_if_right(requests, window=8)) == right


def accepted_if_right(requests: list[RolloutRequest], *, window: int) -> int:
    """Draft tokens that are accepted of a drafter that errs after positions 3, 7, 11... and rests at 4, 8, 12..."""
    accepted = 0
    for r in requests:
        last, left = len(r.prompt_ids), r.sampling.max_new_tokens - 1
        while left:
            right = min(window, left - 1, (3 - last) % 4) if last % 4 else 0
            accepted += right
            last += right + 1
            left -= right + 1
    return accepted


OTHERS = [
    *((8, "model"), (1, "model"), (4, f"{WRONG}:Shared"), (8, f"{WRONG}:Greedy")),
    *(
        pytest.param(window, f"{WRONG}:{drafter}", marks=pytest.mark.deep)
        for window, drafter in ((1, "Shared"), (1, "Greedy"), (4, "Greedy"), (8, "Shared"))
    ),
]


@two_ranks_are_deep("strangers")
@pytest.mark.parametrize(("window", "drafter"), OTHERS)
def test_any_draft_model_changes_no_token(strangers: Engine, other_dir: str, window: int, drafter: str) -> None:
    requests = batch_of_all_kinds()
    configure(strangers, OFF)
    strangers.flush()
    plain = facts(strangers.generate(requests))
    configure(strangers, speculation(other_dir, window, drafter=drafter))
    assert facts(strangers.generate(requests)) == plain
    counts = report(strangers)
    assert 0 < counts.accepted < counts.drafted
    assert counts.failures == 0


@two_ranks_are_deep("strangers")
def test_memory_for_keys_and_values_is_shared_with_the_draft_model(strangers: Engine, other_dir: str) -> None:
    configure(strangers, shared(other_dir, 3))  # which makes the rank call known
    for answer in strangers.rank_call("probe.kv_bytes", b"", timeout_s=60):
        cell, target, draft = msgspec.json.decode(answer)
        assert draft > 0
        assert cell == target + draft


def mixed(draft_dir: str, drafter: str) -> SpeculationConfig:
    """Some requests have drafts of `filler`, others those of the model, others none; in each round others."""
    config = speculation(draft_dir, 4)
    return replace(config, drafters=(f"{WRONG}:mixing", f"{WRONG}:{drafter}"))


def counts_by_drafter(engine: Engine) -> dict[str, Counts]:
    return msgspec.json.decode(engine.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts])


@two_ranks_are_deep("strangers")
def test_requests_of_one_round_have_drafts_of_text_or_of_the_model(strangers: Engine, other_dir: str) -> None:
    requests = batch_of_all_kinds()
    configure(strangers, OFF)
    strangers.flush()
    plain = facts(strangers.generate(requests))
    configure(strangers, mixed(other_dir, "Shared"))
    assert facts(strangers.generate(requests)) == plain
    counts = counts_by_drafter(strangers)
    assert all(0 < counts[name].accepted < counts[name].drafted for name in ("filler", "model"))
    assert sum(of.failures for of in counts.values()) == 0


@two_ranks_are_deep("twins")
@pytest.mark.parametrize(("drafter", "right"), [("Shared", True), ("GivesThemToOthers", False)])
def test_the_model_drafts_for_the_requests_that_have_no_drafts(
    twins: Engine, dense_dir: str, drafter: str, right: bool
) -> None:
    twins.flush()
    configure(twins, mixed(dense_dir, drafter))
    counts_by_drafter(twins)
    twins.generate(batch(1.0))
    counts = counts_by_drafter(twins)
    assert (accept_rate(counts["model"]) >= 0.999) == right
    assert accept_rate(counts["filler"]) < 0.5


@pytest.fixture(scope="module")
def noise_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The twin's shape, and other weights."""
    return make_dense(tmp_path_factory.mktemp("noise"), "seed=7")


@pytest.fixture
def sender() -> Iterator[DraftSender]:
    made = DraftSender(torch.float32)
    yield made
    made.close()


def pushes_to(engine: Engine, sender: DraftSender) -> Pushes:
    return Pushes(sender, lambda weights: push_to_engine(engine, weights, timeout_s=60))


def policy_digests(engine: Engine) -> list[bytes]:
    return engine.rank_call("tests.weights_sync.engine_digests:digests", b"", timeout_s=60)


def test_a_push_between_rollouts_changes_drafts_and_no_token(
    twins: Engine, dense_dir: str, noise_dir: str, sender: DraftSender
) -> None:
    push, requests, config = pushes_to(twins, sender), batch(1.0), shared(dense_dir, 3)
    configure(twins, OFF)
    plain, policy = facts(twins.generate(requests)), policy_digests(twins)
    rates = []
    for folder in (noise_dir, dense_dir):
        assert push(folder) == ""
        configure(twins, config)
        report(twins)
        assert facts(twins.generate(requests)) == plain
        rates.append(accept_rate(report(twins)))
    assert rates[0] < 0.5, "other weights draft otherwise"
    assert rates[1] >= 0.999, "the target's own are right"
    assert policy_digests(twins) == policy


@two_ranks_are_deep("twins")
def test_pushes_during_a_rollout_change_no_token(
    twins: Engine, dense_dir: str, noise_dir: str, sender: DraftSender
) -> None:
    push, requests = pushes_to(twins, sender), batch(1.0, count=120)
    twins.flush()
    configure(twins, OFF)
    plain = facts(twins.generate(requests))
    configure(twins, shared(dense_dir, 3))
    report(twins)
    ended: list[str] = []
    said: list[str] = []
    running: list[int] = []

    def at_the_end_of(trajectory: Trajectory) -> None:
        ended.append(trajectory.request_id)
        if len(ended) in (1, 12, 24):
            said.append(push(dense_dir if len(ended) == 12 else noise_dir))
            running.append(len(requests) - len(ended))

    assert facts(twins.generate(requests, on_finished=at_the_end_of)) == plain
    counts = report(twins)
    assert said == ["", "", ""]
    assert min(running) > 0
    assert counts.failures == 0
    assert accept_rate(counts) < 0.99, "some of it was drafted with other weights"
    assert push(dense_dir) == ""
    assert accept_rate(counts_of(twins, shared(dense_dir, 3), requests)) >= 0.999


@two_ranks_are_deep("twins")
def test_damaged_pushes_during_a_rollout_change_neither_tokens_nor_drafts(
    twins: Engine, dense_dir: str, noise_dir: str, sender: DraftSender
) -> None:
    push, requests, config = pushes_to(twins, sender), batch(1.0), shared(dense_dir, 3)
    twins.flush()
    configure(twins, OFF)
    plain, policy = facts(twins.generate(requests)), policy_digests(twins)
    configure(twins, config)
    assert push(dense_dir) == ""
    report(twins)
    ended: list[str] = []
    said: dict[str, str] = {}
    when = dict(zip((1, 12, 24), DAMAGES, strict=True))

    def at_the_end_of(trajectory: Trajectory) -> None:
        ended.append(trajectory.request_id)
        if len(ended) in when:
            damage = when[len(ended)]
            said[damage] = push(noise_dir, damage)

    assert facts(twins.generate(requests, on_finished=at_the_end_of)) == plain
    for damage, message in DAMAGES.items():
        assert message in said[damage]
    assert accept_rate(report(twins)) >= 0.999, "the target's own weights stay"
    assert policy_digests(twins) == policy
    assert push(noise_dir) == ""
    assert accept_rate(counts_of(twins, config, requests)) < 0.5, "the next whole one lands"
    assert push(dense_dir) == ""


def test_weights_that_land_in_the_policy_are_noticed(
    twins: Engine, dense_dir: str, noise_dir: str, sender: DraftSender
) -> None:
    """The wrong version of the rank call takes the target for the draft model."""
    push, policy = pushes_to(twins, sender), policy_digests(twins)
    configure(twins, speculation(dense_dir, 3, drafter=f"{WRONG_PUSHES}:Shared"))
    for folder, same in ((noise_dir, False), (dense_dir, True)):
        twins.rank_call(INTO_POLICY, msgspec.msgpack.encode(push.pack(folder)), timeout_s=60)
        assert (policy_digests(twins) == policy) == same
    twins.flush()


def test_an_engine_without_a_draft_model_refuses_new_weights(
    engine: Engine, dense_dir: str, sender: DraftSender
) -> None:
    assert "this engine was started without one" in pushes_to(engine, sender)(dense_dir)


def test_an_engine_without_a_draft_model_refuses_it(engine: Engine, other_dir: str) -> None:
    with pytest.raises(EngineError, match="Start it with"):
        configure(engine, speculation(other_dir, 3))
