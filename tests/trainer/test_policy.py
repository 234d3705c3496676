"""One process: losses and gradients against transformers and autograd, and the trainer's other duties."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specactor.trainer.model_trainer import ModelTrainer
from specactor.trainer.packing import checked, split
from specactor.types import TrainSequence
from tests.trainer import policy_cases as cases
from tests.trainer.conftest import EVERY_CASE, FEW_CASES

SINGLE = ["single", "recompute full", "recompute selective", "plain optimizer", "one micro-batch"]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=[] if name == "single" or case in FEW_CASES else [pytest.mark.deep])
        for name in SINGLE
        for case in EVERY_CASE
    ],
)
def test_loss_and_gradient_equal_autograd_through_transformers(
    reference: Path, one_rank: dict[str, Any], name: str, case: str
) -> None:
    expected = json.loads((reference / "reference.json").read_text())[case]
    got = one_rank[name][case]
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("name", SINGLE)
def test_policy_and_critic_equal_autograd_through_transformers(
    reference: Path, one_rank: dict[str, Any], name: str
) -> None:
    for got, expected in zip(
        one_rank[name]["ppo"], json.loads((reference / "reference.json").read_text())["ppo"], strict=True
    ):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert got["critic_loss"] == pytest.approx(expected["critic_loss"], rel=1e-5)
        assert got["critic_grad_norm"] == pytest.approx(expected["critic_grad_norm"], rel=1e-4)
        assert got["critic_explained_variance"] == pytest.approx(expected["explained_variance"], rel=1e-4, abs=1e-6)
    assert got["critic_clip_fraction"] > 0


@pytest.mark.parametrize("name", SINGLE)
def test_experts_that_transformers_chose_change_no_bit(one_rank: dict[str, Any], name: str) -> None:
    steps = one_rank[name]["replay"]
    assert steps["right"] == pytest.approx(steps["free"], rel=0, abs=0, nan_ok=True)
    for wrong in ("swapped", "shifted"):
        assert steps[wrong]["logprob_gap_mean"] != steps["free"]["logprob_gap_mean"]
        assert steps[wrong] == pytest.approx(one_rank["single"]["replay"][wrong], rel=1e-5, nan_ok=True)
    assert steps["missing"].startswith("DataError: sequence 11: got 112 routed experts, expected 120")


@pytest.mark.parametrize("name", [*SINGLE, "dense", "tied"])
def test_logits_equal_transformers(one_rank: dict[str, Any], name: str) -> None:
    assert one_rank[name]["logits"] < 1e-5


def test_ignoring_rope_theta_would_be_noticed(one_rank: dict[str, Any]) -> None:
    assert one_rank["rope_theta"]["logits"] > 1e-2
    assert one_rank["rope_theta"]["grpo"]["loss"] != pytest.approx(one_rank["single"]["grpo"]["loss"], rel=1e-5)


@pytest.mark.parametrize("name", [*SINGLE, "dense", "tied"])
def test_exported_weights_are_the_loaded_ones_bit_for_bit(one_rank: dict[str, Any], name: str) -> None:
    assert one_rank[name]["wrong_weights"] == []


def test_recomputation_changes_nothing(one_rank: dict[str, Any]) -> None:
    for name in ("recompute full", "recompute selective"):
        for case in set(EVERY_CASE) & set(one_rank[name]):
            assert one_rank[name][case] == pytest.approx(one_rank["single"][case], rel=1e-6, nan_ok=True)


def test_statistics(one_rank: dict[str, Any]) -> None:
    stats = one_rank["single"]["grpo"]
    gaps = [
        abs(engine - trainer)
        for s, logprobs in zip(cases.sequences(), one_rank["single"]["logprobs"], strict=True)
        for engine, trainer in zip(s.rollout_logprobs, logprobs, strict=True)
    ]
    assert stats["logprob_gap_max"] == pytest.approx(max(gaps), abs=1e-5)
    assert stats["logprob_gap_mean"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-5)
    assert 0 < stats["logprob_gap_share"] < 1
    assert stats["logprob_gap_share"] == pytest.approx(sum(gap > cases.MAX_GAP for gap in gaps) / len(gaps))
    assert stats["tokens"] == len(gaps)
    assert stats["clip_fraction"] == 0.0
    assert 0 < stats["entropy"] < math.log(cases.VOCAB)
    assert stats["num_microbatches"] > 1
    assert one_rank["one micro-batch"]["grpo"]["num_microbatches"] == 1
    assert one_rank["single"]["gspo_sequence_mean"]["clip_fraction"] > 0
    assert one_rank["single"]["gspo_sequence_mean"]["num_microbatches"] >= 3


def test_statistics_of_the_correction(one_rank: dict[str, Any]) -> None:
    """Tokens of four sequences are masked; the others weigh the geometric mean of their ratios."""
    low, high = cases.GEOMETRIC.bounds
    weights = []
    for s, logprobs in zip(cases.sequences(), one_rank["single"]["logprobs"], strict=True):
        log_ratio = math.fsum(a - b for a, b in zip(logprobs, s.rollout_logprobs, strict=True)) / s.response_len
        weights += [math.exp(log_ratio) if low <= math.exp(log_ratio) <= high else 0.0] * s.response_len
    stats = one_rank["single"]["masked_sequences"]
    assert stats["cut_fraction"] == pytest.approx(weights.count(0.0) / len(weights), rel=1e-6)
    assert 0.1 < stats["cut_fraction"] < 0.5
    effective = math.fsum(weights) ** 2 / math.fsum(w * w for w in weights)
    assert stats["effective_share"] == pytest.approx(effective / len(weights), rel=1e-5)
    off = one_rank["single"]["gspo_token_mean"]
    assert math.isnan(off["effective_share"])
    assert math.isnan(off["cut_fraction"])


def test_only_tokens_of_the_policy_itself_must_agree_with_it(one_rank: dict[str, Any]) -> None:
    """The first half of each response was sampled by an older policy: it is learned from all the same."""
    fresh = [
        abs(engine - trainer)
        for s, logprobs in zip(cases.sequences(), one_rank["single"]["logprobs"], strict=True)
        for engine, trainer in list(zip(s.rollout_logprobs, logprobs, strict=True))[s.response_len // 2 :]
    ]
    stats, all_fresh = one_rank["single"]["stale"], one_rank["single"]["kl"][0]
    assert stats["logprob_gap_max"] == pytest.approx(max(fresh), abs=1e-5)
    assert stats["logprob_gap_mean"] == pytest.approx(sum(fresh) / len(fresh), abs=1e-5)
    assert stats["logprob_gap_mean"] != pytest.approx(all_fresh["logprob_gap_mean"], abs=1e-5)
    assert (stats["loss"], stats["tokens"]) == (pytest.approx(all_fresh["loss"], abs=1e-6), all_fresh["tokens"])


def test_kl_starts_at_zero_and_grows_as_the_policy_leaves_the_reference(one_rank: dict[str, Any]) -> None:
    first, second = one_rank["single"]["kl"]
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl"] > 1e-4
    assert first["loss"] == pytest.approx(one_rank["single"]["grpo"]["loss"], abs=1e-6)


def test_a_step_swaps_in_the_reference_once_and_keeps_the_policy_where_gradients_will_be(
    one_rank: dict[str, Any],
) -> None:
    """A second copy of the weights is memory of the device that no plan counts; each swap copies from the host."""
    assert one_rank["single"]["reference"] == {"swaps": [[True, True]], "unchanged": True}


def test_supervised_steps_learn(one_rank: dict[str, Any]) -> None:
    losses = one_rank["single"]["supervised"]
    assert losses[0] > losses[1] > losses[2]


def test_supervised_loss_is_over_a_constant_number_of_tokens(one_rank: dict[str, Any], reference: Path) -> None:
    """Of the loaded model it is -sum(log-probabilities) / (sequences x 32)."""
    logprobs = torch.log_softmax(load_file(reference / "moe.logits")["logits_RV"].double(), dim=-1)
    targets = torch.tensor([token for s in cases.sequences() for token in s.token_ids[s.prompt_len :]])
    total = logprobs.gather(1, targets[:, None]).sum().item()
    assert one_rank["single"]["supervised_before"] == pytest.approx(-total / (cases.NUM_SEQUENCES * 32), rel=1e-5)


def test_a_trained_policy_is_exported_as_a_whole_folder(one_rank: dict[str, Any]) -> None:
    assert one_rank["single"]["exported"] == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "vocabulary.txt",
    ]
    assert one_rank["single"]["wrong_export"] == []


def test_statistics_are_read_when_all_micro_batches_are_on_their_way() -> None:
    """Else a GPU's host waits for each of them."""
    on_their_way: list[str] = []

    class Entropy:
        def __float__(self) -> float:
            assert on_their_way == ["first", "second"]
            return 2.0

    def measured(batch: Any, output: Any) -> Any:
        return 0.0, {"entropy": Entropy()}

    def run(items: object, loss_of: Callable[[object, object], object], **_: object) -> int:
        for name in ("first", "second"):
            loss_of(name, None)
            on_their_way.append(name)
        return 2

    trainer: Any = SimpleNamespace(
        chunks=[],
        config=cases.config("model", {}),
        optimizer=SimpleNamespace(zero_grad=lambda: None, param_groups=[], step=lambda: (True, 0.5, None)),
        _mtp=None,
        _run=run,
    )
    sums, grad_norm, count = ModelTrainer._update(trainer, [], measured, 1.0)
    assert (sums.entropy, grad_norm, count) == (4.0, 0.5, 2)


def test_updates_split_groups_without_tearing_them() -> None:
    shares = split(cases.sequences(), 2)
    assert [sorted({s.group_id for s in share}) for share in shares] == [[0, 1], [2]] or [
        sorted({s.group_id for s in share}) for share in shares
    ] == [[0], [1, 2]]
    assert sum(len(share) for share in shares) == cases.NUM_SEQUENCES
    assert [{s.group_id for s in share} for share in split(cases.sequences(), 4)] == [{0}, {1}, {2}]


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (TrainSequence(token_ids=(1, 2), prompt_len=0), "cannot be learned"),
        (TrainSequence(token_ids=(1, 2), prompt_len=3), "cannot be learned"),
        (TrainSequence(token_ids=(1, 2, 3), prompt_len=1, rollout_logprobs=(-1.0,)), "1 values of 2 tokens"),
    ],
)
def test_a_sequence_that_cannot_be_learned_is_named(sequence: TrainSequence, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        checked([sequence])
