"""All ranks of a job on three hosts start its drafters, as threads and without a process: each drafter is started once,
where those that it serves reach it, and no engine speaks in another's name. Mistakes are seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from specactor.config import Config, EngineConfig, ParallelConfig
from specactor.parallel.failure import Member
from specactor.parallel.layout import place_engine
from specactor.rollout import drafter_start
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.transport import DrafterAccess, local_endpoint
from specactor.rollout.drafter_start import Host, Offer, access, drafting_hosts, host_of
from tests.rollout.test_drafter_specs import spread

T = TypeVar("T")
MEMBERS = [Member(machine="abc"[i // 2], pid=i, visible=str(i % 2), local_rank=i % 2) for i in range(6)]
"""Two launchers' ranks per host, of which each sees a device of its own."""
JOB = {"drafter_hosts": (0, 1, 2)}
SETTINGS: dict[str, dict[str, Any]] = {
    "host": {},
    "job": JOB,
    "job, some hosts": {**JOB, "drafter_hosts": (1, 2)},
}


@dataclass
class Ranks:
    """What they exchange."""

    world: int
    values: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world, timeout=20)


@dataclass
class Collective:
    rank: int
    ranks: Ranks

    def gather(self, value: T, kind: type[T]) -> list[T]:
        self.ranks.values[self.rank] = value
        self.ranks.barrier.wait()
        found = [self.ranks.values[rank] for rank in range(self.ranks.world)]
        self.ranks.barrier.wait()
        return found

    def together(self, phase: str, work: Callable[[], T]) -> T:
        done = work()
        self.ranks.barrier.wait()
        return done


@dataclass
class Started:
    """Of one rank."""

    specs: Sequence[DrafterSpec] = ()
    access_of: Callable[[int], DrafterAccess] = field(default=lambda engine: DrafterAccess())
    seen: object = None  # when engines may start


def start(
    config: Config,
    folder: Path,
    stacks: Sequence[ExitStack],
    *,
    members: Sequence[Member] = MEMBERS,
    look: Callable[[], object] = lambda: None,
) -> list[Started]:
    """By rank."""
    p, ranks, started = config.parallel, Ranks(len(members)), [Started() for _ in members]
    views, local_ranks = [member.view for member in members], [member.local_rank for member in members]
    size, pooled = p.engine_tensor, config.lends_devices
    places = [place_engine(i, views, local_ranks, engine_tensor=size, pooled=pooled) for i in range(p.engines)]

    def run(rank: int) -> None:
        specs, access_of = drafter_start.start_drafters(
            *(config, cast(Any, Collective(rank, ranks)), members, places, stacks[rank]),
            head="127.0.0.1",
            max_position=30,
            log_dir=folder,
            note=lambda text: None,
        )
        started[rank] = Started(cast(Any, specs), access_of, look())

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return started


def check(folder: Path, monkeypatch: pytest.MonkeyPatch, **parallel: Any) -> None:
    config = spread(folder, **parallel)
    p, requests = config.parallel, config.rollout.engine.max_running_requests
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(drafter_start, "DrafterPool", lambda specs, on_gpus: nullcontext(specs))
    with ExitStack() as outer:
        started = start(config, folder, [outer.enter_context(ExitStack()) for _ in MEMBERS])
    hosts = [member.machine for member in MEMBERS]
    there = {spec.endpoint: (host, spec) for host, own in zip(hosts, started, strict=True) for spec in own.specs}
    drafting = [host.machine for host in drafting_hosts(config, [host_of(config, m.view) for m in MEMBERS])]
    assert sorted(host for host, _ in there.values()) == sorted(p.drafters * drafting), "each once, on its host"
    assert sorted(spec.index for _, spec in there.values()) == list(range(len(there))), "they share files"
    owners = [p.engine_tensor * engine for engine in range(p.engines)]
    told = [started[rank].access_of(engine) for engine, rank in enumerate(owners)]
    assert len({each.engine for each in told}) == p.engines, "a drafter takes one engine for another"
    for rank, each in zip(owners, told, strict=True):
        reached = {address.endpoint: address.keys for address in each.drafters}
        near = {endpoint for endpoint, (host, _) in there.items() if host == hosts[rank]}
        assert set(reached) == (set(there) if p.drafter_hosts else near)
        for endpoint, keys in reached.items():
            spec = there[endpoint][1]
            assert endpoint.startswith("tcp://") or endpoint in near, "another host cannot reach it"
            assert keys is not None
            assert spec.keys is not None
            assert (keys.public, keys.peer) == (spec.keys.peer, spec.keys.public)
    for endpoint, (_, spec) in there.items():
        served = sum(endpoint in {address.endpoint for address in each.drafters} for each in told)
        assert spec.max_requests == served * requests, "room for those that it serves"


@pytest.mark.parametrize("setting", SETTINGS)
def test_drafters_are_where_engines_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    check(tmp_path, monkeypatch, **SETTINGS[setting])


class Drafters(AbstractContextManager["Drafters"]):
    """They have pools on their devices until they sleep."""

    def __init__(self, specs: Sequence[DrafterSpec], *, on_gpus: bool) -> None:
        self.awake = {spec.device for spec in specs}

    def __exit__(self, *_: object) -> None: ...

    def wait_ready(self) -> None:
        time.sleep(0.1)
        self.awake.clear()


@pytest.mark.parametrize(("on_gpus", "awake"), [(True, set[int]()), (False, {0, 1})])
def test_on_gpus_engines_find_drafters_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_gpus: bool, awake: set[int]
) -> None:
    """On all ranks, each of which has a device of an engine. SGLang takes a share of what is free."""
    base = spread(tmp_path)
    engine = EngineConfig(max_total_tokens=100)
    config = replace(base, parallel=ParallelConfig(engines=2), rollout=replace(base.rollout, engine=engine))
    members = [Member(machine="m", pid=i, visible="0,1", local_rank=i) for i in range(2)]
    pools: list[Drafters] = []

    def made(specs: Sequence[DrafterSpec], **named: Any) -> Drafters:
        pools.append(Drafters(specs, **named))
        return pools[-1]

    monkeypatch.setattr(drafter_start, "DrafterPool", made)
    monkeypatch.setattr(drafter_start, "numbers", lambda: (0, 1))
    monkeypatch.setattr(drafter_start, "gpus", lambda: (0, 1) if on_gpus else ())
    with ExitStack() as outer:
        stacks = [outer.enter_context(ExitStack()) for _ in members]
        started = start(
            config, tmp_path, stacks, members=members, look=lambda: {d for pool in pools for d in pool.awake}
        )
    assert [each.seen for each in started] == [awake, awake]


def keys_of_the_first(config: Config, offers: Sequence[Offer], **of: Any) -> DrafterAccess:
    """For the drafters of all hosts."""
    keys = next(drafters[0].keys for _, drafters in offers if drafters)
    found = access(config, offers, **of)
    return replace(found, drafters=tuple(replace(address, keys=keys) for address in found.drafters))


def one_name(config: Config, offers: Sequence[Offer], **of: Any) -> DrafterAccess:
    """For the engines of all ranks, which number their own from 0."""
    return access(config, offers, **of | {"engine": 0})


def own_alone(config: Config, offers: Sequence[Offer], **of: Any) -> DrafterAccess:
    return access(config, [offer for offer in offers if offer[0] == of["host"]], **of)


WRONG: dict[str, tuple[str, Any]] = {
    "each rank is a host": ("host_of", lambda config, view: view),
    "each host counts from 0": ("Host", lambda **fields: Host(**fields | {"first_drafter": 0})),
    "room for one engine": ("Host", lambda **fields: Host(**fields | {"engines": 1})),
    "listens on its host": ("_endpoints", lambda *_: local_endpoint),
    "keys of another host": ("access", keys_of_the_first),
    "engines of one name": ("access", one_name),
    "drafters of its host": ("access", own_alone),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_start_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setattr(drafter_start, *WRONG[wrong])
    with pytest.raises(AssertionError):
        check(tmp_path, monkeypatch, **JOB)
