"""Records between an engine and a drafter process, and their frames.

Invariants: decoding raises `FrameError` for whatever `frames` does not write, and nothing else; no frame exceeds
MAX_FRAME_BYTES; a record stays true when other frames are lost; frames of a session have rising numbers.
"""

from __future__ import annotations

import logging
import struct
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from specactor.config import MAX_WINDOW
from specactor.errors import SpecActorError

MAGIC = b"SADP"
VERSION = 7
MAX_FRAME_BYTES = 16 << 20
AHEAD = 2  # windows that are drafted ahead: one that the engine can verify now, and the next one
MAX_TAIL_TOKENS = AHEAD * MAX_WINDOW
MAX_ROWS = 1 << 14  # tails in one record: with all their tokens, less than a frame
_HEADER = struct.Struct("<4sB3xQQQ")  # magic, version, session of sender and receiver (0: unknown), number
LARGEST = (1 << 63) - 1
_LOG = logging.getLogger(__name__)
TOKEN_BYTES = array("i").itemsize
assert sys.byteorder == "little", "frames hold arrays as this machine does"
_COUNTS = bytes(range(MAX_TAIL_TOKENS + 1))  # all that a tail's number of tokens may be
_UNPACK = [struct.Struct(f"<{count}i").unpack_from for count in range(MAX_TAIL_TOKENS + 1)]  # by tokens of a tail

# Positions count output tokens from 0. Requests go by a number that an engine gives out once per session, so that a
# message about one that has ended can never be taken for one about a later request.
Number = Annotated[int, Meta(ge=0, le=LARGEST)]
Token = Annotated[int, Meta(ge=0, lt=1 << 31)]


class FrameError(SpecActorError):
    pass


class _Record(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True, tag_field="kind", gc=False
):
    pass


class Beat(_Record, frozen=True, tag=0):
    """Engine: I am alive; hold these for me and no others."""

    engine: Annotated[str, Meta(min_length=1, max_length=128)]  # a restart keeps it, and changes the session
    requests: list[tuple[Number, Number, Number]]  # number, prompt tokens, output tokens sent


class Open(_Record, frozen=True, tag=1):
    """Engine: mirror this request, also if you do already."""

    request: Number
    prompt_ids: Annotated[list[Token], Meta(min_length=1)]
    output_ids: list[Token]  # what is committed so far
    seed: Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
    temperature: Annotated[float, Meta(ge=0.0)]  # 0: the likeliest token is wanted
    window: Annotated[int, Meta(ge=1, le=MAX_WINDOW)]  # the most draft tokens that a verify takes


class Commits(_Record, frozen=True, tag=2):
    """Engine: tokens were committed, in columns, which are cheaper than objects."""

    requests: list[Number]
    positions: list[Number]  # of the first token of each
    counts: list[Number]  # tokens of each
    tokens: list[Token]  # of all of them

    def __post_init__(self) -> None:
        if not len(self.requests) == len(self.positions) == len(self.counts):
            raise ValueError("columns of different lengths")
        if len(self.tokens) != sum(self.counts):
            raise ValueError(f"{len(self.tokens)} tokens, expected {sum(self.counts)}")

    def __iter__(self) -> Iterator[tuple[int, int, list[int]]]:
        """Yield (request, position, tokens)."""
        end = 0
        for request, position, count in zip(self.requests, self.positions, self.counts, strict=True):
            start, end = end, end + count
            yield request, position, self.tokens[start:end]


class Close(_Record, frozen=True, tag=3):
    """Engine: the request is over."""

    request: Number


class Pulse(_Record, frozen=True, tag=16):
    """Drafter: I am alive. The answer to a beat."""

    version: Number  # of the weights that I draft with
    requests: Number  # that I mirror, of all engines
    drafted: Number  # tokens drafted for you so far, in this session of yours
    wasted: Number  # of them, thrown away


class Tail(NamedTuple):
    request: int
    base: int  # position of the first token
    tokens: bytes  # 4 bytes each, little endian: most tails are replaced before they are looked into


class TailColumns(_Record, frozen=True, tag=20):
    """Drafter: packed tails. Those of a request begin at one position, the likeliest first, then those from its second
    choices."""

    requests: bytes  # 8 bytes each
    bases: bytes  # 8 bytes each
    counts: bytes  # tokens of each, in one byte
    tokens: bytes  # of all of them

    def __post_init__(self) -> None:
        rows = len(self.counts)
        if not len(self.requests) == len(self.bases) == 8 * rows:
            raise ValueError("columns of different lengths")
        if rows > MAX_ROWS or self.counts.translate(None, _COUNTS):  # 40 times as fast as to look for the greatest
            raise ValueError(f"{rows} tails, expected at most {MAX_ROWS} of at most {MAX_TAIL_TOKENS} tokens")
        if len(self.tokens) != TOKEN_BYTES * sum(self.counts):
            raise ValueError(f"{len(self.tokens)} bytes of tokens, expected {TOKEN_BYTES * sum(self.counts)}")


class Resend(_Record, frozen=True, tag=19):
    """Drafter: open these requests again."""

    requests: list[Number]


ToDrafter = Beat | Open | Commits | Close
ToEngine = Pulse | TailColumns | Resend
Record = TypeVar("Record", ToDrafter, ToEngine)

_ENCODER = msgspec.msgpack.Encoder()
_TO_DRAFTER: msgspec.msgpack.Decoder[list[ToDrafter]] = msgspec.msgpack.Decoder(list[ToDrafter])
_TO_ENGINE: msgspec.msgpack.Decoder[list[ToEngine]] = msgspec.msgpack.Decoder(list[ToEngine])


class Header(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    sender: int
    receiver: int
    number: int


def encode(header: Header, records: Sequence[ToDrafter] | Sequence[ToEngine]) -> bytes:
    """Make one frame. Raises FrameError when too large."""
    start = _HEADER.pack(MAGIC, VERSION, header.sender, header.receiver, header.number)
    data = start + _ENCODER.encode(records)
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"frame of {len(data)} bytes, at most {MAX_FRAME_BYTES}. Send the records in several frames.")
    return data


def decode_to_drafter(data: bytes) -> tuple[Header, list[ToDrafter]]:
    return _decode(data, _TO_DRAFTER)


def decode_to_engine(data: bytes) -> tuple[Header, list[ToEngine]]:
    return _decode(data, _TO_ENGINE)


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[list[Record]]) -> tuple[Header, list[Record]]:
    if not _HEADER.size <= len(data) <= MAX_FRAME_BYTES:
        raise FrameError(f"frame of {len(data)} bytes, expected {_HEADER.size}..{MAX_FRAME_BYTES}")
    magic, version, sender, receiver, number = _HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise FrameError(
            f"frame begins with {magic!r}, version {version}; expected {MAGIC!r}, version {VERSION}. "
            "Both ends must run one version."
        )
    if not (1 <= sender <= LARGEST and receiver <= LARGEST and 1 <= number <= LARGEST):
        raise FrameError(f"frame {number} of session {sender} to {receiver}, expected positive numbers below 2^63")
    try:
        records = decoder.decode(memoryview(data)[_HEADER.size :])
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise FrameError(f"undecodable frame: {error}") from error
    return Header(sender=sender, receiver=receiver, number=number), records


def pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def unpack(data: bytes) -> list[int]:
    """Return the tokens, which may not exist; an incomplete last one is left out."""
    return list(_UNPACK[len(data) // TOKEN_BYTES](data))


def columns(tails: Sequence[Tail]) -> TailColumns:
    return TailColumns(
        requests=array("Q", [tail.request for tail in tails]).tobytes(),
        bases=array("Q", [tail.base for tail in tails]).tobytes(),
        counts=bytes([len(tail.tokens) // TOKEN_BYTES for tail in tails]),
        tokens=b"".join([tail.tokens for tail in tails]),
    )


def newest(records: Sequence[TailColumns]) -> Iterator[tuple[int, int, bytes]]:
    """Yield (request, base, packed tokens) of each request's last message, which is complete."""
    seen: set[int] = set()
    last = b""
    for record in reversed(records):
        if record.requests == last:
            continue
        last = record.requests
        requests, bases = array("Q", last), array("Q", record.bases)
        if seen.issuperset(requests):
            continue
        end = 0
        for request, base, count in zip(requests, bases, record.counts, strict=True):
            start, end = end, end + TOKEN_BYTES * count
            if request not in seen:
                yield request, base, record.tokens[start:end]
        seen.update(requests)


class Numbering:
    def __init__(self, session: int) -> None:
        self.session = session
        self._number = 0

    def frames(self, records: Sequence[ToDrafter] | Sequence[ToEngine], drops: Drops, *, receiver: int) -> list[bytes]:
        """Pack the records in few frames, without those too large for any. `receiver`: its session; 0: unknown."""
        if not records:
            return []
        self._number += 1
        try:
            return [encode(Header(sender=self.session, receiver=receiver, number=self._number), records)]
        except FrameError as error:
            self._number -= 1
            if len(records) == 1:
                drops.add("too_large", str(error))
                return []
            half = len(records) // 2
            first = self.frames(records[:half], drops, receiver=receiver)
            return first + self.frames(records[half:], drops, receiver=receiver)


class Drops:
    def __init__(self, who: str) -> None:
        self._who = who
        self.counts: Counter[str] = Counter()
        self._fresh: Counter[str] = Counter()

    def expect(self, reason: str, count: int = 1) -> None:
        """Count what happens in ordinary operation."""
        if count:
            self.counts[reason] += count

    def add(self, reason: str, detail: str) -> None:
        """Count what should not happen; log when the count is a power of two."""
        self.counts[reason] += 1
        self._fresh[reason] += 1
        count = self.counts[reason]
        if count & (count - 1) == 0:
            _LOG.warning("%s: dropped %s, %d so far; %s", self._who, reason, count, detail)

    def take(self) -> dict[str, int]:
        taken, self._fresh = self._fresh, Counter()
        return dict(taken)
