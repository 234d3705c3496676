"""The drafter trainer over two ranks, plain and with ZeRO, trains what one rank trains."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specactor.errors import ConfigError
from specactor.trainer.drafter.train import DrafterTrainer
from specactor.trainer.drafter.updates import OPTIMIZER
from tests.trainer.conftest import has_deep
from tests.trainer.drafter.ranks import run_ranks
from tests.trainer.drafter.train_cases import UPDATES, learn, trainer
from tests.trainer.drafter.train_rank import name_of

Case = tuple[int, bool]
"""ZeRO's stage, and whether the optimizer is offloaded."""
ZERO: list[Case] = [(1, False), (3, True)]
FURTHER: list[Case] = [(2, True), (2, False), (3, False)]
"""Deep."""


def trained(folder: Path, cases: list[Case], *, forked: bool) -> None:
    """All in one start of two ranks."""
    for stage, offload in cases:
        (folder / name_of(stage, offload=offload)).mkdir()
    run_ranks("train_rank", 2, folder, json.dumps(cases), forked=forked)


def results_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]


@pytest.fixture(scope="module")
def zero(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what two ranks learned with ZeRO, by stage."""
    folder, deep = tmp_path_factory.mktemp("zero"), has_deep(request)
    trained(folder, [*ZERO, *(FURTHER if deep else [])], forked=False)
    return folder


def assert_same_training(results: list[dict[str, Any]], folder: Path) -> None:
    alone = trainer()
    expected = learn(alone)
    for r, result in enumerate(results):
        assert result["whole"]["losses"] == pytest.approx(expected.losses, abs=1e-5)
        assert result["whole"]["tokens"] == expected.tokens
        assert result["whole"]["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-4)
        assert result["whole"]["overlap"] == pytest.approx(expected.overlap, abs=1e-5)
        assert result["on"]["losses"] == pytest.approx(learn_more(alone), abs=1e-5)
        assert result["resumed"]["losses"] == result["on"]["losses"]
        weights = load_file(folder / f"rank{r}.safetensors")
        for name, tensor in expected_weights().items():
            torch.testing.assert_close(weights[name], tensor, atol=2e-5, rtol=1e-4)


def learn_more(made: DrafterTrainer) -> tuple[float, ...]:
    """Losses of two further updates; asked twice, they are of the same."""
    if made.updates == UPDATES:
        made.more = learn(made, 2).losses  # type: ignore[attr-defined]
    return made.more  # type: ignore[attr-defined,no-any-return]


def expected_weights() -> dict[str, Tensor]:
    made = trainer()
    learn(made)
    return dict(made.named_weights())


def assert_divisions_are_told_apart(results: list[dict[str, Any]], stage: int) -> None:
    """Of a trainer of two ranks: of another stage, of three ranks; the plain one is of no number of ranks."""
    expected = [f"ZeRO stage {stage + 1}, expected {stage}. Resume with --distillation.zero {stage + 1}"]
    expected += ["divided over 3 ranks, expected 2. Resume with 3 ranks"] if stage else []
    for result in results:
        assert len(result["refused"]) == len(expected)
        assert all(part in text for part, text in zip(expected, result["refused"], strict=True))


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    trained(tmp_path, [(0, False)], forked=True)
    folder = tmp_path / name_of(0, offload=False)
    results = results_in(folder)
    assert_same_training(results, folder)
    assert_divisions_are_told_apart(results, 0)
    assert results[0]["finite"] == results[1]["finite"] == [True, False]
    assert results[0]["bounded"]["losses"] == results[1]["bounded"]["losses"] != [], "ranks stop together"
    assert [result["replica"] for result in results] == [True, True]
    adam = load_file(folder / OPTIMIZER)
    assert len(adam) == 3 * len(expected_weights())


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(
    ("stage", "offload"), [*ZERO, *(pytest.param(*case, marks=pytest.mark.deep) for case in FURTHER)]
)
def test_zero_trains_as_one_rank(zero: Path, stage: int, offload: bool) -> None:
    folder = zero / name_of(stage, offload=offload)
    results = results_in(folder)
    assert [result["offloads"] for result in results] == [offload] * 2
    assert_same_training(results, folder)
    assert_divisions_are_told_apart(results, stage)
    assert results[0]["finite"] == results[1]["finite"] == [True, False], "also of what another rank has"
    if stage == 3:  # a wrong version looks at what a rank has at hand
        assert [result["parts_are_finite"] for result in results] == [True, True]


def test_zero_without_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # Python then finds none
    with pytest.raises(ConfigError, match=r"distillation.zero: got '2', expected off without DeepSpeed"):
        trainer(zero="2")
