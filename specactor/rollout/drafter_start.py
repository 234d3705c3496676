"""Starts the drafter processes of a run: who starts which, where they listen, and what engines are told.

Which they are is decided in `drafter_specs`, without a process or a socket.

Invariants: every rank calls this with the same config; what is wrong with it is raised on all; all ranks are told of
the drafters before any engine is started.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from specactor.config import Config
from specactor.parallel import addresses
from specactor.parallel.collective import Collective
from specactor.parallel.devices import gpus, numbers
from specactor.parallel.failure import Member, View
from specactor.parallel.layout import engine_owner
from specactor.rollout.decoupled.transport import DrafterAccess, local_endpoint
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.drafter_specs import Host, Offer, access, drafting_hosts, host_of, make_specs, offer


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
    """The drafters that this rank starts: those of its host, if it is the host's first rank. And how an engine that
    this rank starts reaches those that draft for it. They and their ports go with `stack`.

    Args: of each engine, the rank that starts it and its first device there; the host of rank 0, as the others know it;
    longest sequence of the policy in tokens. Collective; raises ConfigError on every rank alike.
    """
    p = config.parallel
    views = [host_of(config, member.view) for member in members]
    own_host = views[collective.rank]
    here = [rank for rank, view in enumerate(views) if view == own_host]
    drafting = drafting_hosts(config, views)
    serve_all = p.drafters_serve == "job"
    owners = [engine_owner(i, engine_tensor=p.engine_tensor) for i in range(p.engines)]
    devices = numbers()
    host = Host(
        ranks=len(here),
        engines=sum(serve_all or owner in here for owner in owners),
        devices=devices,
        has_gpus=bool(gpus()),
        first_drafter=p.drafters * drafting.index(own_host) if own_host in drafting else 0,
        own_engines=tuple(
            (index, devices[first % len(devices)])
            for index, (owner, first) in enumerate(places)
            if owner == collective.rank
        ),
    )
    starts = collective.rank == here[0] and own_host in drafting
    if starts and config.rollout.tail.drafters and (host.engines < 2 or not host.lendable):
        note(
            f"rollout.tail.drafters: this host has {host.engines} engines, {len(host.lendable)} of them with "
            "a device that no other has; nothing will be lent there. Give a host two engines, each its own device."
        )
    endpoint = _endpoints(config, views, collective, head, starts, stack)
    specs = collective.together(
        "drafters",
        lambda: (
            make_specs(config, host, max_position=max_position, log_dir=log_dir, endpoint=endpoint) if starts else []
        ),
    )
    own, told = offer(specs, own_host)
    pool = stack.enter_context(DrafterPool(own, on_gpus=host.has_gpus))
    offers = collective.gather(told, Offer)
    return pool, lambda engine: access(config, offers, host=own_host, engine=engine)


def _endpoints(
    config: Config, views: Sequence[View], collective: Collective, head: str, starts: bool, stack: ExitStack
) -> Callable[[], str]:
    """Where the drafters of this rank listen, if it starts any: where other hosts reach them, if those shall."""
    if config.parallel.drafters_serve == "host" or len(set(views)) == 1:
        return local_endpoint
    seen = collective.gather(addresses.towards(head), str)
    there = [address for view, address in zip(views, seen, strict=True) if address and view != views[collective.rank]]
    network, peers = config.parallel.drafter_network, [head, *there]
    address = collective.together(
        "drafter address", lambda: addresses.own_address(network, peers=peers) if starts else ""
    )
    return stack.enter_context(Ports(address)).take


class Ports:
    """TCP ports of one address for processes that are started later, and started again.

    No port is taken twice while it is kept, and none is kept after `close` or the end of the process.
    """

    # A port is kept by a socket that is bound to it and never listens: Linux gives it to nobody who asks for any port,
    # and lets one who asks for this very port listen there, as ZeroMQ does (both with SO_REUSEADDR). While nobody
    # listens, who connects is refused at once.

    def __init__(self, address: str) -> None:
        self._address = address
        self._kept: list[socket.socket] = []

    def take(self) -> str:
        """An endpoint that is nobody else's until `close`. Raises OSError for an address of another host."""
        is_v6 = ":" in self._address
        keeper = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
        self._kept.append(keeper)
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind((self._address, 0))
        host = f"[{self._address}]" if is_v6 else self._address
        return f"tcp://{host}:{keeper.getsockname()[1]}"

    def close(self) -> None:
        """Harmless the second time."""
        for keeper in self._kept:
            keeper.close()
        self._kept.clear()

    def __enter__(self) -> Ports:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
