"""The receiver against loaders that are wrong on purpose, and buckets that were damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from specactor.weights_sync import receiver as receiver_module
from specactor.weights_sync.buckets import Slot, aligned
from specactor.weights_sync.digest import digest
from specactor.weights_sync.memory import Address, SharedBuffer
from specactor.weights_sync.messages import Answer, Bucket
from specactor.weights_sync.receiver import Receiver, _same_bits
from specactor.weights_sync.sender import MOST_KEPT

Loader = Callable[[torch.nn.Parameter, str, torch.Tensor], None]


def right(parameter: torch.nn.Parameter, name: str, tensor: torch.Tensor) -> None:
    parameter.data[int(name[-1])].copy_(tensor)


def skips_one(parameter: torch.nn.Parameter, name: str, tensor: torch.Tensor) -> None:
    if name != "expert.2":
        right(parameter, name, tensor)


def twice_into_one(parameter: torch.nn.Parameter, name: str, tensor: torch.Tensor) -> None:
    parameter.data[0 if name == "expert.2" else int(name[-1])].copy_(tensor)


def half(parameter: torch.nn.Parameter, name: str, tensor: torch.Tensor) -> None:
    parameter.data[int(name[-1])][:2].copy_(tensor[:2])


def a_hole_beside_a_row_twice(parameter: torch.nn.Parameter, name: str, tensor: torch.Tensor) -> None:
    """Regions are together as large as the tensor."""
    if name != "expert.2":
        return right(parameter, name, tensor)
    for rows in (slice(0, 2), slice(1, 2)):
        parameter.data[2][rows].copy_(tensor[rows])


def a_hole_beside_columns_twice(parameter: torch.nn.Parameter, name: str, tensor: torch.Tensor) -> None:
    if name != "expert.2":
        return right(parameter, name, tensor)
    for columns in (slice(0, 3), slice(1, 3)):
        parameter.data[2][:, columns].copy_(tensor[:, columns])


def changes_it_afterwards(parameter: torch.nn.Parameter, name: str, tensor: torch.Tensor) -> None:
    right(parameter, name, tensor)
    if name == "expert.2":
        parameter.data[2, 1, 1] += 1


def raises(parameter: torch.nn.Parameter, name: str, tensor: torch.Tensor) -> None:
    if name == "expert.2":
        raise ValueError("no such shape")
    right(parameter, name, tensor)


class Rank:
    """An engine rank with one parameter, [experts 4, rows 3, columns 5]."""

    tp_rank = 0

    def __init__(self, loader: Loader) -> None:
        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.experts = torch.nn.Parameter(torch.zeros(4, 3, 5))

            def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
                for name, tensor in weights:
                    loader(self.experts, name, tensor)

        self.model: torch.nn.Module = Model()
        self.flushed = 0

    def begin_weight_update(self) -> None: ...

    def end_weight_update(self) -> None: ...

    def flush_cache(self) -> None:
        self.flushed += 1


@pytest.fixture
def bucket() -> Iterator[tuple[SharedBuffer, Bucket, list[torch.Tensor]]]:
    buffer = SharedBuffer(4096)
    tensors = [torch.randn(3, 5) for _ in range(4)]
    slots, used = [], 0
    for i, tensor in enumerate(tensors):
        slot = Slot(name=f"expert.{i}", dtype="float32", shape=(3, 5), offset=aligned(used), digest=digest(tensor))
        used = slot.offset + slot.num_bytes
        buffer.data[slot.offset : used].copy_(tensor.view(-1).view(torch.uint8))
        slots.append(slot)
    yield buffer, Bucket(version=3, address=buffer.address(), slots=tuple(slots)), tensors
    buffer.close()


def problem(reply: bytes) -> str:
    return msgspec.msgpack.decode(reply, type=Answer).problem


def message(bucket: Bucket) -> bytes:
    return msgspec.msgpack.encode((bucket,))


COMMIT = msgspec.msgpack.encode(3)


def test_what_was_sent_is_in_the_model(bucket: tuple[SharedBuffer, Bucket, list[torch.Tensor]]) -> None:
    rank, receiver = Rank(right), Receiver()
    assert problem(receiver.check(rank, message(bucket[1]))) == ""
    assert not rank.model.get_parameter("experts").any()
    assert problem(receiver.load(rank, message(bucket[1]))) == ""
    assert problem(receiver.commit(rank, COMMIT)) == ""
    assert torch.equal(rank.model.get_parameter("experts"), torch.stack(bucket[2]))
    assert rank.flushed == 1


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (skips_one, "experts was written in 45 of 60 elements"),
        (twice_into_one, "experts was written in 45 of 60 elements"),
        (a_hole_beside_a_row_twice, "experts was written in 55 of 60 elements"),
        (a_hole_beside_columns_twice, "experts was written in 54 of 60 elements"),
        (half, "experts was written in 40 of 60 elements"),
        (changes_it_afterwards, "expert.2: a region of shape (3, 5) is not what was loaded"),
        (raises, "expert.2: ValueError: no such shape"),
    ],
)
def test_a_wrong_loader_is_noticed(
    bucket: tuple[SharedBuffer, Bucket, list[torch.Tensor]], loader: Loader, expected: str
) -> None:
    rank, receiver = Rank(loader), Receiver()
    found = problem(receiver.load(rank, message(bucket[1])))
    assert expected in (found or problem(receiver.commit(rank, COMMIT)))


@pytest.mark.parametrize("loader", [right, skips_one])
def test_what_was_written_beside_a_parameter_fills_no_hole_of_it(
    bucket: tuple[SharedBuffer, Bucket, list[torch.Tensor]], loader: Loader
) -> None:
    """Two parameters are in one storage."""

    def both(parameter: torch.nn.Parameter, name: str, tensor: torch.Tensor) -> None:
        loader(parameter, name, tensor)
        if name == "expert.2":
            rank.model.get_parameter("other").data.copy_(tensor)

    rank, receiver, storage = Rank(both), Receiver(), torch.zeros(5, 3, 5)
    rank.model.register_parameter("other", torch.nn.Parameter(storage[0]))
    rank.model.register_parameter("experts", torch.nn.Parameter(storage[1:]))
    assert problem(receiver.load(rank, message(bucket[1]))) == ""
    found = problem(receiver.commit(rank, COMMIT))
    assert found == ("" if loader is right else WRITTEN_IN_PART)


WRITTEN_IN_PART = "experts was written in 45 of 60 elements: the trainer sent too little"


@pytest.mark.parametrize("byte", [0, 17, 59])
def test_a_flipped_bit_is_named_before_its_tensor_is_loaded(
    bucket: tuple[SharedBuffer, Bucket, list[torch.Tensor]], byte: int
) -> None:
    buffer, sent, _ = bucket
    buffer.data[sent.slots[1].offset + byte] ^= 16
    rank, receiver = Rank(right), Receiver()
    for call in (receiver.check, receiver.load):
        assert problem(call(rank, message(sent))) == "expert.1 arrived with a wrong digest"
    assert not rank.model.get_parameter("experts")[1].any()


def test_a_version_that_was_never_loaded_is_not_committed() -> None:
    assert "never loaded" in problem(Receiver().commit(Rank(right), COMMIT))


def test_an_update_that_was_broken_off_does_not_count_for_the_next(
    bucket: tuple[SharedBuffer, Bucket, list[torch.Tensor]],
) -> None:
    rank, receiver = Rank(right), Receiver()
    assert problem(receiver.load(rank, message(bucket[1]))) == ""
    later = Bucket(version=4, address=bucket[1].address, slots=bucket[1].slots[:1])
    assert problem(receiver.load(rank, message(later))) == ""
    assert "15 of 60" in problem(receiver.commit(rank, msgspec.msgpack.encode(4)))


class Elsewhere(torch.Tensor):
    """Says that it is in another device's memory; nothing but `to` takes it together with host memory."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("cuda", 0)
        if func in (torch.equal, torch.Tensor.data_ptr):
            raise RuntimeError("Expected all tensors to be on the same device")
        if func == torch.Tensor.to:
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].as_subclass(torch.Tensor).to(*args[1:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_copy_is_compared_with_a_source_on_another_device(contiguous: bool) -> None:
    here = torch.arange(15.0).view(3, 5)
    here = here if contiguous else here.T
    there = here.clone().as_subclass(Elsewhere)
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.equal(here, there)
    assert _same_bits(here, there)
    here[2, 2] += 1
    assert not _same_bits(here, there)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("part_bytes", [1, 2**26])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_bits_are_compared_and_not_numbers(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, contiguous: bool, part_bytes: int, device: str
) -> None:
    """A zero of the other sign is seen, and NaN is what it is; in regions with gaps, too, and in every part of them."""
    monkeypatch.setattr(receiver_module, "_COMPARED_BYTES", part_bytes)
    whole = torch.randn(5, 6).to(device, dtype)
    whole[4, 2], whole[1, 0] = 0.0, torch.nan
    target = whole if contiguous else whole[:, :3]
    assert target.is_contiguous() == contiguous
    source = target.clone()
    assert source.isnan().any()
    assert _same_bits(target, source)
    source[4, 2] = -0.0
    assert (source[4] == target[4]).all()
    assert not _same_bits(target, source)


def test_a_number_and_a_row_for_several_are_compared() -> None:
    rows = torch.zeros(4, 3).copy_(torch.arange(3.0))
    assert _same_bits(rows, torch.arange(3.0))
    assert not _same_bits(rows, torch.tensor([0.0, 1.0, -2.0]))
    assert _same_bits(torch.tensor(2.0), torch.tensor(2.0))
    assert not _same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert _same_bits(torch.ones(0, 3), torch.ones(0, 3))
    assert _same_bits(torch.ones(2, dtype=torch.bool)[::1], torch.ones(2, dtype=torch.bool))
    assert _same_bits(torch.ones(3, 2, dtype=torch.bfloat16).T, torch.ones(2, 3))


def zeroes_of_the_other_sign(parameter: torch.nn.Parameter, name: str, tensor: torch.Tensor) -> None:
    """In a region with gaps."""
    for columns in (slice(0, 2), slice(2, 5)):
        parameter.data[int(name[-1])][:, columns].copy_(tensor[:, columns])
    if name == "expert.2":
        parameter.data[2, 1, 1] *= -1


def test_a_zero_that_changed_its_sign_is_noticed(bucket: tuple[SharedBuffer, Bucket, list[torch.Tensor]]) -> None:
    buffer, sent, tensors = bucket
    tensors[2][1, 1] = 0.0
    slot = sent.slots[2]
    buffer.data[slot.offset :][: slot.num_bytes].copy_(tensors[2].view(-1).view(torch.uint8))
    slots = tuple(replace(slot, digest=digest(tensors[2])) if of is slot else of for of in sent.slots)
    found = problem(Receiver().load(Rank(zeroes_of_the_other_sign), message(replace(sent, slots=slots))))
    assert found.startswith("expert.2: a region of shape (3, 2) is not what was loaded into it")


def test_of_a_gpus_bucket_what_is_used_is_brought_to_another(
    bucket: tuple[SharedBuffer, Bucket, list[torch.Tensor]],
) -> None:
    rank: Any = Rank(right)
    rank.model.to("meta")
    [*_, last] = Receiver()._arrived(rank, replace(bucket[1], of_gpu=True))
    assert isinstance(last.raw, torch.Tensor)
    assert last.raw.untyped_storage().nbytes() == last.slot.offset + last.slot.num_bytes < bucket[0].data.numel()


def test_buckets_of_hundreds_of_ranks_are_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of each of 256, and as many mirrors as are kept."""
    opened = list[Address]()
    monkeypatch.setattr(receiver_module, "open_address", lambda address: opened.append(address) or torch.empty(0))
    addresses = [Address(pid=1, fd=fd, inode=1, num_bytes=1) for fd in range(2 * 256 + MOST_KEPT)]
    receiver = Receiver()
    for address in addresses * 2:
        receiver._open(address)
    assert opened == addresses


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("loader", [right, changes_it_afterwards])
def test_a_bucket_in_host_memory_reaches_a_gpu(
    bucket: tuple[SharedBuffer, Bucket, list[torch.Tensor]], loader: Loader
) -> None:
    rank, receiver = Rank(loader), Receiver()
    rank.model.cuda()
    found = problem(receiver.load(rank, message(bucket[1])))
    assert found == ("" if loader is right else "expert.2: a region of shape (3, 5) is not what was loaded into it")
