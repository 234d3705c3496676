"""Which drafter processes a host gets, and how engines reach them.

A drafter has a device of its own, or sleeps on an engine's (rollout.tail.drafters).

A host is a machine. With `rollout.tail.drafters` it is the ranks of one that see the same devices, since the first of
those drives all of their engines, and no others: a drafter that it wakes must draft for them.

Invariants: every drafter has an address of its own and keys of its host, new in every run; engines are given the
drafters of their own host, and with `parallel.drafters_serve` job those of other hosts after them; a rank that starts
no drafter learns the engines' keys and not the drafters'; no two drafters of a job have the same number, and thus the
same log; one that sleeps on an engine's device has the engine's number, and the device is no other engine's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specactor.config import Config
from specactor.errors import ConfigError
from specactor.parallel.failure import View
from specactor.parallel.layout import ModelShape, engine_owner
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.transport import Address, DrafterAccess, EngineKeys, local_endpoint, make_keys


@dataclass(frozen=True, kw_only=True)
class Host:
    """What drafters share with the rest of the job there."""

    ranks: int
    """Of the trainer."""
    engines: int
    """That its drafters draft for."""
    devices: tuple[int, ...]
    """Its GPUs, or its cores where it has none."""
    has_gpus: bool
    first_drafter: int = 0
    """Number of its first drafter in the job."""
    own_engines: tuple[tuple[int, int], ...] = ()
    """(index, first device) of each engine that the host's first rank starts."""

    @property
    def lendable(self) -> tuple[tuple[int, int], ...]:
        """Of those, the ones whose device may be lent when they have nothing to do, since no other engine has it."""
        if self.engines < 2:
            return ()  # whoever has nothing to do has nobody to draft for
        shared = Counter(device for _, device in self.own_engines)
        return tuple((index, device) for index, device in self.own_engines if shared[device] == 1)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What one rank tells all: the drafters that it starts, if any."""

    host: View
    endpoints: tuple[str, ...] = ()
    keys: EngineKeys | None = None


def make_specs(
    config: Config, host: Host, *, max_position: int, log_dir: Path, endpoint: Callable[[], str] = local_endpoint
) -> list[DrafterSpec]:
    """The drafters of one host, without keys. Raises ConfigError for a draft model or a device that is not there.

    Args: longest sequence of the policy in tokens; where each of them listens.
    """
    sleeping = host.lendable if config.rollout.tail.drafters else ()
    own = place(config.parallel.drafters, config.parallel.drafter_devices, host)
    places = [
        *((i, device, None) for i, device in enumerate(own, host.first_drafter)),
        *((index, device, index) for index, device in sleeping),
    ]
    if not places:
        return []
    speculation, engine = config.rollout.speculation, config.rollout.engine
    context = min(max_position, draft_shape(speculation.draft_model).max_position)
    kv_tokens = speculation.drafter_kv_tokens
    requests = host.engines * engine.max_running_requests
    if sleeping and kv_tokens is None and host.has_gpus:
        raise ConfigError.at(
            "rollout.speculation.drafter_kv_tokens",
            kv_tokens,
            "a number of tokens with rollout.tail.drafters on GPUs",
            "A drafter on an engine's device takes what the engine leaves: give the tokens of its last requests.",
        )
    if kv_tokens is None and not host.has_gpus:
        kv_tokens = requests * context
    return [
        DrafterSpec(
            index=index,
            endpoint=endpoint(),
            model_dir=str(Path(speculation.draft_model).resolve()),
            dtype=config.model.dtype,
            device=device,
            engine=of,
            context_length=context,
            kv_tokens=kv_tokens,
            max_requests=requests,
            memory_fraction=engine.memory_fraction,
            random_seed=config.seed,
            log_file=str((log_dir / f"drafter-{index}.log").resolve()),
            start_timeout_s=engine.start_timeout_s,
            max_restarts=engine.max_restarts,
        )
        for index, device, of in places
    ]


def place(drafters: int, devices: Sequence[int], host: Host) -> list[int]:
    """The device of each drafter: as asked for, or else those after the ranks', from the first one again at the end.

    Raises ConfigError for one that the host does not have.
    """
    for device in devices:
        if device not in host.devices:
            raise ConfigError.at(
                "parallel.drafter_devices",
                device,
                f"{'GPUs' if host.has_gpus else 'cores'} of every host that gets drafters: here {host.devices}",
                "Choose among them, or leave it out to take those after the ranks'.",
            )
    return list(devices) or [host.devices[(host.ranks + i) % len(host.devices)] for i in range(drafters)]


def draft_shape(folder: str) -> ModelShape:
    """Raises ConfigError when the folder is no Hugging Face model."""
    try:
        return ModelShape.read(Path(folder))
    except ConfigError as error:
        raise ConfigError.at(
            "rollout.speculation.draft_model",
            folder,
            "the folder of a Hugging Face model",
            f"{error}",
        ) from None


def check_in_engines(config: Config, policy: ModelShape) -> None:
    """Raises ConfigError for a draft model that engines of this policy cannot run beside it."""
    speculation = config.rollout.speculation
    if speculation.mode == "off" or "model" not in speculation.drafters:
        return
    draft = draft_shape(speculation.draft_model)
    for name, own, needed in (
        ("positions", draft.max_position, policy.max_position),
        ("tokens in its vocabulary", draft.vocab_size, policy.vocab_size),
    ):
        if own < needed:
            raise ConfigError.at(
                "rollout.speculation.draft_model",
                f"{own} {name} ({speculation.draft_model})",
                f"at least the policy's {needed}",
                "Make one with specactor drafter init.",
            )


def host_of(config: Config, view: View) -> View:
    """The host of a rank with that view, in the sense of this module."""
    return view if config.rollout.tail.drafters else View(view.machine)


def drafting_hosts(config: Config, hosts: Sequence[View]) -> list[View]:
    """Those that get `parallel.drafters`, or lend devices. Raises ConfigError for one that is not there, and where
    engines would have no drafter.

    Args: of each rank, its own.
    """
    numbered, p = list(dict.fromkeys(hosts)), config.parallel
    if config.rollout.tail.drafters:
        return numbered
    for number in p.drafter_hosts:
        if number >= len(numbered):
            raise ConfigError.at(
                "parallel.drafter_hosts",
                number,
                f"0..{len(numbered) - 1}: the job has {len(numbered)} hosts",
                "Give numbers in the order of ranks, or leave it out to give drafters to all hosts.",
            )
    chosen = [numbered[number] for number in p.drafter_hosts or range(len(numbered))]
    verifying = [hosts[engine_owner(engine, engine_tensor=p.engine_tensor)] for engine in range(p.engines)]
    alone = [number for number, host in enumerate(numbered) if host in verifying and host not in chosen]
    if p.drafters and p.drafters_serve == "host":
        if alone:
            raise ConfigError.at(
                "parallel.drafter_hosts",
                p.drafter_hosts,
                f"also {alone}, whose engines have no other drafters with parallel.drafters_serve host",
                "Name them, or use --parallel.drafters-serve job.",
            )
        return [host for host in chosen if host in verifying]
    return chosen


def offer(specs: Sequence[DrafterSpec], host: View) -> tuple[list[DrafterSpec], Offer]:
    """The drafters with keys, and what all ranks are to be told of them."""
    if not specs:
        return [], Offer(host=host)
    engine_keys, drafter_keys = make_keys()
    endpoints = tuple(spec.endpoint for spec in specs)
    told = Offer(host=host, endpoints=endpoints, keys=engine_keys)
    return [replace(spec, keys=drafter_keys) for spec in specs], told


def access(config: Config, offers: Sequence[Offer], *, host: View, engine: int) -> DrafterAccess:
    """Of an engine on this host: to drafters there first, which it prefers where loads are equal."""
    there = [each for each in offers if each.host == host]
    elsewhere = [each for each in offers if each.host != host and config.parallel.drafters_serve == "job"]
    return DrafterAccess(
        drafters=tuple(
            Address(endpoint=endpoint, keys=each.keys) for each in there + elsewhere for endpoint in each.endpoints
        ),
        engine=f"engine-{engine}",
        may_be_none=config.rollout.tail.drafters,
    )
