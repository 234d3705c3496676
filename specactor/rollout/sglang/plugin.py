"""SpecActor's plugin for SGLang (entry point ``sglang.srt.plugins``).

SGLang only logs a plugin that fails, so a rank call asserts that `register` ran.
"""

from __future__ import annotations

import torch

from specactor.cpu import sglang_hooks
from specactor.data.tokenizer import register_mimo
from specactor.rollout.sglang import (
    draft_runner,
    gpu,
    products,
    rank_calls,
    responses,
    sampling,
    speculation_calls,
    verify_worker,
)
from specactor.weights_sync import messages
from specactor.weights_sync.receiver import Receiver


def register() -> None:
    if not torch.cuda.is_available():
        sglang_hooks.install()
    for part in (sampling, responses, gpu, products, draft_runner):
        part.install()
    register_mimo()
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
