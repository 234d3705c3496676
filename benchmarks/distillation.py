"""Makes a draft model that has learned a target's probabilities of the next token: a dense one, or an EAGLE-3 head.

    python -m benchmarks.distillation layer|head TARGET FOLDER SHAPE_AS_JSON SOURCE_AS_JSON MAX_NEW_TOKENS

Responses are sampled from the target at temperature 1, so the contexts are those of its rollouts. A dense model learns
the whole distribution of every token, since the vocabulary is small; a head its top-k, as in a run.

Shape legend: B sequences, T tokens of a response, V vocabulary.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.trained_models import DraftShape, HeadTraining
from specactor.config import DraftTrainingConfig, SourceConfig
from specactor.data.dataset import build_dataset
from specactor.data.tokenizer import load_tokenizer
from specactor.trainer.drafter import acceptance, command, init
from specactor.trainer.drafter.buffer import TrainingExample
from specactor.trainer.drafter.head import Eagle3Start
from specactor.trainer.drafter.train import DrafterTrainer

SAMPLED_TOGETHER = 512
HELD_OUT = 8  # one of so many sequences is kept for the check at the end
WINDOW = 4


@torch.no_grad()
def sampled(target: Any, prompts: list[tuple[int, ...]], max_new_tokens: int, seed: int) -> list[TrainingExample]:
    """A response to each prompt, at temperature 1."""
    chance = torch.Generator().manual_seed(seed)
    by_length = defaultdict(list)
    for prompt in prompts:
        by_length[len(prompt)].append(prompt)
    examples = []
    for same in by_length.values():
        for first in range(0, len(same), SAMPLED_TOGETHER):
            examples += _responses(target, same[first : first + SAMPLED_TOGETHER], max_new_tokens, chance)
    return examples


def _responses(
    target: Any, prompts: list[tuple[int, ...]], max_new_tokens: int, chance: torch.Generator
) -> list[TrainingExample]:
    """Args: prompts of one length."""
    end = target.config.eos_token_id
    fed, cache = torch.tensor(prompts), None
    running_B = torch.ones(len(prompts), dtype=torch.bool)
    tokens: list[torch.Tensor] = []
    while len(tokens) < max_new_tokens and bool(running_B.any()):
        output = target(fed, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        fed = torch.multinomial(output.logits[:, -1].float().softmax(-1), 1, generator=chance)
        tokens.append(fed[:, 0])
        running_B &= fed[:, 0] != end
    examples = []
    for prompt, response in zip(prompts, torch.stack(tokens, 1).tolist(), strict=True):
        length = response.index(end) + 1 if end in response else len(response)
        ids = np.array([*prompt, *response[:length]], np.int32)
        examples.append(TrainingExample(token_ids=ids, prompt_len=len(prompt), version=0))
    return examples


def learn(draft: Any, examples: list[TrainingExample], shape: DraftShape) -> None:
    """`shape.steps` updates of about `shape.batch_size` responses; the rate falls linearly to a hundredth."""
    num_tokens = sum(len(example.token_ids) for example in examples)
    config = DraftTrainingConfig(
        buffer_tokens=num_tokens,
        tokens_per_update=max(1, num_tokens * shape.batch_size // len(examples)),
        learning_rate=shape.learning_rate,
    )

    def rate(update: int) -> float:
        return shape.learning_rate * max(0.01, 1 - update / shape.steps) * min(1.0, (update + 1) / 20)

    trainer = DrafterTrainer(config, draft, seed=shape.seed)
    trainer.buffer.add(examples)
    trainer.refresh(limit_s=float("inf"), clock=time.perf_counter, max_updates=shape.steps, rate_of=rate)


def problems_of(target_dir: Path, source: str, sequences: int) -> list[tuple[int, ...]]:
    """So many prompts of a source; again from the first where it has fewer."""
    found = msgspec.json.decode(source, type=SourceConfig)
    problems = build_dataset(found, load_tokenizer(target_dir), max_prompt_tokens=256)
    return [problems[i % len(problems)].prompt_ids for i in range(sequences)]


def make_layer(target_dir: Path, folder: Path, shape: DraftShape, source: str, max_new_tokens: int) -> str:
    """Make a dense model; return what it is."""
    beginning = init.RandomStart(
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        seed=shape.seed,
    )
    said = f"{init.make_draft_model(target_dir, folder, beginning) / 1e3:.0f} k parameters"
    if shape.sequences:
        target, draft = init.read_model(target_dir), init.read_model(folder)
        prompts = problems_of(target_dir, source, shape.sequences)
        examples = sampled(target, prompts, max_new_tokens, shape.seed)
        taught = [example for i, example in enumerate(examples) if i % HELD_OUT]
        vocabulary = int(target.config.vocab_size)
        learn(draft, acceptance.with_top_k(target, taught, top_k=vocabulary), shape)
        found = acceptance.measure(target, draft, examples[::HELD_OUT], window=WINDOW, seed=shape.seed)
        said += f", sum of min(p, q) {found.overlap:.3f} on {len(examples[::HELD_OUT])} responses of their own"
        init.write_model(draft, folder, tokenizer=target_dir)
    return said


def make_head(target_dir: Path, folder: Path, how: HeadTraining, source: str, max_new_tokens: int) -> str:
    """Make an EAGLE-3 head; return what it is."""
    said = f"{init.make_draft_model(target_dir, folder, Eagle3Start()) / 1e3:.0f} k parameters"
    target = init.read_model(target_dir)
    examples = sampled(target, problems_of(target_dir, source, how.sequences), max_new_tokens, how.seed)
    head = init.read_draft(folder, target)
    settings = DraftTrainingConfig(
        buffer_tokens=sum(len(example.token_ids) for example in examples),
        learning_rate=how.learning_rate,
        tokens_per_update=how.tokens_per_update,
    )
    stats = command.learn(target, head, examples, settings, seed=how.seed, limit_s=float("inf"), updates=how.updates)
    init.write_model(head, folder, tokenizer=target_dir)
    return f"{said}, KL {stats.kl:.3f}, sum of min(p, q) {stats.overlap:.3f} while learning, {stats.seconds:.0f} s"


def main() -> None:
    kind, target_dir, folder, shape, source, max_new_tokens = sys.argv[1:]
    torch.set_num_threads(1)
    init.quiet()
    places = Path(target_dir), Path(folder)
    if kind == "head":
        said = make_head(*places, HeadTraining(**json.loads(shape)), source, int(max_new_tokens))
    else:
        said = make_layer(*places, DraftShape(**json.loads(shape)), source, int(max_new_tokens))
    print(f"RESULT {said}", flush=True)


if __name__ == "__main__":
    main()
