"""How far requests are. PURE. Shapes: N requests, B on an engine.

Between events a request gains mean tokens per round, and stays as many standard deviations off its mean as it drew at
first: so the last of many equal requests ends as late as when every token is drawn.
"""

from __future__ import annotations

import numpy as np

from specactor.simulator.requests import Floats, Ints, Round

EQUAL = 1e-9  # variance of rounds that all emit as much


class Progress:
    def __init__(self, lengths: Ints, luck_N: Floats) -> None:
        """`lengths` [N] are tokens; `luck_N` counts standard deviations by which each is ahead."""
        self.length_N = lengths.astype(np.float64)
        self.luck_N = luck_N
        self.done_N: Floats = np.zeros(len(lengths))  # means
        self._variance_N: Floats = np.zeros(len(lengths))
        self._turns_N: Floats = np.zeros(len(lengths))  # rounds, each of which emitted a token or more
        self._most_N: Floats = np.zeros(len(lengths))  # tokens that they emitted at most

    def add(self, running: Ints, of: Round, rounds: float) -> None:
        self.done_N[running] += rounds * of.tokens
        self._variance_N[running] += rounds * of.variance
        self._turns_N[running] += rounds
        self._most_N[running] += rounds * of.most

    def rounds_left(self, running: Ints, of: Round) -> Floats:
        """Return [B] rounds like this one until each has finished."""
        # Where rounds vary the last emits more than what is left: half of a token-weighted mean round (renewals).
        beyond_B = np.where(of.variance > EQUAL, ((of.variance + of.tokens**2) / of.tokens - 1.0) / 2.0, 0.0)
        luck_B, variance_B, done_B = self.luck_N[running], self._variance_N[running], self.done_N[running]
        left_B = self.length_N[running] + beyond_B - done_B - luck_B * np.sqrt(variance_B)
        rounds_B = np.where(left_B > 0, _crossing(left_B, luck_B, variance_B, of), 0.0)
        least_B = (self.length_N[running] - self._most_N[running]) / of.most
        most_B = self.length_N[running] - self._turns_N[running]
        return rounds_B.clip(least_B, np.maximum(most_B, least_B)).clip(0.0)

    def finish(self, gone: Ints) -> float:
        """Return the tokens that they emitted beyond the mean."""
        luck = float((self.length_N[gone] - self.done_N[gone]).sum())
        self.done_N[gone] = self.length_N[gone]
        return luck


def _crossing(left_B: Floats, luck_B: Floats, variance_B: Floats, of: Round) -> Floats:
    """Return the r at which r tokens + luck (sqrt(variance + r own) - sqrt(variance)) reaches what is left."""
    own_B = np.maximum(of.variance, 1e-12)
    a_B = of.tokens / own_B
    c_B = a_B * variance_B + luck_B * np.sqrt(variance_B) + left_B
    root_B = (-luck_B + np.sqrt(np.maximum(luck_B**2 + 4.0 * a_B * c_B, 0.0))) / (2.0 * a_B)
    found_B: Floats = np.where(of.variance > EQUAL, (root_B**2 - variance_B) / own_B, left_B / of.tokens)
    return found_B
