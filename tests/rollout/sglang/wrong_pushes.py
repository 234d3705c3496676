"""A rank call with a mistake. Engines register it when they load the drafter of this file by its import path."""

from __future__ import annotations

from typing import Any

import msgspec

from specactor.rollout.sglang import rank_calls
from specactor.weights_sync import draft_push
from specactor.weights_sync.messages import Answer, DraftWeights
from tests.rollout.sglang.wrong_model_drafters import Shared as Shared

INTO_POLICY = "wrong.into_policy"


def _into_policy(rank: Any, payload: bytes) -> bytes:
    """Loads the draft model's weights into the target."""
    weights = msgspec.msgpack.decode(payload, type=DraftWeights)
    return msgspec.msgpack.encode(Answer(problem=draft_push.load(rank.model, weights)))


rank_calls.RANK_CALLS[INTO_POLICY] = _into_policy
