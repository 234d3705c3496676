"""Run by test_warmup as two ranks: makes draft models of the warm-up of a policy; the first writes what they are."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from rich.console import Console

from specactor.config.speculation import WARM_UP_HEAD
from specactor.data.dataset import build_dataset
from specactor.data.tokenizer import load_tokenizer
from specactor.parallel.collective import Collective
from specactor.progress import Progress
from specactor.recipes import load
from specactor.trainer import warmup
from specactor.trainer.drafter import acceptance, init
from specactor.trainer.drafter.buffer import example_from
from specactor.trainer.drafter.head import Eagle3Start


def main(root: Path, kinds: str, *wanted: str) -> None:
    """Args: a folder with a policy; kinds of draft models; settings, up to those that name the draft model."""
    dist.init_process_group("gloo")
    warmup.DRAFT_LIMIT_S, warmup.DRAFT_BATCHES = 600.0, 8  # however busy the machine is
    warmup.DRAFT_UPDATES, warmup.HEAD_UPDATES = 80, 40
    found = {kind: about(root, kind, *wanted, kind) for kind in kinds.split()}
    if dist.get_rank() == 0:
        Path(root, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def about(root: Path, kind: str, *wanted: str) -> dict[str, Any] | None:
    """Make one kind of draft model on all ranks, and say on the first what it is."""
    config = load(["quickstart_plain", *wanted, "--output-dir", str(root)])
    policy, start = root / "policy", root / f"start-{kind}"
    head, collective = kind == WARM_UP_HEAD, Collective()
    tokenizer = load_tokenizer(policy)
    problems = build_dataset(replace(config.data.train_source, size=200), tokenizer, max_prompt_tokens=100)
    told = root / f"told-{kind}-{collective.rank}"
    with told.open("w") as file:
        progress = Progress(1, console=Console(file=file))
        made = [
            warmup.with_draft_model(config, policy, problems, tokenizer, collective, progress).rollout.speculation
            for _ in range(2)
        ]
    if collective.rank:
        return None
    solver = warmup.find_solver(config.warmup.solver)
    solved = warmup.solved_batch(config, problems, solver, tokenizer, stage=0, step=99)
    calculator = load(["calculator"])
    asked = warmup.solved_batch(
        calculator,
        build_dataset(calculator.data.eval_sources(64)["eval"], tokenizer, max_prompt_tokens=100),
        warmup.find_solver(calculator.warmup.solver),
        tokenizer,
        stage=0,
        step=1,
    )
    examples = [example_from(sequence, None, version=0, temperature=1.0) for sequence in solved]
    init.make_draft_model(policy, start, Eagle3Start() if head else init.TargetStart())
    # The same model as target and draft: how peaked it is on solutions that it was not shown.
    target = init.read_model(policy)
    models = [init.read_draft(Path(made[0].first_draft_model), target), init.read_draft(start, target)]
    policies = [target, target] if head else models
    measured = [acceptance.measure(of, m, examples, window=4, seed=0) for of, m in zip(policies, models, strict=True)]
    nothing = cast(Any, None)
    nobody = ["suffix" if word == "model" else word for word in wanted]
    others = [load(["quickstart_plain", *words]) for words in ([], [*wanted[:-1], "x"], nobody)]
    return {
        "folders": [speculation.first_draft_model for speculation in made],
        "else_as_asked": replace(made[0], draft_model=(wanted[-1],)) == config.rollout.speculation,
        "told": told.read_text().count("a draft model learns"),
        "not_learned": [
            tokenizer.decode(
                [t for t, learned in zip(s.token_ids[s.prompt_len :], s.loss_mask, strict=True) if not learned]
            )
            for s in asked
        ],
        "responses": [tokenizer.decode(s.token_ids[s.prompt_len :]) for s in asked],
        "entropy": [each.entropy for each in measured],
        "overlap": [each.overlap for each in measured],
        "left_alone": [
            warmup.with_draft_model(other, root, nothing, nothing, nothing, nothing) is other for other in others
        ],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
