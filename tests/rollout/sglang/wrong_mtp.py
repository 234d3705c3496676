"""The mistakes of `wrong_heads` with MTP layers, and the right ones among them. Engines import them."""

from __future__ import annotations

from typing import Any

from specactor.rollout.sglang.head_runner import MtpRunner
from specactor.rollout.sglang.model_drafter import ModelDrafter, MtpDrafter
from tests.rollout.sglang import wrong_heads


def _with_mtp(drafter: type[ModelDrafter]) -> Any:
    runner = type(drafter.head_runner_type.__name__, (drafter.head_runner_type, MtpRunner), {})
    return type(drafter.__name__, (drafter, MtpDrafter), {"head_runner_type": runner})


Shared = _with_mtp(wrong_heads.Shared)
HeadRests = _with_mtp(wrong_heads.HeadRests)
Recording = _with_mtp(wrong_heads.Recording)
Stale = _with_mtp(wrong_heads.Stale)
Unwritten = _with_mtp(wrong_heads.Unwritten)
KeysAlone = _with_mtp(wrong_heads.KeysAlone)
Shifted = _with_mtp(wrong_heads.Shifted)
Skipping = _with_mtp(wrong_heads.Skipping)
OwnStates = _with_mtp(wrong_heads.OwnStates)
HeadErrs = _with_mtp(wrong_heads.HeadErrs)
HeadErrsAndKeeps = _with_mtp(wrong_heads.HeadErrsAndKeeps)
SharedSlots = _with_mtp(wrong_heads.SharedSlots)
