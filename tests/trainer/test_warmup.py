"""A draft model of the warm-up: made once, and good at what the policy was shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specactor.config.speculation import MADE_BY_WARM_UP
from specactor.data.tiny_model import make_tiny_model
from specactor.errors import ConfigError
from specactor.recipes import load
from tests.lib.ranks import run_ranks
from tests.trainer.conftest import has_deep

WANTED: tuple[str, ...] = ("--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "model")
WANTED += ("--rollout.speculation.draft-model", "warm-up")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the kinds of draft models that are asked for, made by the same two ranks."""
    kinds = MADE_BY_WARM_UP if has_deep(request) else MADE_BY_WARM_UP[:1]
    folder = tmp_path_factory.mktemp("warm-up")
    tiny = load(["quickstart"]).model.tiny
    assert tiny is not None
    make_tiny_model(replace(tiny, num_layers=2), 0, folder / "policy")
    run_ranks(2, "tests.trainer.warmup_script", folder, " ".join(kinds), *WANTED[:-1], folder=folder)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found | {"folder": folder}


@pytest.mark.parametrize(
    "kind", [MADE_BY_WARM_UP[0], *(pytest.param(kind, marks=pytest.mark.deep) for kind in MADE_BY_WARM_UP[1:])]
)
def test_a_draft_model_is_made_once_and_knows_the_worked_solutions(results: dict[str, Any], kind: str) -> None:
    found = results[kind]
    first, second = found["folders"]
    assert first == second
    assert Path(first).parent == results["folder"] / ".warm-up"
    assert found["else_as_asked"]
    assert found["told"] == 1, "the second time it is read"
    learned, fresh = found["entropy"] if kind == "warm-up" else [1 - share for share in found["overlap"]]
    assert learned < 0.7 * fresh
    for said, response in zip(found["not_learned"], found["responses"], strict=True):
        question, _, rest = response.partition("=")
        a, b = map(int, question.split("*"))
        assert (said, rest) == (f"{a * b};", f"{a * b};#{a * b}<eos>"), "what an environment says is not learned"
    assert found["left_alone"] == [True, True, True], "without speculation, with a folder, and for nobody"


def test_it_takes_worked_solutions() -> None:
    with pytest.raises(ConfigError, match=r"speculation\.draft_model: got \('warm-up',\), expected a folder where"):
        load(["quickstart", *WANTED, "--warmup.solver", ""])


def test_a_head_is_not_made_for_drafter_processes() -> None:
    with pytest.raises(ConfigError, match=r"draft_model: got .*warm-up-head.*have no hidden states .* Use warm-up, or"):
        load(["quickstart", "--rollout.speculation.mode", "decoupled", "--parallel.drafters", "1"])
    load(["quickstart", "--rollout.speculation.mode", "decoupled", *WANTED[4:], "--parallel.drafters", "1"])
