"""Draft models with a mistake each, and some that sample at other temperatures. Engines load them by import path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec
from torch import Tensor

from specactor.rollout.sglang import rank_calls
from specactor.rollout.sglang.draft_runner import DraftBatch, DraftRunner, DraftText
from specactor.rollout.sglang.model_drafter import ModelDrafter
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.registry import Filler
from specactor.rollout.speculation.speculator import Speculator
from tests.rollout.speculation.forced import Mixing

KV_BYTES = "probe.kv_bytes"


def _kv_bytes(rank: Any, _: bytes) -> bytes:
    """(bytes of one token's keys and values by which SGLang makes pools, what the target's and the draft model's
    take)"""

    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    def taken(runner: Any) -> int:
        pool = runner.token_to_kv_pool
        return sum(int(buffer[0].nbytes) for buffer in (*pool.k_buffer, *pool.v_buffer))

    runner = rank._scheduler.tp_worker.model_runner
    cell = create_memory_pool_configurator(runner.kv_cache_configurator)._cell_size
    return msgspec.json.encode([cell, taken(runner), sum(map(taken, rank.draft_worker._draft_model_runners()))])


rank_calls.RANK_CALLS[KV_BYTES] = _kv_bytes


class SharedRunner(DraftRunner):
    draft_temperature = 1.0
    few_tokens = 3  # texts of tests are short, and prefilled all the same


class GreedyRunner(DraftRunner):
    draft_temperature = 1e-6


class Shared(ModelDrafter):
    """Right: a model equal to the target drafts what the target emits."""

    runner_type = SharedRunner


class InRows(Shared):
    """Right: nothing is prefilled."""

    class runner_type(SharedRunner):  # noqa: N801
        prefill_tokens = 0


class Greedy(ModelDrafter):
    """Right: the likeliest tokens."""

    runner_type = GreedyRunner


class GivesThemToOthers(Shared):
    """Each draft is that of the next request that asked for one."""

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        made = super().propose(sequences, windows)
        drafts = [draft for draft, window in zip(made, windows, strict=True) if window]
        turned = iter([*drafts[1:], *drafts[:1]])
        return [next(turned)[:window] if window else [] for window in windows]


def mixing() -> Filler:
    """The next speculator is `Mixing`, and the drafter that comes after this one drafts late."""
    right = Speculator.__init__

    def made(self: Speculator, *arguments: Any, **named: Any) -> None:
        Speculator.__init__ = right  # type: ignore[method-assign]
        right(self, *arguments, **named)
        self.__class__ = Mixing

    Speculator.__init__ = made  # type: ignore[method-assign]
    return Filler()


class Rests(Shared):
    """Right: every third request of every round is not drafted for, each time another one."""

    rounds = 0

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        self.rounds += 1
        kept = [0 if (i + self.rounds) % 3 == 0 else window for i, window in enumerate(windows)]
        return super().propose(sequences, kept)


class ReadsSlowly(Rests):
    """Right: and so do those whose texts it has not read yet."""

    class runner_type(SharedRunner):  # noqa: N801
        prefill_tokens = 16


class ReadsThoseOfOthers(Shared):
    """Texts of a prefill read each other's keys."""

    class runner_type(SharedRunner):  # noqa: N801
        def _prefill_batch(self, parts: Sequence[tuple[DraftText, int, int]]) -> Any:
            batch = super()._prefill_batch(parts)
            batch.req_pool_indices = batch.req_pool_indices.roll(5)  # neighbours are of one group, and share keys
            return batch


class ReadsTooFar(Shared):
    """What did not fit in a prefill counts as read."""

    class runner_type(SharedRunner):  # noqa: N801
        prefill_tokens = 16

        def prefill(self, texts: Sequence[DraftText]) -> None:
            super().prefill(texts)
            for text in texts:
                text.cache.cached = text.length - 1


class SkipsTheFirstToken(Shared):
    """The prompt is shown from its second token on."""

    def open(self, sequence: DraftSequence) -> None:
        super().open(sequence)
        self._caches[sequence.request_id].cached = 1


class SeesTheLastTokenAlone(Shared):
    """Of what was emitted only the last token is shown, so an accepted last draft token never is."""

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        cache = self._caches[sequence.request_id]
        began = cache.cached > 0
        super().commit(sequence, tokens)
        if began:
            cache.cached = len(sequence.prompt_ids) + len(sequence.output_ids) - 1


class NextNoiseRunner(SharedRunner):
    """Noise of the position after."""

    def _sample(self, logits_BV: Tensor, batch: DraftBatch, depth: int) -> Tensor:
        return super()._sample(logits_BV, batch, depth + 1)


class TakesTheNextNoise(Shared):
    runner_type = NextNoiseRunner


class ErringRunner(SharedRunner):
    """Right but for the token after every fourth position."""

    def _sample(self, logits_BV: Tensor, batch: DraftBatch, depth: int) -> Tensor:
        tokens_B = super()._sample(logits_BV, batch, depth)
        wrong_B = batch.base.plus(depth, len(tokens_B)).host % 4 == 3
        return tokens_B.where(~wrong_B.to(tokens_B.device), (tokens_B + 1) % logits_BV.shape[1])


class Errs(Shared):
    """Its drafts are rejected at every fourth position; it rests in the round after."""

    runner_type = ErringRunner

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        last = [len(s.prompt_ids) + len(s.output_ids) - 1 for s in sequences]
        kept = [0 if at % 4 == 0 else window for at, window in zip(last, windows, strict=True)]
        return super().propose(sequences, kept)


class ErrsAndKeeps(Errs):
    """Keys and values of rejected draft tokens count as those of the tokens that were emitted in their place."""

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        cache = self._caches[sequence.request_id]
        if cache.fed:
            cache.fed = list(tokens[: len(cache.fed)])
        super().commit(sequence, tokens)


def fail_to_draft(rank: Any, payload: bytes) -> bytes:
    """Rank call: on these ranks (JSON) the draft model raises before every pass."""

    def fail(*_: Any) -> NoReturn:
        raise MemoryError("no memory for the pass")

    if rank.tp_rank in json.loads(payload):
        rank.draft_worker.speculator.drafters["model"].propose = fail
    return b""
