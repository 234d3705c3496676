"""Which drafter processes a host gets, and how its engines reach them.

A drafter has a device of its own, or sleeps on an engine's (rollout.tail.drafters).

Invariants: every drafter of a host has an address and keys of its own host, new in every run; engines are given the
drafters of their own host and no others; a rank that starts no drafter learns the engines' keys and not the drafters'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specactor.config import Config
from specactor.errors import ConfigError
from specactor.parallel.layout import ModelShape
from specactor.rollout.decoupled.access import DrafterAccess
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.transport import EngineKeys, local_endpoint, make_keys


@dataclass(frozen=True, kw_only=True)
class Host:
    """What drafters share with the rest of the job there."""

    ranks: int
    """Of the trainer."""
    engines: int
    devices: tuple[int, ...]
    """Its GPUs, or its cores where it has none."""
    has_gpus: bool
    own_engines: tuple[tuple[int, int], ...] = ()
    """(index, first device) of each engine that the host's first rank starts."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What one rank tells all: the drafters that it starts, if any."""

    machine: str
    endpoints: tuple[str, ...] = ()
    keys: EngineKeys | None = None


def make_specs(config: Config, host: Host, *, max_position: int, log_dir: Path) -> list[DrafterSpec]:
    """The drafters of one host, without keys. Raises ConfigError for a draft model that is not there.

    Args: longest sequence of the policy in tokens.
    """
    sleeping = host.own_engines if config.rollout.tail.drafters else ()
    own = place(config.parallel.drafters, config.parallel.drafter_devices, host)
    places = [*((device, None) for device in own), *((device, engine) for engine, device in sleeping)]
    if not places:
        return []
    speculation, engine = config.rollout.speculation, config.rollout.engine
    context = min(max_position, draft_shape(speculation.draft_model).max_position)
    kv_tokens = speculation.drafter_kv_tokens
    requests = max(1, host.engines) * engine.max_running_requests
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
            endpoint=local_endpoint(),
            model_dir=str(Path(speculation.draft_model).resolve()),
            dtype=config.model.dtype,
            device=device,
            engine=of,
            context_length=context,
            kv_tokens=kv_tokens,
            max_requests=requests,
            memory_fraction=engine.memory_fraction,
            sharpen=speculation.sharpen,
            branches=speculation.branches,
            random_seed=config.seed,
            log_file=str((log_dir / f"drafter-{index}.log").resolve()),
            start_timeout_s=engine.start_timeout_s,
            max_restarts=engine.max_restarts,
        )
        for index, (device, of) in enumerate(places)
    ]


def place(drafters: int, devices: Sequence[int], host: Host) -> list[int]:
    """The device of each drafter: as asked for, or else those after the ranks', from the first one again at the end."""
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
            f"Drafter processes read it: {error}",
        ) from None


def offer(specs: Sequence[DrafterSpec], machine: str) -> tuple[list[DrafterSpec], Offer]:
    """The drafters with keys, and what all ranks are to be told of them."""
    if not specs:
        return [], Offer(machine=machine)
    engine_keys, drafter_keys = make_keys()
    endpoints = tuple(spec.endpoint for spec in specs)
    told = Offer(machine=machine, endpoints=endpoints, keys=engine_keys)
    return [replace(spec, keys=drafter_keys) for spec in specs], told


def access(offers: Sequence[Offer], *, machine: str, engine: int) -> DrafterAccess:
    """Of an engine on this machine."""
    for each in offers:
        if each.machine == machine and each.endpoints:
            return DrafterAccess(endpoints=each.endpoints, keys=each.keys, engine=f"engine-{engine}")
    return DrafterAccess(engine=f"engine-{engine}")
