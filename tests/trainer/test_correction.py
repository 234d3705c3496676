"""Corrections for other probabilities where tokens were sampled: against plain Python, with wrong versions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from specactor.trainer.losses import Action, Level, correction_weights_T

Weights = Callable[..., tuple[Tensor, Tensor]]
LEVELS: tuple[Level, ...] = get_args(Level)
ACTIONS: tuple[Action, ...] = get_args(Action)
BOUNDS = (0.7, 1.5)


def cases(seed: int) -> tuple[list[list[float]], list[list[float]]]:
    """(trainer's, sampled) log-probabilities of responses of 1 to 8 tokens; the first ones agree nearly."""
    rng = random.Random(seed)
    lengths = [1, 2, 5, 8, 3, 4]
    trainer = [[rng.uniform(-4, 0) for _ in range(n)] for n in lengths]
    spreads = [0.05, 0.1, 0.1, 0.3, 0.6, 1.0]
    sampled = [[x + rng.gauss(0, spread) for x in row] for row, spread in zip(trainer, spreads, strict=True)]
    return trainer, sampled


def reference(
    trainer: list[list[float]], sampled: list[list[float]], level: Level, action: Action
) -> tuple[list[float], list[bool]]:
    """(weights, what the bounds changed), response by response, in float64."""
    low, high = BOUNDS
    weights, changed = [], []
    for new, old in zip(trainer, sampled, strict=True):
        ratios = [math.exp(n - o) for n, o in zip(new, old, strict=True)]
        if level != "token":
            power = 1 / len(ratios) if level == "geometric" else 1
            ratios = [math.prod(ratios) ** power] * len(ratios)
        outside = [not low <= r <= high for r in ratios]
        match action:
            case "truncate":
                weights += [min(max(r, low), high) for r in ratios]
            case "mask":
                weights += [0.0 if out else r for r, out in zip(ratios, outside, strict=True)]
            case "reject":
                outside = [any(outside)] * len(ratios)
                weights += [float(not out) for out in outside]
        changed += outside
    return weights, changed


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64, requires_grad=True)


def sequences(rows: list[list[float]]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row) for row in rows]))


def check(level: Level, action: Action, weights: Weights = correction_weights_T) -> None:
    some, others = 0, 0
    for seed in range(4):
        trainer, sampled = cases(seed)
        got_T, cut_T = weights(
            flat(trainer),
            flat(sampled),
            level=level,
            action=action,
            bounds=BOUNDS,
            sequence_T=sequences(trainer),
            num_sequences=len(trainer),
            sum_over_context=lambda x_S: x_S,
        )
        want, changed = reference(trainer, sampled, level, action)
        assert got_T.tolist() == pytest.approx(want, abs=1e-12)
        assert cut_T.tolist() == changed
        assert not got_T.requires_grad
        some, others = some + sum(changed), others + len(changed) - sum(changed)
    assert min(some, others) > 0, "the cases must have both"


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_weights_equal_the_reference(level: Level, action: Action) -> None:
    check(level, action)


def apply(trainer: list[float], sampled: list[float], **settings: Any) -> list[float]:
    """Weights of one response."""
    return correction_weights_T(
        *(torch.tensor(x, dtype=torch.float64) for x in (trainer, sampled)),
        sequence_T=torch.zeros(len(trainer), dtype=torch.int64),
        num_sequences=1,
        sum_over_context=lambda x_S: x_S,
        **settings,
    )[0].tolist()


def test_weights_by_hand() -> None:
    """Ratios 1, 2 and 1/4: their product is 1/2, their mean 0.5 ** (1 / 3) = 0.794."""
    trainer, sampled = [-1.0, -1.0, -1.0], [-1.0, -1.0 - math.log(2), -1.0 + math.log(4)]
    expected = {
        ("token", "truncate"): [1, 1.5, 0.6],
        ("token", "mask"): [1, 0, 0],
        ("token", "reject"): [0, 0, 0],
        ("sequence", "truncate"): [0.6, 0.6, 0.6],
        ("sequence", "mask"): [0, 0, 0],
        ("geometric", "mask"): [0.5 ** (1 / 3)] * 3,
        ("geometric", "reject"): [1, 1, 1],
    }
    for (level, action), weights in expected.items():
        got = apply(trainer, sampled, level=level, action=action, bounds=(0.6, 1.5))
        assert got == pytest.approx(weights), (level, action)


def test_the_default_is_truncated_importance_sampling_to_the_bit() -> None:
    """What the shipped recipes use: min(exp(trainer - engine), 2), in float32."""
    generator = torch.Generator().manual_seed(1)
    trainer_T, engine_T = (-4 * torch.rand(4096, generator=generator) for _ in range(2))
    engine_T[:2] = torch.tensor([-500.0, trainer_T[1]])
    got_T, cut_T = correction_weights_T(
        trainer_T,
        engine_T,
        level="token",
        action="truncate",
        bounds=(0.0, 2.0),
        sequence_T=torch.zeros(4096, dtype=torch.int64),
        num_sequences=1,
        sum_over_context=lambda x_S: x_S,
    )
    want_T = (trainer_T - engine_T).exp().clamp(max=2.0)
    assert torch.equal(got_T, want_T)
    assert torch.equal(cut_T, (trainer_T - engine_T).exp() > 2.0)


def test_a_responses_parts_are_weighed_by_the_policy_that_sampled_each() -> None:
    """Two tokens of version 3, one of version 4, whose policy is the trainer's: the last one weighs 1."""
    trainer, by_version = [-1.0, -2.0, -0.5], {3: [-1.2, -1.9, -3.0], 4: [-1.0, -2.0, -0.5]}
    sampled = by_version[3][:2] + by_version[4][2:]
    settings = {"level": "token", "action": "truncate", "bounds": (0.0, 9.0)}
    assert apply(trainer, sampled, **settings) == pytest.approx([math.exp(0.2), math.exp(-0.1), 1.0])
    settings["level"] = "sequence"
    assert apply(trainer, sampled, **settings) == pytest.approx([math.exp(0.1)] * 3)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_undo_the_bias(level: Level) -> None:
    """Over all responses of two tokens that the engine may sample, the weighted mean of any function of the response
    is its mean under the trainer's policy."""
    generator = torch.Generator().manual_seed(0)
    engine_VV, trainer_VV = (
        torch.log_softmax(torch.randn(5, 5, generator=generator, dtype=torch.float64), -1) for _ in range(2)
    )
    value_VV = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    first, total = 2, 0.0  # of the first token only one is possible, so that both levels are unbiased
    for second in range(5):
        weights = apply(
            [0.0, trainer_VV[first, second].item()],
            [0.0, engine_VV[first, second].item()],
            level=level,
            action="truncate",
            bounds=(0.0, 1e9),
        )
        total += math.exp(engine_VV[first, second]) * weights[1] * value_VV[first, second].item()
    assert total == pytest.approx((trainer_VV[first].exp() * value_VV[first]).sum().item())


@pytest.mark.parametrize("level", LEVELS)
def test_extreme_ratios_and_no_tokens_stay_finite(level: Level) -> None:
    for action in ACTIONS:
        assert all(map(math.isfinite, apply([0.0, -900.0], [-900.0, 0.0], level=level, action=action, bounds=BOUNDS)))
        assert apply([], [], level=level, action=action, bounds=BOUNDS) == []


# ------------------------------------------------------------------------------------ one sequence over several ranks


def split_over_context(level: Level, action: Action, *, exchange: bool) -> tuple[Tensor, Tensor]:
    """(weights with even and odd tokens on two ranks, whose sums are exchanged or not; weights on one rank)."""
    trainer, sampled = cases(1)
    parts = [slice(0, None, 2), slice(1, None, 2)]

    def rank(part: slice, sum_over_context: Callable[[Tensor], Tensor]) -> Tensor:
        return correction_weights_T(
            flat(trainer)[part],
            flat(sampled)[part],
            level=level,
            action=action,
            bounds=BOUNDS,
            sequence_T=sequences(trainer)[part],
            num_sequences=len(trainer),
            sum_over_context=sum_over_context,
        )[0]

    def exchanged(mine: slice, other: slice) -> Tensor:
        """Sums are the same on both ranks from the first on, so each can be found after those before it."""
        known: list[Tensor] = []
        while True:
            sums: list[list[Tensor]] = [[], []]
            for part, own in ((other, sums[0]), (mine, sums[1])):

                def add(x_S: Tensor, own: list[Tensor] = own) -> Tensor:
                    own.append(x_S.clone())
                    return known[len(own) - 1] if len(own) <= len(known) else x_S

                weights = rank(part, add)
            if len(sums[1]) == len(known):
                return weights
            known.append(sums[0][len(known)] + sums[1][len(known)])

    weights_T = torch.empty_like(flat(trainer).detach())
    for mine, other in (parts, parts[::-1]):
        weights_T[mine] = exchanged(mine, other) if exchange else rank(mine, lambda x_S: x_S)
    return weights_T, rank(slice(None), lambda x_S: x_S)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_context_parallelism_changes_no_weight(level: Level, action: Action) -> None:
    spread_T, whole_T = split_over_context(level, action, exchange=True)
    torch.testing.assert_close(spread_T, whole_T, atol=1e-12, rtol=0)
    alone_T, _ = split_over_context(level, action, exchange=False)
    is_local = level == "token" and action != "reject"
    assert torch.allclose(alone_T, whole_T) == is_local, "without the exchange it is wrong"


# --------------------------------------------------------------------------------------------------- wrong versions


def _swapped(new: Tensor, old: Tensor, **kw: Any) -> tuple[Tensor, Tensor]:
    return correction_weights_T(old, new, **kw)


def _not_detached(new: Tensor, old: Tensor, **kw: Any) -> tuple[Tensor, Tensor]:
    return correction_weights_T(new, old, **kw)[0] * (new - new.detach() + 1), correction_weights_T(new, old, **kw)[1]


def _no_lower_bound(new: Tensor, old: Tensor, **kw: Any) -> tuple[Tensor, Tensor]:
    return correction_weights_T(new, old, **{**kw, "bounds": (0.0, BOUNDS[1])})


def _sum_for_mean(new: Tensor, old: Tensor, **kw: Any) -> tuple[Tensor, Tensor]:
    return correction_weights_T(new, old, **{**kw, "level": "sequence"})


def _one_sequence(new: Tensor, old: Tensor, **kw: Any) -> tuple[Tensor, Tensor]:
    return correction_weights_T(new, old, **{**kw, "sequence_T": torch.zeros_like(kw["sequence_T"])})


def _masked_to_one(new: Tensor, old: Tensor, **kw: Any) -> tuple[Tensor, Tensor]:
    weights_T, cut_T = correction_weights_T(new, old, **kw)
    return (weights_T > 0).double(), cut_T


def _rejects_tokens(new: Tensor, old: Tensor, **kw: Any) -> tuple[Tensor, Tensor]:
    weights_T, cut_T = correction_weights_T(new, old, **{**kw, "action": "mask"})
    return (weights_T > 0).double(), cut_T


def _truncated(new: Tensor, old: Tensor, **kw: Any) -> tuple[Tensor, Tensor]:
    return correction_weights_T(new, old, **{**kw, "action": "truncate"})


@pytest.mark.parametrize(
    ("level", "action", "wrong"),
    [
        ("token", "truncate", _swapped),
        ("token", "truncate", _not_detached),
        ("token", "truncate", _no_lower_bound),
        ("geometric", "truncate", _sum_for_mean),
        ("sequence", "mask", _one_sequence),
        ("token", "mask", _masked_to_one),
        ("token", "mask", _truncated),
        ("token", "reject", _rejects_tokens),
        ("geometric", "reject", _no_lower_bound),
    ],
)
def test_a_wrong_correction_is_caught(level: Level, action: Action, wrong: Weights) -> None:
    with pytest.raises(AssertionError):
        check(level, action, wrong)
