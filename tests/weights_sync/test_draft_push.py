"""A push of the draft model's weights arrives whole or not at all, and cannot be taken for the policy's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from specactor.errors import EngineError
from specactor.rollout.sglang import model_drafter
from specactor.rollout.sglang.model_drafter import ModelDrafter
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.weights_sync import draft_push
from specactor.weights_sync.draft_push import CHECK, LOAD, DraftSender, num_bytes, push_to_engine
from specactor.weights_sync.messages import Answer, Bucket, DraftWeights


class Model(nn.Module):
    """Fuses two tensors into one parameter, as SGLang's models do."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.fused = nn.Parameter(torch.randn(6, 4))
        self.norm = nn.Parameter(torch.randn(4))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        rows = {"gate": slice(0, 3), "up": slice(3, 6)}
        for name, tensor in weights:
            (self.norm.data if name == "norm" else self.fused.data[rows[name]]).copy_(tensor)

    def named(self) -> list[tuple[str, Tensor]]:
        return [("gate", self.fused[:3]), ("up", self.fused[3:]), ("norm", self.norm)]

    def bits(self) -> list[list[float]]:
        return [parameter.detach().flatten().tolist() for parameter in self.parameters()]


@pytest.fixture
def sender() -> Iterator[DraftSender]:
    made = DraftSender(torch.float32)
    yield made
    made.close()


def flip(sender: DraftSender, at: int) -> None:
    assert sender._buffer is not None
    sender._buffer.data[at] ^= 1


def test_new_weights_arrive_bit_for_bit(sender: DraftSender) -> None:
    here, there = Model(1), Model(2)
    assert here.bits() != there.bits()
    for version in (1, 2):  # the second time, the memory is there already
        weights = sender.pack(here.named(), version=version)
        assert num_bytes(weights) == 4 * (24 + 4)
        assert draft_push.load(there, weights) == ""
        assert here.bits() == there.bits()
        here = Model(3)


def test_weights_travel_in_the_type_that_drafts() -> None:
    sender, here, there = DraftSender(torch.bfloat16), Model(1), Model(2).to(torch.bfloat16)
    weights = sender.pack(here.named(), version=1)
    assert num_bytes(weights) == 2 * (24 + 4)
    assert draft_push.load(there, weights) == ""
    assert there.bits() == here.to(torch.bfloat16).bits()
    sender.close()


@pytest.mark.parametrize("at", [0, 47, 64, 111, 128, 143])
def test_a_flipped_bit_is_refused_and_the_old_weights_stay(sender: DraftSender, at: int) -> None:
    """In any of the tensors, which begin at multiples of 64 bytes."""
    there = Model(2)
    before = there.bits()
    weights = sender.pack(Model(1).named(), version=1)
    flip(sender, at)
    assert "wrong digest" in draft_push.check(weights)
    assert "wrong digest" in draft_push.load(there, weights)
    assert there.bits() == before


def test_without_digests_a_flipped_bit_would_be_drafted_with(
    sender: DraftSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong version of the receiver."""
    there, before = Model(2), Model(2).bits()
    weights = sender.pack(Model(1).named(), version=1)
    flip(sender, 3)
    monkeypatch.setattr("specactor.weights_sync.receiver._check", lambda *_: None)
    assert draft_push.load(there, weights) == ""
    assert there.bits() not in (before, Model(1).bits())


Change = Callable[[list[tuple[str, Tensor]]], list[tuple[str, Tensor]]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda named: named[:2], "norm was written in 0 of 4 elements"),
        (lambda named: [*named[:2], ("norm", torch.ones(5))], "norm: RuntimeError"),
        (lambda named: [*named, ("experts", torch.ones(5))], "experts: KeyError"),
    ],
    ids=["torn", "of another shape", "of another model"],
)
def test_half_a_load_is_undone(sender: DraftSender, change: Change, message: str) -> None:
    there = Model(2)
    before = there.bits()
    weights = sender.pack(change(Model(1).named()), version=1)
    assert draft_push.check(weights) == ""
    assert message in draft_push.load(there, weights)
    assert there.bits() == before


def test_memory_that_is_gone_is_refused(sender: DraftSender) -> None:
    weights = sender.pack(Model(1).named(), version=1)
    sender.close()
    assert "cannot be read" in draft_push.check(weights)


def test_policy_and_draft_model_cannot_read_each_others_messages(sender: DraftSender) -> None:
    weights = sender.pack(Model(1).named(), version=1)
    of_policy = (Bucket(version=1, address=weights.address, slots=weights.slots),)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(of_policy), type=DraftWeights)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(weights), type=tuple[Bucket, ...])
    assert (weights.as_bucket(),) == of_policy, "what is inside is alike, so only the form tells them apart"


class Engine:
    """With two ranks; answers rank calls as `model_drafter` does."""

    def __init__(self, index: int, say: Callable[[str, int], str] = lambda call, rank: "") -> None:
        self.index, self._say = index, say
        self.calls: list[str] = []

    def rank_call(self, name: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        self.calls.append(name)
        return [msgspec.msgpack.encode(Answer(problem=self._say(name, rank))) for rank in (0, 1)]

    def kill(self) -> None:
        raise AssertionError("a draft model is no reason to")


def test_nothing_is_loaded_before_all_ranks_have_checked(sender: DraftSender) -> None:
    weights = sender.pack(Model(1).named(), version=1)
    right = Engine(0)
    assert push_to_engine(right, weights, timeout_s=1) == ""
    assert right.calls == [CHECK, LOAD]
    wrong = Engine(7, lambda call, rank: "gate arrived with a wrong digest" if rank else "")
    assert push_to_engine(wrong, weights, timeout_s=1) == "engine 7, rank 1: gate arrived with a wrong digest"
    assert wrong.calls == [CHECK]


def test_an_engine_that_died_is_left_to_whoever_uses_it(sender: DraftSender) -> None:
    def die(call: str, rank: int) -> str:
        raise EngineError("engine 3 died.\nThe end of its log")

    assert push_to_engine(Engine(3, die), sender.pack(Model(1).named(), version=1), timeout_s=1) == "engine 3 died."


def test_the_names_of_the_calls_are_those_of_functions() -> None:
    assert f"{model_drafter.__name__}:{model_drafter.check_weights.__name__}" == CHECK
    assert f"{model_drafter.__name__}:{model_drafter.load_weights.__name__}" == LOAD


class Refusing(Model):
    """Its loader fails half-way, and on this rank alone."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights([next(iter(weights))])
        raise RuntimeError("out of memory")


def engine_rank(model: Model) -> tuple[Any, ModelDrafter]:
    """As `model_drafter` sees it, with a drafter that has shown five tokens of a text to its model."""
    drafter = ModelDrafter()
    drafter.open(DraftSequence(request_id="r", prompt_ids=(1, 2, 3)))
    drafter._caches["r"].cached = 5
    worker = SimpleNamespace(
        speculator=SimpleNamespace(drafters={"model": drafter}),
        draft_runners={"model": SimpleNamespace(model=model)},
    )
    return SimpleNamespace(draft_worker=worker), drafter


def test_all_ranks_draft_from_the_same_state_whether_or_not_they_took_the_weights(sender: DraftSender) -> None:
    """Or tensor-parallel ranks would run the draft model on different tokens, and wait for each other for ever."""
    payload = msgspec.msgpack.encode(sender.pack(Model(1).named(), version=4))
    ranks = [engine_rank(Model(2)), engine_rank(Refusing(2))]
    replies = [model_drafter.load_weights(rank, payload) for rank, _ in ranks]
    problems = [msgspec.msgpack.decode(reply, type=Answer).problem for reply in replies]
    assert problems[0] == ""
    assert "out of memory" in problems[1]
    assert [drafter._caches["r"].cached for _, drafter in ranks] == [0, 0]
    assert [drafter.version for _, drafter in ranks] == [4, 0], "its own, where it did not take them"


def test_a_rank_that_raises_begins_anew_too(sender: DraftSender, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(model: nn.Module, weights: DraftWeights) -> str:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(draft_push, "load", no_room)
    rank, drafter = engine_rank(Model(2))
    with pytest.raises(RuntimeError, match="out of memory"):
        model_drafter.load_weights(rank, msgspec.msgpack.encode(sender.pack(Model(1).named(), version=4)))
    assert (drafter.version, drafter._caches["r"].cached) == (0, 0)
