"""The start of a run's drafter processes: hosts, devices, addresses, keys.

Invariants: keys are new in every run, and only ranks that start drafters learn the drafters'; no two drafters of a job
have one number; all ranks raise config errors.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path

from specactor.config import Config
from specactor.config.speculation import MADE_BY_WARM_UP, MTP, WARM_UP_HEAD
from specactor.errors import ConfigError
from specactor.parallel import meeting
from specactor.parallel.collective import Collective
from specactor.parallel.devices import gpus, numbers
from specactor.parallel.failure import Member, View
from specactor.parallel.layout import ModelShape, engine_owner, longest_text
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.transport import Address, DrafterAccess, local_endpoint, make_keys
from specactor.rollout.drafter_pool import DrafterPool


@dataclass(frozen=True, kw_only=True)
class Host:
    ranks: int
    engines: int
    devices: tuple[int, ...]  # its GPUs, or its cores where it has none
    has_gpus: bool
    first_drafter: int = 0
    own_engines: tuple[tuple[int, int], ...] = ()  # (index, first device), started by its first rank

    @property
    def lendable(self) -> tuple[tuple[int, int], ...]:
        """Return the engines whose device no other engine has."""
        if self.engines < 2:
            return ()  # whoever has nothing to do has nobody to draft for
        shared = Counter(device for _, device in self.own_engines)
        return tuple((index, device) for index, device in self.own_engines if shared[device] == 1)


Offer = tuple[View, tuple[Address, ...]]  # a rank's host, and the drafters that it starts


def make_specs(
    config: Config, host: Host, *, max_position: int, log_dir: Path, endpoint: Callable[[], str] = local_endpoint
) -> list[DrafterSpec]:
    """Return one host's drafters, without keys. `max_position` is the policy's longest sequence in tokens. Raises
    ConfigError for a draft model that is not there."""
    sleeping = host.lendable if config.lends_devices else ()
    own = place(config.parallel.drafters, host)
    places = [
        *((i, device, None) for i, device in enumerate(own, host.first_drafter)),
        *((index, device, index) for index, device in sleeping),
    ]
    if not places:
        return []
    engine, models = config.rollout.engine, config.rollout.speculation.in_processes
    contexts = _contexts(models, max_position)
    requests = host.engines * engine.max_running_requests
    if sleeping and host.has_gpus and engine.max_total_tokens is None:
        raise ConfigError.at(
            "rollout.engine.max_total_tokens",
            None,
            "a number of tokens where drafters sleep on the GPUs of engines",
            "Both caches have so much room: leave memory for a second one, or set parallel.drafters.",
        )

    def kv_tokens(context: int) -> int | None:
        if host.has_gpus:
            return engine.max_total_tokens if sleeping else None  # None: SGLang decides
        return requests * context

    names = list(islice(cycle(models), len(places)))  # in turn
    return [
        DrafterSpec(
            index=index,
            drafter=name,
            endpoint=endpoint(),
            model_dir=str(Path(models[name]).resolve()),
            dtype=config.model.dtype,
            device=device,
            engine=of,
            context_length=contexts[name],
            kv_tokens=kv_tokens(contexts[name]),
            max_requests=requests,
            memory_fraction=engine.memory_fraction,
            random_seed=config.seed,
            log_file=str((log_dir / f"drafter-{index}.log").resolve()),
            start_timeout_s=engine.start_timeout_s,
            max_restarts=engine.max_restarts,
        )
        for name, (index, device, of) in zip(names, places, strict=True)
    ]


def _contexts(models: Mapping[str, str], max_position: int) -> dict[str, int]:
    """Return each drafter's longest sequence. Raises ConfigError for a head."""
    contexts = {}
    for name, folder in models.items():
        draft = draft_shape(folder)
        if draft.is_head:
            raise ConfigError.at(
                "rollout.speculation.draft_model",
                f"an EAGLE-3 head ({folder})",
                f"a draft model, since {name} is among the drafters",
                "A head reads the policy's hidden states, which stay in its engine. Use mode coupled with the drafter "
                "model, or make a draft model with specactor drafter init.",
            )
        contexts[name] = min(max_position, draft.max_position)
    return contexts


def place(drafters: int, host: Host) -> list[int]:
    """Return devices after those of ranks; cores may be shared. Raises ConfigError for too few GPUs: a drafter keeps
    most of its GPU's memory."""
    free = len(host.devices) - host.ranks
    if host.has_gpus and drafters > free:
        raise ConfigError.at(
            "parallel.drafters",
            drafters,
            f"<= {max(0, free)}: this host has {len(host.devices)} GPUs and {host.ranks} ranks, one GPU each",
            "Start fewer ranks, or 0 for drafters that sleep on the engines' GPUs until one has nothing to do.",
        )
    return [host.devices[(host.ranks + i) % len(host.devices)] for i in range(drafters)]


def draft_shape(folder: str) -> ModelShape:
    """Read a draft model's shape. Raises ConfigError for no Hugging Face model."""
    if not Path(folder, "config.json").is_file():
        raise ConfigError.at(
            "rollout.speculation.draft_model",
            folder,
            "a folder with config.json",
            "Give that of a model in Hugging Face format with --rollout.speculation.draft-model; nothing is "
            "downloaded. Or draft without one: --rollout.speculation.mode auto --rollout.speculation.drafters suffix.",
        )
    shape = ModelShape.read(Path(folder), "rollout.speculation.draft_model")
    if shape.has_mtp:
        raise ConfigError.at(
            "rollout.speculation.draft_model",
            f"a policy with an MTP layer ({folder})",
            "a model without",
            "Remove num_nextn_predict_layers from a copy's config.json; the policy's own layer drafts with the drafter "
            "mtp.",
        )
    if shape.num_experts:
        raise ConfigError.at(
            "rollout.speculation.draft_model",
            f"a mixture of {shape.num_experts} experts ({folder})",
            "a dense model",
            "Beside the policy SGLang leaves such a model's weights as they happen to be. Make a dense one of the "
            "policy: specactor drafter init.",
        )
    return shape


def check_in_engines(config: Config, policy: ModelShape) -> None:
    """Raise ConfigError, of a head's files EngineError, for draft models that this policy's engines, or drafter
    processes, cannot run."""
    speculation = config.rollout.speculation
    if speculation.uses_mtp and not policy.has_mtp:
        raise ConfigError.at(
            "rollout.speculation.drafters",
            MTP,
            f"others, since {config.model.path} has no MTP layer",
            "Train a MiMo model, or make an EAGLE-3 head: specactor drafter init ... start:eagle3-start.",
        )
    _contexts({n: of for n, of in speculation.in_processes.items() if of not in MADE_BY_WARM_UP}, policy.max_position)
    models = [*speculation.in_engines.values()]
    shapes = {folder: draft_shape(folder) for folder in models if folder not in MADE_BY_WARM_UP}  # which fit
    for folder, draft in shapes.items():
        longest = longest_text(config, policy.max_position)  # for which its engine makes room
        for name, own, needed, whose in (
            ("positions", draft.max_position, longest, "as many as the run's longest text has tokens: "),
            ("tokens in its vocabulary", draft.vocab_size, policy.vocab_size, "at least the policy's "),
        ):
            if own < needed:
                raise ConfigError.at(
                    "rollout.speculation.draft_model",
                    f"{own} {name} ({folder})",
                    f"{whose}{needed}",
                    "Make one with specactor drafter init.",
                )
        if rule := draft.refused_by(config.parallel.engine_tensor):
            raise ConfigError.at(
                "parallel.engine_tensor",
                config.parallel.engine_tensor,
                f"{rule} of the draft model {folder}",
                "Use another, or draft in processes: --rollout.speculation.mode decoupled.",
            )
        if draft.is_head:
            from specactor.rollout.sglang.head_runner import refuse_unfit  # which others need not import

            cached = config.rollout.engine.extra_args.get("enable_hierarchical_cache", False)
            refuse_unfit(Path(folder), hierarchical_cache=bool(cached))
    heads = [folder for folder in models if folder == WARM_UP_HEAD or (folder in shapes and shapes[folder].is_head)]
    if len(heads) > 1:
        raise ConfigError.at(
            "rollout.speculation.draft_model", heads, "at most one EAGLE-3 head", "Leave the others out."
        )


def check_tokenizers(config: Config) -> None:
    """Raise ConfigError for a draft model whose tokenizer differs from the policy's."""
    speculation = config.rollout.speculation
    if not speculation.in_use or config.model.tiny is not None:
        return
    policy = _vocabulary(Path(config.model.path))
    for folder in speculation.in_use:
        own = _vocabulary(Path(folder))
        if own and policy and own != policy:
            differs = sum(policy.get(token) != i for token, i in own.items()) or len(policy) - len(own)
            raise ConfigError.at(
                "rollout.speculation.draft_model",
                f"another tokenizer ({folder}: {differs} tokens differ)",
                "the policy's",
                "Its tokens would mean something else. Make one with specactor drafter init.",
            )


def _vocabulary(folder: Path) -> Mapping[str, int]:
    file = folder / "tokenizer.json"
    found = json.loads(file.read_bytes()) if file.is_file() else {}
    vocabulary = found.get("model", {}).get("vocab")
    return vocabulary if isinstance(vocabulary, dict) else {}


def host_of(config: Config, view: View) -> View:
    """Return a rank's machine; where devices are lent, the ranks there that see the same ones, of which the first
    drives their engines alone: a drafter that it wakes drafts for these."""
    return view if config.lends_devices else View(view.machine)


def drafting_hosts(config: Config, hosts: Sequence[View]) -> list[View]:
    """Return the hosts that start drafters, from each rank's host. Raises ConfigError for too few."""
    numbered, p = list(dict.fromkeys(hosts)), config.parallel
    if config.lends_devices:
        return numbered
    for number in p.drafter_hosts:
        if number >= len(numbered):
            raise ConfigError.at(
                "parallel.drafter_hosts",
                number,
                f"0..{len(numbered) - 1}: the job has {len(numbered)} hosts",
                "Give numbers in the order of ranks, or leave it out to give each host drafters of its own.",
            )
    if p.drafter_hosts:
        return [numbered[number] for number in p.drafter_hosts]
    verifying = [hosts[engine_owner(engine, engine_tensor=p.engine_tensor)] for engine in range(p.engines)]
    return [host for host in numbered if host in verifying]


def with_keys(specs: Sequence[DrafterSpec]) -> tuple[list[DrafterSpec], tuple[Address, ...]]:
    """Return the drafters, and how engines reach them, which all ranks are sent."""
    engine_keys, drafter_keys = make_keys()
    addresses = tuple(Address(endpoint=s.endpoint, keys=engine_keys, drafter=s.drafter) for s in specs)
    return [replace(spec, keys=drafter_keys) for spec in specs], addresses


def access(config: Config, offers: Sequence[Offer], *, host: View, engine: int) -> DrafterAccess:
    """Return an engine's drafters. Those of its host come first, and are preferred at equal loads."""
    there = [drafters for of, drafters in offers if of == host]
    elsewhere = [drafters for of, drafters in offers if of != host and config.parallel.drafter_hosts]
    return DrafterAccess(
        drafters=tuple(chain(*there, *elsewhere)),
        engine=f"engine-{engine}",
        may_be_none=config.lends_devices,
    )


def _own_host(
    config: Config, views: Sequence[View], drafting: Sequence[View], places: Sequence[tuple[int, int]], rank: int
) -> Host:
    p, own, devices = config.parallel, views[rank], numbers()
    owners = [engine_owner(i, engine_tensor=p.engine_tensor) for i in range(p.engines)]
    return Host(
        ranks=views.count(own),
        engines=sum(bool(p.drafter_hosts) or views[owner] == own for owner in owners),
        devices=devices,
        has_gpus=bool(gpus()),
        first_drafter=p.drafters * drafting.index(own) if own in drafting else 0,
        own_engines=tuple(
            (index, devices[first % len(devices)]) for index, (owner, first) in enumerate(places) if owner == rank
        ),
    )


def start_drafters(
    config: Config,
    collective: Collective,
    members: Sequence[Member],
    places: Sequence[tuple[int, int]],
    stack: ExitStack,
    *,
    head: str,
    max_position: int,
    log_dir: Path,
    note: Callable[[str], None],
) -> tuple[DrafterPool, Callable[[int], DrafterAccess]]:
    """Start this host's drafters on its first rank; return them, and how an engine reaches its drafters. On GPUs of
    engines they are asleep by then.

    Collective. Raises ConfigError on every rank, and EngineError as `DrafterPool.wait_ready`.

    Args:
        places: each engine's starting rank and first device.
        head: the host of rank 0.
    """
    views = [host_of(config, member.view) for member in members]
    drafting, own_host = drafting_hosts(config, views), views[collective.rank]
    host = _own_host(config, views, drafting, places, collective.rank)
    starts = views.index(own_host) == collective.rank and own_host in drafting
    if starts and config.lends_devices and (host.engines < 2 or not host.lendable):
        note(
            f"parallel.drafters 0: this host has {host.engines} engines, {len(host.lendable)} of them with "
            "a device that no other has; nothing will be lent there. Give a host two engines, each its own device."
        )
    endpoint = _endpoints(config, views, collective, head, starts, stack)
    specs = collective.together(
        "drafters",
        lambda: (
            make_specs(config, host, max_position=max_position, log_dir=log_dir, endpoint=endpoint) if starts else []
        ),
    )
    own, addresses = with_keys(specs)
    pool = stack.enter_context(DrafterPool(own, on_gpus=host.has_gpus))
    if config.lends_devices and host.has_gpus:
        # SGLang sizes a pool by what is free: engines look at a GPU when its drafter has given back what it took.
        collective.together("drafter start", pool.wait_ready)
    offers = list(zip(views, collective.gather(addresses, tuple[Address, ...]), strict=True))
    return pool, lambda engine: access(config, offers, host=own_host, engine=engine)


def _endpoints(
    config: Config, views: Sequence[View], collective: Collective, head: str, starts: bool, stack: ExitStack
) -> Callable[[], str]:
    if not config.parallel.drafter_hosts or len(set(views)) == 1:
        return local_endpoint
    seen = collective.gather(meeting.towards(head), str)
    there = [address for view, address in zip(views, seen, strict=True) if address and view != views[collective.rank]]
    address = collective.together("drafter address", lambda: meeting.own_address([head, *there]) if starts else "")
    return partial(kept_endpoint, address, stack)


def kept_endpoint(address: str, stack: ExitStack) -> str:
    """Return a free TCP endpoint, whose port is kept until the stack ends, also while a process restarts. Raises
    OSError for another host's address."""
    # A port is kept by a socket that is bound to it and never listens: Linux gives it to nobody who asks for any port,
    # and lets one who asks for this very port listen there, as ZeroMQ does (both with SO_REUSEADDR). While nobody
    # listens, who connects is refused at once.
    is_v6 = ":" in address
    keeper = stack.enter_context(socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET))
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    keeper.bind((address, 0))
    host = f"[{address}]" if is_v6 else address
    return f"tcp://{host}:{keeper.getsockname()[1]}"
