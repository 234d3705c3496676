"""Models, and what transformers and autograd make of them, without any of the trainer: run in a process of its own.

python -m tests.trainer.reference_script FOLDER
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from specactor.cpu import torchvision_ops

torchvision_ops.install()

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM  # noqa: E402  # noqa: E402

from specactor.cpu.sglang_ops import sample_with_noise  # noqa: E402
from specactor.types import TrainSequence  # noqa: E402
from tests.trainer import policy_cases as cases  # noqa: E402

SHAPE = {
    "vocab_size": cases.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}


def main(root: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    save_model(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **MOE, tie_word_embeddings=False)), root / "moe")
    dense, tied = SHAPE | {"num_hidden_layers": 3}, SHAPE | {"num_hidden_layers": 6}  # see `conftest.DENSE`
    save_model(Qwen3ForCausalLM(Qwen3Config(**dense, tie_word_embeddings=False)), root / "dense")
    save_model(Qwen3ForCausalLM(Qwen3Config(**tied, tie_word_embeddings=True)), root / "tied")
    for name in ("moe", "dense", "tied"):
        save_file({"logits_RV": all_logits(root / name)}, root / f"{name}.logits")
    save_file(all_experts(root / "moe"), root / "moe.experts")
    results: dict[str, Any] = {name: learn(root / "moe", case) for name, case in cases.CASES.items()}
    results["sampled"] = all_sampled(root / "moe")
    results["ppo"] = learn_with_critic(root / "moe")
    (root / "reference.json").write_text(json.dumps(results))


def save_model(model: torch.nn.Module, folder: Path) -> None:
    """With weights far from their initialisation, so that every one of them matters."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
            elif "gate.weight" in name:
                weight.copy_(0.3 * torch.randn_like(weight))
            else:
                weight.mul_(3)
    model.save_pretrained(folder)
    (folder / "vocabulary.txt").write_text("stands for a tokenizer's file\n")


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits_of(model: torch.nn.Module, s: TrainSequence) -> torch.Tensor:
    """(response, V): sequences one at a time, nothing packed or padded."""
    return model(torch.tensor([s.token_ids])).logits[0, s.prompt_len - 1 : -1]


@torch.no_grad()
def all_experts(folder: Path) -> dict[str, torch.Tensor]:
    """Per sequence int16 (tokens - 1, layers, experts per token), each layer's in no particular order."""
    model = load(folder)
    found = {}
    for i, s in enumerate(cases.sequences()):
        by_layer = model(torch.tensor([s.token_ids]), output_router_logits=True).router_logits
        chosen = [logits.topk(MOE["num_experts_per_tok"], sorted=False).indices.sort().values for logits in by_layer]
        found[str(i)] = torch.stack(chosen, dim=1)[:-1].to(torch.int16)
    return found


@torch.no_grad()
def all_sampled(folder: Path) -> list[list[int]]:
    """The sequences' prompts with responses that the policy samples, each with its number as the seed."""
    model, found = load(folder), []
    for seed, s in enumerate(cases.sequences()):
        ids = list(s.token_ids[: s.prompt_len])
        while len(ids) < len(s.token_ids):
            scaled = model(torch.tensor([ids])).logits[0, -1:].double() / cases.TEMPERATURE
            token = sample_with_noise(scaled.log_softmax(-1), torch.tensor([seed]), torch.tensor([len(ids) - 1]))
            ids.append(int(token))
        found.append(ids)
    return found


@torch.no_grad()
def all_logits(folder: Path) -> torch.Tensor:
    model = load(folder)
    return torch.cat([logits_of(model, s) for s in cases.sequences()])


def logprobs_of(model: torch.nn.Module, s: TrainSequence) -> torch.Tensor:
    logprobs = torch.log_softmax(logits_of(model, s).double() / cases.TEMPERATURE, dim=-1)
    return logprobs[range(s.response_len), list(s.token_ids[s.prompt_len :])]


def sequence_loss(case: cases.Case, s: TrainSequence, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Sum over the tokens of one response, written from the papers: GRPO, arXiv 2402.03300; GSPO, arXiv 2507.18071."""
    algorithm = case.algorithm
    difference = new - old
    ratio = torch.exp(difference.mean().expand_as(new) if algorithm.loss == "gspo" else difference)
    bounded = torch.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
    gain = torch.minimum(ratio * s.advantage, bounded * s.advantage)
    engine = torch.tensor(s.rollout_logprobs, dtype=torch.float64)
    match algorithm.correction.level:
        case "token":
            gain = gain * torch.clip(torch.exp(old - engine), max=algorithm.correction.bounds[1])
        case "geometric":
            ratio = float(torch.exp((old - engine).mean()))
            gain = gain * (ratio if algorithm.correction.bounds[0] <= ratio <= algorithm.correction.bounds[1] else 0)
    return -gain.sum()


def learn(folder: Path, case: cases.Case) -> dict[str, float]:
    model = load(folder)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=max(case.rate, 1e-12), betas=(0.9, 0.95), eps=cases.ADAM_EPS, weight_decay=0.0
    )
    every = cases.sequences()
    groups = sorted({s.group_id for s in every})
    size = len(groups) // case.updates
    with torch.no_grad():
        old = {id(s): logprobs_of(model, s) for s in every}
    losses, norms = [], []
    for k in range(case.updates):
        part = [s for s in every if s.group_id in groups[k * size : (k + 1) * size]]
        tokens = sum(s.response_len for s in part)
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for s in part:
            mean = case.algorithm.aggregation == "sequence_mean"
            weight = 1 / (len(part) * s.response_len) if mean else 1 / tokens
            loss = loss + weight * sequence_loss(case, s, logprobs_of(model, s), old[id(s)])
        loss.backward()
        squares = [float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None]
        losses.append(loss.item())
        norms.append(math.sqrt(sum(squares)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return {"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms)}


def generalised_advantages(values: list[float], reward: float) -> list[float]:
    """From the definition, arXiv 1506.02438 eq. 16: a sum of temporal differences for every token."""
    critic = cases.PPO.algorithm.critic
    ahead = [*values[1:], 0.0]
    earned = [0.0] * (len(values) - 1) + [reward]
    deltas = [r + critic.gamma * b - a for r, a, b in zip(earned, values, ahead, strict=True)]
    decay = critic.gamma * critic.gae_lambda
    return [sum(decay ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


class ReferenceCritic(torch.nn.Module):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.body = load(folder).model
        self.head = torch.nn.Linear(SHAPE["hidden_size"], 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)

    def forward(self, s: TrainSequence) -> torch.Tensor:
        hidden = self.body(torch.tensor([s.token_ids])).last_hidden_state
        return self.head(hidden)[0, s.prompt_len - 1 : -1, 0].double()


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> tuple[float, float]:
    """(loss, gradient norm before clipping)."""
    optimizer.zero_grad()
    loss.backward()
    squares = [float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.item(), math.sqrt(sum(squares))


def learn_with_critic(folder: Path) -> list[dict[str, float]]:
    """Two steps of PPO: policy and critic each by its own AdamW."""
    policy, critic, case = load(folder), ReferenceCritic(folder), cases.PPO
    adam = {"lr": case.rate, "betas": (0.9, 0.95), "eps": cases.ADAM_EPS, "weight_decay": 0.0}
    optimizers = [torch.optim.AdamW(model.parameters(), **adam) for model in (policy, critic)]
    every = cases.sequences()
    clip = case.algorithm.critic.value_clip
    results = []
    for _ in range(2):
        with torch.no_grad():
            old = [logprobs_of(policy, s) for s in every]
            values = [critic(s) for s in every]
        raw = [torch.tensor(generalised_advantages(v.tolist(), s.reward)) for s, v in zip(every, values, strict=True)]
        returns = [a + v for a, v in zip(raw, values, strict=True)]
        flat = torch.cat(raw).double()
        done = []
        for k in range(case.updates):
            part = [i for i, s in enumerate(every) if s.group_id == k]
            tokens = sum(every[i].response_len for i in part)
            gain, error = torch.zeros(()).double(), torch.zeros(()).double()
            for i in part:
                advantage = (raw[i] - flat.mean()) / (flat.std(correction=0) + 1e-6)
                ratio = torch.exp(logprobs_of(policy, every[i]) - old[i])
                gain = gain + torch.minimum(ratio * advantage, torch.clip(ratio, 0.8, 1.2) * advantage).sum() / tokens
                new = critic(every[i])
                held = torch.clip(new, values[i] - clip, values[i] + clip)
                worst = torch.maximum((new - returns[i]) ** 2, (held - returns[i]) ** 2)
                error = error + worst.sum() / 2 / tokens
            steps = zip((policy, critic), optimizers, (-gain, error), strict=True)
            done.append([x for model, optimizer, loss in steps for x in update(model, optimizer, loss)])
        names = ("loss", "grad_norm", "critic_loss", "critic_grad_norm")
        means = dict(zip(names, torch.tensor(done).mean(0).tolist(), strict=True))
        unexplained = (torch.cat(returns) - torch.cat(values)).var() / torch.cat(returns).var()
        results.append(means | {"explained_variance": 1 - float(unexplained)})
    return results


if __name__ == "__main__":
    main(Path(sys.argv[1]))
