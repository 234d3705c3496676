"""A flipped bit anywhere changes the digest, on the host and in the form that runs on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from specactor.weights_sync import digest as module
from specactor.weights_sync.digest import copy_and_digest, digest, digest_spans
from specactor.weights_sync.plan import Block, Span
from tests.weights_sync.test_plan import SPANS, bytes_of

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


def test_a_chunk_takes_a_device_few_kernels() -> None:
    """A plan has thousands of small ones, whose digests begin one after the other."""
    data = torch.ones(1000, dtype=torch.uint8)
    with Kernels() as made:  # type: ignore[no-untyped-call]
        module.device_total(data)
    assert made.names == ["arange", "mul_", "sum"]


class Kernels(TorchDispatchMode):
    """Names of operations that compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names += [] if name in ("split", "slice", "detach") else [name]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_bytes", [1, 255, 256 * 1024, 256 * 1024 + 1, 1_000_003])
def test_a_copy_in_pieces_has_the_digest_of_the_whole(num_bytes: int) -> None:
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    assert module.copy_with_digest(target, source) == digest(source)
    assert torch.equal(target, source)


@given(st.lists(SPANS, min_size=1, max_size=5), st.sampled_from([1, 3, 16, 2**20]), st.integers(0, 99))
def test_a_digest_is_of_the_same_bytes_in_the_same_order_however_they_are_cut(
    spans: list[Span], piece: int, seed: int
) -> None:
    memory = np.random.default_rng(seed).integers(0, 256, 200, np.uint8)
    blocks, end = list[Block](), 0
    for span in spans:
        blocks.append(Block(span, end, span.length + 1))  # a gap after every run
        end += span.count * (span.length + 1)
    wanted = memory[[byte for span in spans for byte in bytes_of(span)]].tobytes()
    copied = np.zeros(end, np.uint8)
    with mock.patch.object(module, "PIECE_BYTES", piece):
        assert digest_spans({0: memory}, spans) == xxhash.xxh3_64_intdigest(wanted)
        assert copy_and_digest([copied] * len(spans), blocks, [memory]) == xxhash.xxh3_64_intdigest(wanted)
    places = [b.to + run * b.step + i for b in blocks for run in range(b.span.count) for i in range(b.span.length)]
    assert copied[places].tobytes() == wanted


def column_by_column(block: Block, most_bytes: int) -> Iterator[Block]:
    span = block.span
    for byte in range(span.length):
        yield Block(Span(0, span.at + byte, span.step, 1, span.count), block.to + byte, block.step)


def test_a_cut_in_another_order_has_another_digest() -> None:
    memory, span = np.arange(64, dtype=np.uint8), Span(0, 0, 16, 8, 3)
    right = digest_spans({0: memory}, [span])
    with mock.patch.object(module, "cut", column_by_column):
        assert digest_spans({0: memory}, [span]) != right
