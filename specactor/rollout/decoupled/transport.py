"""Frames over ZeroMQ: engines have DEALER sockets, a drafter a ROUTER.

Invariants: nothing blocks; a frame that finds no room is dropped and counted; without keys a drafter listens on this
host only; with keys both ends prove theirs (CURVE).
"""

from __future__ import annotations

import ipaddress
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator

from specactor.errors import ConfigError
from specactor.rollout.decoupled.protocol import LARGEST, MAX_FRAME_BYTES, Drops

_RECEIVE_FRAMES = 1024  # at a time; from all sockets in turns
_INPUT, _AT_ONCE = int(zmq.POLLIN), int(zmq.NOBLOCK)  # plain: arithmetic of enumerations takes tens of us
_send = zmq.backend.Socket.send  # without pyzmq's wrapper, which costs as much again and does nothing for bytes


@dataclass(frozen=True, kw_only=True)
class Keys:
    """The CURVE key pair of an engine, or of a drafter."""

    public: str
    secret: str = field(repr=False)
    peer: str  # the other end's public key


@dataclass(frozen=True, kw_only=True)
class Address:
    endpoint: str
    keys: Keys | None = None  # none: it hears everybody on its host
    drafter: str = "decoupled"  # as engines call it


def make_keys() -> tuple[Keys, Keys]:
    """Return an engine's and a drafter's."""
    (engine_public, engine_secret), (drafter_public, drafter_secret) = (
        (public.decode(), secret.decode()) for public, secret in (zmq.curve_keypair(), zmq.curve_keypair())
    )
    return (
        Keys(public=engine_public, secret=engine_secret, peer=drafter_public),
        Keys(public=drafter_public, secret=drafter_secret, peer=engine_public),
    )


def new_session() -> int:
    """Return a number above earlier ones, unless the clock went back."""
    return (time.time_ns() // 1_000_000 << 22 | secrets.randbits(22)) & LARGEST


def local_endpoint() -> str:
    """Return a new address on this host, a fifth faster than TCP."""
    return f"ipc://@specactor-drafter-{secrets.token_hex(8)}"


class ZmqLink:
    def __init__(self, session: int, drafters: Sequence[Address]) -> None:
        self.num_drafters = len(drafters)
        self._context = zmq.Context()
        self._sockets = [self._connect(session, address) for address in drafters]
        self._numbers: dict[object, int] = {socket: drafter for drafter, socket in enumerate(self._sockets)}
        self._inputs = [(socket, _INPUT) for socket in self._sockets]

    def _connect(self, session: int, address: Address) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        _prepare(socket, address.endpoint)
        socket.setsockopt(zmq.IDENTITY, _name(session))
        socket.setsockopt(zmq.IMMEDIATE, 1)  # what nobody is there for is not kept for later
        if (keys := address.keys) is not None:
            socket.curve_publickey = keys.public.encode()
            socket.curve_secretkey = keys.secret.encode()
            socket.curve_serverkey = keys.peer.encode()
        socket.connect(address.endpoint)
        return socket

    def send(self, drafter: int, frame: bytes) -> bool:
        try:
            _send(self._sockets[drafter], frame, _AT_ONCE)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[tuple[int, bytes]]:
        frames: list[tuple[int, bytes]] = []
        while len(frames) < _RECEIVE_FRAMES and (ready := zmq.zmq_poll(self._inputs, 0)):
            for socket, _ in ready:  # to try and fail would cost more than to ask each time
                frames.append((self._numbers[socket], socket.recv(_AT_ONCE)))  # parts of a message: rubbish each
        return frames

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=100)  # milliseconds, for its last words
        self._context.term()


class Hub:
    def __init__(self, endpoint: str, *, keys: Keys | None = None, drops: Drops | None = None) -> None:
        """Listen at ``ipc://@name`` or ``tcp://127.0.0.1:*``; `drops` counts who is refused. Raises ConfigError for an
        address that cannot be had, or that other hosts reach without keys."""
        _check_reach(endpoint, keys)
        self.drops = drops or Drops("drafter")
        self._keys = keys
        self._context = zmq.Context()
        self._authenticator = None if keys is None else ThreadAuthenticator(self._context)
        if self._authenticator is not None:
            self._authenticator.start()
            self._authenticator.configure_curve_callback(credentials_provider=self)
        self._socket = self._context.socket(zmq.ROUTER)
        self._inputs = [(self._socket, _INPUT)]
        _prepare(self._socket, endpoint)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else what cannot be sent is lost without a word
        self._socket.setsockopt(
            zmq.ROUTER_HANDOVER, 1
        )  # who comes back is heard, though its old connection seems alive
        if keys is not None:
            self._socket.curve_server = True
            self._socket.curve_publickey = keys.public.encode()
            self._socket.curve_secretkey = keys.secret.encode()
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError.at("drafter endpoint", endpoint, "a free address of this host", f"{error}.") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)  # with a number for a ``*``

    def callback(self, domain: str, key: bytes) -> bool:
        """Admit the owner of one key, and count others; for pyzmq's authenticator."""
        assert self._keys is not None
        admitted = secrets.compare_digest(key, self._keys.peer.encode())
        if not admitted:
            key_text = key.decode(errors="replace")
            self.drops.add("refused", f"a connection with the key {key_text}, of another run; end that one")
        return admitted

    def receive(self) -> list[tuple[int, bytes]]:
        """Return (engine's session or 0, frame) of all that have arrived."""
        frames = []
        for _ in range(_RECEIVE_FRAMES):
            if not zmq.zmq_poll(self._inputs, 0):
                break
            name, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            frames.append((_session(name), parts[0] if len(parts) == 1 else b""))
        return frames

    def send(self, session: int, frame: bytes) -> bool:
        """Send a frame to an engine; return False where it was dropped: the queue is full, or the engine is gone."""
        try:
            self._socket.send_multipart([_name(session), frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                return False
            raise
        return True

    def wait(self, timeout_s: float, files: Sequence[int] = ()) -> list[int]:
        """Wait for frames or files; return the files that are readable."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        for file in files:
            poller.register(file, zmq.POLLIN)
        ready = dict(poller.poll(round(1000 * timeout_s)))
        return [file for file in files if file in ready]

    def again(self) -> Hub:
        """Return a new one at the same address, once this one is closed."""
        return Hub(self.endpoint, keys=self._keys, drops=self.drops)

    def close(self) -> None:
        if self._context.closed:
            return
        self._socket.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()


def _prepare(socket: zmq.Socket[bytes], endpoint: str) -> None:
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    socket.setsockopt(zmq.LINGER, 0)
    if endpoint.startswith("tcp://"):  # a host that is cut off says no goodbye
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)  # milliseconds
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)  # then the connection is over, and made anew
    for queue in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(queue, 256)  # frames
    # CURVE puts 33 bytes around a frame: command, nonce, code, flags.
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + 33)


def _name(session: int) -> bytes:
    """Return a connection's name; ZeroMQ reserves those that begin with a zero."""
    return b"V" + session.to_bytes(8, "little")


def _session(name: bytes) -> int:
    return int.from_bytes(name[1:], "little") if len(name) == 9 and name[:1] == b"V" else 0


def _check_reach(endpoint: str, keys: Keys | None) -> None:
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" or keys is not None:
        return
    host = rest.rpartition(":")[0].strip("[]")
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if scheme != "tcp" or not local:
        raise ConfigError.at(
            "drafter endpoint",
            endpoint,
            "ipc://@NAME or tcp on a loopback address",
            "Give the job CURVE keys (make_keys) to listen elsewhere.",
        )


@dataclass(frozen=True, kw_only=True)
class DrafterAccess:
    drafters: tuple[Address, ...] = ()  # they need not be there yet
    engine: str = "engine"  # a name that no other engine has, the same after a restart
    may_be_none: bool = False  # no drafter process may be there, where no device may be lent
