"""Slots and their alignment."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specactor.weights_sync.buckets import ALIGNMENT, ELEMENT_BYTES, Slot, aligned


@given(st.integers(0, 2**40))
def test_alignment_rounds_up_by_less_than_one_line(num_bytes: int) -> None:
    assert aligned(num_bytes) % ALIGNMENT == 0
    assert 0 <= aligned(num_bytes) - num_bytes < ALIGNMENT


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_a_slot_has_the_bytes_that_torch_says(dtype: str) -> None:
    tensor = torch.zeros(3, 5, dtype=getattr(torch, dtype))
    slot = Slot(name="w", dtype=dtype, shape=(3, 5), offset=0)
    assert slot.num_bytes == tensor.numel() * tensor.element_size() == ELEMENT_BYTES[dtype] * math.prod((3, 5))
    assert Slot(name="scalar", dtype=dtype, shape=(), offset=0).num_bytes == ELEMENT_BYTES[dtype]


def test_a_slot_survives_the_wire() -> None:
    slot = Slot(name="w", dtype="float32", shape=(2,), offset=64, digest=2**64 - 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(slot), type=Slot) == slot
