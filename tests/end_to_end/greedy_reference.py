"""Run in a clean process: does the exported model, under transformers, answer greedily like the engine did?

python greedy_reference.py EXPORT_DIR EVALUATION.jsonl
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    lines = [json.loads(line) for line in Path(sys.argv[2]).read_text().splitlines()][:64]
    by_length = defaultdict(list)  # so that nothing is padded
    for line in lines:
        by_length[len(line["prompt_ids"])].append(line)
    different = []
    for length, some in by_length.items():
        prompts, wanted = torch.tensor([line["prompt_ids"] for line in some]), [line["token_ids"] for line in some]
        out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=max(map(len, wanted))
        )
        for line, tokens, expected in zip(some, out[:, length:].tolist(), wanted, strict=True):
            if tokens[: len(expected)] != expected:
                different.append(line["problem"])
    print(json.dumps({"prompts": len(lines), "different": different}))


if __name__ == "__main__":
    main()
