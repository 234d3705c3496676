"""Makes a dense draft model that has learned a target's law of the next token, in plain PyTorch on one thread.

    python -m benchmarks.distillation TARGET FOLDER SHAPE_AS_JSON SOURCE_AS_JSON MAX_NEW_TOKENS

Responses are sampled from the target at temperature 1, so the contexts are those of its rollouts. Cross entropy on them
would teach the law through samples of it; here the whole law is at hand, and its cross entropy, which is the divergence
KL(target, draft) up to a constant, is the same in expectation with less noise.

Shape legend: B sequences, T tokens of a response, V vocabulary.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from specactor.config import SourceConfig
from specactor.cpu import torchvision_ops
from specactor.data.dataset import build_dataset
from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer

if torch.version.cuda is None:
    torchvision_ops.install()
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from benchmarks.trained_models import DraftShape

SAMPLED_TOGETHER = 512
HELD_OUT = 8
"""One of so many sequences is kept for the check at the end."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """A sampled response, and the target's law at each of its tokens."""

    ids: list[int]
    """Prompt and response."""
    prompt_len: int
    logp: Tensor
    """[T, V]"""


def new_draft(target: Any, shape: DraftShape) -> Qwen3ForCausalLM:
    """Random, with the target's vocabulary."""
    source = target.config
    torch.manual_seed(shape.seed)
    config = Qwen3Config(
        vocab_size=source.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=source.max_position_embeddings,
        rope_theta=10000.0,
        rms_norm_eps=source.rms_norm_eps,
        tie_word_embeddings=False,
        dtype="float32",
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )
    return Qwen3ForCausalLM(config).to(torch.float32)


@torch.no_grad()
def sampled(target: Any, prompts: list[tuple[int, ...]], max_new_tokens: int, seed: int) -> list[Lesson]:
    """A response to each prompt, at temperature 1."""
    chance = torch.Generator().manual_seed(seed)
    by_length = defaultdict(list)
    for prompt in prompts:
        by_length[len(prompt)].append(prompt)
    lessons = []
    for same in by_length.values():
        for first in range(0, len(same), SAMPLED_TOGETHER):
            lessons += _responses(target, same[first : first + SAMPLED_TOGETHER], max_new_tokens, chance)
    return lessons


def _responses(
    target: Any, prompts: list[tuple[int, ...]], max_new_tokens: int, chance: torch.Generator
) -> list[Lesson]:
    """Args: prompts of one length."""
    end = target.config.eos_token_id
    fed, cache = torch.tensor(prompts), None
    running_B = torch.ones(len(prompts), dtype=torch.bool)
    laws: list[Tensor] = []
    tokens: list[Tensor] = []
    while len(tokens) < max_new_tokens and bool(running_B.any()):
        output = target(fed, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        laws.append(output.logits[:, -1].float().log_softmax(-1))
        fed = torch.multinomial(laws[-1].exp(), 1, generator=chance)
        tokens.append(fed[:, 0])
        running_B &= fed[:, 0] != end
    logp_BTV, tokens_BT = torch.stack(laws, 1), torch.stack(tokens, 1).tolist()
    lessons = []
    for prompt, response, logp_TV in zip(prompts, tokens_BT, logp_BTV, strict=True):
        length = response.index(end) + 1 if end in response else len(response)
        lessons.append(Lesson(ids=[*prompt, *response[:length]], prompt_len=len(prompt), logp=logp_TV[:length].clone()))
    return lessons


def laws_of(draft: Any, lessons: list[Lesson]) -> tuple[Tensor, Tensor]:
    """(log p, log q) at every token of the lessons' responses: [tokens, V] each."""
    longest = max(len(lesson.ids) for lesson in lessons)
    ids = torch.zeros(len(lessons), longest, dtype=torch.int64)
    wanted = torch.zeros(len(lessons), longest, dtype=torch.bool)
    for i, lesson in enumerate(lessons):
        ids[i, : len(lesson.ids)] = torch.tensor(lesson.ids)
        wanted[i, lesson.prompt_len - 1 : len(lesson.ids) - 1] = True
    logq = draft(ids, use_cache=False).logits[wanted].log_softmax(-1)
    return torch.cat([lesson.logp for lesson in lessons]), logq


def learn(draft: Any, lessons: list[Lesson], shape: DraftShape) -> None:
    """AdamW on KL(target, draft) per token; the rate falls linearly to a hundredth."""
    chance = torch.Generator().manual_seed(shape.seed)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=shape.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(shape.steps):
        rate = shape.learning_rate * max(0.01, 1 - step / shape.steps) * min(1.0, (step + 1) / 20)
        optimizer.param_groups[0]["lr"] = rate
        batch = torch.randint(len(lessons), (shape.batch_size,), generator=chance).tolist()
        logp, logq = laws_of(draft, [lessons[i] for i in batch])
        loss = (logp.exp() * (logp - logq)).sum(-1).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def overlap(draft: Any, lessons: list[Lesson]) -> float:
    """Mean over tokens of sum_v min(p(v), q(v))."""
    logp, logq = laws_of(draft, lessons)
    return float(torch.minimum(logp.exp(), logq.exp()).sum(-1).mean())


def main() -> None:
    target_dir, folder = Path(sys.argv[1]), Path(sys.argv[2])
    shape = DraftShape(**json.loads(sys.argv[3]))
    torch.set_num_threads(1)
    target = Qwen3MoeForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    draft = new_draft(target, shape)
    said = f"{sum(p.numel() for p in draft.parameters()) / 1e3:.0f} k parameters"
    if shape.sequences:
        source = msgspec.json.decode(sys.argv[4], type=SourceConfig)
        problems = build_dataset(source, load_tokenizer(target_dir), max_prompt_tokens=256)
        prompts = [problems[i % len(problems)].prompt_ids for i in range(shape.sequences)]
        lessons = sampled(target, prompts, int(sys.argv[5]), shape.seed)
        held_out = lessons[::HELD_OUT]
        learn(draft, [lesson for i, lesson in enumerate(lessons) if i % HELD_OUT], shape)
        said += f", sum of min(p, q) {overlap(draft, held_out):.3f} on {len(held_out)} responses of their own"
    draft.save_pretrained(folder)
    make_char_tokenizer(folder)
    print(f"RESULT {said}", flush=True)


if __name__ == "__main__":
    main()
