"""The drafter trainer: against a plain loop of PyTorch, with what it leaves alone, and after a resume."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specactor.errors import CheckpointError, ConfigError
from specactor.trainer.distillation import train as module
from specactor.trainer.distillation.buffer import Lesson
from specactor.trainer.distillation.emphasis import bin_of, lost, token_weights
from specactor.trainer.distillation.train import DrafterTrainer
from tests.trainer.distillation import cases
from tests.trainer.distillation.train_cases import UPDATES, learn, resumed, trainer

# ------------------------------------------------------------------------------------- one rank, against a plain loop


def lesson_loss(model: Any, x: Lesson, weights: np.ndarray[Any, Any], shift: int = 1) -> Tensor:
    """Sum over the response: sequences one at a time, tokens in a loop, nothing padded."""
    logits = model(input_ids=torch.tensor(x.token_ids[None].astype(np.int64))).logits[0] / x.temperature
    total = torch.zeros(())
    for t in range(x.prompt_len, len(x.token_ids)):
        q = logits[max(0, t - shift)].softmax(-1)
        sample = -q[int(x.token_ids[t])].log()
        loss = 1.1 * sample
        if x.law is not None:
            row = t - x.prompt_len
            p = torch.tensor(x.law.logprobs[row]).exp()
            kept = torch.tensor(x.law.tokens[row]).long()
            rest_p, rest_q = 1 - p.sum(), 1 - q[kept].sum()
            loss = 0.1 * sample + (p * (p / q[kept]).log()).sum() + rest_p * (rest_p / rest_q).log()
        total = total + float(weights[t - x.prompt_len]) * loss
    return total


def plain_losses(shift: int = 1) -> list[float]:
    """What a loop of AdamW makes of the same draws."""
    source, model, settings = trainer(), cases.model(), cases.config()
    adam = torch.optim.AdamW(model.parameters(), betas=settings.adam_betas, weight_decay=0.0)
    found = []
    for update in range(UPDATES):
        drawn = source.buffer.draw(update, settings.tokens_per_update)
        mean = source.buffer.mean_reward()
        weights = [
            token_weights(
                x.response_len,
                lost=source.lost,
                position_emphasis=0.5,
                reward=x.reward,
                mean_reward=mean,
                reward_emphasis=0.2,
            )
            for x in drawn
        ]
        total = sum(w.sum() for w in weights)
        loss = sum(lesson_loss(model, x, w, shift) for x, w in zip(drawn, weights, strict=True)) / total
        adam.param_groups[0]["lr"] = settings.learning_rate * min(1.0, (update + 1) / 2)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        adam.step()
        found.append(loss.item())
    return found


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return plain_losses()


def test_losses_are_those_of_a_plain_loop(plain: list[float]) -> None:
    stats = learn(trainer())
    assert stats.losses == pytest.approx(plain, abs=1e-5)
    assert stats.micro_steps > stats.updates == UPDATES, "updates have several micro-batches"
    assert stats.stopped == "updates"
    assert 0 < stats.overlap < 1


def test_positions_shifted_by_one_are_caught(plain: list[float]) -> None:
    assert plain_losses(shift=2)[0] != pytest.approx(plain[0], abs=1e-3)


def test_padding_that_counts_is_caught(plain: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    build = module.batches.build

    def padding_counts(lessons: Any, weights: Any, device: Any) -> Any:
        longest = max(len(x.token_ids) for x in lessons)
        padded = [
            Lesson(
                token_ids=np.pad(x.token_ids, (0, longest - len(x.token_ids))),
                prompt_len=x.prompt_len,
                version=0,
                temperature=x.temperature,
            )
            for x in lessons
        ]
        return build(padded, [np.ones(x.response_len) for x in padded], device)

    monkeypatch.setattr(module.batches, "build", padding_counts)
    assert learn(trainer()).losses[0] != pytest.approx(plain[0], abs=1e-3)


def test_it_learns() -> None:
    losses = learn(trainer(reward_emphasis=0.0, position_emphasis=0.0, learning_rate=1e-2), 25).losses
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


# ------------------------------------------------------------------------------------------- where acceptance is lost


def lost_by_loop(shift: int = 0) -> tuple[float, ...]:
    """Of the first update's lessons, before it: one token at a time."""
    source, model = trainer(), cases.model()
    tokens, kept = [0.0] * 8, [0.0] * 8
    for x in source.buffer.draw(0, source.tokens_per_update):
        if x.law is None:
            continue
        logits = model(input_ids=torch.tensor(x.token_ids[None].astype(np.int64))).logits[0] / x.temperature
        for row in range(x.response_len):
            q = logits[x.prompt_len - 1 + row].softmax(-1)
            p, there = torch.tensor(x.law.logprobs[row]).exp(), torch.tensor(x.law.tokens[row]).long()
            both = torch.minimum(p, q[there]).sum() + torch.minimum(1 - p.sum(), 1 - q[there].sum())
            tokens[bin_of(row + shift)] += 1
            kept[bin_of(row + shift)] += both.item()
    return lost(tokens, kept)


def test_it_sees_where_acceptance_is_lost() -> None:
    made = trainer()
    learn(made, 1)
    assert made.lost == pytest.approx(lost_by_loop(), abs=1e-5)
    assert len(set(made.lost)) > 1
    assert made.lost != pytest.approx(lost_by_loop(shift=1)[: len(made.lost)], abs=1e-3), "positions off by one"


def test_what_was_lost_weighs_more_in_the_next_refresh_alone() -> None:
    made, flat = trainer(), trainer(position_emphasis=0.0)
    made.lost = ()
    assert learn(made, 2).losses == learn(flat, 2).losses, "nothing is known yet"
    assert made.lost == flat.lost
    assert learn(made, 1).losses != learn(flat, 1).losses


# -------------------------------------------------------------------------------------------------- what is left alone


def test_random_states_are_neither_read_nor_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(seed: int) -> tuple[float, ...]:
        made = trainer()
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())
        stats = learn(made, 2)
        assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == before
        return stats.losses

    assert losses(0) == losses(1)

    def from_the_process(self: Any, number: int, num_tokens: int) -> list[Lesson]:
        return [self.lessons[i] for i in torch.randperm(len(self.lessons))[:8]]

    monkeypatch.setattr(module.DraftBuffer, "draw", from_the_process)
    with pytest.raises(AssertionError):
        losses(0)


def test_nothing_to_learn_from() -> None:
    made = DrafterTrainer(cases.config(), cases.model(), seed=0)
    stats = made.refresh(limit_s=1.0, clock=lambda: 0.0)
    assert (stats.stopped, stats.updates, stats.version) == ("empty", 0, 0)


# ------------------------------------------------------------------------------------------------------------- resume


def test_a_resumed_trainer_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    made = trainer()
    learn(made)
    made.save(tmp_path)
    again = resumed(tmp_path)
    assert (again.version, again.updates, again.lost) == (1, UPDATES, made.lost)
    assert made.lost not in ((), (0.1, 0.2, 0.4)), "it is of what was seen"
    later = cases.lessons(6, seed=8)
    made.buffer.add(later)
    again.buffer.add(later)
    assert learn(made).losses == learn(again).losses
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), again.model.parameters(), strict=True))


def test_an_optimizer_that_forgot_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer()
    learn(made)
    made.save(tmp_path)
    monkeypatch.setattr("specactor.trainer.distillation.updates.PlainUpdater.load", lambda self, folder: None)
    assert learn(resumed(tmp_path)).losses != learn(made).losses


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    learn(made := trainer(), 1)
    made.save(tmp_path)
    weights = load_file(tmp_path / module.WEIGHTS)
    assert set(weights) == {name for name, _ in made.model.named_parameters()}
    other = DrafterTrainer(cases.config(), torch.nn.Linear(2, 2), seed=0)
    with pytest.raises(CheckpointError, match="of another draft model"):
        other.load(tmp_path)
    (tmp_path / module.STATE).unlink()
    with pytest.raises(CheckpointError, match="no state of a draft model"):
        resumed(tmp_path)


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sample_weight": 0.0, "law_weight": 0.0}, "law_weight: got 0.0"),
        ({"max_time_share": 0.0}, "max_time_share: got 0.0, expected > 0"),
        ({"offload": True}, "offload: got True, expected False without ZeRO"),
        ({"recovery_time_share": 0.01}, "recovery_time_share: got 0.01, expected 0 or in 0.03..1"),
        ({"top_k": 0}, "position_emphasis: got 0.5, expected 0 with top_k 0"),
        ({"buffer_tokens": 0}, "buffer_tokens: got 0, expected > 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cases.config(**wrong)


def test_every_seed_draws_its_own(plain: list[float]) -> None:
    other = DrafterTrainer(cases.config(), cases.model(), seed=1)
    other.buffer.add(cases.lessons())
    assert any(a != pytest.approx(b, abs=1e-5) for a, b in itertools.zip_longest(learn(other).losses, plain))
