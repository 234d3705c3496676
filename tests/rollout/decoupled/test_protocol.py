"""Records survive the way; anything else is a FrameError."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.rollout.decoupled import protocol
from specactor.rollout.decoupled.protocol import (
    MAX_ROWS,
    MAX_TAIL_TOKENS,
    Beat,
    Close,
    Commits,
    Drops,
    FrameError,
    Header,
    Numbering,
    Open,
    Pulse,
    Resend,
    Tail,
    TailColumns,
    columns,
    decode_to_drafter,
    decode_to_engine,
    encode,
    newest,
    pack,
    unpack,
)
from specactor.rollout.decoupled.transport import new_session


def numbers(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


HEADER = Header(sender=7, receiver=9, number=3)
TO_DRAFTER = [
    Beat(engine="e", requests=[(1, 10, 5)]),
    Open(request=1, prompt_ids=[1, 2], output_ids=[3], seed=-5, temperature=0.7, window=4),
    Commits(requests=[1, 5], positions=[3, 0], counts=[2, 1], tokens=[2, 1 << 30, 7]),
    Close(request=1),
]
TO_ENGINE = [
    Pulse(version=1, requests=2, drafted=3, wasted=1),
    TailColumns(
        requests=numbers(1, 2),
        bases=numbers(2, 700),
        counts=b"\2\1",
        tokens=pack([5, 6, 7]),
    ),
    Resend(requests=[4, 5]),
]


def test_records_survive_the_way() -> None:
    assert decode_to_drafter(encode(HEADER, TO_DRAFTER)) == (HEADER, TO_DRAFTER)
    assert decode_to_engine(encode(HEADER, TO_ENGINE)) == (HEADER, TO_ENGINE)
    assert unpack(pack([0, 1, (1 << 31) - 1])) == [0, 1, (1 << 31) - 1]


def test_one_direction_does_not_read_the_other() -> None:
    with pytest.raises(FrameError):
        decode_to_engine(encode(HEADER, TO_DRAFTER))
    with pytest.raises(FrameError):
        decode_to_drafter(encode(HEADER, TO_ENGINE))


@pytest.mark.parametrize("decode", [decode_to_drafter, decode_to_engine])
@given(data=st.binary(max_size=200), whole=st.integers(0, 2), at=st.integers(0, 150), change=st.integers(1, 255))
def test_anything_else_is_a_frame_error(decode, data: bytes, whole: int, at: int, change: int) -> None:  # type: ignore[no-untyped-def]
    """Random bytes; a header, then random bytes; a frame with one byte changed, cut, or with something behind it."""
    frame = encode(HEADER, TO_DRAFTER if decode is decode_to_drafter else TO_ENGINE)
    changed = bytearray(frame)
    changed[at % len(frame)] ^= change
    for wrong in (data, frame[:32] + data, frame[: at % len(frame)], frame + data + b"\0", bytes(changed)):
        try:
            decode(wrong)
        except FrameError:
            continue
        assert len(wrong) == len(frame) or wrong[32:] == data, "a cut frame, or one with more behind it, was read"


@pytest.mark.parametrize(
    "record",
    [
        b"\x92\x03",  # a close of nothing
        b"\x92\x03\xff",  # a negative request
        b"\x93\x03\x01\x00",  # one field too many
        b"\x92\x09\x01",  # an unknown kind
        b"\x92\x03\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00",  # 1.0 in place of a number
        b"\x92\x03\xa1\x31",  # text in place of a number
        b"\x97\x01\x01\x90\x90\x00\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x04",  # an empty prompt
        b"\x93\x00\xa1\xff\x90",  # no UTF-8
        b"\x91" * 5000,  # nested
    ],
)
def test_records_are_strict(record: bytes) -> None:
    start = encode(HEADER, [])[:-1]
    assert decode_to_drafter(start + b"\x91\x92\x03\x01")[1] == [Close(request=1)]
    opening = b"\x97\x01\x01\x91\x05\x90\x00\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00\x04"
    assert len(decode_to_drafter(start + b"\x91" + opening)[1]) == 1
    with pytest.raises(FrameError):
        decode_to_drafter(start + b"\x91" + record)


@pytest.mark.parametrize(
    "fields",
    [
        ([1], [0], [2]),  # no tokens
        ([1], [0], [2], [5, 6], 0),  # one field too many
        ([1], [0], [1], [5, 6]),
        ([1], [0], [3], [5, 6]),
        ([1], [0], [], []),
        ([1], [0, 0], [2], [5, 6]),
        ([1, 2], [0], [2], [5, 6]),
        ([1, 2], [0, 0], [3, -1], [5, 6]),
        ([1, 2], [0, 0], [(1 << 63) - 1, (1 << 63) - 1], [5, 6]),
        ([-1], [0], [2], [5, 6]),
        ([1], [-1], [2], [5, 6]),
        ([1], [0], [2], [5, -6]),
        ([1], [0], [2], [5, 1 << 31]),
        ([1], [0], [2], [5, 6.0]),
        (["1"], [0], [2], [5, 6]),
        ([1], [0], [2], pack([5, 6])),
        ([1], [0], [1], [[5]]),
        (1, 0, 2, [5, 6]),
    ],
)
def test_commits_are_strict(fields: tuple[object, ...]) -> None:
    start = encode(HEADER, [])[:-1] + b"\x91"
    [record] = decode_to_drafter(start + msgspec.msgpack.encode((2, [1, 9], [0, 4], [2, 0], [5, 6])))[1]
    assert isinstance(record, Commits)
    assert list(record) == [(1, 0, [5, 6]), (9, 4, [])]
    with pytest.raises(FrameError) as error:
        decode_to_drafter(start + msgspec.msgpack.encode((2, *fields)))
    assert len(str(error.value)) < 200, "it may be logged"


@pytest.mark.parametrize(
    "fields",
    [
        (numbers(1), numbers(2), b"\2", pack([5, 6]), 0),  # one field too many
        (numbers(1, 2), numbers(2), b"\2", pack([5, 6])),
        (numbers(1), numbers(2, 3), b"\2", pack([5, 6])),
        (numbers(1), numbers(2), b"\2\0", pack([5, 6])),
        (numbers(1)[:-1], numbers(2)[:-1], b"\2", pack([5, 6])),
        (numbers(1), numbers(2), b"\1", pack([5, 6])),
        (numbers(1), numbers(2), b"\2", pack([5, 6])[:-1]),
        (numbers(1), numbers(2), bytes([MAX_TAIL_TOKENS + 1]), pack([5] * (MAX_TAIL_TOKENS + 1))),
        ([1], [2], [2], pack([5, 6])),
        (numbers(*[1] * (MAX_ROWS + 1)), numbers(*[2] * (MAX_ROWS + 1)), bytes(MAX_ROWS + 1), b""),
    ],
)
def test_columns_are_strict(fields: tuple[object, ...]) -> None:
    start = encode(HEADER, [])[:-1] + b"\x91"
    good = (20, numbers(1), numbers(2), b"\2", pack([5, 6]))
    assert len(decode_to_engine(start + msgspec.msgpack.encode(good))[1]) == 1
    with pytest.raises(FrameError) as error:
        decode_to_engine(start + msgspec.msgpack.encode((20, *fields)))
    assert len(str(error.value)) < 200, "it may be logged"


def tail(request: int, base: int, *tokens: int) -> Tail:
    return Tail(request, base, pack(tokens))


def test_tails_survive_as_columns() -> None:
    made = columns([tail(1, 4, 10, 11), tail(2, 0), tail(3, 9, 12)])
    assert decode_to_engine(encode(HEADER, [made])) == (HEADER, [made])
    assert sorted(newest([made])) == [(1, 4, pack([10, 11])), (2, 0, b""), (3, 9, pack([12]))]


@given(
    sent=st.lists(
        st.dictionaries(st.integers(0, 3), st.tuples(st.integers(0, 9), st.lists(st.integers(0, 99), max_size=4)))
    )
)
def test_of_several_tails_the_last_counts(sent: list[dict[int, tuple[int, list[int]]]]) -> None:
    records = [columns([tail(request, base, *tokens) for request, (base, tokens) in record.items()]) for record in sent]
    expected = {request: of for record in sent for request, of in record.items()}
    assert {request: (base, unpack(tokens)) for request, base, tokens in newest(records)} == expected


def test_headers_are_strict() -> None:
    frame = encode(HEADER, [])
    for at, value in ((0, b"X"), (4, b"\x06"), (4, b"\x08"), (8, bytes(8)), (15, b"\xff"), (24, bytes(8))):
        with pytest.raises(FrameError):
            decode_to_drafter(frame[:at] + value + frame[at + len(value) :])
    with pytest.raises(FrameError, match="bytes"):
        decode_to_drafter(bytes(protocol.MAX_FRAME_BYTES + 1))


def test_what_is_too_much_for_a_frame_goes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", 200)
    records = [Commits(requests=[i], positions=[0], counts=[20], tokens=list(range(20))) for i in range(9)]
    records.insert(4, Commits(requests=[99], positions=[0], counts=[100], tokens=[70_000] * 100))
    drops = Drops("test")
    frames = Numbering(7).frames(records, drops, receiver=9)
    assert len(frames) > 2
    assert all(len(frame) <= 200 for frame in frames)
    decoded = [decode_to_drafter(frame) for frame in frames]
    assert [record.requests for _, records in decoded for record in records] == [[i] for i in range(9)]  # type: ignore[union-attr]
    assert [header.number for header, _ in decoded] == list(range(1, len(frames) + 1))
    assert drops.counts == {"too_large": 1}


def test_sessions_rise() -> None:
    sessions = []
    for _ in range(3):
        sessions.append(new_session())
        began = sessions[-1] >> 22
        while new_session() >> 22 == began:
            pass
    assert sessions == sorted(set(sessions))
    assert all(0 < session < 1 << 63 for session in sessions)


def test_the_log_stays_short(caplog: pytest.LogCaptureFixture) -> None:
    drops = Drops("test")
    for _ in range(1000):
        drops.add("malformed", "bytes")
        drops.expect("stale")
    assert len(caplog.records) == 10
    assert drops.counts == {"malformed": 1000, "stale": 1000}
