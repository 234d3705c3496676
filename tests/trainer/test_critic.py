"""GAE and value losses against plain Python in float64, with wrong versions; resuming with a critic."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from specactor.config import AlgorithmConfig, CriticConfig
from specactor.trainer.critic import Critic
from specactor.trainer.losses import gae, gae_of_turns, turn_numbers, value_loss_T, whitened
from specactor.trainer.microbatch import Estimate
from specactor.types import TrainSequence
from tests.trainer.conftest import CRITICS

Gae = Callable[..., tuple[list[Tensor], list[Tensor]]]


def reference(values: list[float], reward: float, gamma: float, decay: float) -> list[float]:
    """The paper's other form, eq. 14 to 16: a weighted mean of k-step advantages, which know each the end."""
    n = len(values)

    def k_step(t: int, k: int) -> float:
        """Advantage at t with k rewards and what the critic expects after them."""
        earned = gamma ** (n - 1 - t) * reward if t + k >= n else 0.0
        ahead = gamma**k * values[t + k] if t + k < n else 0.0
        return earned + ahead - values[t]

    def of(t: int) -> float:
        left = n - t
        known = sum((1 - decay) * decay ** (k - 1) * k_step(t, k) for k in range(1, left))
        return known + decay ** (left - 1) * k_step(t, left)  # from the end on, all k-step advantages are alike

    return [of(t) for t in range(n)]


def check_gae(estimate: Gae = gae) -> None:
    rng = random.Random(3)
    for gamma, decay in ((0.97, 0.9), (1.0, 1.0), (0.9, 0.0), (1.0, 0.95)):
        values = [[rng.gauss(0, 1) for _ in range(n)] for n in (1, 7, 3, 0, 12)]
        rewards = [rng.uniform(-1, 1) for _ in values]
        rows = [torch.tensor(row, dtype=torch.float64) for row in values]
        advantages, returns = estimate(rows, rewards, gamma=gamma, decay=decay)
        for got_T, target_T, row, reward in zip(advantages, returns, values, rewards, strict=True):
            want = reference(row, reward, gamma, decay)
            assert got_T.tolist() == pytest.approx(want, abs=1e-12)
            assert target_T.tolist() == pytest.approx([a + v for a, v in zip(want, row, strict=True)], abs=1e-12)


def test_gae_equals_the_reference() -> None:
    check_gae()


def test_gae_by_hand() -> None:
    """Values 0.5, 0.25, 1 and reward 2: temporal differences -0.25 + 0.5 (with gamma 1: V(t+1) - V(t)) and 2 - 1."""
    values = [torch.tensor([0.5, 0.25, 1.0])]
    (ones,), (targets,) = gae(values, [2.0], gamma=1.0, decay=1.0)
    assert ones.tolist() == [1.5, 1.75, 1.0]
    assert targets.tolist() == [2.0, 2.0, 2.0]
    (zeros,), _ = gae(values, [2.0], gamma=1.0, decay=0.0)
    assert zeros.tolist() == [-0.25, 0.75, 1.0]
    (halves,), _ = gae(values, [2.0], gamma=0.5, decay=0.5)
    assert halves.tolist() == [-0.375 + 0.25 * (0.25 + 0.25 * 1.0), 0.25 + 0.25 * 1.0, 1.0]


def estimates(
    values: list[list[float]], masks: list[tuple[bool, ...]], rewards: list[float], **settings: Any
) -> list[Estimate]:
    """What a critic that gave these values makes of conversations."""
    critic = object.__new__(Critic)
    algorithm = AlgorithmConfig(critic=CriticConfig(gae_lambda=0.9, **settings))
    critic.config = cast("Any", SimpleNamespace(algorithm=algorithm))
    critic._per_token = lambda part, of: [torch.tensor(row) for row in values]  # type: ignore[method-assign]
    sequences = [
        TrainSequence(token_ids=(1,) * (1 + len(mask)), prompt_len=1, loss_mask=mask, reward=reward)
        for mask, reward in zip(masks, rewards, strict=True)
    ]
    [found] = critic.estimates([sequences])
    return list(found)


def test_what_an_environment_said_takes_no_part_in_advantages() -> None:
    """Whatever the critic expects there; and what it expects before a turn follows on the turn before."""
    yes, no = True, False
    masks, rewards = [(yes, yes, no, no, yes), (yes, yes), (yes, no, yes)], [2.0, 0.0, 1.0]
    for said in (7.0, -3.0):
        found = estimates([[0.5, 0.25, said, said, 1.0], [0.1, 0.2], [0.3, said, 0.4]], masks, rewards)
        rows = [[0.5, 0.25, 1.0], [0.1, 0.2], [0.3, 0.4]]
        own = [reference(row, reward, 1.0, 0.9) for row, reward in zip(rows, rewards, strict=True)]
        want = whitened([torch.tensor(row, dtype=torch.float64) for row in own])
        for estimate, advantages_T, of, row in zip(found, want, own, rows, strict=True):
            kept = estimate.advantages.isfinite()
            assert estimate.advantages[kept].tolist() == pytest.approx(advantages_T.tolist(), abs=1e-6)
            assert estimate.returns[kept].tolist() == pytest.approx(
                [a + v for a, v in zip(of, row, strict=True)], abs=1e-6
            )
        assert [int((~e.returns.isfinite()).sum()) for e in found] == [2, 0, 1]


def _bootstrapped(values: list[Tensor], rewards: list[float], **kw: float) -> Any:
    """The last value expects itself again: as if the response went on."""
    return gae(
        values, [r + kw["gamma"] * float(v[-1]) if len(v) else r for r, v in zip(rewards, values, strict=True)], **kw
    )


def _without_gamma_in_the_decay(values: list[Tensor], rewards: list[float], *, gamma: float, decay: float) -> Any:
    return gae(values, rewards, gamma=gamma, decay=decay / gamma)


def _returns_without_lambda(values: list[Tensor], rewards: list[float], **kw: float) -> Any:
    return gae(values, rewards, **kw)[0], gae(values, rewards, **{**kw, "decay": 1.0})[1]


def _left_aligned(values: list[Tensor], rewards: list[float], **kw: float) -> Any:
    """Rewards come after the longest response, not after each."""
    longest = max(map(len, values))
    padded = [torch.cat([v, v.new_zeros(longest - len(v))]) for v in values]
    advantages, returns = gae(padded, rewards, **kw)
    return [a[: len(v)] for a, v in zip(advantages, values, strict=True)], [
        r[: len(v)] for r, v in zip(returns, values, strict=True)
    ]


@pytest.mark.parametrize("wrong", [_bootstrapped, _without_gamma_in_the_decay, _returns_without_lambda, _left_aligned])
def test_a_wrong_gae_is_caught(wrong: Gae) -> None:
    with pytest.raises(AssertionError):
        check_gae(wrong)


# ---------------------------------------------------------------------------------------------------------- over turns

GaeOfTurns = Callable[..., tuple[list[Tensor], list[Tensor]]]


def check_gae_of_turns(estimate: GaeOfTurns = gae_of_turns, numbers: Callable[[Tensor], Tensor] = turn_numbers) -> None:
    """Random conversations, turn by turn in Python: a step's value is the first of a turn, `reference` knows the rest.
    Some begin or end with what an environment said; one has no token, one no sampled token."""
    rng = random.Random(5)
    shapes = [[(3, 2), (1, 1), (4, 0)], [(5, 0)], [(0, 2), (2, 3)], [(1, 1), (1, 1), (1, 1)], [], [(0, 2)]]
    for gamma, decay in ((0.97, 0.9), (1.0, 1.0), (0.9, 0.0), (1.0, 0.95)):
        masks, sampled, want, targets, rewards = [], [], [], [], []
        for shape in shapes:
            turns = [[rng.gauss(0, 1) for _ in range(own)] for own, _ in shape if own]
            reward = rng.uniform(-1, 1)
            steps = reference([turn[0] for turn in turns], reward, gamma, decay)
            masks.append([flag for own, said in shape for flag in [True] * own + [False] * said])
            sampled.append([value for turn in turns for value in turn])
            want.append([a for a, turn in zip(steps, turns, strict=True) for _ in turn])
            targets.append([a + turn[0] for a, turn in zip(steps, turns, strict=True) for _ in turn])
            rewards.append(reward)
        advantages, returns = estimate(
            [torch.tensor(row, dtype=torch.float64) for row in sampled],
            rewards,
            turns=[numbers(torch.tensor(mask, dtype=torch.bool)) for mask in masks],
            gamma=gamma,
            decay=decay,
        )
        for got, of in ((advantages, want), (returns, targets)):
            assert [row_T.tolist() for row_T in got] == [pytest.approx(row, abs=1e-12) for row in of]


def test_gae_of_turns_equals_the_reference() -> None:
    check_gae_of_turns()


def test_gae_of_turns_by_hand() -> None:
    """Turns of two and one tokens, reward 2: the second turn is worth 2 - 1, the first 0.5 * 1 - 0.5 and half of half
    of that. The values 9 and 0.25 are within a turn, and count nowhere."""
    values, turns = [torch.tensor([0.5, 9.0, 1.0]), torch.tensor([0.75, 0.25])], [[0, 0, 1], [0, 0]]
    numbers = [torch.tensor(row) for row in turns]
    (talk, single), (of_talk, of_single) = gae_of_turns(values, [2.0, 1.0], turns=numbers, gamma=0.5, decay=0.5)
    assert (talk.tolist(), of_talk.tolist()) == ([0.25, 0.25, 1.0], [0.75, 0.75, 2.0])
    assert (single.tolist(), of_single.tolist()) == ([0.25, 0.25], [1.0, 1.0])


def test_turns_of_one_token_are_tokens() -> None:
    values = [torch.randn(n, dtype=torch.float64) for n in (1, 5, 0)]
    turns = [torch.arange(len(own)) for own in values]
    of_turns = gae_of_turns(values, [1.0, -1.0, 0.5], turns=turns, gamma=0.9, decay=0.8)
    of_tokens = gae(values, [1.0, -1.0, 0.5], gamma=0.9, decay=0.8)
    assert [[t.tolist() for t in part] for part in of_turns] == [[t.tolist() for t in part] for part in of_tokens]


def test_a_critic_over_turns_gives_each_turn_one_advantage() -> None:
    """From values and masks to whitened advantages, by the reference; what the environment said is left out."""
    yes, no = True, False
    masks, rewards = [(yes, yes, no, no, yes), (yes, yes), (yes, no, yes)], [2.0, 0.0, 1.0]
    values = [[0.5, 0.25, 7.0, 7.0, 1.0], [0.1, 0.2], [0.3, 7.0, 0.4]]
    found = estimates(values, masks, rewards, level="turn")
    steps = [reference(row, r, 1.0, 0.9) for row, r in zip([[0.5, 1.0], [0.1], [0.3, 0.4]], rewards, strict=True)]
    own = [[steps[0][0]] * 2 + [steps[0][1]], [steps[1][0]] * 2, steps[2]]
    want = whitened([torch.tensor(row, dtype=torch.float64) for row in own])
    for estimate, advantages_T in zip(found, want, strict=True):
        kept = estimate.advantages.isfinite()
        assert estimate.advantages[kept].tolist() == pytest.approx(advantages_T.tolist(), abs=1e-6)
    assert found[0].returns[[0, 1, 4]].tolist() == pytest.approx([steps[0][0] + 0.5] * 2 + [2.0], abs=1e-6)
    assert [int((~e.returns.isfinite()).sum()) for e in found] == [2, 0, 1]


def _value_of_the_last_token(values: list[Tensor], rewards: list[float], *, turns: list[Tensor], **kw: float) -> Any:
    """A turn is judged by what was expected at its end."""
    last = [torch.cumsum(torch.bincount(t), 0) - 1 for t in turns]
    found = gae([own[at] for own, at in zip(values, last, strict=True)], rewards, **kw)
    return [[row[t] for row, t in zip(part, turns, strict=True)] for part in found]


def _tokens(values: list[Tensor], rewards: list[float], *, turns: list[Tensor], **kw: float) -> Any:
    return gae(values, rewards, **kw)


def _every_token_its_own_return(values: list[Tensor], rewards: list[float], *, turns: list[Tensor], **kw: float) -> Any:
    advantages, _ = gae_of_turns(values, rewards, turns=turns, **kw)
    return advantages, [a + own for a, own in zip(advantages, values, strict=True)]


@pytest.mark.parametrize("wrong", [_value_of_the_last_token, _tokens, _every_token_its_own_return])
def test_a_wrong_gae_of_turns_is_caught(wrong: GaeOfTurns) -> None:
    with pytest.raises(AssertionError):
        check_gae_of_turns(wrong)


def test_turns_that_run_into_each_other_are_caught() -> None:
    with pytest.raises(AssertionError):
        check_gae_of_turns(numbers=lambda mask_T: torch.zeros(int(mask_T.sum()), dtype=torch.int64))


# ------------------------------------------------------------------------------------------------- whitening and losses


def test_advantages_are_whitened_over_all_tokens_of_the_step() -> None:
    found = whitened([torch.tensor([1.0, 3.0]), torch.tensor([]), torch.tensor([5.0, 7.0, 9.0])])
    flat_T = torch.cat(found)
    assert [len(a_T) for a_T in found] == [2, 0, 3]
    assert flat_T.mean().item() == pytest.approx(0, abs=1e-6)
    assert flat_T.std(correction=0).item() == pytest.approx(1, rel=1e-5)
    assert whitened([torch.tensor([4.0])])[0].tolist() == [0.0]


ValueLoss = Callable[[Tensor, Tensor, Tensor, float | None], tuple[Tensor, Tensor]]


def check_value_loss(loss_fn: ValueLoss = value_loss_T) -> None:
    """Value by the published max of two squares, gradient by finite differences."""
    rng = random.Random(7)
    new, old, want = ([rng.gauss(0, 1) for _ in range(64)] for _ in range(3))
    clips: tuple[float | None, ...] = (0.3, 1.0, None)
    for clip in clips:

        def of(v: float, i: int, clip: float | None = clip) -> float:
            held = v if clip is None else min(max(v, old[i] - clip), old[i] + clip)
            return max((v - want[i]) ** 2, (held - want[i]) ** 2) / 2

        values_T = torch.tensor(new, dtype=torch.float64, requires_grad=True)
        others = (torch.tensor(x, dtype=torch.float64) for x in (old, want))
        loss_T, clipped_T = loss_fn(values_T, *others, clip)
        assert loss_T.tolist() == pytest.approx([of(v, i) for i, v in enumerate(new)], abs=1e-12)
        (gradient_T,) = torch.autograd.grad(loss_T.sum(), values_T)
        slopes = [(of(v + 1e-6, i) - of(v - 1e-6, i)) / 2e-6 for i, v in enumerate(new)]
        assert gradient_T.tolist() == pytest.approx(slopes, abs=1e-6)
        assert clipped_T.tolist() == [s == 0 for s in slopes]
        assert clipped_T.any() == (clip is not None)


def test_value_loss_and_its_gradient() -> None:
    check_value_loss()


def test_value_loss_by_hand() -> None:
    """From 0 with clip 0.5: a value of 1 stops on its way up to 2, and comes back down to 0."""
    values_T = torch.tensor([1.0, 1.0, 0.4], requires_grad=True)
    loss_T, clipped_T = value_loss_T(values_T, torch.zeros(3), torch.tensor([2.0, 0.0, 2.0]), 0.5)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), values_T)
    assert loss_T.tolist() == pytest.approx([1.5**2 / 2, 0.5, 1.6**2 / 2])
    assert gradient_T.tolist() == pytest.approx([0.0, 1.0, -1.6])
    assert clipped_T.tolist() == [True, False, False]


def _smallest(v_T: Tensor, old_T: Tensor, want_T: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    held_T = v_T if clip is None else old_T + (v_T - old_T).clamp(-clip, clip)
    return torch.minimum((v_T - want_T) ** 2, (held_T - want_T) ** 2) / 2, held_T != v_T


def _always_held(v_T: Tensor, old_T: Tensor, want_T: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    held_T = v_T if clip is None else old_T + (v_T - old_T).clamp(-clip, clip)
    return (held_T - want_T) ** 2 / 2, held_T != v_T


def _held_around_the_return(v_T: Tensor, old_T: Tensor, want_T: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    return value_loss_T(v_T, want_T, old_T, clip)


@pytest.mark.parametrize("wrong", [_smallest, _always_held, _held_around_the_return])
def test_a_wrong_value_loss_is_caught(wrong: ValueLoss) -> None:
    with pytest.raises(AssertionError):
        check_value_loss(wrong)


# ------------------------------------------------------------------------------------------------------------ resuming


OF_SAVED = pytest.mark.parametrize("layout", [CRITICS[0][0], pytest.param(CRITICS[1][0], marks=pytest.mark.deep)])


@OF_SAVED
def test_a_resumed_run_goes_on_bit_for_bit_with_its_critic(two_ranks: dict[str, Any], layout: str) -> None:
    saved = two_ranks[f"save ppo {layout}"]
    assert saved["resumed"] == saved["undisturbed"]
    assert saved["before"]["critic_loss"] != saved["undisturbed"][0]["critic_loss"]


@OF_SAVED
def test_a_critic_is_loaded_under_another_layout(two_ranks: dict[str, Any], layout: str) -> None:
    loaded, saved = two_ranks[f"load ppo {layout}"], two_ranks[f"save ppo {layout}"]
    for got, expected in zip(loaded["resumed"], saved["undisturbed"], strict=True):
        for name in ("critic_loss", "critic_grad_norm", "critic_explained_variance"):
            assert got[name] == pytest.approx(expected[name], rel=1e-4), name


def test_a_checkpoint_without_a_critic_is_refused(one_rank: dict[str, Any]) -> None:
    error = one_rank["no critic"]["error"]
    assert "was saved without a critic, expected one with algorithm.advantage = gae" in error
    assert "\n" not in error
