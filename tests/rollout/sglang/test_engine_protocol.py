"""Messages survive the socket; anything else on it is an error, at once."""

from __future__ import annotations

import socket
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.config import EngineConfig
from specactor.errors import EngineError
from specactor.rollout.sglang import engine_protocol as p
from specactor.types import RolloutRequest, SamplingParams

SPEC = p.EngineSpec(
    index=1, model_dir="m", dtype="float32", devices=(0,), context_length=64, log_file="l", config=EngineConfig()
)
REQUEST = RolloutRequest(
    request_id="a", prompt_ids=(1, 2), sampling=SamplingParams(temperature=1.0, max_new_tokens=3), seed=4, group_id=5
)


def through_socket(message: p.ToHost | p.FromHost) -> bytes:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(p.frame(message))
        body = p.read_frame(theirs)
    assert body is not None
    return body


@pytest.mark.parametrize(
    "message",
    [
        p.Start(spec=SPEC),
        p.Generate(call=1, requests=[REQUEST]),
        p.RankCall(call=2, name="x", payload=b"\x00\xff", timeout_s=1.5),
        p.Command(call=3, verb="pause"),
    ],
)
def test_messages_to_the_host_arrive_as_they_were(message: p.ToHost) -> None:
    assert p.decode_to_host(through_socket(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        p.Finished(call=1, request=0, token_ids=[1], logprobs=[-0.1], finish_reason="stop"),
        p.Finished(
            call=1, request=0, token_ids=[1], logprobs=[-0.1], finish_reason="length", routed_experts=b"\x00\xff"
        ),
        p.RankReplies(call=2, replies=[b"a", b""]),
        p.Failed(call=3, message="no"),
        p.StartFailed(message="no"),
    ],
)
def test_messages_from_the_host_arrive_as_they_were(message: p.FromHost) -> None:
    assert p.decode_from_host(through_socket(message)) == message


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    for decode in (p.decode_from_host, p.decode_to_host):
        try:
            decode(data)
        except p.ProtocolError:
            continue
        msgspec.msgpack.decode(data)  # the odd chance that it is a message


def test_logprobs_keep_their_bits() -> None:
    values = [-0.1, -1e-30, -123.456789012345678]
    sent = p.Finished(call=1, request=0, token_ids=[1, 2, 3], logprobs=values, finish_reason="stop")
    received = p.decode_from_host(through_socket(sent))
    assert isinstance(received, p.Finished)
    assert received.logprobs == values


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (struct.pack("<IB", 10, 99), "version 99"),
        (struct.pack("<IB", 0, p.VERSION), "frame of 0 bytes"),
        (struct.pack("<IB", 2**32 - 1, p.VERSION), "frame of 4294967295 bytes"),
    ],
)
def test_bad_headers_are_refused_before_anything_is_read(header: bytes, message: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(header)
        with pytest.raises(p.ProtocolError, match=message):
            p.read_frame(theirs)


def test_ends_of_the_stream() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        assert p.read_frame(theirs) is None
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(p.frame(p.Done(call=1))[:-1])
        ours.close()
        with pytest.raises(p.ProtocolError, match="ended within a frame"):
            p.read_frame(theirs)


def test_a_spec_needs_a_device_per_rank() -> None:
    with pytest.raises(EngineError, match="got 1 devices, expected 2"):
        msgspec.structs.replace(p.Start(spec=SPEC), spec=p.EngineSpec(**{**_fields(SPEC), "tensor_parallel": 2}))


def _fields(spec: p.EngineSpec) -> dict[str, object]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}
