"""Ports that are kept for processes that come later."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest
import zmq

from specactor.errors import ConfigError
from specactor.rollout.decoupled.transport import Address, Hub, ZmqLink, make_keys
from specactor.rollout.drafter_start import kept_endpoint


def has_v6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_a_kept_port_is_free_for_its_drafter_again_and_again(host: str) -> None:
    if ":" in host and not has_v6():
        pytest.skip("this machine has no IPv6")
    engine_keys, drafter_keys = make_keys()
    with ExitStack() as stack:
        endpoint = kept_endpoint(host, stack)
        link = ZmqLink(7, [Address(endpoint=endpoint, keys=engine_keys)])
        try:
            for frame in (b"one", b"two", b"three"):
                hub = Hub(endpoint, keys=drafter_keys)
                assert hub.endpoint == endpoint
                with pytest.raises(ConfigError, match="free address"):
                    Hub(endpoint, keys=drafter_keys)
                while not link.send(0, frame):
                    assert hub.wait(0.05) == []
                while (7, frame) not in hub.receive():
                    hub.wait(1.0)
                hub.close()
        finally:
            link.close()


def test_a_kept_port_is_given_to_nobody_else() -> None:
    with ExitStack() as stack:
        endpoints = {kept_endpoint("127.0.0.1", stack) for _ in range(50)}
        assert len(endpoints) == 50
        numbers = {int(endpoint.rpartition(":")[2]) for endpoint in endpoints}
        others = [socket.create_server(("127.0.0.1", 0)) for _ in range(500)]
        try:
            assert not numbers & {other.getsockname()[1] for other in others}
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind(("127.0.0.1", min(numbers)))
        finally:
            for other in others:
                other.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", min(numbers)), timeout=5)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as free:
        free.bind(next(iter(endpoints)))


def test_ports_of_another_host_are_not_to_be_had() -> None:
    with ExitStack() as stack, pytest.raises(OSError, match="assign"):
        kept_endpoint("192.0.2.77", stack)
