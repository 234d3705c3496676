"""A draft model without a target, and transformers beside it: draft_backend_script.py FOLDER TOKENS REQUESTS CONTEXT.

A line on stdin is a JSON list, the name of an operation and its arguments; the line on stdout that answers it begins
with ANSWER. Operations:
  new NAME STEPS            forget all, and begin with the backend of this name
  extend LANES              its answers
  runners_up                its second choices of the last call
  want BOOL                 whether those of the next calls are wanted
  runner_up LANES           the token of the second score, and by how much that is above the third, as reference
  forget KEY
  reference LANES           per lane, what transformers' logits and the noise give for the next token, and by how much
                            its score is above the second
  renew FOLDER DAMAGED      new weights for backend and reference; damaged ones for the backend alone: what it says,
                            and its version
  sleep                     whether any key is held then
  wake
  state                     tokens with keys, blocks and rows that are free
"""

import json
import sys
from dataclasses import replace
from itertools import pairwise

import torch
from transformers import AutoModelForCausalLM

from specactor.cpu.sglang_ops import murmur_hash32
from specactor.rollout.decoupled.drafter_side import Lane
from specactor.rollout.sglang.draft_backend import DraftBackend
from specactor.rollout.sglang.draft_runner import load_alone
from specactor.weights_sync.draft_push import DraftSender
from tests.rollout.sglang import wrong_draft_backends


def lanes_of(values: list[dict[str, object]]) -> list[Lane]:
    return [replace(Lane(**value), prompt_ids=tuple(value["prompt_ids"])) for value in values]  # type: ignore[arg-type]


def references(model: torch.nn.Module, lanes: list[Lane], *, choice: int = 0) -> list[tuple[int, float]]:
    texts = [[*lane.prompt_ids, *lane.tokens] for lane in lanes]
    longest = max(map(len, texts))
    with torch.no_grad():
        logits_BTV = model(torch.tensor([text + [0] * (longest - len(text)) for text in texts])).logits
    last = [logits_TV[len(text) - 1] for text, logits_TV in zip(texts, logits_BTV, strict=True)]
    return [reference(lane, logits_V, choice) for lane, logits_V in zip(lanes, last, strict=True)]


def reference(lane: Lane, logits_V: torch.Tensor, choice: int) -> tuple[int, float]:
    scores_V = torch.log_softmax(logits_V / (lane.temperature or 1.0), dim=0).double()
    if lane.temperature:
        position = torch.tensor([len(lane.prompt_ids) + len(lane.tokens) - 1])
        words_V = murmur_hash32(torch.tensor([lane.seed]), position, torch.arange(len(scores_V)))[0]
        scores_V = scores_V - (-(words_V.double() / (2**32 - 1)).log()).log()
    best = scores_V.topk(3)
    ranked = best.values.tolist()
    return int(best.indices[choice]), min(a - b for a, b in pairwise(ranked[: choice + 2]))


def renew(backend: DraftBackend, source: torch.nn.Module, *, damaged: bool) -> str:
    sender = DraftSender(torch.float32)
    weights = sender.pack(source.named_parameters(), version=backend.version + 1)
    if damaged:
        assert sender._buffer is not None
        sender._buffer.data[weights.slots[-1].offset] ^= 1
    return backend.renew(weights)


def main(folder: str, tokens: int, requests: int, context: int) -> None:
    torch.set_num_threads(1)
    runner = load_alone(folder, dtype="float32", max_tokens=tokens, max_requests=requests, context_length=context)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    backend = DraftBackend(runner)
    for line in sys.stdin:
        operation, *arguments = json.loads(line)
        answer: object = None
        match operation:
            case "new":
                backend = getattr(wrong_draft_backends, arguments[0])(runner)
            case "extend":
                answer = backend.extend(lanes_of(arguments[0]))
            case "runners_up":
                answer = backend.runners_up()
            case "want":
                backend.wants_runners_up = arguments[0]
            case "runner_up":
                answer = references(model, lanes_of(arguments[0]), choice=1)
            case "forget":
                backend.forget(arguments[0])
            case "reference":
                answer = references(model, lanes_of(arguments[0]))
            case "renew":
                source, damaged = arguments
                there = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
                answer = [renew(backend, there, damaged=damaged), backend.version]
                model = model if damaged else there
            case "sleep":
                backend.sleep()
                answer = hasattr(runner.token_to_kv_pool, "k_buffer")
            case "wake":
                backend.wake()
            case "state":
                cached = sum(known.cache.cached for known in backend._known.values())
                slots = backend._slots
                answer = [cached, len(slots._free_blocks), len(slots._free_rows)]
        print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
