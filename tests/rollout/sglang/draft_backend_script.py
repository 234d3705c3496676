"""A draft model without a target, and transformers beside it: draft_backend_script.py FOLDER TOKENS REQUESTS CONTEXT.

A line on stdin is a JSON list, the name of an operation and its arguments; the line on stdout that answers it begins
with ANSWER. Operations:
  new NAME STEPS SHARPEN    forget all, and begin with the continuer of this name
  extend LANES              its answers
  forget KEY
  reference LANES           per lane, what transformers' logits and the noise give for the next token, and by how much
                            its score is above the second
  renew FOLDER DAMAGED      new weights for continuer and reference; damaged ones for the continuer alone: what it says,
                            and its version
  sleep                     whether any key is held then
  wake
  state                     tokens with keys, blocks and rows that are free, beta, positions that it was fitted to
"""

import json
import sys
from dataclasses import replace

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from specactor.rollout.decoupled.continuer import Lane
from specactor.rollout.planning.noise import gumbel
from specactor.rollout.sglang import draft_backend
from specactor.rollout.sglang.draft_backend import ModelContinuer
from specactor.rollout.sglang.draft_runner import load_alone
from specactor.weights_sync.draft_sender import DraftSender
from tests.rollout.sglang import wrong_draft_backends


def lanes_of(values: list[dict[str, object]]) -> list[Lane]:
    return [replace(Lane(**value), prompt_ids=tuple(value["prompt_ids"])) for value in values]  # type: ignore[arg-type]


def references(model: torch.nn.Module, lanes: list[Lane]) -> list[tuple[int, float]]:
    """Args: -1 for the best next token, -2 for the second best."""
    texts = [[*lane.prompt_ids, *lane.tokens] for lane in lanes]
    longest = max(map(len, texts))
    with torch.no_grad():
        logits_BTV = model(torch.tensor([text + [0] * (longest - len(text)) for text in texts])).logits
    return [
        reference(lane, logits_TV[len(text) - 1])
        for lane, text, logits_TV in zip(lanes, texts, logits_BTV, strict=True)
    ]


def reference(lane: Lane, logits_V: torch.Tensor) -> tuple[int, float]:
    scores_V = torch.log_softmax(logits_V / (lane.temperature or 1.0), dim=0).double().numpy()
    if lane.temperature:
        position = len(lane.prompt_ids) + len(lane.tokens) - 1
        noise_1V = gumbel(np.array([lane.seed]), np.array([position]), np.arange(len(scores_V))[None])
        scores_V = scores_V + noise_1V[0]
    order = scores_V.argsort()
    gaps = np.diff(scores_V[order])
    return int(order[-1]), float(gaps[-1])


def renew(continuer: ModelContinuer, source: torch.nn.Module, *, damaged: bool) -> str:
    sender = DraftSender(torch.float32)
    weights = sender.pack(source.named_parameters(), version=continuer.version + 1)
    if damaged:
        assert sender._buffer is not None
        sender._buffer.data[weights.slots[-1].offset] ^= 1
    return continuer.renew(weights)


def main(folder: str, tokens: int, requests: int, context: int) -> None:
    torch.set_num_threads(1)
    runner = load_alone(folder, dtype="float32", max_tokens=tokens, max_requests=requests, context_length=context)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    continuer = ModelContinuer(runner)
    for line in sys.stdin:
        operation, *arguments = json.loads(line)
        answer: object = None
        match operation:
            case "new":
                name, steps, sharpen = arguments
                kind = getattr(wrong_draft_backends, name, None) or getattr(draft_backend, name)
                continuer = kind(runner, steps=steps, sharpen=sharpen)
            case "extend":
                answer = continuer.extend(lanes_of(arguments[0]))
            case "forget":
                continuer.forget(arguments[0])
            case "reference":
                answer = references(model, lanes_of(arguments[0]))
            case "renew":
                source, damaged = arguments
                there = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
                answer = [renew(continuer, there, damaged=damaged), continuer.version]
                model = model if damaged else there
            case "sleep":
                continuer.sleep()
                answer = hasattr(runner.token_to_kv_pool, "k_buffer")
            case "wake":
                continuer.wake()
            case "state":
                slots = continuer._slots
                sharpening = continuer.sharpening
                answer = [
                    continuer.cached_tokens,
                    slots.free_blocks,
                    slots.free_rows,
                    sharpening.beta,
                    sharpening._weight,
                ]
        print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
