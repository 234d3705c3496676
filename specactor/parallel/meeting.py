"""How ranks meet, and how silent hosts are noticed.

Invariants: what is wrong is raised on every rank, with one message; what an earlier start left in the launcher's store
means nothing; every wait has a bound; a host that left without an error is not missed, nor any while this process did
not run; a rank that knows of a failure ends; loopback needs its interface named.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from specactor.config.rules import flat
from specactor.errors import ConfigError, PeerFailedError
from specactor.parallel.failure import TICKETS, Member
from specactor.parallel.seals import KEY, job_key, mark
from specactor.waits import BULK_S, MOMENT_S, SIGN_OF_LIFE_S, SILENT_S

_PACKAGES = ("torch", "megatron-core", "mbridge", "sglang", "transformers")
_TOKEN = "specactor/token"
# The variable that names the network interface between hosts; `meet` sets it where nobody did.
INTERFACE = "GLOO_SOCKET_IFNAME"


class Greeting(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    machine: str
    address: str  # by which it reaches the host of rank 0; empty: it does not
    program: str
    settings: dict[str, str]  # by dotted name
    nonce: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """All ranks of one start of the job."""

    open_store: Callable[[], Store]  # connects anew to a store that only this start of the job has
    hosts: tuple[str, ...]  # each rank's name
    machines: tuple[str, ...]  # tell each rank's host from others


def meet(head: str, port: int, *, rank: int, world: int, config: Mapping[str, object]) -> Meeting:
    """Wait for all ranks; return what they share. Sets gloo's interface over several hosts. Raises ConfigError where
    hosts cannot reach each other, or differ in program or `config`. `head` is rank 0's host, with the launcher's store.
    """
    own = Greeting(
        host=socket.gethostname(),
        machine=Member.here().machine,
        address=towards(head),
        program=program(),
        settings={name: repr(value) for name, value in (flat(config) | {KEY: mark(job_key())}).items()},
    )
    store = _connected(head, port)
    token, problem, ranks = _hold(store, own, world) if rank == 0 else _join(store, own, rank)
    if problem:
        raise ConfigError(problem)
    machines = tuple(each.machine for each in ranks)
    if len(set(machines)) > 1 and INTERFACE not in os.environ:
        os.environ[INTERFACE] = interface_of(own_address([head, *(each.address for each in ranks)]))

    def open_store() -> Store:
        return PrefixStore(token, _connected(head, port))

    return Meeting(open_store=open_store, hosts=tuple(each.host for each in ranks), machines=machines)


_Verdict = tuple[str, list[Greeting]]
"""Rank 0's: how ranks differ, and all greetings, without settings."""


def _hold(store: Store, own: Greeting, world: int) -> tuple[str, str, list[Greeting]]:
    # a name that nobody had before: the others may read that of an earlier start first
    token = uuid.uuid4().hex
    store.set(_TOKEN, token)
    greetings = [own]
    for other in range(1, world):
        try:
            store.wait([f"{token}/{other}"], timedelta(seconds=BULK_S))
        except RuntimeError:
            raise ConfigError.at(
                "launcher",
                f"nothing from rank {other} of {world}",
                f"a word from it within {BULK_S:g} s",
                "The log of its host says why: it may not have started, or not reach this one.",
            ) from None
        greetings.append(msgspec.json.decode(store.get(f"{token}/{other}"), type=Greeting))
    problem = difference(greetings)
    ranks = [msgspec.structs.replace(greeting, settings={}) for greeting in greetings]
    store.set(f"{token}/verdict", msgspec.json.encode((problem, ranks)).decode())
    return token, problem, ranks


def _join(store: Store, own: Greeting, rank: int) -> tuple[str, str, list[Greeting]]:
    """Answer until a verdict, maybe after an earlier start's, names this process."""
    store.set_timeout(timedelta(seconds=BULK_S))
    deadline = time.monotonic() + 2 * BULK_S
    while time.monotonic() < deadline:
        try:
            token = store.get(_TOKEN).decode()
            store.set(f"{token}/{rank}", msgspec.json.encode(own).decode())
            store.wait([f"{token}/verdict"], timedelta(seconds=MOMENT_S))
            problem, ranks = msgspec.json.decode(store.get(f"{token}/verdict"), type=_Verdict)
            if own.nonce in {each.nonce for each in ranks}:
                return token, problem, ranks
            time.sleep(MOMENT_S)
        except DistStoreError:  # it was not there in time: another start may have begun meanwhile
            continue
        except DistNetworkError as error:
            raise PeerFailedError(f"meeting: the launcher on the host of rank 0 is gone ({error})") from None
    raise PeerFailedError(f"meeting: got no verdict of rank 0 within {2 * BULK_S:g} s, expected one. See its log.")


def _connected(head: str, port: int) -> Store:
    try:
        return TCPStore(head, port, is_master=False, timeout=timedelta(seconds=SILENT_S))  # there before us
    except RuntimeError:
        raise ConfigError.at(
            "launcher",
            f"no answer on {socket.gethostname()} from {head}:{port}",
            "the store that torchrun keeps on the host of rank 0",
            "That name must lead to that host from all hosts: mend it in DNS or /etc/hosts, or give torchrun there "
            "--local-addr with an address; and no firewall may stop its ports.",
        ) from None


def difference(greetings: Sequence[Greeting]) -> str:
    """Say how the first rank unlike rank 0 differs; empty where none does."""
    first = greetings[0]
    for rank, other in enumerate(greetings):
        if other.program != first.program:
            return (
                f"launcher: got {other.program} on {other.host} (rank {rank}), expected {first.program} as on "
                f"{first.host} (rank 0). Install one version on all hosts, or start all from a folder that they share."
            )
        names = sorted(first.settings.keys() | other.settings.keys())
        for name in names:
            ours, theirs = (each.settings.get(name, "nothing") for each in (first, other))
            if ours != theirs:
                return (
                    f"{name}: got {theirs} on {other.host} (rank {rank}), expected {ours} as on {first.host} (rank 0). "
                    "Start all hosts with the same recipe and the same options."
                )
    return ""


def program() -> str:
    """Return a digest of our files, and the versions that decide what is computed."""
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.blake2b(digest_size=4)
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return f"specactor {digest.hexdigest()} (python {platform.python_version()}, {versions})"


_LEFT = 1 << 40  # more beats than there will be: the host has left without an error


class HostWatch:
    """Notices lost hosts while it is entered. All ranks beat, since one may block in a call; each host's first watches:
    on rank 0's host all hosts, elsewhere that host."""

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        on_silent: Callable[[str], None],
        on_reported: Callable[[threading.Event], None],
    ) -> None:
        """In threads, `on_silent` is told of a lost host and ends the process, and `on_reported` is called once when
        some rank has reported a failure, and ends the process unless the event comes: this rank has left."""
        firsts = [meeting.machines.index(machine) for machine in dict.fromkeys(meeting.machines)]
        self._meeting, self._rank, self._on_silent = meeting, rank, on_silent
        self._first = meeting.machines.index(meeting.machines[rank])
        watched = [] if rank != self._first else firsts[1:] if rank == 0 else firsts[:1]
        self._heard_s = dict.fromkeys(watched, time.monotonic())
        self._beats: dict[int, int] = {}
        self._stop = threading.Event()
        self._told = threading.Thread(target=on_reported, args=(self._stop,), name="hosts-reported", daemon=True)
        self._has_failed = False
        does = () if len(firsts) == 1 else (self._beat, self._look) if watched else (self._beat,)
        self._threads = [threading.Thread(target=each, name=f"hosts-{each.__name__}", daemon=True) for each in does]

    def __enter__(self) -> HostWatch:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._has_failed = kind is not None
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * SIGN_OF_LIFE_S)

    def _beat(self) -> None:
        while not self._stop.is_set():
            try:
                self._exchange(self._meeting.open_store())
            except (RuntimeError, ConfigError) as error:
                # Where the store is gone for good so is the launcher, and this rank with it; else it is asked again.
                if not self._stop.is_set():
                    print(f"specactor: rank {self._rank}: no beat: {error}. It is tried again.", file=sys.stderr)
                self._stop.wait(SIGN_OF_LIFE_S)

    def _exchange(self, store: Store) -> None:
        going = True
        while going:
            going = not self._stop.wait(SIGN_OF_LIFE_S)
            leaves_well = not going and not self._has_failed and self._rank == self._first
            store.add(f"beats/{self._first}", _LEFT if leaves_well else 1)
            for rank in tuple(self._heard_s):
                beats = store.add(f"beats/{rank}", 0)
                if rank == 0 or beats != self._beats.get(rank):
                    self._heard_s[rank] = time.monotonic()
                if beats >= _LEFT:
                    del self._heard_s[rank]
                self._beats[rank] = beats
            # asked now: when this rank is ended, the launcher's store may be gone with the host that reported
            if store.add(TICKETS, 0) > 0 and self._told.ident is None:
                self._told.start()

    def _look(self) -> None:
        before_s = time.monotonic()
        while not self._stop.wait(MOMENT_S):
            now_s = time.monotonic()
            late_s, before_s = now_s - before_s - MOMENT_S, now_s
            for rank, heard_s in tuple(self._heard_s.items()):
                if late_s > MOMENT_S:
                    self._heard_s[rank] = heard_s + late_s
                elif now_s - heard_s > SILENT_S:
                    self._on_silent(
                        f"{self._meeting.hosts[rank]}, the host of rank {rank}, has not answered for {SILENT_S:g} s: "
                        "it died, or the network to it is cut."
                    )


def own_address(peers: Sequence[str]) -> str:
    """Return the address on GLOO_SOCKET_IFNAME's interface, or towards the first peer outside. Raises ConfigError for
    none."""
    named = os.environ.get(INTERFACE, "").partition(",")[0]
    found = next(iter(_addresses_of(named)), "") if named else leading_out(peers)
    if not found:
        raise ConfigError.at(
            INTERFACE,
            named,
            f"a network interface by which {socket.gethostname()} reaches other hosts: here there are "
            f"{own_addresses()}, and there {peers}",
            "Set it to the one by which the hosts reach each other.",
        )
    return found


def leading_out(peers: Sequence[str]) -> str:
    """Return the address towards the first of `peers` on another host, or ""."""
    return next(filter(_leads_out, map(towards, peers)), "")


def towards(peer: str) -> str:
    """Return the sender of a packet to that host, unsent, or ""."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]  # any port
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def own_addresses() -> list[str]:
    """Return all addresses of this host, but for those that name an interface."""
    return [address for name in psutil.net_if_addrs() for address in _addresses_of(name)]


def _addresses_of(interface: str) -> list[str]:
    families = (socket.AF_INET, socket.AF_INET6)
    every = [of.address for of in psutil.net_if_addrs().get(interface, []) if of.family in families]
    return [address for address in every if "%" not in address]


def interface_of(address: str) -> str:
    """Return the name of this host's network interface with that address."""
    return str(next(name for name, each in psutil.net_if_addrs().items() if address in {of.address for of in each}))


def _leads_out(address: str) -> bool:
    return bool(address) and not ip_address(address.partition("%")[0]).is_loopback
