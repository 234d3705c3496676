"""The page of heads that learn, from runs written by hand, and the loss that it compares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.drafter_refresh_runs import LENGTH, Run
from benchmarks.head_training import BITS, FROZEN, HEADS, has_ended, rows_of, table, total_variation


def finished(name: str, length: float, tokens: str = "t") -> Run:
    line = {LENGTH: length, "time/rollout_s": 1.0, "time/train_s": 0.98, "time/refresh_s": 0.02, "drafter/updates": 3}
    lines = [{"step": step, **line} for step in range(1, 11)]
    return Run(name=name, lines=lines, tokens=tokens, facts=[{"step": 1, "policy/loss": 0.25}])


def test_heads_of_a_task_by_fifth_and_what_learning_takes() -> None:
    page = table(rows_of(BITS, [finished(name, 3.0 + i) for i, name in enumerate(HEADS)]), steps=10)
    frozen, kl, _ = page.rows
    assert frozen == [BITS, FROZEN, *["3.00"] * 5, "-", "-"]
    assert kl == [BITS, "KL", *["4.00"] * 5, "3.0", "1.0 %"]
    assert "(frozen, KL, total variation): count_bits +0.00, +0.00, +0.00. " in page.verdict
    assert page.verdict.endswith("met by all.")
    assert "same responses" in page.intro
    page = table(page.rows, steps=10, wrong=["count_bits: KL differs"])
    assert "DIFFERENT: ['count_bits: KL differs']" in page.intro


def test_a_run_that_has_ended_is_not_made_again(tmp_path: Path) -> None:
    """Without an evaluation the first line is of step 1."""
    assert not has_ended(tmp_path / "nothing", 2)
    for step in (1, 2):
        assert not has_ended(tmp_path, 2)
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}}}\n')
    assert has_ended(tmp_path, 2)


def test_a_head_that_ends_lower_or_takes_too_long_misses_the_aim() -> None:
    falls, slow = finished("KL", 4.0), finished("total variation", 4.0)
    falls = replace(falls, lines=[{**line, LENGTH: 4.0 - float(line["step"]) / 100} for line in falls.lines])
    slow = replace(slow, lines=[{**line, "time/refresh_s": 0.08} for line in slow.lines])
    page = table(rows_of(BITS, [finished(FROZEN, 3.0), falls, slow]), steps=10)
    assert page.verdict.endswith("missed by KL in count_bits, total variation in count_bits.")


def test_total_variation_is_half_the_sum_of_differences_and_has_its_gradient() -> None:
    chance = torch.Generator().manual_seed(0)
    logits, policy = torch.randn(2, 6, 9, generator=chance, dtype=torch.float64)
    logits.requires_grad_()
    logp, tokens = policy.log_softmax(1).sort(descending=True)
    loss = total_variation(logits.log_softmax(1), tokens, logp)
    wanted = (logits.softmax(1) - policy.softmax(1)).abs().sum(1) / 2
    torch.testing.assert_close(loss, wanted, atol=1e-6, rtol=0)
    [own], [expected] = (torch.autograd.grad(value.sum(), [logits], retain_graph=True) for value in (loss, wanted))
    torch.testing.assert_close(own, expected, atol=1e-6, rtol=0)
