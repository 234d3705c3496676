"""Log-probabilities by transformers, in a process of its own: reference_logprobs.py FOLDER; one JSON list per line.

A line on stdin holds cases [prompt, response, temperature]; the line on stdout that answers it holds, per case,
log_softmax(logits / temperature) of every response token, in float32.
"""

import json
import sys

import torch
from transformers import Qwen3MoeForCausalLM


def main(folder: str) -> None:
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for line in sys.stdin:
        answers = []
        for prompt, response, temperature in json.loads(line):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits / temperature, dim=-1)
            answers.append(logprobs[torch.arange(len(response)), torch.tensor(response)].tolist())
        print("ANSWERS " + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
