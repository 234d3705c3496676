"""Requests with every sampling option, and a tokenizer in whose text they may stop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models

from specactor.types import RolloutRequest
from tests.rollout.conftest import VOCAB, request

EOS = 1
BOS = 2
MERGES = [("a", "b"), ("c", "d"), ("ab", "c"), ("ab", "cd"), ("d", "a")]
STOPS = [("ab",), ("abc",), ("dd", "abcd"), ("cab", "bd"), ("daab",)]
OPTIONS: list[dict[str, object]] = [
    {},
    {"top_p": 0.8},
    {"top_k": 7},
    {"top_p": 0.9, "top_k": 20},
    {"logit_bias": ((7, 4.0), (50, -3.0))},
    {"logit_bias": ((EOS, 2.5),), "ignore_eos": False},
    {"stop_token_ids": tuple(range(3, VOCAB, 9)), "ignore_eos": False},
    {"ignore_eos": False},
]


def with_options(count: int = 36) -> list[RolloutRequest]:
    return [request(i, temperature=(0.0, 0.7, 1.2)[i % 3], new=6 + i % 31, **OPTIONS[i % 8]) for i in range(count)]  # type: ignore[arg-type]


def make_tokenizer(folder: Path) -> Tokenizer:
    """Four letters and what `MERGES` makes of them; all other tokens are spelled like a letter."""
    tokens = ["<pad>", "<eos>", "<bos>", *"abcd", *(left + right for left, right in MERGES)]
    tokens += ["abcd"[i % 4] + str(i) for i in range(VOCAB - len(tokens))]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=MERGES))
    tokenizer.add_special_tokens(["<bos>"])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("[0-9]"), ""), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def cut(tokens: tuple[int, ...], stops: Sequence[str], tokenizer: Tokenizer) -> int:
    """Tokens that plain decoding emits: after each it looks at the last few, one more than the longest stop can have
    where each has a letter."""
    few = 1 + max(map(len, stops))
    for length in range(1, len(tokens) + 1):
        text = tokenizer.decode(list(tokens[max(0, length - few) : length]), skip_special_tokens=False)
        if any(stop in text for stop in stops):
            return length
    return len(tokens)
