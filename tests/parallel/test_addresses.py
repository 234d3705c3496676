"""Addresses of this host, as it has them."""

from __future__ import annotations

import ipaddress

import pytest

from specactor.errors import ConfigError
from specactor.parallel import addresses
from specactor.parallel.addresses import interface_of, leading_out, own_address, own_addresses, towards, within


def test_the_way_to_a_host_begins_at_an_address_of_this_one() -> None:
    assert towards("127.0.0.1") == towards("localhost") == "127.0.0.1"
    for own in own_addresses():
        assert towards(own) == own
    assert towards("no.such.host.invalid") == ""


def test_an_address_in_a_network() -> None:
    assert within("127.0.0.0/8") == "127.0.0.1"
    assert within("192.0.2.255/32") == ""
    assert all(within(str(ipaddress.ip_network(own))) == own for own in own_addresses())


def test_an_interface_is_known_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"


def test_loopback_is_no_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the host of rank 0, whose own name may lead to itself."""
    ways = {"head": "127.0.0.1", "10.1.0.7": "10.1.0.3", "10.9.0.1": "10.9.0.2", "gone": ""}
    monkeypatch.setattr(addresses, "towards", ways.__getitem__)
    assert own_address("", peers=["head", "gone", "10.1.0.7", "10.9.0.1"]) == "10.1.0.3"
    assert leading_out(["head", "10.9.0.1"]) == "10.9.0.2"
    assert leading_out(["head", "gone"]) == ""
    monkeypatch.setattr(addresses, "own_addresses", lambda: ["127.0.0.1", "10.9.0.2"])
    assert own_address("10.9.0.0/16", peers=["head", "10.1.0.7"]) == "10.9.0.2", "as asked for"
    assert own_address("127.0.0.0/8", peers=[]) == "127.0.0.1", "as asked for"
    message = (
        r"^parallel.drafter_network: got '', expected a network that drafters' hosts are in: here there are "
        r"\['127.0.0.1', '10.9.0.2'\], and other hosts \['head', 'gone'\]. Name the one by which they reach each other."
    )
    with pytest.raises(ConfigError, match=message):
        own_address("", peers=["head", "gone"])
    with pytest.raises(ConfigError, match=r"^parallel.drafter_network: got '10.1.0.0/16'"):
        own_address("10.1.0.0/16", peers=["10.1.0.7"])
