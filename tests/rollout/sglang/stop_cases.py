"""Script: requests of SGLang end where the function that looks at every token says. Prints JSON."""

from __future__ import annotations

import json
import random
import sys
import tempfile
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from specactor.cpu import torchvision_ops

torchvision_ops.install()
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req  # noqa: E402
from sglang.srt.sampling.sampling_params import SamplingParams  # noqa: E402

from specactor.rollout.sglang import responses  # noqa: E402

SEEDS = (*range(700), 8657)  # in the last one look is too few, as in one of 10,000
EOS = 1
# Bytes of a, b, c, a space, and of é and € in parts; then what a merge of some of them would be.
PIECES = ["<eos>", "a", "b", "c", "Ġ", "Ã", "©", "â", "Ĥ", "¬", "ab", "Ġc", "Ã©", "©a", "âĤ", "bc"]
STOPS = ["ab", "abc", "a c", "é", "€a", "bab", " ", "cé", "\ufffd", "<eos>", "c" * 9]

Finish = Callable[[Callable[..., None], Any, int], None]


def text_of(decoder: Any, merges: Sequence[tuple[str, str]] = ()) -> responses.Text:
    vocabulary = {"<pad>": 0} | {piece: i for i, piece in enumerate(PIECES, start=EOS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[*merges]))
    tokenizer.decoder = decoder
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
        return responses.Text(folder)


def every_token(original: Callable[..., None], req: Any, new_tokens: int = 1) -> None:
    """What decides: SGLang is asked after each token, about as many of the last ones as can have a stop string."""
    before = responses.begun_of(req)
    req.sampling_params.stop_str_max_len = max(len(stop.encode()) for stop in req.sampling_params.stop_strs)
    req.sampling_params.max_new_tokens += len(before)
    usual_length(original, req, new_tokens)
    req.sampling_params.max_new_tokens -= len(before)
    if req.finished_len is not None:
        req.finished_len -= len(before)


def request(draw: random.Random, text: responses.Text) -> tuple[Any, int]:
    """A request after a round, and how many tokens are new."""
    tokens = [draw.randrange(EOS, EOS + len(PIECES)) for _ in range(draw.randint(1, 24))]
    new, begun = draw.randint(1, min(8, len(tokens))), draw.choice([0, 0, draw.randint(1, 6)])
    sampling = SamplingParams(
        max_new_tokens=draw.choice([len(tokens) - 1, len(tokens), 30]) or 1,
        stop=draw.sample(STOPS, draw.randint(1, 2)),
        stop_token_ids=draw.choice([None, None, [draw.randrange(EOS, EOS + len(PIECES))]]),
        ignore_eos=draw.random() < 0.5,
        custom_params={"specactor_begun": begun} if begun else None,
    )
    sampling.normalize(text)
    prompt = array("q", [draw.randrange(EOS, EOS + len(PIECES)) for _ in range(8)])
    req = Req("r", "", prompt, sampling, eos_token_ids={EOS}, vocab_size=1 + EOS + len(PIECES))
    req.tokenizer, req.output_ids = text, array("q", tokens)
    if draw.random() < 0.1:
        req.to_finish = FINISH_ABORT("failed", 500)
    if draw.random() < 0.05:
        req.output_ids[-new] = 10_000  # no token
    return req, new


def end_of(finish: Finish, seed: int, text: responses.Text) -> object:
    req, new = request(random.Random(seed), text)
    finish(Req.update_finish_state, req, new)
    reason = req.finished_reason and req.finished_reason.to_json()
    return reason, req.finished_len, list(req.output_ids), req.to_finish and "error", req.sampling_params.max_new_tokens


def spelled_ends(finish: Finish, text: responses.Text) -> list[int | None]:
    """Where a response ends that has a stop string of two tokens in four others: in plain rounds, and in longer ones;
    last where the first two were brought along."""
    tokens = [PIECES.index(piece) + EOS for piece in ["c", *"abab", "c", "c"]]
    ends = []
    for size, begun in ((1, 0), (2, 0), (3, 0), (7, 0), (1, 2), (5, 2)):
        sampling = SamplingParams(max_new_tokens=30, stop="abab", custom_params={"specactor_begun": begun})
        sampling.normalize(text)
        assert sampling.stop_str_max_len == 2
        req = Req("r", "", array("q", [EOS, *tokens[:begun]]), sampling, eos_token_ids={EOS}, vocab_size=100)
        req.tokenizer = text
        for start in range(begun, len(tokens), size):
            req.output_ids.extend(tokens[start : start + size])
            finish(Req.update_finish_state, req, len(tokens[start : start + size]))
            if req.finished():
                break
        ends.append(req.finished_len)
    return ends


def usual_length(original: Callable[..., None], req: Any, new_tokens: int = 1) -> None:
    """A wrong version: as many tokens are looked at as a stop string usually has, and one more."""
    emitted, before = req.output_ids, responses.begun_of(req)
    for length in range(len(emitted) - new_tokens + 1, len(emitted) + 1):
        req.output_ids = before + emitted[:length]
        original(req, 1)
        if req.finished():
            break
    req.output_ids = emitted


def narrow_look(original: Callable[..., None], req: Any, new_tokens: int = 1) -> None:
    """A wrong version: its first look is as narrow as any other."""
    responses.finish_token_by_token(lambda r, _=1: original(r, 1), req, new_tokens)


def one_look(original: Callable[..., None], req: Any, new_tokens: int = 1) -> None:
    """A wrong version: it takes one look whatever the tokenizer and the stop strings are."""
    keeps, responses.Text.keeps = responses.Text.keeps, lambda *_: True  # type: ignore[method-assign]
    responses.finish_token_by_token(original, req, new_tokens)
    responses.Text.keeps = keeps  # type: ignore[method-assign]


def main() -> None:
    found: dict[str, Any] = {"differ": {}, "decoded": {}}
    decoded = [0]
    decode = responses.Text.decode

    def counted(text: responses.Text, tokens: Any) -> str:
        decoded[0] += 1
        return decode(text, tokens)

    responses.Text.decode = counted  # type: ignore[method-assign]
    # The last one drops a space at the beginning of a text, so that a longer text may have more of it.
    stripped = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 0, 1)])
    for kind, decoder in {"bytes": decoders.ByteLevel(), "joined": decoders.Fuse(), "other": stripped}.items():
        text = text_of(decoder)
        expected = [end_of(every_token, seed, text) for seed in SEEDS]
        versions: dict[str, Finish] = {"ours": responses.finish_token_by_token, "one look": one_look}
        if kind == "bytes":
            versions |= {"SGLang's": lambda original, req, new: original(req, new), "narrow look": narrow_look}
        for name, finish in versions.items():
            ends = [end_of(finish, seed, text) for seed in SEEDS]
            found["differ"][f"{kind}, {name}"] = sum(a != b for a, b in zip(ends, expected, strict=True))
        decoded[0] = 0
        req, _ = request(random.Random(1), text)
        req.sampling_params = SamplingParams(max_new_tokens=30, stop=["zz"])
        req.sampling_params.normalize(text)
        req.output_ids, req.to_finish = array("q", [2, 3] * 4), None
        responses.finish_token_by_token(Req.update_finish_state, req, 8)
        found["decoded"][kind] = decoded[0]
    merged = text_of(decoders.ByteLevel(), [("a", "b")])
    versions = {"ours": responses.finish_token_by_token, "usual length": usual_length}
    found["spelled"] = {name: spelled_ends(finish, merged) for name, finish in versions.items()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
