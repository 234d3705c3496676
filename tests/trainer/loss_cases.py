"""A tiny softmax policy, and the objectives of the papers in plain Python.

The policy is a table theta (contexts x vocabulary): the next token's distribution is softmax(theta[previous token]).
The references are objectives (to be maximised), written as loops over sequences in Python floats; the gradient
that the losses are compared with is their finite difference.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specactor.trainer.losses import Aggregation, LossKind

VOCAB = 5
MAX_NEW_TOKENS = 9
LOW, HIGH = 0.15, 0.3
AGGREGATIONS: tuple[Aggregation, ...] = ("sequence_mean", "token_mean", "fixed_length")
Table = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences of token ids (the first is the prompt), one advantage each, the policy and the one that sampled."""

    sequences: list[list[int]]
    advantages: list[float]
    theta: Table
    old: Table


def make_case(seed: int, *, spread: float = 0.5) -> Case:
    rng = random.Random(seed)
    sequences = [[rng.randrange(VOCAB) for _ in range(1 + rng.randint(1, MAX_NEW_TOKENS))] for _ in range(6)]
    old = [[rng.gauss(0, 1) for _ in range(VOCAB)] for _ in range(VOCAB)]
    return Case(
        sequences=sequences,
        advantages=[rng.choice([-1, 1]) * rng.uniform(0.3, 2) for _ in sequences],
        theta=[[x + rng.gauss(0, spread) for x in row] for row in old],
        old=old,
    )


def log_softmax(row: list[float], token: int) -> float:
    return row[token] - math.log(sum(math.exp(x) for x in row))


def token_logprobs(theta: Table, sequence: list[int]) -> list[float]:
    return [log_softmax(theta[before], after) for before, after in itertools.pairwise(sequence)]


def clip(x: float) -> float:
    return min(max(x, 1 - LOW), 1 + HIGH)


def token_objectives(case: Case, theta: Table, frozen: Table, kind: LossKind) -> list[list[float]]:
    """The terms that the papers sum; `frozen` is the policy inside their stop-gradients."""
    out = []
    for sequence, a in zip(case.sequences, case.advantages, strict=True):
        new, old, held = (token_logprobs(t, sequence) for t in (theta, case.old, frozen))
        if kind == "ppo_clip":
            ratios = [math.exp(n - o) for n, o in zip(new, old, strict=True)]
            out.append([min(r * a, clip(r) * a) for r in ratios])
        elif kind == "gspo":
            s = math.exp(sum(n - o for n, o in zip(new, old, strict=True)) / len(new))
            out.append([min(s * a, clip(s) * a)] * len(new))
        else:
            weights = [clip(math.exp(h - o)) for h, o in zip(held, old, strict=True)]
            out.append([w * a * n for w, n in zip(weights, new, strict=True)])
    return out


def aggregate(values: list[list[float]], aggregation: Aggregation) -> float:
    if aggregation == "sequence_mean":
        return sum(sum(row) / len(row) for row in values) / len(values)
    if aggregation == "token_mean":
        flat = [v for row in values for v in row]
        return sum(flat) / len(flat)
    return sum(sum(row) for row in values) / (len(values) * MAX_NEW_TOKENS)


def finite_difference(objective: Callable[[Table], float], theta: Table, h: float = 1e-6) -> Tensor:
    gradient = torch.zeros(len(theta), VOCAB, dtype=torch.float64)
    for i, j in itertools.product(range(len(theta)), range(VOCAB)):
        up, down = [list(row) for row in theta], [list(row) for row in theta]
        up[i][j] += h
        down[i][j] -= h
        gradient[i, j] = (objective(up) - objective(down)) / (2 * h)
    return gradient
