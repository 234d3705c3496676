"""Run in a clean process: does the exported model, under transformers, answer greedily like the engine did?

python greedy_reference.py EXPORT_DIR EVALUATION.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    lines = [json.loads(line) for line in Path(sys.argv[2]).read_text().splitlines()][:64]
    different = []
    for line in lines:
        prompt, expected = torch.tensor([line["prompt_ids"]]), line["token_ids"]
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=len(expected)
        )
        if out[0, prompt.shape[1] :].tolist() != expected:
            different.append(line["problem"])
    print(json.dumps({"prompts": len(lines), "different": different}))


if __name__ == "__main__":
    main()
