"""The plain PyTorch loop that the trainer is compared with: transformers' model, padded batches, fused AdamW.

It knows nothing of the trainer: no Megatron-core, no patched torch. With several ranks each takes every n-th of the
sequences sorted by length, and gradients are summed in one flat buffer. Sequences of similar length share a
micro-batch, which wastes the least padding.

python -m benchmarks.trainer_speed_plain MODEL_DIR FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks import trainer_speed_case as case
from specactor.types import TrainSequence


@dataclass(frozen=True)
class Setting:
    """One way to run the loop."""

    experts: str  # transformers' implementation of the experts
    sequences: int  # of one micro-batch, at most; a rank may have fewer

    def __str__(self) -> str:
        return f"{self.experts}, {self.sequences} sequences"


SETTINGS = [
    Setting(experts, sequences) for experts in ("eager", "grouped_mm") for sequences in (16, 32, case.NUM_SEQUENCES)
]
"""transformers' third implementation, batched_mm, copies the weights of an expert for every token: not a contender."""


def backward(model: torch.nn.Module, part: Sequence[TrainSequence], num_tokens: int) -> float:
    """One micro-batch: adds to the gradients, returns its share of the loss (GRPO, truncated importance weights)."""
    longest = max(len(s.token_ids) for s in part)
    tokens_BL = torch.tensor([[*s.token_ids, *[0] * (longest - len(s.token_ids))] for s in part])
    attended_BL = torch.tensor([[1] * len(s.token_ids) + [0] * (longest - len(s.token_ids)) for s in part])
    rows = torch.tensor([[b, t - 1] for b, s in enumerate(part) for t in range(s.prompt_len, len(s.token_ids))])
    logits_RV = model(tokens_BL, attention_mask=attended_BL, use_cache=False).logits[rows[:, 0], rows[:, 1]]
    targets_R = tokens_BL[rows[:, 0], rows[:, 1] + 1]
    logprobs_R = torch.log_softmax(logits_RV, dim=-1).gather(1, targets_R[:, None])[:, 0]
    advantages_R = torch.tensor([s.advantage for s in part])[rows[:, 0]]
    engine_R = torch.tensor([p for s in part for p in s.rollout_logprobs])
    old_R = logprobs_R.detach()
    ratio_R = (logprobs_R - old_R).exp()
    gain_R = torch.minimum(ratio_R * advantages_R, ratio_R.clamp(1 - case.CLIP, 1 + case.CLIP) * advantages_R)
    loss = -(gain_R * (old_R - engine_R).exp().clamp(max=case.TIS_CAP)).sum() / num_tokens
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def sum_over_ranks(parameters: Sequence[Tensor], loss: float) -> float:
    """Sum gradients in place; returns the sum of the losses."""
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat = torch.cat([*[grad.flatten() for grad in grads], torch.tensor([loss])])
    dist.all_reduce(flat)
    parts = torch.split(flat, [*(p.numel() for p in parameters), 1])
    for parameter, total in zip(parameters, parts, strict=False):
        parameter.grad = total.view_as(parameter)
    return float(flat[-1])


def main() -> None:
    model_dir, folder = Path(sys.argv[1]), Path(sys.argv[2])
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if world > 1:
        dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=case.LEARNING_RATE, betas=case.ADAM_BETAS, weight_decay=0.0, fused=True
    )
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    batch = case.sequences(vocab_size)
    num_tokens = sum(s.response_len for s in batch)

    def step(setting: Setting) -> float:
        model.set_experts_implementation(setting.experts)
        mine = sorted(batch, key=lambda s: len(s.token_ids))[rank::world]
        optimizer.zero_grad()
        loss = 0.0
        for start in range(0, len(mine), setting.sequences):
            loss += backward(model, mine[start : start + setting.sequences], num_tokens)
        if world > 1:
            loss = sum_over_ranks(parameters, loss)
        torch.nn.utils.clip_grad_norm_(parameters, case.GRAD_CLIP)
        optimizer.step()
        return loss

    barrier = dist.barrier if world > 1 else lambda: None
    case.serve(folder, rank=rank, settings=SETTINGS, step=step, barrier=barrier)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
