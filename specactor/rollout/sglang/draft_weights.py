"""Rank calls that bring new weights to an engine's draft model: see `weights_sync.draft_sender`.

Invariants: only the draft model's parameters are written; the policy's receiver cannot read these messages and this one
cannot read the policy's; the draft model begins anew with every text, so no key of the old weights is read again,
and on every rank alike, also on one that did not take the weights: ranks that differed in what the draft model has seen
would run it on different tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from specactor.errors import EngineError
from specactor.rollout.sglang.model_drafter import DraftModel
from specactor.weights_sync import draft_receiver
from specactor.weights_sync.messages import CheckReply, DraftWeights


def check(rank: Any, payload: bytes) -> bytes:
    """Whether the bytes are those of their source; changes nothing."""
    _model(rank)
    return _reply(draft_receiver.check(msgspec.msgpack.decode(payload, type=DraftWeights)))


def load(rank: Any, payload: bytes) -> bytes:
    """Check, load, and draft with the new weights from the next round on; with the old ones where it answers a problem.
    One rank alone may, and drafts are then of two versions until the next push: bad ones, which cost speed. A rank that
    did not take them keeps the version that it had, so when they are brought again, that is news."""
    weights = msgspec.msgpack.decode(payload, type=DraftWeights)
    model, speculator = _model(rank), rank.draft_worker.speculator
    problem = "it was not loaded"
    try:
        problem = draft_receiver.load(model, weights)
    finally:
        for drafter in speculator.drafters.values() if speculator is not None else ():
            if isinstance(drafter, DraftModel):
                drafter.renewed(drafter.version if problem else weights.draft_version)
    return _reply(problem)


def _reply(problem: str) -> bytes:
    return msgspec.msgpack.encode(CheckReply(problem=problem))


def _model(rank: Any) -> torch.nn.Module:
    worker = rank.draft_worker
    runners = worker._draft_model_runners() if worker is not None else ()
    if not runners:
        raise EngineError(
            "draft model: got new weights, but this engine was started without one. Start it with "
            "rollout.speculation.draft_model, and model among the drafters."
        )
    model: torch.nn.Module = runners[0].model
    return model
