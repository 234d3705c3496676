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
from specactor.trainer.drafter import train as module
from specactor.trainer.drafter.buffer import TrainingExample
from specactor.trainer.drafter.train import DrafterTrainer
from specactor.trainer.drafter.updates import ADAM_BETAS, GRAD_CLIP
from tests.trainer.drafter import cases
from tests.trainer.drafter.train_cases import UPDATES, learn, resumed, trainer

# ------------------------------------------------------------------------------------- one rank, against a plain loop


def example_loss(model: Any, x: TrainingExample, shift: int = 1) -> Tensor:
    """Sum over the response: sequences one at a time, tokens in a loop, nothing padded."""
    logits = model(input_ids=torch.tensor(x.token_ids[None].astype(np.int64))).logits[0] / x.temperature
    total = torch.zeros(())
    for t in range(x.prompt_len, len(x.token_ids)):
        q = logits[max(0, t - shift)].softmax(-1)
        loss = -q[int(x.token_ids[t])].log()
        if x.top_k is not None:
            row = t - x.prompt_len
            p = torch.tensor(x.top_k.logprobs[row]).float().exp()
            kept = torch.tensor(x.top_k.tokens[row]).long()
            rest_p, rest_q = 1 - p.sum(), 1 - q[kept].sum()
            loss = (p * (p / q[kept]).log()).sum() + rest_p * (rest_p / rest_q).log()
        total = total + loss
    return total


def plain_losses(shift: int = 1) -> list[float]:
    """What a loop of AdamW makes of the same draws."""
    source, model, settings = trainer(), cases.model(), cases.config()
    adam = torch.optim.AdamW(model.parameters(), betas=ADAM_BETAS, weight_decay=0.0)
    found = []
    for update in range(UPDATES):
        drawn = source.buffer.draw(update, settings.tokens_per_update)
        loss = sum(example_loss(model, x, shift) for x in drawn) / sum(x.response_len for x in drawn)
        adam.param_groups[0]["lr"] = settings.learning_rate * min(1.0, (update + 1) / 2)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        adam.step()
        found.append(loss.item())
    return found


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return plain_losses()


def test_losses_are_those_of_a_plain_loop(plain: list[float]) -> None:
    stats = learn(trainer())
    assert stats.losses == pytest.approx(plain, abs=1e-5)
    assert stats.updates == UPDATES
    assert 0 < stats.overlap < 1


def test_positions_shifted_by_one_are_caught(plain: list[float]) -> None:
    assert plain_losses(shift=2)[0] != pytest.approx(plain[0], abs=1e-3)


def test_padding_that_counts_is_caught(plain: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    build = module.losses.build

    def padding_counts(examples: Any, device: Any) -> Any:
        longest = max(len(x.token_ids) for x in examples)
        padded = [
            TrainingExample(
                token_ids=np.pad(x.token_ids, (0, longest - len(x.token_ids))),
                prompt_len=x.prompt_len,
                version=0,
                temperature=x.temperature,
            )
            for x in examples
        ]
        return build(padded, device)

    monkeypatch.setattr(module.losses, "build", padding_counts)
    assert learn(trainer()).losses[0] != pytest.approx(plain[0], abs=1e-3)


def test_it_learns() -> None:
    losses = learn(trainer(learning_rate=1e-2), 25).losses
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


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

    def from_the_process(self: Any, number: int, num_tokens: int) -> list[TrainingExample]:
        return [self.examples[i] for i in torch.randperm(len(self.examples))[:8]]

    monkeypatch.setattr(module.DraftBuffer, "draw", from_the_process)
    with pytest.raises(AssertionError):
        losses(0)


def test_nothing_to_learn_from() -> None:
    made = DrafterTrainer(cases.config(), cases.model(), seed=0)
    stats = made.refresh(limit_s=1.0, clock=lambda: 0.0)
    assert (stats.updates, made.version) == (0, 0)


# ------------------------------------------------------------------------------------------------------------- resume


def test_a_resumed_trainer_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    made = trainer()
    learn(made)
    made.save(tmp_path)
    again = resumed(tmp_path)
    assert (again.version, again.updates) == (1, UPDATES)
    later = cases.examples(6, seed=8)
    made.buffer.add(later)
    again.buffer.add(later)
    assert learn(made).losses == learn(again).losses
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), again.model.parameters(), strict=True))


def test_an_optimizer_that_forgot_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer()
    learn(made)
    made.save(tmp_path)
    monkeypatch.setattr("specactor.trainer.drafter.updates.PlainUpdater.load", lambda self, folder: None)
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
        ({"refresh": -0.1}, "refresh: got -0.1, expected a share"),
        ({"buffer_tokens": 0}, "buffer_tokens: got 0, expected > 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cases.config(**wrong)


def test_every_seed_draws_its_own(plain: list[float]) -> None:
    other = DrafterTrainer(cases.config(), cases.model(), seed=1)
    other.buffer.add(cases.examples())
    assert any(a != pytest.approx(b, abs=1e-5) for a, b in itertools.zip_longest(learn(other).losses, plain))
