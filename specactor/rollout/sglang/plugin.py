"""SpecActor's plugin for SGLang (entry point ``sglang.srt.plugins``): all that we add to its schedulers begins here.

SGLang loads it in an engine's process and in each of its schedulers. It only logs a plugin that fails, so the engine's
process asserts by a rank call that `register` ran in every scheduler.
"""

from __future__ import annotations

import torch

from specactor.cpu import sglang_hooks
from specactor.data import mimo
from specactor.rollout.sglang import (
    draft_runner,
    rank_calls,
    routed_experts,
    row_graphs,
    sampling,
    speculation_calls,
    stopping,
    tile_backend,
    verify_worker,
)
from specactor.weights_sync import messages
from specactor.weights_sync.receiver import Receiver


def register() -> None:
    """Called once per process by SGLang."""
    if not torch.cuda.is_available():
        sglang_hooks.install()
    else:
        tile_backend.install()
    for part in (sampling, stopping, routed_experts, row_graphs, draft_runner):
        part.install()
    mimo.register()
    receiver = Receiver()
    rank_calls.RANK_CALLS.update(
        {
            messages.CHECK: receiver.check,
            messages.LOAD: receiver.load,
            messages.PLAN: receiver.plan,
            messages.PULL: receiver.pull,
            messages.COMMIT: receiver.commit,
        }
    )
    rank_calls.install()
    verify_worker.register(speculation_calls.starting, speculation_calls.make_speculator)
