"""The end of a push of the draft model's weights: in every engine rank, and in drafter processes.

Invariants: nothing is written before the digests of all tensors were compared with their source's; the model has all of
the new weights, read back and compared bit for bit, or all of the old ones; no parameter of another model is touched.
So a push that arrives torn or changed costs drafts of the new version, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch

from specactor.weights_sync.messages import CheckReply, Commit, DraftWeights
from specactor.weights_sync.receiver import Receiver


@dataclass
class _Rank:
    """The draft model, as a receiver sees what it writes to. Its layout is the one that checkpoints are loaded in, and
    its keys are dropped by whoever owns them."""

    model: torch.nn.Module
    tp_rank: int = 0

    def begin_weight_update(self) -> None: ...

    def end_weight_update(self) -> None: ...

    def flush_cache(self) -> None: ...


def check(weights: DraftWeights) -> str:
    """What is wrong with the bytes; empty if they are those of their source."""
    try:
        return _problem(Receiver().check(_Rank(torch.nn.Module()), msgspec.msgpack.encode(weights.as_round())))
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        return f"the bucket cannot be read ({error})"


@torch.no_grad()
def load(model: torch.nn.Module, weights: DraftWeights) -> str:
    """Check again, and load. Returns what is wrong; then the model has its old weights."""
    if problem := check(weights):
        return problem
    before = [parameter.detach().clone() for parameter in model.parameters()]
    receiver, rank = Receiver(), _Rank(model)
    problem = _problem(receiver.load(rank, msgspec.msgpack.encode(weights.as_round())))
    if not problem:
        problem = _problem(receiver.commit(rank, msgspec.msgpack.encode(Commit(version=weights.draft_version))))
    if problem:
        for parameter, old in zip(model.parameters(), before, strict=True):
            parameter.copy_(old)
    return problem


def _problem(reply: bytes) -> str:
    return msgspec.msgpack.decode(reply, type=CheckReply).problem
