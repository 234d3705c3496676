"""A draft model of the warm-up: made once, good at what the policy was shown, and the engines' to check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from specactor.data.dataset import build_dataset
from specactor.data.tiny_model import make_tiny_model
from specactor.data.tokenizer import load_tokenizer
from specactor.errors import ConfigError
from specactor.parallel.collective import Collective
from specactor.progress import Progress
from specactor.recipes import load
from specactor.trainer import warmup
from specactor.trainer.drafter import acceptance, init
from specactor.trainer.drafter.buffer import example_from

WANTED = ("--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "model")
WANTED += ("--rollout.speculation.draft-model", "warm-up")


class Alone:
    """The collective of a job of one rank."""

    rank = 0

    def together(self, phase: str, work: Any) -> Any:
        return work()


def test_a_draft_model_is_made_once_and_knows_the_worked_solutions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "DRAFT_LIMIT_S", 600.0)  # of a busy machine
    monkeypatch.setattr(warmup, "DRAFT_UPDATES", 60)
    monkeypatch.setattr(warmup, "DRAFT_BATCHES", 8)
    config = load(["quickstart", *WANTED, "--warmup.cache-dir", str(tmp_path / "cache")])
    assert config.model.tiny is not None
    policy = tmp_path / "policy"
    make_tiny_model(replace(config.model.tiny, num_layers=1), 0, policy)
    tokenizer = load_tokenizer(policy)
    problems = build_dataset(replace(config.data.train, size=200), tokenizer, max_prompt_tokens=100)
    progress = Progress(1, enabled=False, console=Console(file=(tmp_path / "said").open("w")))

    def made() -> str:
        found = warmup.with_draft_model(
            config, policy, problems, tokenizer, cast(Collective, Alone()), progress
        ).rollout.speculation
        assert replace(found, draft_model="warm-up") == config.rollout.speculation
        return found.draft_model

    folder = Path(made())
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert Path(made()) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written, "the second time it is read"
    assert (tmp_path / "said").read_text().count("a draft model learns") == 1

    solver = warmup.find_solver(config.warmup.solver)
    solved = warmup.solved_batch(config, problems, solver, tokenizer, stage=0, step=99)
    examples = [example_from(sequence, None, version=0, temperature=1.0) for sequence in solved]
    start = tmp_path / "start"
    init.make_draft_model(policy, start, init.TargetStart())
    # The same model as target and draft: how peaked it is on solutions that it was not shown.
    models = (init.read_model(folder), init.read_model(start))
    learned, fresh = (acceptance.measure(model, model, examples, window=4, seed=0).entropy for model in models)
    assert learned < 0.7 * fresh


def test_where_nothing_is_asked_for_the_config_stays(tmp_path: Path) -> None:
    for words in ([], [*WANTED[:4], "--rollout.speculation.draft-model", str(tmp_path)]):
        config = load(["quickstart", *words])
        nothing = cast(Any, None)
        assert warmup.with_draft_model(config, tmp_path, nothing, nothing, nothing, nothing) is config


def test_it_takes_worked_solutions() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.speculation\.draft_model: got 'warm-up', expected a folder where"):
        load(["quickstart", *WANTED, "--warmup.solver", ""])
