"""The first difference between two runs' records, in the order of computing, and its cause by elimination. PURE.
Speculation is named only where context, weights and noise are equal, it was on, and the noise picks another token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specactor.config.rules import flat
from specactor.replay.records import BLOCK, RankWeights, SampleRecord, StepRecord

Noise = Callable[[int, int, int], float]
"""(seed, position in the sequence, token) -> what the engine adds to the log-probability."""

TIES = "a kernel's tie"  # the cause of such a difference
SOME = "arithmetic of engines"  # where few responses differ
OTHER_LAYOUT = "another layout of ranks: gradients are summed in another order, which rounds otherwise"
ROUNDED, ROUNDING = ("loss", "grad_norm", "entropy"), 1e-3
"""Metrics that two layouts of ranks give nearly alike, and the share by which they may differ."""
AUDITED = ("scored", "unpicked")  # metrics of training that say nothing where rollout.audit is off
NO_MATTER = (
    *("name", "output_dir", "resume", "checkpoint", "eval.every", "tracking", "parallel.engines"),
    *("parallel.drafters", "parallel.drafter_hosts"),
    *("rollout.speculation", "rollout.audit", "distillation", "weights_sync", "train.steps"),
)
"""Settings that change no token and no weight; train.steps may, by the learning rate, which is compared itself."""
TEMPLATE = "prompt template or tokenizer"
AREAS = (
    (TEMPLATE, ("data.prompt_template", "model.path")),
    ("data", ("data", "seed")),
    ("sampling settings", ("rollout.",)),
    ("reward or environment", ("reward", "environment", "algorithm.overlong")),
    ("algorithm", ("algorithm.", "train.", "parallel.")),
)
"""Cause -> beginnings of its settings."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    cause: str
    where: str  # the sample, token or tensor
    evidence: tuple[str, ...] = ()
    step: int = 0
    pair: tuple[SampleRecord, SampleRecord] | None = None  # the sample in both runs, if it is a sample that differs
    token: int | None = None  # index of the sample's first token that differs, if known


def first_difference(
    ours: Sequence[StepRecord], theirs: Sequence[StepRecord], *, noise: Noise | None = None
) -> Finding | None:
    """Return the first difference in common steps. Without `noise`, ties and wrong acceptances are not told apart."""
    other = {record.step: record for record in theirs}
    is_rounded = False  # whether steps before were learned from by another layout of ranks
    for a in sorted((a for a in ours if a.step in other), key=lambda record: record.step):
        b = other[a.step]
        again = {s.request_id: s for s in b.samples}  # a replay may have one alone
        pairs = [(s, again[s.request_id]) for s in a.samples if s.request_id in again]
        found = _of_inputs(a, b, pairs)
        if found is None:
            found = _of_responses(a, b, pairs, noise) or _of_rewards(a, b, pairs)
            found = found or _of_training(a, b) or _of_data(a, b)  # verdicts on responses may decide what is drawn next
            if found is not None and is_rounded:
                found = replace(found, cause=OTHER_LAYOUT, evidence=(*found.evidence, f"else: {found.cause}"))
        if found is not None:
            return replace(found, step=a.step)
        is_rounded |= bool(a.metrics and b.metrics) and not _is_same_layout(a, b)
    return None


def settings_that_differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return settings, by dotted path, that differ and can change a token or a weight."""
    ours, theirs = flat(a), flat(b)
    pairs = {path: (ours.get(path), theirs.get(path)) for path in sorted({*ours, *theirs})}
    may_matter = [path for path in pairs if not f"{path}.".startswith(tuple(f"{name}." for name in NO_MATTER))]
    return {path: pairs[path] for path in may_matter if pairs[path][0] != pairs[path][1]}


Pairs = list[tuple[SampleRecord, SampleRecord]]


def _of(pair: tuple[SampleRecord, SampleRecord], cause: str, *evidence: str, token: int | None = None) -> Finding:
    s = pair[0]
    at = "" if token is None else f", token {token} of {s.num_tokens}"
    where = f"group {s.group}, sample {s.sample} (problem {s.problem}){at}"
    return Finding(cause=cause, where=where, evidence=evidence, pair=pair, token=token)


def _because(a: StepRecord, b: StepRecord, *areas: str) -> tuple[str, ...]:
    starts = [start for area, starts in AREAS for start in starts if area in areas]
    settings = settings_that_differ(a.config, b.config)
    found = [f"{k}: {x!r}, {y!r}" for k, (x, y) in settings.items() if any(k.startswith(s) for s in starts)]
    return (*found, *_libraries(a, b))


def _libraries(a: StepRecord, b: StepRecord) -> list[str]:
    names = sorted({*a.libraries, *b.libraries})
    pairs = [(name, a.libraries.get(name, "none"), b.libraries.get(name, "none")) for name in names]
    return [f"{name} {x}, {y}" for name, x, y in pairs if x != y]


def _of_inputs(a: StepRecord, b: StepRecord, pairs: Pairs) -> Finding | None:
    checks: tuple[tuple[str, str, Callable[[SampleRecord], object], tuple[str, ...]], ...] = (
        ("data order", "drew another problem", lambda s: s.problem, ("data",)),
        (TEMPLATE, "another prompt", lambda s: (s.prompt, s.prompt_len), (TEMPLATE, "data")),
        ("noise: another seed", "another seed", lambda s: s.seed, ("data",)),
    )
    for cause, what, of, areas in checks:
        differing = [(x, y) for x, y in pairs if of(x) != of(y)]
        if differing:
            x, y = differing[0]
            counted = f"{what} in {len(differing)} of {len(pairs)} samples: {of(x)}, {of(y)}"
            return _of((x, y), cause, counted, *_because(a, b, *areas))
    return None


def _of_data(a: StepRecord, b: StepRecord) -> Finding | None:
    if not a.data or not b.data or a.data == b.data:
        return None
    is_partial = a.config.get("rollout", {}).get("partial", False)
    cause = "data order, or a response that goes on into the next step" if is_partial else "data order"
    told = "equal samples, and the stream stands elsewhere after them"
    return Finding(cause=cause, where="data state", evidence=(told, *_because(a, b, "data")))


def _of_responses(a: StepRecord, b: StepRecord, pairs: Pairs, noise: Noise | None) -> Finding | None:
    differing = [p for p in pairs if any(getattr(p[0], n) != getattr(p[1], n) for n in ("tokens", "logprobs", "spans"))]
    if not differing:
        if others := [(x, y) for x, y in pairs if x.branches != y.branches]:
            told = f"equal first sequences, and other ones after them in {len(others)} of {len(pairs)} samples"
            return _of(others[0], "a further sequence of an agent's session", told)
        routed = [(x, y) for x, y in pairs if x.routing and y.routing and x.routing != y.routing]
        told = f"other experts in {len(routed)} of {len(pairs)} samples, with equal log-probabilities"
        return _of(routed[0], "routing record", told) if routed else None
    x, y = differing[0]
    share = f"other tokens or log-probabilities in {len(differing)} of {len(pairs)} samples"
    if x.spans != y.spans and x.tokens == y.tokens and x.logprobs == y.logprobs:
        return _of((x, y), "weight version", share, f"policy versions {x.spans}, {y.spans}")
    settings = _because(a, b, "sampling settings")
    sampled = [line for line in settings if line.startswith("rollout.")]
    if sampled:
        return _of((x, y), "sampling settings", share, *sampled, token=_first_token(x, y))
    return _of_engines(a, b, differing, len(pairs), (share, *settings), noise)


def _of_engines(
    a: StepRecord, b: StepRecord, differing: Pairs, total: int, evidence: tuple[str, ...], noise: Noise | None
) -> Finding:
    """Explain responses that differ although requests, settings and the trainer's weights are equal."""
    kept = [(x, y, at) for x, y in differing if (at := _first_token(x, y)) is not None]
    if not kept:
        x, y = differing[0]
        block = next(i for i in range(10**9) if _block(x, i) != _block(y, i))
        told = f"in tokens {block * BLOCK} to {block * BLOCK + BLOCK - 1}"
        told += "; none of these samples was kept whole: tracking.record full keeps all"
        cause = _engine_cause(a, b, differing, total)
        return _of((x, y), f"sampling or {cause}" if cause == SOME else cause, *evidence, told)
    # Equal tokens with other log-probabilities show that something else was computed; then other tokens follow of it.
    computed = [(x, y, at) for x, y, at in kept if x.token_ids[at:][:1].tolist() == y.token_ids[at:][:1].tolist() != []]
    seeded = [(x, y, at) for x, y, at in kept if x.seeded is None or at < x.seeded]
    x, y, at = (computed or seeded or kept)[0]
    if computed or at >= min(x.num_tokens, y.num_tokens):
        last = [float(s.logprob_values[at]) if at < s.num_tokens else math.nan for s in (x, y)]
        told = f"log-probability {last[0]:.6f}, {last[1]:.6f} there; {x.num_tokens}, {y.num_tokens} tokens in all"
        return _of((x, y), _engine_cause(a, b, differing, total), *evidence, told, token=at)
    tokens = int(x.token_ids[at]), int(y.token_ids[at])
    scores = float(x.logprob_values[at]), float(y.logprob_values[at])
    told = f"token {tokens[0]} ({scores[0]:.4f}), token {tokens[1]} ({scores[1]:.4f}) after equal ones"
    if not seeded:
        told += "; in a later turn of an agent, whose seed is not recorded: it may be a kernel's tie"
    if noise is None or not seeded:
        return _of((x, y), "sampling", *evidence, told, token=at)
    position = x.prompt_len + at
    gap = scores[0] + noise(x.seed, position, tokens[0]) - scores[1] - noise(y.seed, position, tokens[1])
    told += f"; with the noise of seed {x.seed} token {tokens[0]} scores {gap:+.4f} against token {tokens[1]}"
    # A response's first token comes from its prefill: no verification has part in it.
    at_once = any(start == 0 for _, _, start in kept)
    cause = _sampler_cause(a, b, gap, is_usual=_are_most(differing, total), at_once=at_once)
    return _of((x, y), cause, *evidence, told, token=at)


def _sampler_cause(a: StepRecord, b: StepRecord, gap: float, *, is_usual: bool, at_once: bool) -> str:
    """Explain two tokens after equal ones with equal log-probabilities."""
    is_coarse = a.config.get("model", {}).get("dtype") == "bfloat16"
    # Closer ones may swap by rounding: from kernel to kernel float32 differs by 1e-5, bfloat16 by some hundredths.
    if abs(gap) < (0.1 if is_coarse else 1e-3):
        return TIES
    wrong = a if gap < 0 else b
    which = "the first run" if gap < 0 else "the second run"
    speculates = not at_once and wrong.config.get("rollout", {}).get("speculation", {}).get("mode", "off") != "off"
    if is_usual and not speculates:
        return f"noise: {which} did not sample with its seeds"
    who = ("speculation or noise" if is_usual else "speculation") if speculates else "sampling"
    return f"{who}: {which} emitted a token that its noise does not pick"


def _engine_cause(a: StepRecord, b: StepRecord, differing: Pairs, total: int) -> str:
    if told := _libraries(a, b):
        return f"library version: {told[0]}"
    if a.engines == b.engines and a.engines > 1:
        engines = {x.group % a.engines for x, _ in differing}  # but for groups that moved to another
        if len(engines) == 1:
            return f"weights or arithmetic of engine {engines.pop()}"
    return "weights or arithmetic of engines" if _are_most(differing, total) else SOME


def _are_most(differing: Pairs, total: int) -> bool:
    """Return whether so many samples differ as where a cause holds for every token: half of them at least."""
    return 2 * len(differing) >= total


def _first_token(x: SampleRecord, y: SampleRecord) -> int | None:
    """Return the first token that differs, or whose log-probability does; None where one sample is not kept whole."""
    if not (x.whole and y.whole):
        return None
    shared = min(x.num_tokens, y.num_tokens)
    same = (x.token_ids[:shared] == y.token_ids[:shared]) & (
        x.logprob_values[:shared].view(np.int32) == y.logprob_values[:shared].view(np.int32)
    )
    return shared if same.all() else int(np.argmin(same))


def _block(s: SampleRecord, i: int) -> tuple[bytes, bytes]:
    return s.tokens[4 * i : 4 * i + 4], s.logprobs[4 * i : 4 * i + 4]


def _of_rewards(a: StepRecord, b: StepRecord, pairs: Pairs) -> Finding | None:
    learned = bool(a.metrics and b.metrics)
    checks: tuple[tuple[str, str, bool], ...] = (
        ("score", "reward or environment", True),
        ("reward", "shaping of rewards", True),
        ("advantage", "advantages", learned),
    )
    for name, cause, compared in checks:
        differing = [(x, y) for x, y in pairs if compared and getattr(x, name) != getattr(y, name)]
        if differing:
            x, y = differing[0]
            told = f"{name} {getattr(x, name)}, {getattr(y, name)}; {len(differing)} of {len(pairs)} samples"
            because = _because(a, b, "reward or environment", "algorithm" if name != "score" else "data")
            return _of((x, y), cause, told, *because)
    return None


def _of_training(a: StepRecord, b: StepRecord) -> Finding | None:
    if copies := _unequal_copies(a) or _unequal_copies(b):
        told = "copies of a parameter differ between data-parallel ranks"
        return Finding(cause="gradients were not reduced over all ranks", where=copies, evidence=(told,))
    is_same_layout = _is_same_layout(a, b)
    both = [n for n in a.metrics if n in b.metrics and n not in AUDITED]
    shared = [n for n in both if is_same_layout or n in (*ROUNDED, "learning_rate", "tokens")]
    slack = 0.0 if is_same_layout else ROUNDING
    metrics = [n for n in shared if not _same(a.metrics[n], b.metrics[n], slack * (n in ROUNDED))]
    tensor = _first_tensor(a.weights, b.weights) if is_same_layout else None
    moved = [r for r, (x, y) in enumerate(zip(a.weights, b.weights, strict=False)) if _moved(x, y) and is_same_layout]
    if tensor is None and not metrics and not moved:
        return None
    changed = tuple(f"{n} {a.metrics[n]!r}, {b.metrics[n]!r}" for n in metrics)
    changed += tuple(f"other moments on rank {r}" for r in moved)
    where = f"parameter {tensor}" if tensor is not None else "metrics of training" if metrics else "optimizer state"
    if not a.samples or not b.samples:
        cause = f"{'weights' if tensor else 'optimizer'} at the start: another checkpoint, warm-up or model"
    elif "learning_rate" in metrics:
        cause = "learning rate"
    elif {"tokens", "num_microbatches"} & {*metrics}:
        cause = "microbatches: other tokens were learned from"
    elif metrics:
        cause = "training: loss or gradient"
    elif moved:
        cause = "optimizer: its moments"
    else:
        cause = "weights changed outside of training"
    return Finding(cause=cause, where=where, evidence=(*changed, *_because(a, b, "algorithm")))


def _same(x: float, y: float, slack: float) -> bool:
    return x == y or (x != x and y != y) or abs(x - y) <= slack * max(abs(x), abs(y), 0.01)


def _is_same_layout(a: StepRecord, b: StepRecord) -> bool:
    return [r.place for r in a.weights] == [r.place for r in b.weights]


def _moved(x: RankWeights, y: RankWeights) -> bool:
    return x.optimizer != y.optimizer and bool(x.optimizer and y.optimizer)  # older records have none


def _first_tensor(a: Sequence[RankWeights], b: Sequence[RankWeights]) -> str | None:
    for rank, (x, y) in enumerate(zip(a, b, strict=True)):
        for name in x.digests:
            if x.digests[name] != y.digests.get(name):
                return f"{name} of rank {rank}"
    return None


def _unequal_copies(record: StepRecord) -> str | None:
    known: dict[tuple[object, ...], int] = {}
    for rank in record.weights:
        tensor, pipeline, expert, expert_tensor = rank.place
        for name, digest in rank.digests.items():
            is_expert = re.search(r"\.experts\.", name) is not None
            owner = (name, pipeline, expert, expert_tensor) if is_expert else (name, pipeline, tensor)
            if known.setdefault(owner, digest) != digest:
                return f"parameter {name}"
    return None
