"""What an environment said is not learned from: no gradient, no weight, no metric of it. What an agent said in several
sequences is one response."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from specactor.actor import SpecActor
from specactor.config import AlgorithmConfig
from specactor.trainer import microbatch
from specactor.trainer.advantages import group_advantages
from specactor.trainer.losses import token_weights
from specactor.trainer.microbatch import Shape, build, items_of
from specactor.trainer.objective import PolicyObjective
from specactor.trainer.packing import checked
from specactor.types import Problem, ScoredGroup, TrainSequence, Trajectory
from tests.trainer.policy_cases import VOCAB, config, sequences

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_group", lambda: None)
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 1)


def masked() -> list[TrainSequence]:
    """Stretches of both kinds; the last sequence is learned from whole."""
    rng = random.Random(3)
    made = []
    for s in sequences()[:6]:
        mask = [rng.random() < 0.6 for _ in range(s.response_len)]
        mask[0], mask[-1] = True, False
        made.append(replace(s, loss_mask=tuple(mask)))
    return [*made, sequences()[6]]


def loss_of(batch: Sequence[TrainSequence], logits_1TV: Tensor, kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    algorithm = AlgorithmConfig(loss=kind, aggregation="sequence_mean")
    weights = token_weights([s.num_learned for s in batch], "sequence_mean", 32)
    micro = build(items_of(batch, weights, None, None), Shape(1, 0, 1), CPU)
    return PolicyObjective(algorithm, 1.0)(micro, logits_1TV)


def random_logits(batch: Sequence[TrainSequence]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    total = sum(len(s.token_ids) for s in batch)
    return torch.randn(1, total, VOCAB, generator=generator, dtype=torch.float64).requires_grad_()


def reference(batch: Sequence[TrainSequence], logits_1TV: Tensor) -> Tensor:
    """GRPO's loss at ratio 1, token by token."""
    logprobs, start, loss = logits_1TV[0].log_softmax(-1), 0, torch.zeros((), dtype=torch.float64)
    for s in batch:
        learned = [i for i in range(s.response_len) if not s.loss_mask or s.loss_mask[i]]
        for i in learned:
            position = s.prompt_len + i
            logprob = logprobs[start + position - 1, s.token_ids[position]]
            weight = (logprob.detach() - s.rollout_logprobs[i]).exp().clamp(max=2.0)
            loss = loss - s.advantage * weight * (logprob - logprob.detach()).exp() / (len(batch) * len(learned))
        start += len(s.token_ids)
    return loss


def observations_have_no_gradient(kind: str) -> None:
    batch = masked()
    logits = random_logits(batch)
    loss, sums = loss_of(batch, logits, kind)
    (gradient,) = torch.autograd.grad(loss, logits)
    reached = gradient[0].abs().sum(-1) > 0
    want, start = torch.zeros(len(reached), dtype=torch.bool), 0
    for s in batch:
        for i in range(s.response_len):
            want[start + s.prompt_len + i - 1] = not s.loss_mask or s.loss_mask[i]
        start += len(s.token_ids)
    assert torch.equal(reached, want)
    assert sums["tokens"] == sum(s.num_learned for s in batch) == sums["gap_tokens"]
    if kind == "ppo_clip":
        expected = reference(batch, logits)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0], rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("kind", ["ppo_clip", "cispo", "gspo"])
def test_what_an_environment_said_has_no_gradient(kind: str) -> None:
    observations_have_no_gradient(kind)


def test_a_mask_that_is_ignored_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = microbatch._responses

    def all_learned(items: Sequence[microbatch.Item], padded: list[int], rows_T: Tensor) -> tuple[Tensor, ...]:
        return right([replace(i, sequence=replace(i.sequence, loss_mask=())) for i in items], padded, rows_T)

    monkeypatch.setattr(microbatch, "_responses", all_learned)
    with pytest.raises(AssertionError):
        observations_have_no_gradient("ppo_clip")


def test_a_mask_of_all_tokens_has_the_bits_of_none() -> None:
    batch = sequences()[:5]
    whole = [replace(s, loss_mask=(True,) * s.response_len) for s in batch]
    found = []
    for each in (batch, whole):
        logits = random_logits(each)
        loss, _ = loss_of(each, logits, "ppo_clip")
        found.append((loss, *torch.autograd.grad(loss, logits)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_context_parallel_ranks_share_the_learned_tokens() -> None:
    batch = masked()
    items = items_of(batch, [1.0] * len(batch), None, None)
    parts = [build(items, Shape(2, rank, 1), CPU).source_R.tolist() for rank in range(2)]
    flags = [x for s in batch for x in s.loss_mask or (True,) * s.response_len]
    assert sorted(parts[0] + parts[1]) == [i for i, learned in enumerate(flags) if learned]


def test_a_sessions_sequences_are_one_response() -> None:
    """Two responses of a group, one a session of two sequences: each response has half of the weight."""

    def sampled(*token_ids: int, branches: tuple[Trajectory, ...] = ()) -> Trajectory:
        return Trajectory(
            request_id="0.0.0",
            group_id=0,
            prompt_ids=(1,),
            token_ids=token_ids,
            logprobs=(-1.0,) * len(token_ids),
            finish_reason="stop",
            spans=(),
            branches=branches,
        )

    problem = Problem(index=0, prompt="", prompt_ids=(1,), answer="", verifier="exact", metadata={})
    responses = (sampled(2, 3, branches=(sampled(4, 5, 6),)), sampled(7, 8, 9))
    group = ScoredGroup(problem=problem, trajectories=responses, scores=(1.0, 0.0), rewards=(1.0, 0.0))
    actor = SimpleNamespace(
        config=config("model", {}),
        version=0,
        audit=SimpleNamespace(num_seeded=lambda *_: 0),
        _advantages=lambda rewards, _: group_advantages(rewards, "dr_grpo"),
    )
    batch = SpecActor.learnable(cast("SpecActor", actor), [group])
    assert [(s.is_branch, s.advantage) for s in batch] == [(False, 0.5), (True, 0.5), (False, -0.5)]
    weights = token_weights([s.num_learned for s in batch], "sequence_mean", 32, is_branch=[s.is_branch for s in batch])
    assert sum(w * s.num_learned * s.advantage for w, s in zip(weights, batch, strict=True)) == pytest.approx(0)


def test_a_short_mask_is_refused() -> None:
    with pytest.raises(AssertionError, match="1 values of 2 tokens"):
        checked([TrainSequence(token_ids=(1, 2, 3), prompt_len=1, loss_mask=(True,))])
