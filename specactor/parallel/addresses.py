"""By which address other hosts reach this one.

Invariant: nothing is sent to find it, and an address that only this host knows (loopback) is found only where its
interface is named.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from ipaddress import ip_address

import psutil  # type: ignore[import-untyped]

from specactor.errors import ConfigError

INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable that names the network interface between hosts; `meeting` sets it where nobody did."""
_ANY_PORT = 9


def own_address(peers: Sequence[str]) -> str:
    """Return this host's address on the interface that GLOO_SOCKET_IFNAME names, or, where it names none, on the way to
    the first peer outside. Raises ConfigError where there is none."""
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
    """Return the address on the way to the first of `peers` that is not this host itself; empty where none is."""
    return next(filter(_leads_out, map(towards, peers)), "")


def towards(peer: str) -> str:
    """Return the sender that a packet to that host would have; empty where there is no way to it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
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
    """Return the name of the network interface that has that address of this host."""
    return str(next(name for name, each in psutil.net_if_addrs().items() if address in {of.address for of in each}))


def _leads_out(address: str) -> bool:
    return bool(address) and not ip_address(address.partition("%")[0]).is_loopback
