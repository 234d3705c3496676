"""The windows that each way to draft would verify, and what is expected of them. PURE: estimates in, choices out.

A way's windows are those of the highest predicted speed (`planning.windows`), from the acceptance of its drafters and
the measured costs of rounds. What drafting took already is charged whatever the windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specactor.rollout.draft.drafter import DraftSequence
from specactor.rollout.draft.trees import Candidates
from specactor.rollout.planning.acceptance import AcceptanceModel
from specactor.rollout.planning.reconfiguration import LiveCosts
from specactor.rollout.planning.windows import Choice, best_windows, choose_windows, padded


class Costs(Protocol):
    """Seconds of rounds, as `OnlineCosts` has them."""

    def verify_s(self, requests: int, rows: int) -> float: ...

    def verify_curve(self, requests: int, max_rows: int) -> NDArray[np.float64]: ...

    def draft_s(self, drafter: str, requests: int) -> Callable[[int], float]: ...


class Part(Costs):
    """What a sample of the requests costs, as its part of a round of all, in which the others do as it does."""

    def __init__(self, costs: Costs, *, sample: int, requests: int) -> None:
        self._costs, self._sample, self._requests = costs, sample, requests

    def verify_s(self, requests: int, rows: int) -> float:
        rows = round(rows * self._requests / self._sample)
        return self._costs.verify_s(self._requests, rows) * self._sample / self._requests

    def verify_curve(self, requests: int, max_rows: int) -> NDArray[np.float64]:
        rows = np.round(np.arange(requests, max_rows + 1) * (self._requests / self._sample)).astype(np.intp)
        curve = self._costs.verify_curve(self._requests, int(rows[-1]))
        return curve[rows - self._requests] * (self._sample / self._requests)

    def draft_s(self, drafter: str, requests: int) -> Callable[[int], float]:
        of_all = self._costs.draft_s(drafter, self._requests)
        return lambda depth: of_all(depth) * self._sample / self._requests


def of_drafter(
    name: str,
    model: AcceptanceModel,
    costs: Costs,
    sequences: Sequence[DraftSequence],
    caps: Sequence[int],
    drafts: Sequence[Sequence[int]] | None,
) -> Choice:
    """Of one drafter; at most `caps[i]` draft tokens for request i. `drafts`: if they are there already."""
    requests = len(sequences)
    lengths = caps if drafts is None else [len(draft) for draft in drafts]
    draft_s = costs.draft_s(name, requests)
    if drafts is not None:
        spent_s = draft_s(max(caps))
        draft_s = lambda depth: spent_s  # noqa: E731
    if requests == 1:
        drafted = None if drafts is None else lengths[0]
        survival = model.survival(sequences[0].request_id, caps[0], drafted=drafted)
        return choose_windows([survival], verify_s=costs.verify_s, draft_s=draft_s, max_window=model.max_window)
    survival_BW = model.survivals([s.request_id for s in sequences], covered=drafts is not None)
    verify_N1 = costs.verify_curve(requests, requests * (1 + model.max_window))
    return best_windows(survival_BW, lengths, verify_N1=verify_N1, draft_s=draft_s)


def of_requests(reaching_BW: NDArray[np.float64], lengths: Sequence[int], costs: Costs, *, spent_s: float) -> Choice:
    """Of drafts that are there, one of each request. `reaching_BW`: their survivals, whosoever they are; `lengths`: of
    the drafts; `spent_s`: what drafting took."""
    requests, max_window = reaching_BW.shape
    verify_N1 = costs.verify_curve(requests, requests * (1 + max_window))
    return best_windows(reaching_BW, lengths, verify_N1=verify_N1, draft_s=lambda depth: spent_s)


def live_costs(costs: Costs, requests: int, *, max_window: int, spent_s: float) -> LiveCosts:
    """Seconds of rounds for which drafts are there. Plain decoding is no choice: a window of 0 says the same."""
    return LiveCosts(
        plain_s=float("inf"),
        verify_s=costs.verify_curve(requests, requests * (1 + max_window))[::requests],
        coupled_draft_s=np.full(max_window, spent_s),
        decoupled_draft_s=None,
    )


def of_trees(trees: Candidates, costs: Costs, caps: Sequence[int], *, spent_s: float, max_window: int) -> Choice:
    """Draft tokens of each request's tree; `spent_s`: what drafting took."""
    requests = len(caps)
    if requests == 1:
        return choose_windows(
            trees.survivals, verify_s=costs.verify_s, draft_s=lambda depth: spent_s, max_window=max_window
        )
    survival_BW, lengths = padded(trees.survivals, max_window)
    verify_N1 = costs.verify_curve(requests, requests * (1 + max_window))
    return best_windows(survival_BW, lengths, verify_N1=verify_N1, draft_s=lambda depth: spent_s)
