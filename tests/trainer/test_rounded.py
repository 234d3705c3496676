"""Routing replay where roundings send tokens to other experts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.lib.ranks import run_ranks
from tests.trainer.conftest import run


@pytest.mark.deep
def test_with_the_samplers_experts_a_mixture_is_as_near_as_a_model_without_a_choice(tmp_path: Path) -> None:
    run([sys.executable, "-m", "tests.trainer.rounded_script", "transformers", str(tmp_path)])
    run_ranks(1, "tests.trainer.rounded_script", "trainer", tmp_path, tmp_path / "results.json", folder=tmp_path)
    gaps = json.loads((tmp_path / "results.json").read_text())
    assert gaps["dense free"] == gaps["dense replayed"], "all experts compute every token"
    assert gaps["moe free"] > 2.5 * gaps["dense free"], "the two choose differently"
    assert gaps["moe replayed"] < 1.5 * gaps["dense free"]
