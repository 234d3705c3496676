"""What a trainer rank and the host of one of its engines say to each other, and how it is framed on their socket.

A frame is: length of the rest in bytes (4, little endian), version of the protocol (1), message (MessagePack with a
tag per type). A frame that is too long, of another version, or does not decode is a `ProtocolError`: the two ends are
then out of step, and the engine is given up. Nothing is unpickled.

Every request has a ``call``, a number that its answers repeat. A call is answered by any number of `Finished` and
`Progress`, and then by exactly one of `Done`, `RankReplies` and `Failed`.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field

import msgspec

from specactor.config import EngineConfig, SpeculationConfig
from specactor.errors import EngineError
from specactor.parallel.layout import ENGINE_RESERVED_TOKENS
from specactor.rollout.decoupled.transport import DrafterAccess
from specactor.types import FinishReason, RolloutRequest

VERSION = 2
MAX_FRAME_BYTES = 1 << 30
_HEADER = struct.Struct("<IB")


class ProtocolError(EngineError):
    """A frame that the other end cannot have meant."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine to start."""

    index: int
    """Of the engine in the job."""
    model_dir: str
    """Folder of a model in Hugging Face format."""
    dtype: str
    """float32 or bfloat16."""
    tensor_parallel: int = 1
    devices: tuple[int | str, ...]
    """One core (without a GPU) or one GPU per tensor-parallel rank."""
    config: EngineConfig = field(default_factory=EngineConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    drafters: DrafterAccess = field(default_factory=DrafterAccess)
    """Processes that draft for it, in mode decoupled."""
    context_length: int
    """Longest sequence in tokens, prompt included."""
    reserved_tokens: int = ENGINE_RESERVED_TOKENS
    """Of that, what requests may not use; `layout.reserved_tokens`."""
    penalties: bool = False
    """Its requests may have penalties: SGLang then prepares no round while another runs."""
    log_file: str
    random_seed: int = 0

    def __post_init__(self) -> None:
        if len(self.devices) != self.tensor_parallel:
            raise EngineError(
                f"engine {self.index}: got {len(self.devices)} devices, expected {self.tensor_parallel}, "
                "one per tensor-parallel rank. Fix EngineSpec.devices."
            )


class Generate(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Generate all of these; they are admitted together, in this order."""

    call: int
    requests: list[RolloutRequest]
    report_tokens: int = 0
    """Report what a running response has after every this many tokens; 0: only that there is progress."""


class Abort(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """End some of the running requests, in whatever calls; they finish with reason ``abort`` and the tokens they have.

    Ids of requests that do not run are passed over: they may just have finished.
    """

    call: int
    request_ids: list[str]


class RankCall(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Run a registered function in every tensor-parallel rank."""

    call: int
    name: str
    payload: bytes
    timeout_s: float


class Command(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """One of the verbs without arguments."""

    call: int
    verb: str


class Finished(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """One response; ``request`` is its index in the call."""

    call: int
    request: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    routed_experts: bytes = b""


class News(msgspec.Struct, frozen=True, kw_only=True):
    """What a running response has got since the last news of it; ``request`` is its index in the call."""

    request: int
    token_ids: list[int]
    logprobs: list[float]


class Progress(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The engine is alive and moving in this call."""

    call: int
    news: News | None = None
    """If the call asked for it."""


class Done(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    call: int


class RankReplies(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """One per tensor-parallel rank."""

    call: int
    replies: list[bytes]


class Failed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The call failed; the engine goes on."""

    call: int
    message: str


class Ready(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The engine takes requests."""

    host_pid: int
    scheduler_pids: list[int]
    max_sequence_tokens: int
    """Prompt and response together; the smaller of the context and what the KV pool lets one request use."""
    kv_tokens: int
    """Size of the KV pool."""
    start_s: float
    memory_release: bool
    """Whether weights and KV cache can leave the device between rollouts."""


class StartFailed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    message: str


class Start(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    spec: EngineSpec


ToHost = Start | Generate | Abort | RankCall | Command
FromHost = Ready | StartFailed | Finished | Progress | Done | RankReplies | Failed

TO_HOST: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)
FROM_HOST: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)
_ENCODER = msgspec.msgpack.Encoder()


def frame(message: ToHost | FromHost) -> bytes:
    """The bytes of one message on the socket."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"message of {len(body)} bytes, at most {MAX_FRAME_BYTES}. Send it in parts.")
    return _HEADER.pack(len(body) + 1, VERSION) + body


def body_length(header: bytes) -> int:
    """Bytes that follow a header. Raises ProtocolError for a header that this version does not write."""
    length, version = _HEADER.unpack(header)
    if version != VERSION:
        raise ProtocolError(f"frame of protocol version {version}, expected {VERSION}. Both ends must run one version.")
    if not 1 <= length <= MAX_FRAME_BYTES + 1:
        raise ProtocolError(f"frame of {length} bytes, expected 1..{MAX_FRAME_BYTES + 1}")
    return int(length) - 1


HEADER_BYTES = _HEADER.size


def decode_from_host(body: bytes) -> FromHost:
    try:
        return FROM_HOST.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"undecodable message from the engine host: {error}") from error


def decode_to_host(body: bytes) -> ToHost:
    try:
        return TO_HOST.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"undecodable message to the engine host: {error}") from error


def read_frame(connection: socket.socket) -> bytes | None:
    """Body of the next frame; None at the end of the stream. Raises ProtocolError for a stream cut within a frame."""
    header = _read_exactly(connection, HEADER_BYTES, at_start=True)
    if header is None:
        return None
    return _read_exactly(connection, body_length(header), at_start=False)


def _read_exactly(connection: socket.socket, count: int, *, at_start: bool) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        try:
            part = connection.recv(min(count - len(data), 1 << 20))
        except ConnectionResetError:
            part = b""
        if not part:
            if at_start and not data:
                return None
            raise ProtocolError(f"stream ended within a frame: {len(data)} of {count} bytes")
        data += part
    return bytes(data)
