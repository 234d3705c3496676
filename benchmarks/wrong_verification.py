"""A verification that accepts one wrong token in a thousand, for `benchmarks.replay`. It breaks engines that load it.

--rollout.speculation.drafters benchmarks.wrong_verification:one_in_a_thousand
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from specactor.rollout.sglang import verify_worker
from specactor.rollout.speculation.suffix import SuffixDrafter
from specactor.rollout.speculation.verification import DraftTree

EVERY = 1000.0  # emitted tokens, on average, to a wrong one


class WrongPath:
    """Keeps the first rejected draft token, too, after as many tokens as it draws."""

    def __init__(self) -> None:
        self._right = verify_worker.accepted_path
        self._random = random.Random(7)
        self._left = self._random.expovariate(1 / EVERY)

    def __call__(self, tree: DraftTree, samples: Sequence[int]) -> list[int]:
        path = self._right(tree, samples)
        self._left -= len(path)
        if self._left > 0 or path[-1] + 1 >= tree.num_rows or not tree.is_chain:
            return path
        self._left = self._random.expovariate(1 / EVERY)
        return [*path, path[-1] + 1]


def one_in_a_thousand() -> SuffixDrafter:
    if not isinstance(verify_worker.accepted_path, WrongPath):
        verify_worker.accepted_path = WrongPath()  # type: ignore[assignment]
    return SuffixDrafter()
