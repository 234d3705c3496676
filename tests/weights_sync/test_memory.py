"""Shared buffers: seen by another process, gone with their owner, never mistaken for another."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch

from specactor.weights_sync.memory import Address, SharedBuffer, open_address

READER = """
import sys, msgspec, torch
from specactor.weights_sync.memory import Address, open_address
data = open_address(msgspec.json.decode(sys.argv[1], type=Address))
assert data[:3].tolist() == [7, 8, 9], data[:3]
data[3] = 42
"""


def test_another_process_reads_and_writes_the_same_memory() -> None:
    buffer = SharedBuffer(4096)
    buffer.data[:3] = torch.tensor([7, 8, 9], dtype=torch.uint8)
    address = msgspec.json.encode(buffer.address()).decode()
    subprocess.run([sys.executable, "-c", READER, address], check=True, timeout=120)
    assert buffer.data[3] == 42
    buffer.close()


def test_an_address_survives_the_wire() -> None:
    buffer = SharedBuffer(64)
    address = buffer.address()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(address), type=Address) == address
    buffer.close()


def test_a_closed_buffer_cannot_be_opened_nor_mistaken_for_its_successor() -> None:
    first = SharedBuffer(64)
    old = first.address()
    first.close()
    second = SharedBuffer(64)
    assert second.address() != old
    with pytest.raises(OSError):
        open_address(old)
    second.close()
