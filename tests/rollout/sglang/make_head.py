"""Writes an EAGLE-3 head of random weights: make_head.py TARGET HEAD [VOCABULARY]."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from specactor.trainer.drafter import init
from specactor.trainer.drafter.buffer import RolloutLine
from specactor.trainer.drafter.head import Eagle3Start
from tests.trainer.drafter.cases import write_rollouts


def main(target: str, folder: str, vocab: str = "0") -> None:
    text = Path(f"{folder}.jsonl")
    write_rollouts(text, [RolloutLine(prompt_ids=[3], token_ids=list(range(3, 96, 2)))])
    init.make_draft_model(Path(target), Path(folder), Eagle3Start(draft_vocab=int(vocab), rollouts=(text,)))
    head = init.read_draft(Path(folder), init.read_model(Path(target)))
    with torch.no_grad():
        torch.manual_seed(5)
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    init.write_model(head, Path(folder), tokenizer=Path(target))


if __name__ == "__main__":
    main(*sys.argv[1:])
