"""A flipped bit anywhere changes the digest, on the host and in the form that runs on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specactor.weights_sync import digest as module
from specactor.weights_sync.digest import digest

FORMS: list[Callable[[torch.Tensor], int]] = [
    digest,
    lambda tensor: module.digest_of(tensor.contiguous().view(-1).view(torch.uint8)),
]


@pytest.mark.parametrize("form", FORMS, ids=["host", "device"])
@given(st.integers(1, 300), st.data())
def test_every_single_bit_counts(form: Callable[[torch.Tensor], int], length: int, data: st.DataObject) -> None:
    tensor = torch.randn(length, generator=torch.Generator().manual_seed(length))
    before = form(tensor)
    raw = tensor.view(torch.uint8)
    byte = data.draw(st.integers(0, raw.numel() - 1))
    raw[byte] ^= 1 << data.draw(st.integers(0, 7))
    assert form(tensor) != before
    raw.copy_(torch.randn(length, generator=torch.Generator().manual_seed(length)).view(torch.uint8))
    assert form(tensor) == before


@pytest.mark.parametrize("form", FORMS, ids=["host", "device"])
def test_swapped_and_equal_sum_contents_differ(form: Callable[[torch.Tensor], int]) -> None:
    tensor = torch.arange(64, dtype=torch.float32)
    assert form(tensor) != form(tensor.flip(0))


def test_layout_in_memory_does_not_count() -> None:
    tensor = torch.randn(6, 4)
    assert digest(tensor.t()) == digest(tensor.t().contiguous())
    assert digest(tensor.t()) != digest(tensor)


def test_the_device_form_is_the_same_in_one_piece_and_in_many() -> None:
    data = torch.randint(0, 256, (9 * 2**20,), dtype=torch.uint8)
    index = torch.arange(data.numel(), dtype=torch.int64)
    whole = int((data.to(torch.int64) * (2 * index + 1)).sum()) & (2**64 - 1)
    assert module.digest_of(data) == whole


@pytest.mark.parametrize("num_bytes", [1, 255, 256 * 1024, 256 * 1024 + 1, 1_000_003])
def test_a_copy_in_pieces_has_the_digest_of_the_whole(num_bytes: int) -> None:
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    assert module.copy_with_digest(target, source) == digest(source)
    assert torch.equal(target, source)
