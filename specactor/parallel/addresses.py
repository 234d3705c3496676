"""By which address other hosts reach this one.

Invariant: nothing is sent to find it, and an address that only this host knows (loopback) is found only where a network
of such addresses was asked for.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address, ip_network

import psutil  # type: ignore[import-untyped]

from specactor.errors import ConfigError

_ANY_PORT = 9


def own_address(network: str, *, peers: Sequence[str]) -> str:
    """Return this host's address in `network`, or, where that is empty, on the way to the first peer outside. Raises
    ConfigError where there is none."""
    found = within(network) if network else leading_out(peers)
    if not found:
        raise ConfigError.at(
            "parallel.drafter_network",
            network,
            f"a network that drafters' hosts are in: here there are {own_addresses()}, and other hosts {peers}",
            "Name the one by which they reach each other.",
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


def within(network: str) -> str:
    """The first of this host's addresses in that network; empty where it has none."""
    return next((own for own in own_addresses() if ip_address(own) in ip_network(network)), "")


def own_addresses() -> list[str]:
    """Return all addresses of this host, but for those that name an interface."""
    families = (socket.AF_INET, socket.AF_INET6)
    every = [of.address for each in psutil.net_if_addrs().values() for of in each if of.family in families]
    return [address for address in every if "%" not in address]


def interface_of(address: str) -> str:
    """Return the name of the network interface that has that address of this host."""
    return str(next(name for name, each in psutil.net_if_addrs().items() if address in {of.address for of in each}))


def _leads_out(address: str) -> bool:
    return bool(address) and not ip_address(address.partition("%")[0]).is_loopback
