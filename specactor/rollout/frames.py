"""Frames on the socket between a process and its owner. A call is a question and its answers, which share a number;
number 0 says what to start, and its answer how that went. After a `ProtocolError` the process is given up.
"""

from __future__ import annotations

import socket
import struct
from typing import TypeVar

import msgspec

from specactor.errors import EngineError

VERSION = 5
MAX_BYTES = 1 << 30
_HEADER = struct.Struct("<IB?I")  # bytes of the message, version, whether it is the last of its call, call
HEADER_BYTES = _HEADER.size
_ENCODER = msgspec.msgpack.Encoder()
Message = TypeVar("Message")


class ProtocolError(EngineError):
    pass


class Failed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The call failed; the process goes on, unless it was the first call."""

    message: str


def is_final(error: Exception) -> bool:
    """Return whether a start that failed so would fail again, which a child says; of the rest it dies."""
    may_pass = isinstance(error, OSError | EOFError | MemoryError | RuntimeError)  # a port, a device, a disk, a process
    return not may_pass or isinstance(error, NotImplementedError | RecursionError)


def pack(call: int, message: object, *, last: bool = True) -> bytes:
    """Return one frame. Raises ProtocolError for a message that is too long."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_BYTES:
        raise ProtocolError(f"message of {len(body)} bytes, at most {MAX_BYTES}. Send it in parts.")
    return _HEADER.pack(len(body), VERSION, last, call) + body


def unpack_header(data: bytes) -> tuple[int, int, bool]:
    """Return (bytes of the message, call, whether it is the last of its call). Raises ProtocolError for another
    version."""
    length, version, last, call = _HEADER.unpack(data)
    if version != VERSION:
        raise ProtocolError(f"frame of protocol version {version}, expected {VERSION}. Both ends must run one version.")
    if not 1 <= length <= MAX_BYTES:
        raise ProtocolError(f"frame of {length} bytes, expected 1..{MAX_BYTES}")
    return length, call, last


def decode(body: bytes, decoder: msgspec.msgpack.Decoder[Message]) -> Message:
    """Read a message. Raises ProtocolError for one of another type."""
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:  # ValueError: text that is not UTF-8
        raise ProtocolError(f"undecodable message: {error}") from error


def read(connection: socket.socket, decoder: msgspec.msgpack.Decoder[Message]) -> tuple[int, bool, Message] | None:
    """Return (call, whether it is its last, message) of the next frame; None at the end. Raises ProtocolError for a
    stream cut within one."""
    data = _read_exactly(connection, HEADER_BYTES)
    if not data:
        return None
    length, call, last = unpack_header(data)
    body = _read_exactly(connection, length)
    if not body:
        raise ProtocolError("stream ended within a frame, after its header")
    return call, last, decode(body, decoder)


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            part = connection.recv(min(count - len(data), 1 << 20))
        except ConnectionResetError:
            part = b""
        if not part:
            if not data:
                return b""
            raise ProtocolError(f"stream ended within a frame: {len(data)} of {count} bytes")
        data += part
    return bytes(data)
