"""Engines whose requests change drafter, mode and window at random rounds: a right version, and wrong ones.

As in `wrong_versions`, each is loaded as a draft method. `Ahead` drafts like one of another process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specactor.rollout.sglang import verify_worker
from specactor.rollout.speculation.speculator import Speculator
from specactor.rollout.speculation.verification import DraftTree
from tests.rollout.sglang.wrong_trees import Third
from tests.rollout.sglang.wrong_versions import Function, Rehearsed, heal, patch
from tests.rollout.speculation.forced import Drawn, Switching


class Ahead(Third):
    name = "ahead"
    every = 5
    drafts_ahead = True


def switching() -> Rehearsed:
    """The next speculator does what is drawn at random, and not what costs say."""

    def made(right: Function, self: Speculator, *arguments: Any, **named: Any) -> None:
        right(self, *arguments, **named)
        self.__class__ = Switching
        self._drawn = Drawn(5)  # type: ignore[attr-defined]

    heal()
    patch(Speculator, "__init__", made)
    return Rehearsed(learns=False)


def _switching_but(name: str, wrong: Function) -> Callable[[], Rehearsed]:
    def load() -> Rehearsed:
        drafter = switching()
        patch(verify_worker, name, wrong)
        return drafter

    return load


_lengths: list[int] = []


def _trusts(right: Function, tree: DraftTree, samples: Sequence[int]) -> list[int]:
    """Where the number of draft tokens has changed, the first of them is not compared."""
    path: list[int] = right(tree, samples)
    _lengths.append(tree.num_rows)
    changed = len(_lengths) > 1 and _lengths[-1] != _lengths[-2]
    return [0, 1] if changed and len(path) == 1 and tree.tokens else path


trusts_after_a_switch = _switching_but("accepted_path", _trusts)
