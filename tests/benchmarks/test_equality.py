"""The tally of the equality matrix sees every way in which two responses can differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.equality import Tally
from specactor.types import Trajectory

PLAIN = [
    Trajectory(
        request_id=f"r{i}",
        group_id=0,
        prompt_ids=(1, 2),
        token_ids=(3, 4 + i, 5),
        logprobs=(-0.5, -1.0, -0.25),
        finish_reason="length",
        spans=(),
    )
    for i in range(3)
]


def tally_with(**other: Any) -> Tally:
    """Of responses of which the second differs in `other`."""
    tally = Tally()
    tally.compare([PLAIN[0], replace(PLAIN[1], **other), PLAIN[2]], PLAIN)
    return tally


def test_equal_responses_differ_in_nothing() -> None:
    tally = tally_with()
    assert (tally.responses, tally.tokens) == (3, 9)
    assert (tally.flips, tally.others, tally.logprob) == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("other", "flips", "others"),
    [
        ({"token_ids": (9, 5, 5)}, 1, 0),
        ({"token_ids": (3, 5, 9)}, 1, 0),
        ({"token_ids": (3, 5), "logprobs": (-0.5, -1.0)}, 0, 1),
        ({"token_ids": (3, 5, 5, 7), "logprobs": (-0.5, -1.0, -0.25, 0.0)}, 0, 1),
        ({"token_ids": (), "logprobs": ()}, 0, 1),
        ({"finish_reason": "stop"}, 0, 1),
    ],
    ids=str,
)
def test_wrong_responses_are_caught(other: dict[str, Any], flips: int, others: int) -> None:
    tally = tally_with(**other)
    assert (tally.flips, tally.others) == (flips, others)


def test_the_largest_difference_of_log_probabilities_is_kept() -> None:
    assert tally_with(logprobs=(-0.5, -1.0, -0.75)).logprob == 0.5


def test_a_response_that_is_missing_is_no_equality() -> None:
    with pytest.raises(ValueError, match="longer than"):
        Tally().compare(PLAIN[:2], PLAIN)
