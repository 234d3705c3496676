"""The kernel that samples on GPUs, in Triton's interpreter, beside what samples on CPUs."""

from __future__ import annotations

from typing import Any

import pytest

from specactor.rollout.sglang.sampling import at_once
from tests.lib.scripts import found_by

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return found_by("tests.rollout.sglang.sampling_kernel_cases", anew=True, TRITON_INTERPRET="1")


def test_noise_is_that_of_every_other_path(found: dict[str, Any]) -> None:
    """Its bits are the CPU's. Of the logarithms the interpreter has NumPy's, which differ from torch's in the last
    place; a GPU has one library for both."""
    assert found["noise"]["bits"]
    assert found["noise"]["error"] < 1e-14


def test_tokens_are_the_argmax_of_logits_and_noise(found: dict[str, Any]) -> None:
    """Any temperature, greedy rows, excluded tokens, vocabularies of any size; a row alone has the same bits."""
    for case in (*found["drawn"].values(), found["large"]):
        assert case["others"] == 0
        assert case["error"] < 1e-6
        assert case["alone"]


def test_wrong_noise_and_a_forgotten_chunk_are_seen(found: dict[str, Any]) -> None:
    assert all(others > 3 for others in found["wrong"])


def test_sglang_s_sampler_gives_the_same_tokens_and_log_probabilities(found: dict[str, Any]) -> None:
    """Rows of every kind in one batch, and of one kind. SGLang rounds a probability before it takes the logarithm, so
    that candidates nearer than 1e-6 may change places; none of these rows has such."""
    for name in ("mixed", "greedy", "plain"):
        assert found[name]["others"] == 0
        assert found[name]["error"] < 1e-6


def test_probabilities_are_made_of_few_rows_at_once(found: dict[str, Any]) -> None:
    """Those of all rows of a round, at large vocabularies, would not fit beside the logits."""
    most = [found[name]["most_probs"] for name in ("mixed", "greedy", "plain")]
    assert most == [at_once("filtered", 700)[-1], 0, 0]
