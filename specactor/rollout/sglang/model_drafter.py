"""The drafter `model`: a small dense model on a model runner of SGLang, in the scheduler process of every engine rank.

Its keys and values lie in buffers of its own, at the slots that the scheduler gave to the target: position p of a
request is slot `req_to_token[row, p]` in both. So nothing is allocated, moved or freed here, and a rollback is a
shorter length. A round begins with the tokens that the model has not seen yet (the whole prompt, the bonus token, what
was decoded plainly), one row each, as in `rows`; then each further draft token is a pass with one row per request.

Invariants:
- the first `cached` tokens of a request's prompt and output, counted from position 0, have keys and values that were
  computed from just these tokens; what drafts left behind them is overwritten before it is read;
- a round writes at positions that are committed, or that the target's rows of the same round write too, so the
  scheduler has reserved their slots;
- ranks that are asked for the same drafts in the same order give the same ones: nothing else has an influence.

Shape legend: B requests that want another token, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from specactor.rollout.draft.drafter import Drafter, DraftSequence
from specactor.rollout.planning.sharpening import Lane, Record, Sharpening
from specactor.rollout.sglang import draft_sampling
from specactor.rollout.sglang.draft_runner import DraftForward, common

NEW_WEIGHTS_WEIGHT = 0.25
"""What evidence about the best sharpness is worth after the draft model has changed."""


@dataclass(slots=True)
class _Seen:
    """What the model has seen of a request."""

    cached: int = 0
    fed: list[int] = field(default_factory=list)
    """Draft tokens that it saw after those; seen for good as far as the target emits the same."""


@dataclass(slots=True, kw_only=True)
class _Lanes:
    """The requests of a round that want drafts, those of larger windows first."""

    sequences: list[DraftSequence]
    windows: list[int]
    table: Tensor
    """[B] rows of the page table."""
    base: Tensor
    """[B] position of the last committed token, on the CPU."""
    seeds: Tensor
    """[B]"""
    temperatures: Tensor
    """[B, 1]"""
    is_greedy: list[bool]
    """Requests whose likeliest token is drafted, whatever the noise."""
    greedy: Tensor
    """[B], the same."""

    def count(self, depth: int) -> int:
        """Lanes that want more than `depth` tokens; they are the first ones."""
        return sum(window > depth for window in self.windows)


class DraftModel(Drafter):
    """`attach` it to an engine rank before it is asked."""

    name = "model"
    drafts_first = False

    def __init__(self, sharpen: Literal["fitted", "shared", "greedy"] = "fitted") -> None:
        self._sharpen = sharpen
        self._seen: dict[str, _Seen] = {}
        self._record = Record()
        self._version = 0
        self.sharpening = Sharpening()

    def attach(self, runner: Any, find: Callable[[str], Any]) -> None:
        """Args: SGLang's runner of the draft model; SGLang's request of an id."""
        self._forward = DraftForward(runner)
        self._find = find

    @property
    def beta(self) -> float:
        """Factor of the log-probabilities."""
        return {"fitted": self.sharpening.beta, "shared": 1.0, "greedy": math.inf}[self._sharpen]

    @property
    def version(self) -> int:
        return self._version

    def renewed(self, version: int) -> None:
        """The model has new weights: texts are shown to it from their beginning, and beta is fitted anew."""
        self._version = version
        self._record = Record()
        self.sharpening.new_version(NEW_WEIGHTS_WEIGHT)
        self.policy_changed()

    def open(self, sequence: DraftSequence) -> None:
        self._seen[sequence.request_id] = _Seen()

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        seen = self._seen[sequence.request_id]
        if seen.cached == _length(sequence) - len(tokens):
            seen.cached += common(seen.fed, tokens)
        seen.fed = []
        self._record.commit(sequence.request_id, tokens)

    def close(self, sequence: DraftSequence) -> None:
        del self._seen[sequence.request_id]

    def policy_changed(self) -> None:
        for seen in self._seen.values():
            seen.cached, seen.fed = 0, []

    @torch.no_grad()
    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        self._record.teach(self.sharpening)
        order = sorted((i for i, window in enumerate(windows) if window), key=lambda i: -windows[i])
        drafts: list[list[int]] = [[] for _ in sequences]
        if order:
            lanes = self._lanes([sequences[i] for i in order], [windows[i] for i in order])
            for i, draft in zip(order, self._drafts(lanes), strict=True):
                drafts[i] = draft
        return drafts

    def _drafts(self, lanes: _Lanes) -> list[list[int]]:
        with self._forward.running():
            tokens = [self._sample(self._catch_up(lanes), lanes, 0)]
            for depth in range(1, lanes.windows[0]):
                logits_BV = self._step(tokens[-1][: lanes.count(depth)], lanes, depth)
                tokens.append(self._sample(logits_BV, lanes, depth))
        columns = [tokens_B.tolist() for tokens_B in tokens]
        drafts = [[column[lane] for column in columns[:window]] for lane, window in enumerate(lanes.windows)]
        for sequence, draft in zip(lanes.sequences, drafts, strict=True):
            self._seen[sequence.request_id].fed = draft[:-1]
        return drafts

    def _lanes(self, sequences: list[DraftSequence], windows: list[int]) -> _Lanes:
        device = self._forward.device
        reqs = [self._find(sequence.request_id) for sequence in sequences]
        greedy = [sequence.temperature == 0 for sequence in sequences]
        base = [_length(sequence) - 1 for sequence in sequences]
        if self._sharpen == "fitted":
            self._record.begin(
                [None if g else Lane(s.request_id, s.seed, b) for s, b, g in zip(sequences, base, greedy, strict=True)]
            )
        temperatures = [[sequence.temperature or 1.0] for sequence in sequences]
        return _Lanes(
            sequences=sequences,
            windows=windows,
            table=torch.tensor([req.kv.req_pool_idx for req in reqs], dtype=torch.int64, device=device),
            base=torch.tensor(base, dtype=torch.int64),
            seeds=torch.tensor([sequence.seed for sequence in sequences], dtype=torch.int64, device=device),
            temperatures=torch.tensor(temperatures, dtype=torch.float32, device=device),
            is_greedy=greedy,
            greedy=torch.tensor(greedy, device=device),
        )

    def _catch_up(self, lanes: _Lanes) -> Tensor:
        """Show the model all that it has not seen. Returns the logits after the last committed tokens."""
        starts = [
            min(self._seen[sequence.request_id].cached, last)
            for sequence, last in zip(lanes.sequences, lanes.base.tolist(), strict=True)
        ]
        texts = [_text(sequence, start) for sequence, start in zip(lanes.sequences, starts, strict=True)]
        logits_BV = self._forward.after(texts, lanes.table, starts)
        for sequence in lanes.sequences:
            self._seen[sequence.request_id].cached = _length(sequence)
        return logits_BV

    def _step(self, tokens_B: Tensor, lanes: _Lanes, depth: int) -> Tensor:
        """Logits after the draft tokens `tokens_B`, the depth-th of their requests."""
        count = len(tokens_B)
        return self._forward.logits(tokens_B, lanes.table[:count], lanes.base[:count] + depth)

    def _sample(self, logits_BV: Tensor, lanes: _Lanes, depth: int) -> Tensor:
        """int64 [B]"""
        count = len(logits_BV)
        if all(lanes.is_greedy[:count]):
            return logits_BV.argmax(dim=1)
        logq_BV = draft_sampling.log_probabilities(logits_BV, lanes.temperatures[:count])
        if self._sharpen == "fitted":
            self._record.add(*draft_sampling.likeliest(logq_BV))
        return draft_sampling.draw(
            logq_BV,
            beta=self.beta,
            seeds_B=lanes.seeds[:count],
            positions_B=(lanes.base[:count] + depth).to(logits_BV.device),
            greedy_B=lanes.greedy[:count],
        )


def _length(sequence: DraftSequence) -> int:
    return len(sequence.prompt_ids) + len(sequence.output_ids)


def _text(sequence: DraftSequence, start: int) -> list[int]:
    """Tokens of prompt and output from position `start` on."""
    prompt = len(sequence.prompt_ids)
    if start >= prompt:
        return sequence.output_ids[start - prompt :]
    return [*sequence.prompt_ids[start:], *sequence.output_ids]
