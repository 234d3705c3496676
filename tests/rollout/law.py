"""How probable it is that tokens drawn from a law are as far from it as these: p-values. Numbers in, numbers out.

Given what came before it, a token's place among the exact probabilities (the probability of all likelier tokens, plus a
uniform share of its own) is uniform in [0, 1), and independent of all earlier ones. So sums over all tokens of all
responses have known means and variances, although later tokens depend on earlier ones.

Shape legend: N responses to one prompt, T tokens of each, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import erfc, sqrt

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
Response = tuple[int, ...]
MIN_EXPECTED = 5.0
"""Cells of a chi-square test in which fewer are expected are put together."""
MIN_VARIANCE = 50.0
"""Of the count of a token that is compared with its expectation: below, it is too far from a normal distribution."""
MOST_FREQUENT = 8
"""First tokens after which second ones are counted."""


class Law(msgspec.Struct, frozen=True, kw_only=True):
    """Of the responses to one prompt; the fields are explained in reference_law.py."""

    logprobs: list[list[float]]
    above: list[list[float]]
    entropy: list[list[float]]
    spread: list[list[float]]
    expected: list[float]
    variance: list[float]
    first: list[float]
    second: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Responses to one prompt, all of one length."""

    prompt: tuple[int, ...]
    responses: tuple[Response, ...]

    @property
    def frequent(self) -> list[int]:
        """First tokens, the most frequent ones first."""
        return [token for token, _ in Counter(r[0] for r in self.responses).most_common(MOST_FREQUENT)]


Reference = Callable[[Sample], Law]


def p_values(samples: Sequence[Sample], reference: Reference) -> dict[str, float]:
    """By what is looked at. Right versions have values like uniform random numbers."""
    laws = [reference(sample) for sample in samples]
    tables = list(zip(samples, laws, strict=True))
    return {
        "first tokens": chi_square([(_counts([r[0] for r in s.responses], law), law.first) for s, law in tables]),
        "second tokens": chi_square(
            [
                (_counts([r[1] for r in s.responses if r[0] == token], law), p)
                for s, law in tables
                for token, p in zip(s.frequent, law.second, strict=True)
            ]
        ),
        "every token": _largest_deviation(tables),
        "uniform": _uniform(laws),
        "entropy": _two_sided(surprise(laws)),
    }


def entropy(laws: Sequence[Law]) -> float:
    """Mean of the exact entropies at all places, in nats."""
    return float(np.mean([law.entropy for law in laws]))


def surprise(laws: Sequence[Law]) -> float:
    """Sum of -log p(token) less the exact entropies, in standard deviations. Greedy responses are far below 0."""
    excess = sum(-np.sum(law.logprobs) - np.sum(law.entropy) for law in laws)
    return float(excess / np.sqrt(sum(np.sum(law.spread) for law in laws)))


def chi_square(tables: Sequence[tuple[Floats, Sequence[float]]]) -> float:
    """Of all tables of (counts [V], probabilities [V]) together."""
    statistic, freedom = 0.0, 0
    for counts_V, p in tables:
        expected_V = counts_V.sum() * np.array(p)
        order = expected_V.argsort()
        rare = max(int((expected_V < MIN_EXPECTED).sum()), int((expected_V[order].cumsum() < MIN_EXPECTED).sum()) + 1)
        observed, expected = (
            np.append(values[order[rare:]], values[order[:rare]].sum()) for values in (counts_V, expected_V)
        )
        statistic += float((np.square(observed - expected) / expected).sum())
        freedom += len(observed) - 1
    return float(stats.chi2.sf(statistic, freedom))


def _counts(tokens: Sequence[int], law: Law) -> Floats:
    return np.bincount(tokens, minlength=len(law.first)).astype(np.float64)


def _largest_deviation(tables: Sequence[tuple[Sample, Law]]) -> float:
    """Of a token's number of occurrences from its expectation; times the number of tokens, as the worst was chosen."""
    counts_V = sum(_counts([token for r in s.responses for token in r], law) for s, law in tables)
    variance_V = np.sum([law.variance for _, law in tables], axis=0)
    z_V = (counts_V - np.sum([law.expected for _, law in tables], axis=0)) / np.sqrt(variance_V)
    frequent_V = variance_V > MIN_VARIANCE
    return min(1.0, int(frequent_V.sum()) * _two_sided(float(np.abs(z_V[frequent_V]).max())))


def _uniform(laws: Sequence[Law]) -> float:
    """Kolmogorov and Smirnov's test of the tokens' places among the probabilities."""
    above = np.concatenate([np.ravel(law.above) for law in laws])
    p = np.exp(np.concatenate([np.ravel(law.logprobs) for law in laws]))
    return float(stats.kstest(above + p * np.random.default_rng(0).random(len(p)), "uniform").pvalue)


def _two_sided(z: float) -> float:
    return erfc(abs(z) / sqrt(2))
