"""Policy losses against plain Python and finite differences, with wrong versions that are caught."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specactor.errors import DataError
from specactor.trainer.losses import Aggregation, LossKind, policy_loss_T, token_weights
from tests.trainer.loss_cases import (
    AGGREGATIONS,
    HIGH,
    LOW,
    MAX_NEW_TOKENS,
    Case,
    Table,
    aggregate,
    finite_difference,
    make_case,
    token_logprobs,
    token_objectives,
)

PolicyLoss = Callable[..., tuple[Tensor, Tensor]]
TokenWeights = Callable[[list[int], Aggregation, int], list[float]]


def flat(case: Case, theta: Tensor) -> tuple[Tensor, Tensor]:
    """(logprobs_T, sequence_T) of all sequences, packed."""
    pairs = [p for sequence in case.sequences for p in itertools.pairwise(sequence)]
    before, after = (torch.tensor(ids) for ids in zip(*pairs, strict=True))
    lengths = torch.tensor([len(s) - 1 for s in case.sequences])
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return torch.log_softmax(theta, dim=-1)[before, after], sequence_T


def run(
    case: Case, kind: LossKind, weights: list[float], loss_fn: PolicyLoss = policy_loss_T
) -> tuple[float, Tensor, Tensor]:
    """(loss, its gradient in theta, clipped_T)."""
    theta = torch.tensor(case.theta, dtype=torch.float64, requires_grad=True)
    logprobs_T, sequence_T = flat(case, theta)
    old_T, _ = flat(case, torch.tensor(case.old, dtype=torch.float64))
    loss_T, clipped_T = loss_fn(
        logprobs_T,
        old_T,
        torch.tensor(case.advantages, dtype=torch.float64)[sequence_T],
        kind=kind,
        clip_low=LOW,
        clip_high=HIGH,
        sequence_T=sequence_T,
        num_sequences=len(case.sequences),
        sum_over_context=lambda x_S: x_S,
    )
    loss = (loss_T * torch.tensor(weights, dtype=torch.float64)[sequence_T]).sum()
    (gradient,) = torch.autograd.grad(loss, theta)
    return loss.item(), gradient, clipped_T


def check_policy_loss(
    kind: LossKind,
    aggregation: Aggregation,
    loss_fn: PolicyLoss = policy_loss_T,
    weights_fn: TokenWeights = token_weights,
) -> None:
    some_clipped = 0
    for seed in range(4):
        case = make_case(seed)
        weights = weights_fn([len(s) - 1 for s in case.sequences], aggregation, MAX_NEW_TOKENS)

        def objective(theta: Table, case: Case = case) -> float:
            return aggregate(token_objectives(case, theta, case.theta, kind), aggregation)

        loss, gradient, clipped_T = run(case, kind, weights, loss_fn)
        assert loss == pytest.approx(-objective(case.theta), abs=1e-10)
        torch.testing.assert_close(gradient, -finite_difference(objective, case.theta), atol=1e-7, rtol=0)
        some_clipped += int(clipped_T.sum())
    assert some_clipped > 0, "the cases must exercise clipping"


@pytest.mark.parametrize("kind", ["ppo_clip", "cispo"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_value_and_gradient(kind: LossKind, aggregation: Aggregation) -> None:
    check_policy_loss(kind, aggregation)


def test_gspo_is_the_sequence_objective() -> None:
    """The token form with sequence_mean has the gradient of the objective with one ratio per sequence."""
    check_policy_loss("gspo", "sequence_mean")


def test_clipped_tokens_by_hand() -> None:
    """Ratios 2 and 1/2, advantages of either sign: four cases, two of which are clipped."""
    log2 = math.log(2)
    logprobs_T = torch.tensor([log2, log2, -log2, -log2, log2], dtype=torch.float64, requires_grad=True)
    advantages_T = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0], dtype=torch.float64)
    expected = {
        # kind: losses, clipped, gradients
        "ppo_clip": ([-1.3, 2, -0.5, 0.85, 0], [1, 0, 0, 1, 0], [0, 2, -0.5, 0, 0]),
        "cispo": (
            [-1.3 * log2, 1.3 * log2, 0.85 * log2, -0.85 * log2, 0],
            [1, 1, 1, 1, 0],
            [-1.3, 1.3, -0.85, 0.85, 0],
        ),
    }
    kinds: tuple[LossKind, ...] = ("ppo_clip", "cispo")
    for kind in kinds:
        loss_T, clipped_T = policy_loss_T(
            logprobs_T,
            torch.zeros(5, dtype=torch.float64),
            advantages_T,
            kind=kind,
            clip_low=LOW,
            clip_high=HIGH,
            sequence_T=torch.arange(5),
            num_sequences=5,
            sum_over_context=lambda x_S: x_S,
        )
        (gradient,) = torch.autograd.grad(loss_T.sum(), logprobs_T)
        losses, clipped, gradients = expected[kind]
        assert loss_T.tolist() == pytest.approx(losses)
        assert clipped_T.tolist() == [bool(c) for c in clipped]
        assert gradient.tolist() == pytest.approx(gradients)


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo", "cispo"])
def test_on_policy_gradient_is_reinforce(kind: LossKind) -> None:
    case = make_case(3)
    case = Case(sequences=case.sequences, advantages=case.advantages, theta=case.old, old=case.old)
    weights = token_weights([len(s) - 1 for s in case.sequences], "sequence_mean", MAX_NEW_TOKENS)

    def reinforce(theta: Table) -> float:
        logprobs = [token_logprobs(theta, s) for s in case.sequences]
        return sum(a * sum(x) / len(x) for a, x in zip(case.advantages, logprobs, strict=True)) / len(logprobs)

    _, gradient, clipped_T = run(case, kind, weights)
    torch.testing.assert_close(gradient, -finite_difference(reinforce, case.theta), atol=1e-8, rtol=0)
    assert not clipped_T.any()


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo", "cispo"])
def test_extreme_ratios_and_no_tokens_stay_finite(kind: LossKind) -> None:
    for logprobs in ([0.0, -300.0], []):
        logprobs_T = torch.tensor(logprobs, requires_grad=True)
        loss_T, _ = policy_loss_T(
            logprobs_T,
            torch.full((len(logprobs),), -150.0),
            torch.zeros(len(logprobs)),
            kind=kind,
            clip_low=LOW,
            clip_high=HIGH,
            sequence_T=torch.zeros(len(logprobs), dtype=torch.int64),
            num_sequences=3,
            sum_over_context=lambda x_S: x_S,
        )
        loss_T.sum().backward()
        assert loss_T.isfinite().all()
        assert logprobs_T.grad is not None
        assert (logprobs_T.grad == 0).all()


# ------------------------------------------------------------------------------------ one sequence over several ranks


def split_over_context(case: Case, exchange: bool) -> Tensor:
    """Loss of every token when even and odd tokens are on two ranks, whose sums are exchanged (or not)."""
    theta = torch.tensor(case.theta, dtype=torch.float64)
    logprobs_T, sequence_T = flat(case, theta)
    old_T, _ = flat(case, torch.tensor(case.old, dtype=torch.float64))
    advantages_T = torch.tensor(case.advantages, dtype=torch.float64)[sequence_T]

    def rank(part: slice, sum_over_context: Callable[[Tensor], Tensor]) -> Tensor:
        return policy_loss_T(
            logprobs_T[part],
            old_T[part],
            advantages_T[part],
            kind="gspo",
            clip_low=LOW,
            clip_high=HIGH,
            sequence_T=sequence_T[part],
            num_sequences=len(case.sequences),
            sum_over_context=sum_over_context,
        )[0]

    loss_T = torch.empty_like(logprobs_T)
    parts = [slice(0, None, 2), slice(1, None, 2)]
    for mine, other in (parts, parts[::-1]):
        sent: list[Tensor] = []
        rank(other, lambda x_S, sent=sent: sent.append(x_S.clone()) or x_S)  # type: ignore[misc]
        received = iter(sent)
        loss_T[mine] = rank(mine, (lambda x_S, r=received: x_S + next(r)) if exchange else (lambda x_S: x_S))
    return loss_T


def test_gspo_does_not_depend_on_context_parallelism() -> None:
    case = make_case(1)
    whole = split_over_context(case, exchange=True)
    weights = token_weights([len(s) - 1 for s in case.sequences], "sequence_mean", MAX_NEW_TOKENS)
    _, sequence_T = flat(case, torch.tensor(case.theta, dtype=torch.float64))
    total = (whole * torch.tensor(weights, dtype=torch.float64)[sequence_T]).sum().item()
    assert total == pytest.approx(run(case, "gspo", weights)[0], abs=1e-12)
    assert (split_over_context(case, exchange=False) - whole).abs().max() > 1e-3, "without the exchange it is wrong"


# --------------------------------------------------------------------------------------------------- wrong versions


def _ratio_of(args: tuple[Tensor, ...]) -> Tensor:
    return (args[0] - args[1]).exp()


def _optimistic_clip(*args: Tensor, **kw: object) -> tuple[Tensor, Tensor]:
    """min for max where the advantage is negative: the sign error of forgetting that A < 0 turns the bound round."""
    r, a = _ratio_of(args), args[2]
    unclipped, clipped = -a * r, -a * r.clamp(1 - LOW, 1 + HIGH)
    return torch.where(a > 0, torch.maximum(unclipped, clipped), torch.minimum(unclipped, clipped)), r > 1 + HIGH


def _always_clip(*args: Tensor, **kw: object) -> tuple[Tensor, Tensor]:
    r = _ratio_of(args)
    return -args[2] * r.clamp(1 - LOW, 1 + HIGH), r > 1 + HIGH


def _swapped_bounds(*args: Tensor, **kw: object) -> tuple[Tensor, Tensor]:
    return policy_loss_T(*args, **{**kw, "clip_low": HIGH, "clip_high": LOW})  # type: ignore[arg-type]


def _gspo_without_length(*args: Tensor, **kw: object) -> tuple[Tensor, Tensor]:
    """Sums for means: both sums get the value of the first, and counts become ones."""
    calls = itertools.count()
    return policy_loss_T(  # type: ignore[misc]
        *args, **{**kw, "sum_over_context": lambda x_S: x_S if next(calls) == 0 else torch.ones_like(x_S)}
    )


def _gspo_per_token(*args: Tensor, **kw: object) -> tuple[Tensor, Tensor]:
    return policy_loss_T(*args, **{**kw, "kind": "ppo_clip"})  # type: ignore[arg-type]


def _cispo_with_gradient_in_weight(*args: Tensor, **kw: object) -> tuple[Tensor, Tensor]:
    r = _ratio_of(args)
    return -r.clamp(1 - LOW, 1 + HIGH) * args[2] * args[0], r > 1 + HIGH


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("ppo_clip", _optimistic_clip),
        ("ppo_clip", _always_clip),
        ("ppo_clip", _swapped_bounds),
        ("gspo", _gspo_without_length),
        ("gspo", _gspo_per_token),
        ("cispo", _cispo_with_gradient_in_weight),
        ("cispo", _swapped_bounds),
    ],
)
def test_a_wrong_policy_loss_is_caught(kind: LossKind, wrong: PolicyLoss) -> None:
    with pytest.raises(AssertionError):
        check_policy_loss(kind, "sequence_mean", loss_fn=wrong)


# ----------------------------------------------------------------------------------------------------------- weights


def test_weights_by_hand() -> None:
    assert token_weights([2, 8], "sequence_mean", 16) == [1 / 4, 1 / 16]
    assert token_weights([2, 8], "token_mean", 16) == [1 / 10, 1 / 10]
    assert token_weights([2, 8], "fixed_length", 16) == [1 / 32, 1 / 32]
    assert token_weights([4, 0], "sequence_mean", 16) == [1 / 8, 0.0]


def test_the_sequences_of_a_session_weigh_together_what_another_response_does() -> None:
    lengths, is_branch = [2, 3, 5, 4], [False, True, True, False]
    assert token_weights(lengths, "sequence_mean", 16, is_branch=is_branch) == [1 / 20, 1 / 20, 1 / 20, 1 / 8]
    assert token_weights(lengths, "fixed_length", 16, is_branch=is_branch) == [1 / 32] * 4
    assert token_weights(lengths, "token_mean", 16, is_branch=is_branch) == [1 / 14] * 4


@pytest.mark.parametrize("lengths", [[], [0, 0], [3, -1]])
def test_an_update_without_tokens_is_refused(lengths: list[int]) -> None:
    with pytest.raises(DataError, match="at least one token"):
        token_weights(lengths, "token_mean", 16)


def _per_microbatch(lengths: list[int], aggregation: Aggregation, max_new_tokens: int) -> list[float]:
    """Wrong: each micro-batch of two sequences is normalised by itself, then averaged."""
    chunks = [lengths[i : i + 2] for i in range(0, len(lengths), 2)]
    return [w / len(chunks) for chunk in chunks for w in token_weights(chunk, aggregation, max_new_tokens)]


def test_a_token_mean_per_microbatch_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_policy_loss("ppo_clip", "token_mean", weights_fn=_per_microbatch)
    check_policy_loss("ppo_clip", "fixed_length", weights_fn=_per_microbatch)  # the one that is right by accident
