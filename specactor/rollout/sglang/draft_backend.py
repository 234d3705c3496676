"""The draft model in a process without a target: continues the texts of many engines' requests, all in one batch.

Keys and values lie in a pool of its own, of bounded size. A pass shows the model what it has not seen of each text (a
token per text when all goes well) and samples the next token with the target's own noise, as the drafter `model` does
inside an engine (`draft_model`). A rollback is a shorter length.

Invariants:
- the first `cached` tokens of a text, counted from position 0, have keys and values that were computed from just these
  tokens; what lies behind is overwritten before it is read;
- what is answered for a text depends on the text, its seed and temperature, and beta: not on the other texts of the
  call, nor on what was evicted, rolled back or forgotten before;
- beta is fitted to tokens that the target emitted, and never to the draft tokens ahead of them.

Shape legend: B texts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from specactor.rollout.decoupled.continuer import Lane
from specactor.rollout.planning.hindsight import Hindsight
from specactor.rollout.planning.sharpening import Sharpening
from specactor.rollout.sglang import draft_sampling
from specactor.rollout.sglang.draft_runner import DraftForward, common
from specactor.rollout.sglang.draft_slots import BLOCK_TOKENS, Slots
from specactor.rollout.sglang.model_drafter import NEW_WEIGHTS_WEIGHT
from specactor.weights_sync import draft_receiver
from specactor.weights_sync.messages import DraftWeights

Sharpen = Literal["fitted", "shared", "greedy"]


@dataclass(slots=True, kw_only=True)
class _Seen:
    """What the model has seen of a text."""

    prompt_ids: Sequence[int]
    output: int = 0
    """Tokens of the output in the last call."""
    cached: int = 0
    fed: list[int] = field(default_factory=list)
    """Draft tokens that it saw after those; seen for good as far as the output goes on with the same."""


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Texts that have room in the pool together."""

    index: list[int] = field(default_factory=list)
    """Of their lanes in the call."""
    lanes: list[Lane] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Of the page table."""
    keys: set[Hashable] = field(default_factory=set)


class ModelContinuer:
    """A `Continuer`."""

    def __init__(self, runner: Any, *, steps: int = 1, sharpen: Sharpen = "fitted") -> None:
        """Args: SGLang's runner from `draft_runner.load_alone`; draft tokens per text and call."""
        self.version = 0
        self._forward = DraftForward(runner)
        self._slots = Slots(num_slots=self._forward.num_slots, num_rows=self._forward.num_rows)
        self._model: torch.nn.Module = runner.model
        self._steps = steps
        self._sharpen = sharpen
        self._seen: dict[Hashable, _Seen] = {}
        self._hindsight = Hindsight()
        self.sharpening = Sharpening()

    @property
    def beta(self) -> float:
        """Factor of the log-probabilities."""
        return {"fitted": self.sharpening.beta, "shared": 1.0, "greedy": math.inf}[self._sharpen]

    @property
    def cached_tokens(self) -> int:
        """Tokens of all texts whose keys and values are held."""
        return sum(seen.cached for seen in self._seen.values())

    @property
    def max_tokens(self) -> int:
        """Tokens of texts for which the pool has room in any case."""
        return max(1, self._forward.num_slots - self._forward.num_rows * BLOCK_TOKENS)

    def renew(self, weights: DraftWeights) -> str:
        """See `continuer.Renewable`. Texts are shown to the new weights from their beginning."""
        problem = draft_receiver.load(self._model, weights)
        if not problem:
            self.version = weights.draft_version
            self.sharpening.new_version(NEW_WEIGHTS_WEIGHT)
            for seen in self._seen.values():
                seen.cached, seen.fed = 0, []
        return problem

    def sleep(self) -> None:
        """See `continuer.Sleeper`."""
        self._forward.leave_device()

    def wake(self) -> None:
        """See `continuer.Sleeper`."""
        self._forward.take_device()

    def forget(self, key: Hashable) -> None:
        self._slots.free(key)
        self._seen.pop(key, None)
        self._hindsight.forget(key)

    @torch.no_grad()
    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        """`steps` tokens for each lane, fewer where the model's context ends; none for a text that is too long for the
        context or the whole pool."""
        for lane in lanes:
            self._meet(lane)
        self._hindsight.teach(self.sharpening)
        answers: list[list[int]] = [[] for _ in lanes]
        for batch in self._batches(lanes):
            with self._forward.running():
                drafts = self._continue(batch)
            for i, draft in zip(batch.index, drafts, strict=True):
                answers[i] = draft
        return answers

    def _meet(self, lane: Lane) -> None:
        """Find out what is still seen of a text that may have changed since the last call."""
        seen = self._seen.get(lane.key)
        if seen is None or not _same(seen.prompt_ids, lane.prompt_ids):
            self._hindsight.forget(lane.key)
            seen = self._seen[lane.key] = _Seen(prompt_ids=lane.prompt_ids)
        agreed = min(lane.agreed, seen.output)
        if agreed == seen.output:
            agreed += common(seen.fed, lane.tokens[seen.output :])
            at_end = seen.cached == len(lane.prompt_ids) + seen.output
            seen.cached += agreed - seen.output if at_end else 0
        seen.cached = min(seen.cached, len(lane.prompt_ids) + agreed)
        seen.output, seen.fed = len(lane.tokens), []
        self._hindsight.judge(lane.key, lane.tokens, agreed=agreed, committed=lane.committed)

    def _batches(self, lanes: Sequence[Lane]) -> Iterator[_Batch]:
        """All lanes that have room, in as few batches as the pool allows; a batch is computed before the next."""
        asked = {lane.key for lane in lanes}
        batch = _Batch()
        for i, lane in enumerate(lanes):
            if _length(lane) > self._forward.context_length:
                continue
            row = self._place(lane, asked, batch.keys)
            if row is None and batch.index:
                yield batch
                batch = _Batch()
                row = self._place(lane, asked, batch.keys)
            if row is not None:
                batch.index.append(i)
                batch.lanes.append(lane)
                batch.rows.append(row)
                batch.keys.add(lane.key)
        if batch.index:
            yield batch

    def _place(self, lane: Lane, asked: Collection[Hashable], in_use: Collection[Hashable]) -> int | None:
        """Row of the page table; None where there is no room beside those in use. Of the others, those that are asked
        for are evicted last."""
        tokens = min(_length(lane) + self._steps - 1, self._forward.context_length)
        reserved = self._slots.reserve(lane.key, tokens, in_use=asked)
        if reserved is None:
            reserved = self._slots.reserve(lane.key, tokens, in_use=in_use)
        if reserved is None:
            return None
        for evicted in reserved.evicted:
            del self._seen[evicted]
        for index, block in reserved.new_blocks:
            self._forward.place(reserved.row, index, block)
        return reserved.row

    def _continue(self, batch: _Batch) -> list[list[int]]:
        lengths = [_length(lane) for lane in batch.lanes]
        for lane in batch.lanes:  # a lane of an earlier batch of this call may have evicted it
            if lane.key not in self._seen:
                self._seen[lane.key] = _Seen(prompt_ids=lane.prompt_ids, output=len(lane.tokens))
        states = [self._seen[lane.key] for lane in batch.lanes]
        starts = [min(seen.cached, length - 1) for seen, length in zip(states, lengths, strict=True)]
        texts = [_text(lane, start) for lane, start in zip(batch.lanes, starts, strict=True)]
        table_B = torch.tensor(batch.rows, dtype=torch.int64, device=self._forward.device)
        noise = _Noise.of(batch.lanes, self._forward.device)
        base_B = torch.tensor(lengths, dtype=torch.int64) - 1
        columns = [self._sample(self._forward.after(texts, table_B, starts), batch.lanes, noise, base_B, 0)]
        for seen, length in zip(states, lengths, strict=True):
            seen.cached = length
        for depth in range(1, min(self._steps, self._forward.context_length - max(lengths) + 1)):
            logits_BV = self._forward.logits(columns[-1], table_B, base_B + depth)
            columns.append(self._sample(logits_BV, batch.lanes, noise, base_B, depth))
        drafts: list[list[int]] = torch.stack(columns, dim=1).tolist()
        for seen, draft in zip(states, drafts, strict=True):
            seen.fed = draft[:-1]
        return drafts

    def _sample(self, logits_BV: Tensor, lanes: Sequence[Lane], noise: _Noise, base_B: Tensor, depth: int) -> Tensor:
        """int64 [B]. Args: positions of the texts' last tokens, on the CPU; draft tokens after those."""
        if all(noise.is_greedy):
            return logits_BV.argmax(dim=1)
        logq_BV = draft_sampling.log_probabilities(logits_BV, noise.temperatures)
        if self._sharpen == "fitted":
            self._expect(lanes, noise.is_greedy, depth, *draft_sampling.likeliest(logq_BV))
        return draft_sampling.draw(
            logq_BV,
            beta=self.beta,
            seeds_B=noise.seeds,
            positions_B=(base_B + depth).to(logits_BV.device),
            greedy_B=noise.greedy,
        )

    def _expect(self, lanes: Sequence[Lane], greedy: Sequence[bool], depth: int, logq_BK: Any, tokens_BK: Any) -> None:
        for b, lane in enumerate(lanes):
            if not greedy[b]:
                self._hindsight.expect(
                    lane.key,
                    len(lane.tokens) + depth,
                    seed=lane.seed,
                    position=_length(lane) - 1 + depth,
                    logq_K=logq_BK[b],
                    tokens_K=tokens_BK[b],
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noise:
    """What sampling needs of each text of a batch."""

    is_greedy: list[bool]
    """Texts whose likeliest token is drafted."""
    greedy: Tensor
    """[B], the same."""
    seeds: Tensor
    """[B]"""
    temperatures: Tensor
    """[B, 1]"""

    @classmethod
    def of(cls, lanes: Sequence[Lane], device: torch.device) -> _Noise:
        is_greedy = [lane.temperature == 0 for lane in lanes]
        temperatures = [[lane.temperature or 1.0] for lane in lanes]
        return cls(
            is_greedy=is_greedy,
            greedy=torch.tensor(is_greedy, device=device),
            seeds=torch.tensor([lane.seed for lane in lanes], dtype=torch.int64, device=device),
            temperatures=torch.tensor(temperatures, dtype=torch.float32, device=device),
        )


def _length(lane: Lane) -> int:
    return len(lane.prompt_ids) + len(lane.tokens)


def _text(lane: Lane, start: int) -> list[int]:
    """Tokens of prompt and output from position `start` on."""
    prompt = len(lane.prompt_ids)
    if start >= prompt:
        return list(lane.tokens[start - prompt :])
    return [*lane.prompt_ids[start:], *lane.tokens]


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    return one is other or list(one) == list(other)
