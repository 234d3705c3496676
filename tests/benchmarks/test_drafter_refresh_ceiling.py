"""What a draft model could have reached, offline: against laws that are known, on a run's folder made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import drafter_refresh_ceiling as module
from benchmarks.drafter_refresh_ceiling import CONFIG, ceilings, offline_accept_length, whole_law
from specactor.trainer.distillation import batches
from specactor.trainer.distillation.acceptance import accept_length, with_laws
from specactor.trainer.distillation.buffer import Lesson
from specactor.trainer.distillation.drafter import DrafterTrainer
from tests.trainer.distillation import cases

WINDOW = 4


def labelled(target: Any, top_k: int = cases.VOCAB, *, seed: int = 0) -> list[Lesson]:
    return with_laws(target, cases.lessons(30, seed=seed), top_k=top_k, storage="float32")


def test_a_draft_model_with_the_policys_law_is_always_right() -> None:
    lessons = labelled(cases.model())
    most = accept_length([[True] * x.response_len for x in lessons], WINDOW)
    assert offline_accept_length(cases.model(), lessons, window=WINDOW) == most
    assert offline_accept_length(cases.model(seed=7), lessons, window=WINDOW) < 0.8 * most


def test_what_was_not_kept_is_spread_over_the_other_tokens() -> None:
    lessons = labelled(cases.model(), top_k=5)
    batch = batches.build(lessons, [torch.ones(x.response_len).numpy() for x in lessons], torch.device("cpu"))
    law_NV = whole_law(batch, cases.VOCAB).exp()
    torch.testing.assert_close(law_NV.sum(1), torch.ones(len(law_NV), dtype=torch.float64))
    kept_NK = batch.top_logp_NK.double().exp()
    torch.testing.assert_close(law_NV.gather(1, batch.top_tokens_NK), kept_NK, rtol=1e-4, atol=1e-6)
    assert law_NV.min() > 0


def a_run(root: Path, versions: Sequence[int]) -> None:
    """Checkpoints at the jump and at the end, of a draft model that never learned."""
    trainer = DrafterTrainer(CONFIG, cases.model(), seed=0)
    for version in versions:
        policy = cases.model(seed=10 + (version > 4))
        lessons = [
            Lesson(token_ids=x.token_ids, prompt_len=x.prompt_len, version=version, law=x.law)
            for x in labelled(policy, seed=version)
        ]
        trainer.buffer.add(lessons)
        if version in (4, versions[-1]):
            folder = root / "checkpoints" / f"step-{version + 1:06d}" / "drafter"
            folder.mkdir(parents=True)
            trainer.save(folder)


def test_ceilings_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY_UPDATES", 30)
    monkeypatch.setattr(module.start, "read_model", lambda folder: cases.model())
    a_run(tmp_path, [3, 4, 5, 6])
    found = ceilings(tmp_path, tmp_path, before=4, window=WINDOW)
    assert found.taught == found.untaught, "this run taught nothing"
    assert found.memorised > found.untaught
    assert found.taught_long != found.untaught
    assert "as the run taught it" in found.text()


def test_the_verdict_is_given_where_it_follows() -> None:
    figures = {"before": 4.0, "untaught": 2.0, "taught": 2.5, "taught_long": 3.0, "memorised": 3.9}
    assert "different responses" in module.Ceilings(**figures).text()
    assert "different responses" not in module.Ceilings(**figures | {"taught_long": 3.8}).text()
    assert "different responses" not in module.Ceilings(**figures | {"memorised": 3.2}).text()
