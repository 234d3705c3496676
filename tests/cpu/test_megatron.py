"""Megatron's CPU platform: attention, rotary embedding and experts against written-out arithmetic, on 2 gloo ranks.

The platform changes torch for the whole process, so everything runs in processes of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lib.ranks import run_ranks
from tests.trainer.conftest import ROOT, environment


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of 2 ranks found."""
    results = tmp_path_factory.mktemp("megatron") / "results.json"
    run_ranks(2, "tests.cpu.megatron_script", results, folder=results.parent)
    ranks: list[dict[str, Any]] = json.loads(results.read_text())
    return ranks


@pytest.mark.parametrize("context", [1, 2])
def test_packed_attention_equals_the_softmax_written_out(found: list[dict[str, Any]], context: int) -> None:
    for rank in found:
        assert rank[f"attention{context}"]["output"] < 1e-5
        assert rank[f"attention{context}"]["gradient"] < 1e-5


@pytest.mark.parametrize("context", [1, 2])
def test_packed_rotation_equals_complex_multiplication(found: list[dict[str, Any]], context: int) -> None:
    assert max(rank[f"rotation{context}"] for rank in found) < 1e-5


def test_grouped_linear_equals_one_product_per_expert(found: list[dict[str, Any]]) -> None:
    assert max(rank["experts"] for rank in found) < 1e-5


def test_buckets_hold_every_sequence_once_with_bounded_padding(found: list[dict[str, Any]]) -> None:
    assert found[0]["buckets"] == []


def test_context_parallel_ranks_share_a_sequence_without_gap_or_overlap(found: list[dict[str, Any]]) -> None:
    assert found[0]["positions"]


@pytest.mark.parametrize("what", ["strided_scatter", "uneven_all_gather", "one_device"])
def test_gaps_of_gloo_are_filled(found: list[dict[str, Any]], what: str) -> None:
    assert all(rank["gloo"][what] for rank in found)


def test_cuda_means_the_cpu(found: list[dict[str, Any]]) -> None:
    assert all(found[0]["devices"].values()), found[0]["devices"]


def test_installing_too_late_is_an_error() -> None:
    code = "import sys; sys.modules['megatron.core'] = sys; from specactor.cpu import megatron; megatron.install()"
    outcome = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(ROOT), env=environment(), capture_output=True, timeout=60, check=False
    )
    assert b"must be called before megatron.core is imported" in outcome.stderr
