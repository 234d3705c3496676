"""A push of the draft model, which every rank has whole, to its host's engines and drafter processes.

Invariants: an engine loads nothing before its ranks have compared all digests; the model then has all new weights, read
back bit for bit, or all old; no other model is touched. An engine that refuses goes on, and is asked again.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import torch

from specactor.errors import EngineError
from specactor.weights_sync.buckets import aligned
from specactor.weights_sync.memory import SharedBuffer, pack
from specactor.weights_sync.messages import Answer, DraftWeights
from specactor.weights_sync.receiver import EngineRank, Receiver

if TYPE_CHECKING:
    from specactor.rollout.sglang.engine_client import Engine


def check(weights: DraftWeights) -> str:
    """Return what is wrong with the bytes, or ""."""
    with closing(Receiver()) as receiver:
        try:
            return _problem(receiver.check(EngineRank(torch.nn.Module()), _payload(weights)))
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            return f"the bucket cannot be read ({error})"


@torch.no_grad()
def load(model: torch.nn.Module, weights: DraftWeights) -> str:
    """Return what is wrong; then the model has its old weights."""
    if problem := check(weights):
        return problem
    before = [parameter.detach().clone() for parameter in model.parameters()]
    rank = EngineRank(model)
    with closing(Receiver()) as receiver:
        problem = _problem(receiver.load(rank, _payload(weights)))
        if not problem:
            problem = _problem(receiver.commit(rank, msgspec.msgpack.encode(weights.draft_version)))
    if problem:
        for parameter, old in zip(model.parameters(), before, strict=True):
            parameter.copy_(old)
    return problem


def _payload(weights: DraftWeights) -> bytes:
    return msgspec.msgpack.encode((weights.as_bucket(),))


def _problem(reply: bytes) -> str:
    return msgspec.msgpack.decode(reply, type=Answer).problem


CHECK = "specactor.rollout.sglang.model_drafter:check_weights"
LOAD = "specactor.rollout.sglang.model_drafter:load_weights"
"""Rank calls. Payload: `DraftWeights`; answer: `Answer`."""


class DraftSender:
    def __init__(self, dtype: torch.dtype) -> None:
        """Args: of the weights that draft."""
        self._dtype = dtype
        self._buffer: SharedBuffer | None = None

    def pack(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> DraftWeights:
        """Copy the weights, under Hugging Face names, over those before."""
        tensors = [(name, tensor.detach().to(self._dtype).cpu()) for name, tensor in weights]
        buffer = self._room(max(1, sum(aligned(tensor.nbytes) for _, tensor in tensors)))
        slots = pack(tensors, lambda _: buffer.data)
        return DraftWeights(draft_version=version, address=buffer.address(), slots=slots)

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _room(self, num_bytes: int) -> SharedBuffer:
        if self._buffer is None or self._buffer.data.numel() < num_bytes:
            self.close()
            self._buffer = SharedBuffer(num_bytes)
        return self._buffer


def num_bytes(weights: DraftWeights) -> int:
    return sum(slot.num_bytes for slot in weights.slots)


def push_to_engine(engine: Engine, weights: DraftWeights, *, timeout_s: float) -> str:
    """Return why the engine, which may be generating, did not take the weights, or ""."""
    payload = msgspec.msgpack.encode(weights)
    try:
        for call in (CHECK, LOAD):
            for rank, reply in enumerate(engine.rank_call(call, payload, timeout_s=timeout_s)):
                problem = msgspec.msgpack.decode(reply, type=Answer).problem
                if problem:
                    return f"engine {engine.index}, rank {rank}: {problem}"
    except EngineError as error:  # one that died is noticed, and replaced, by whoever uses it next
        return str(error).partition("\n")[0]
    return ""
