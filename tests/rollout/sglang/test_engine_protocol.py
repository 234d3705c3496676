"""Messages survive the socket; anything else on it is an error, at once."""

from __future__ import annotations

import socket
import struct
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.config import EngineConfig
from specactor.errors import EngineError
from specactor.rollout import frames
from specactor.rollout.decoupled.spec import FROM_DRAFTER, TO_DRAFTER
from specactor.rollout.sglang import engine_protocol as p
from specactor.types import RolloutRequest, SamplingParams

SPEC = p.EngineSpec(
    index=1, model_dir="m", dtype="float32", devices=(0,), context_length=64, log_file="l", config=EngineConfig()
)
REQUEST = RolloutRequest(
    request_id="a", prompt_ids=(1, 2), sampling=SamplingParams(temperature=1.0, max_new_tokens=3), seed=4, group_id=5
)


def through_socket(message: Any, decoder: msgspec.msgpack.Decoder[Any]) -> object:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frames.pack(7, message, last=False))
        frame = frames.read(theirs, decoder)
    assert frame is not None
    assert frame[:2] == (7, False)
    return frame[2]


@pytest.mark.parametrize(
    "message",
    [
        p.Generate(requests=[REQUEST]),
        p.RankCall(name="x", payload=b"\x00\xff", timeout_s=1.5),
        p.Command(verb="abort"),
        p.Command(verb="abort_requests", request_ids=["a", "b"]),
    ],
)
def test_messages_to_the_host_arrive_as_they_were(message: p.ToEngine) -> None:
    assert through_socket(message, p.TO_ENGINE) == message
    assert through_socket(SPEC, p.SPEC) == SPEC


@pytest.mark.parametrize(
    "message",
    [
        p.Finished(request=0, token_ids=[1], logprobs=[-0.1], finish_reason="stop"),
        p.Finished(request=0, token_ids=[1], logprobs=[-0.1], finish_reason="length", routed_experts=b"\x00\xff"),
        p.Progress(),
        p.Progress(request=0, token_ids=[1, 2], logprobs=[-0.1, -0.2]),
        p.Done(replies=[b"a", b""]),
        frames.Failed(message="no"),
    ],
)
def test_messages_from_the_host_arrive_as_they_were(message: p.FromEngine) -> None:
    assert through_socket(message, p.FROM_ENGINE) == message


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    for decoder in (p.FROM_ENGINE, p.TO_ENGINE, FROM_DRAFTER, TO_DRAFTER):
        try:
            frames.decode(data, decoder)
        except frames.ProtocolError:
            continue
        msgspec.msgpack.decode(data)  # the odd chance that it is a message


def test_logprobs_keep_their_bits() -> None:
    values = [-0.1, -1e-30, -123.456789012345678]
    sent = p.Finished(request=0, token_ids=[1, 2, 3], logprobs=values, finish_reason="stop")
    received = through_socket(sent, p.FROM_ENGINE)
    assert isinstance(received, p.Finished)
    assert received.logprobs == values


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (struct.pack("<IB?I", 10, 99, True, 1), "version 99"),
        (struct.pack("<IB?I", 0, frames.VERSION, True, 1), "frame of 0 bytes"),
        (struct.pack("<IB?I", 2**32 - 1, frames.VERSION, True, 1), "frame of 4294967295 bytes"),
    ],
)
def test_bad_headers_are_refused_before_anything_is_read(header: bytes, message: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(header)
        with pytest.raises(frames.ProtocolError, match=message):
            frames.read(theirs, p.FROM_ENGINE)


def test_ends_of_the_stream() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        assert frames.read(theirs, p.FROM_ENGINE) is None
    whole = frames.pack(1, p.Done())
    for cut in (1, frames.HEADER_BYTES, len(whole) - 1):
        ours, theirs = socket.socketpair()
        with theirs:
            ours.sendall(whole[:cut])
            ours.close()
            with pytest.raises(frames.ProtocolError, match="ended within a frame"):
                frames.read(theirs, p.FROM_ENGINE)


def test_a_spec_needs_a_device_per_rank() -> None:
    with pytest.raises(EngineError, match="got 1 devices, expected 2"):
        replace(SPEC, tensor_parallel=2)
