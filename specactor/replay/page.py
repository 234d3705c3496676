"""The page of `specactor diff`: the token that differs first, in its context. One file, without script or network."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from specactor.config import Config
from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer
from specactor.errors import ConfigError
from specactor.replay.compare import Finding, Noise
from specactor.replay.records import SampleRecord
from specactor.report import PAGE, POLICY, STYLE, Rows, table

AROUND = 6  # tokens on each side of the place that the table has
MARK = "mark { background: #f4c7c3; } .after { color: #8a93a0; } pre { margin: .3rem 0; }"

Text = Callable[[Sequence[int]], str]
"""Token ids -> what they say."""


def text_of(config: Config) -> Text:
    """Return how token ids of a run are read; as numbers where its model has no tokenizer any more."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(config.model.path)
        if config.model.tiny is not None:
            folder = Path(scratch)
            make_char_tokenizer(folder)
        try:
            tokenizer = load_tokenizer(folder)
        except ConfigError:
            return lambda ids: "".join(f"{token} " for token in ids)
    return lambda ids: str(tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))


def diff_page(found: Finding, names: tuple[str, str], text: Text, noise: Noise | None) -> str:
    """Return the page of a difference between two runs of these names."""
    title = f"{names[0]} and {names[1]}: step {found.step}"
    facts = table("Where they differ", [("step", str(found.step)), ("where", found.where), ("cause", found.cause)])
    evidence = "".join(f"<p>{escape(line)}</p>" for line in found.evidence)
    cards = f'{facts}<div class="card"><b>Evidence</b>{evidence}</div>'
    if found.pair is not None:
        cards += _responses(found, names, text, noise)
    body = f'<header><h1>{escape(title)}</h1></header>\n<div class="grid">{cards}</div>'
    return PAGE.format(policy=POLICY, title=escape(title), style=STYLE + MARK, body=body)


def _responses(found: Finding, names: tuple[str, str], text: Text, noise: Noise | None) -> str:
    """Both responses side by side, and the tokens around the place."""
    assert found.pair is not None
    kept = next((s for s in found.pair if s.whole), None)
    if kept is None:
        return '<div class="card wide">Neither run kept the response whole; tracking.record full keeps all.</div>'
    prompt = escape(text(kept.prompt_ids.tolist()))
    cards = f'<div class="card wide"><b>Prompt</b> <small>{kept.prompt_len} tokens</small><pre>{prompt}</pre></div>'
    for name, sample in zip(names, found.pair, strict=True):
        about = f"{sample.num_tokens} tokens, score {sample.score:g}, advantage {sample.advantage:+.3f}"
        shown = _marked(sample, found.token, text) if sample.whole else "not kept whole"
        cards += f'<div class="card"><b>{escape(name)}</b> <small>{about}</small><pre>{shown}</pre></div>'
    if found.token is not None:
        cards += table("Tokens around the place", _around(found.pair, found.token, names, text, noise))
    return cards


def _marked(sample: SampleRecord, at: int | None, text: Text) -> str:
    """The response, with the token at that place marked, and what follows of it pale."""
    ids = sample.token_ids.tolist()
    if at is None:
        return escape(text(ids))
    before, token, after = (escape(text(part)) for part in (ids[:at], ids[at : at + 1], ids[at + 1 :]))
    return f'{before}<mark>{token or "(end)"}</mark><span class="after">{after}</span>'


def _around(
    pair: tuple[SampleRecord, SampleRecord], at: int, names: tuple[str, str], text: Text, noise: Noise | None
) -> Rows:
    """A heading, then per token of both its text, log-probability, and score with the noise of its place."""
    rows: Rows = [("token", *(f"{name}: {what}" for name in names for what in ("text", "log-prob", "with noise")))]
    for i in range(max(0, at - AROUND), at + AROUND + 1):
        cells: list[str] = []
        for sample in pair:
            if i >= len(sample.token_ids):
                cells += ["-", "-", "-"]
                continue
            token, logprob = int(sample.token_ids[i]), float(sample.logprob_values[i])
            drawn = "-" if noise is None else f"{logprob + noise(sample.seed, sample.prompt_len + i, token):+.4f}"
            cells += [f"{text([token])!r} ({token})", f"{logprob:.6f}", drawn]
        rows.append((f"{i}{' differs' if i == at else ''}", *cells))
    return rows
