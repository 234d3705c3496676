"""The target's law by transformers, in a process of its own: reference_law.py FOLDER; one JSON object per line.

A line on stdin names equally long responses to one prompt; temperature 1. The line on stdout that answers it holds, per
token of each response, of the law p of the next token at that place, in float64:
  logprobs   log p(token)
  above      probability of the tokens likelier than it (of equally likely ones, those with smaller ids)
  entropy    of p, in nats
  spread     variance of log p(v) where v is drawn from p
and, summed over all tokens: expected, sum of p(v), and variance, sum of p(v) (1 - p(v)), for every v; and, for the
first token, first, its law, and second, the law after each of the first tokens named in `after`.
"""

import json
import sys

import torch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM

BATCH = 256


def log_law(model: Qwen3MoeForCausalLM, prompt: list[int], responses: list[list[int]]) -> Tensor:
    """log p of the next token after the prompt and every token of a response: [responses, 1 + tokens, V]."""
    parts = []
    for start in range(0, len(responses), BATCH):
        ids = torch.tensor([prompt + response for response in responses[start : start + BATCH]])
        with torch.no_grad():
            parts.append(torch.log_softmax(model(ids).logits[:, len(prompt) - 1 :].double(), dim=-1))
    return torch.cat(parts)


def main(folder: str) -> None:
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for line in sys.stdin:
        asked = json.loads(line)
        logp_NTV = log_law(model, asked["prompt"], asked["responses"])[:, :-1]
        p_NTV = logp_NTV.exp()
        tokens_NT1 = torch.tensor(asked["responses"]).unsqueeze(-1)
        logprobs_NT1 = logp_NTV.gather(-1, tokens_NT1)
        entropy_NT = -(p_NTV * logp_NTV).sum(-1)
        earlier_V = torch.arange(p_NTV.shape[-1])
        likelier_NTV = (logp_NTV > logprobs_NT1) | ((logp_NTV == logprobs_NT1) & (earlier_V < tokens_NT1))
        answer = {
            "logprobs": logprobs_NT1.squeeze(-1),
            "above": (p_NTV * likelier_NTV).sum(-1),
            "entropy": entropy_NT,
            "spread": (p_NTV * logp_NTV.square()).sum(-1) - entropy_NT.square(),
            "expected": p_NTV.sum((0, 1)),
            "variance": (p_NTV * (1 - p_NTV)).sum((0, 1)),
            "first": p_NTV[0, 0],
            "second": log_law(model, asked["prompt"], [[token] for token in asked["after"]])[:, 1].exp(),
        }
        print("ANSWERS " + json.dumps({name: value.tolist() for name, value in answer.items()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
