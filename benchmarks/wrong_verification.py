"""A verification that accepts one wrong token in a thousand, for `benchmarks.replay`. It breaks engines that load it.

    --rollout.speculation.drafters benchmarks.wrong_verification:one_in_a_thousand

The token has the log-probability that it should have, so engine and trainer agree on it: nothing but the noise tells.
"""

from __future__ import annotations

import random
from typing import Any

from sglang.srt.layers.sampler import Sampler
from torch import Tensor

from specactor.rollout.sglang import verify_worker
from specactor.rollout.sglang.verify_batch import Rows
from specactor.rollout.speculation.suffix import SuffixDrafter

_worker: Any = verify_worker  # whose imports are replaced
LIKELY = 1e-3  # a token that nobody would sample betrays itself
EVERY = 1000.0  # emitted tokens, on average, to a wrong one


class Fault:
    """Takes a request's first draft token for the target's sample, after as many emitted tokens as it draws."""

    def __init__(self) -> None:
        self._spread, self._accepted = _worker.spread, _worker.Worker._accepted
        self._sample = Sampler._sample_from_probs
        self._rows: Rows | None = None
        self._random = random.Random(7)
        self._left = self._random.expovariate(1 / EVERY)

    def spread(self, batch: Any, rows: Rows, **named: Any) -> None:
        self._rows = rows
        self._spread(batch, rows, **named)

    def sample(self, sampler: Any, probs: Tensor, *rest: Any) -> Any:
        rows, self._rows = self._rows, None  # of this call, and not of those that it makes
        tokens, masks = self._sample(sampler, probs, *rest)
        for tree, first in zip(rows.trees, rows.starts, strict=False) if rows is not None else ():
            if self._left > 0 or not tree.tokens or tree.tokens[0] == int(tokens[first]):
                continue
            if probs[first, tree.tokens[0]] > LIKELY:
                tokens[first] = tree.tokens[0]
                self._left = self._random.expovariate(1 / EVERY)
        return tokens, masks

    def accepted(self, worker: Any, *rest: Any) -> list[list[int]]:
        paths: list[list[int]] = self._accepted(worker, *rest)
        self._left -= sum(map(len, paths))  # all that the round emits, of requests without drafts too
        return paths


def one_in_a_thousand() -> SuffixDrafter:
    if not isinstance(getattr(_worker.spread, "__self__", None), Fault):  # it is loaded more than once
        fault = Fault()
        _worker.spread = fault.spread
        _worker.Worker._accepted = lambda worker, *rest: fault.accepted(worker, *rest)
        Sampler._sample_from_probs = lambda sampler, *arguments: fault.sample(sampler, *arguments)
    return SuffixDrafter()
