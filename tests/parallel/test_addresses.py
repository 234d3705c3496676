"""Addresses of this host, as it has them."""

from __future__ import annotations

import pytest

from specactor.errors import ConfigError
from specactor.parallel import meeting
from specactor.parallel.meeting import interface_of, leading_out, own_address, own_addresses, towards


def test_the_way_to_a_host_begins_at_an_address_of_this_one() -> None:
    assert towards("127.0.0.1") == towards("localhost") == "127.0.0.1"
    for own in own_addresses():
        assert towards(own) == own
    assert towards("no.such.host.invalid") == ""


def test_an_interface_is_known_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"


def test_loopback_is_no_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the host of rank 0, whose own name may lead to itself."""
    ways = {"head": "127.0.0.1", "10.1.0.7": "10.1.0.3", "10.9.0.1": "10.9.0.2", "gone": ""}
    monkeypatch.setattr(meeting, "towards", ways.__getitem__)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert own_address(["head", "gone", "10.1.0.7", "10.9.0.1"]) == "10.1.0.3"
    assert leading_out(["head", "10.9.0.1"]) == "10.9.0.2"
    assert leading_out(["head", "gone"]) == ""
    with pytest.raises(ConfigError, match=r"^GLOO_SOCKET_IFNAME: got '', expected a network interface by which .*gone"):
        own_address(["head", "gone"])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth9")
    assert own_address(["head", "10.1.0.7"]) == "127.0.0.1", "as asked for"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    with pytest.raises(ConfigError, match=r"^GLOO_SOCKET_IFNAME: got 'eth9', expected a network interface"):
        own_address(["10.1.0.7"])
