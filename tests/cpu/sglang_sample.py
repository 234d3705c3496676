"""SGLang's own sampling with noise: sglang_sample.py; a JSON line [logprobs, seeds, positions] in, tokens out."""

import json
import sys

import torch
from sglang.srt.layers.sampler import multinomial_with_seed

logprobs, seeds, positions = json.loads(sys.stdin.readline())
tokens = multinomial_with_seed(
    torch.tensor(logprobs, dtype=torch.float32), torch.tensor(seeds), torch.tensor(positions)
)
print("TOKENS " + json.dumps(tokens.view(-1).tolist()), flush=True)
