"""Several draft models at once, in the engine and in processes: each keeps its own keys, and none changes a token."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from specactor.config import EngineConfig, SpeculationConfig
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.transport import Address, local_endpoint, make_keys
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.process_guard import descendants
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.sglang.speculation_calls import REPORT
from specactor.rollout.speculation.counters import Counts, added
from specactor.weights_sync.draft_push import DraftSender
from tests.rollout.conftest import CONTEXT, two_ranks_are_deep
from tests.rollout.sglang.decoupled_setting import LIMIT_S, aim, loaded, wait_until
from tests.rollout.sglang.pushes import Pushes
from tests.rollout.sglang.test_model_drafter import batch, make_dense, policy_digests, pushes_to, sender
from tests.rollout.sglang.test_verify_worker import batch as batch_of_all_kinds
from tests.rollout.sglang.test_verify_worker import configure, facts

__all__ = ["sender"]

HERE = "tests.rollout.sglang.listed_drafters"
MAX_WINDOW = 8
OFF = SpeculationConfig(mode="off", max_window=MAX_WINDOW)
SMALL = ("num_hidden_layers=1", "num_key_value_heads=4")
ENGINE_KEYS, DRAFTER_KEYS = make_keys()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Of a draft model that has nothing to do with the target, and of a larger one that equals it."""
    small = make_dense(tmp_path_factory.mktemp("small"), "seed=5", *SMALL)
    return small, make_dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engine(
    request: pytest.FixtureRequest, make_spec: Callable[..., EngineSpec], folders: tuple[str, str]
) -> Iterator[Engine]:
    ranks: int = request.param
    spec = make_spec(
        80 + ranks,
        model_dir=folders[1],
        tensor_parallel=ranks,
        devices=tuple(range(ranks)),
        config=EngineConfig(max_running_requests=32, max_total_tokens=6144),
        speculation=listed(folders, "suffix", "model", "model:2"),
    )
    with running(spec) as started:
        configure(started, loaded("Near"))  # brings the rank calls of tests along
        yield started


def listed(folders: tuple[str, str], *drafters: str, **fields: object) -> SpeculationConfig:
    settings = {"mode": "coupled", "max_window": MAX_WINDOW} | fields
    return SpeculationConfig(drafters=drafters, draft_model=folders, **settings)  # type: ignore[arg-type]


def in_turns(folders: tuple[str, str], second: str) -> SpeculationConfig:
    return listed(folders, f"{HERE}:turns", f"{HERE}:First", f"{HERE}:{second}")


def counts_of(engine: Engine) -> dict[str, Counts]:
    counts = msgspec.json.decode(engine.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts])
    assert sum(each.failures for each in counts.values()) == 0
    return counts


def plain(engine: Engine) -> list[object]:
    configure(engine, OFF)
    engine.flush()
    return list(facts(engine.generate(batch_of_all_kinds())))


def drafted(engine: Engine, config: SpeculationConfig) -> list[object]:
    engine.flush()
    configure(engine, config)
    return list(facts(engine.generate(batch_of_all_kinds())))


@two_ranks_are_deep("engine")
def test_draft_models_in_turns_change_no_token(engine: Engine, folders: tuple[str, str]) -> None:
    """Beside drafts of text, for other requests in every round."""
    assert drafted(engine, in_turns(folders, "Second")) == plain(engine)


@two_ranks_are_deep("engine")
@pytest.mark.parametrize(
    "fields",
    [{"window": 4}, {}, {"mode": "auto", "fastest_of": 2}],
    ids=["fixed window", "coupled", "auto, fastest of 2"],
)
def test_a_list_changes_no_token(engine: Engine, folders: tuple[str, str], fields: dict[str, object]) -> None:
    want = plain(engine)
    for drafters in (("suffix", "model", "model:2"), ("model:2", "model")):
        assert drafted(engine, listed(folders, *drafters, **fields)) == want
        counts = counts_of(engine)
        if "window" in fields:
            assert [name for name in drafters if counts[name].drafted] == [drafters[0]], "the first that has something"


def rate(engine: Engine, config: SpeculationConfig) -> float:
    """Of the second draft model's tokens, how many were accepted."""
    engine.flush()
    configure(engine, in_turns(config.draft_model, "Second"))
    engine.generate([replace(each, seed=each.seed + 1) for each in batch(1.0)])  # what keys were there are others now
    configure(engine, config)
    engine.flush()
    counts_of(engine)
    engine.generate(batch(1.0))
    counts = counts_of(engine)
    assert min(counts[name].drafted for name in ("filler", "model", "model:2")) > 100
    assert counts["model"].accepted < 0.5 * counts["model"].drafted
    return counts["model:2"].accepted / counts["model:2"].drafted


@two_ranks_are_deep("engine")
def test_the_second_has_keys_and_positions_of_its_own(engine: Engine, folders: tuple[str, str]) -> None:
    """It equals the target, so it is always right, whatever the first one drafts in between."""
    assert rate(engine, in_turns(folders, "Second")) >= 0.999
    assert rate(engine, in_turns(folders, "TakesTheFirstsPositions")) < 0.9
    assert rate(engine, in_turns(folders, "IsNotRolledBack")) < rate(engine, in_turns(folders, "Errs")) - 0.05


@pytest.mark.parametrize("engine", [1], indirect=True, ids=["tp1"])
def test_memory_for_keys_and_values_is_that_of_all(engine: Engine, folders: tuple[str, str]) -> None:
    configure(engine, in_turns(folders, "Second"))  # which makes the rank call known
    [answer] = engine.rank_call("probe.kv_bytes", b"", timeout_s=60)
    cell, target, drafts = msgspec.json.decode(answer)
    assert cell == target + drafts
    assert drafts > 1.5 * target, "two layers, and one of twice as many heads"


@pytest.mark.parametrize("engine", [1], indirect=True, ids=["tp1"])
def test_new_weights_are_the_firsts(
    engine: Engine, folders: tuple[str, str], tmp_path: Path, sender: DraftSender
) -> None:
    policy, push = policy_digests(engine), pushes_to(engine, sender)
    assert push(make_dense(tmp_path, "seed=6", *SMALL)) == ""
    assert policy_digests(engine) == policy
    assert rate(engine, in_turns(folders, "Second")) >= 0.999
    assert push(folders[0]) == ""


@pytest.fixture(scope="module")
def processes(folders: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrafterPool]:
    """The larger draft model is the first here."""
    specs = [
        DrafterSpec(
            index=index,
            drafter=name,
            endpoint=local_endpoint(),
            keys=DRAFTER_KEYS,
            model_dir=folder,
            dtype="float32",
            device=1,
            context_length=CONTEXT,
            kv_tokens=6144,
            max_requests=48,
            log_file=str(tmp_path_factory.mktemp("drafter") / "log"),
        )
        for index, (name, folder) in enumerate(zip(("decoupled", "decoupled:2"), folders[::-1], strict=True))
    ]
    with DrafterPool(specs) as pool:
        pool.wait_ready()
        yield pool


@pytest.fixture
def aimed(engine: Engine, processes: DrafterPool, tmp_path: Path) -> Engine:
    specs = [drafter.spec for drafter in processes.drafters]
    aim(engine, [Address(endpoint=s.endpoint, keys=ENGINE_KEYS, drafter=s.drafter) for s in specs], tmp_path)
    return engine


def until_drafted(engine: Engine, config: SpeculationConfig, name: str) -> None:
    """Rollouts like plain decoding, until this drafter has drafted: a short one may end before it has read prompts."""
    want = plain(engine)
    configure(engine, config)
    counts, deadline = counts_of(engine), time.monotonic() + LIMIT_S
    while not counts.get(name, Counts()).drafted:
        assert time.monotonic() < deadline, f"{name} did not draft: {counts}"
        engine.flush()
        assert facts(engine.generate(batch_of_all_kinds())) == want
        counts = added([counts, counts_of(engine)])


WHERE = [
    (("decoupled", "decoupled:2"), "decoupled", {"mode": "decoupled", "window": 3}),
    (("decoupled:2", "decoupled", "suffix"), "decoupled:2", {"mode": "decoupled", "window": 3}),
    (("decoupled", "suffix", "model:2", "decoupled:2"), "suffix", {"mode": "auto", "fastest_of": 2}),
    (("decoupled:2", "model", "decoupled"), "model", {"mode": "decoupled"}),
]


@pytest.mark.deep
@pytest.mark.parametrize("engine", [1, 2], indirect=True, ids=["tp1", "tp2"])
@pytest.mark.parametrize(("drafters", "drafts", "fields"), WHERE)
def test_two_kinds_of_processes_change_no_token(
    aimed: Engine, folders: tuple[str, str], drafters: tuple[str, ...], drafts: str, fields: dict[str, object]
) -> None:
    until_drafted(aimed, listed(folders, *drafters, **fields), drafts)


@pytest.mark.deep
@pytest.mark.parametrize("engine", [1], indirect=True, ids=["tp1"])
def test_a_process_that_dies_costs_no_token_and_the_others_go_on(
    aimed: Engine, processes: DrafterPool, folders: tuple[str, str]
) -> None:
    config, restarts = listed(folders, "decoupled:2", "decoupled", mode="decoupled", window=3), processes.restarts
    until_drafted(aimed, config, "decoupled:2")
    want = plain(aimed)
    configure(aimed, config)
    seen: list[object] = []

    def kill(trajectory: object) -> None:
        seen.append(trajectory)
        if len(seen) == 2:
            os.kill(descendants(processes.drafters[1].pid)[0], signal.SIGKILL)

    aimed.flush()
    assert facts(aimed.generate(batch_of_all_kinds(), on_finished=kill)) == want
    wait_until(lambda: processes.restarts > restarts, "it is not started again")
    until_drafted(aimed, config, "decoupled")
    processes.drafters[1].wait_ready()
    until_drafted(aimed, config, "decoupled:2")


@pytest.mark.deep
def test_new_weights_reach_the_processes_of_the_first_alone(
    processes: DrafterPool, folders: tuple[str, str], sender: DraftSender
) -> None:
    push = Pushes(sender, lambda weights: "".join(processes.renew(weights)[0]))
    assert push(folders[1]) == ""
    assert [drafter.version for drafter in processes.drafters] == [1, 0]
    assert processes.oldest_version() == 1
    assert not processes.want(1)
