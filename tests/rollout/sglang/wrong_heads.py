"""EAGLE-3 heads with a mistake each, and right ones at the target's own temperature. Engines import them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from torch import Tensor

from specactor.rollout.sglang import rank_calls
from specactor.rollout.sglang.draft_runner import DraftBatch, DraftRunner, DraftText, Positions
from specactor.rollout.sglang.head_runner import HeadRunner, TargetStates
from specactor.rollout.sglang.model_drafter import ModelDrafter
from tests.rollout.sglang import probes  # noqa: F401 - its rank calls
from tests.rollout.sglang.wrong_model_drafters import Errs, ErrsAndKeeps, Rests

RECORDED = "heads.recorded"


class SharedRunner(HeadRunner):
    draft_temperature = 1.0


class Shared(ModelDrafter):
    """Right: a head that knows its target drafts what the target emits."""

    head_runner_type = SharedRunner


class HeadRests(Rests):
    """Right: every third request of every round is not drafted for, each time another one."""

    head_runner_type = SharedRunner


_recorded: list[tuple[list[int], list[int], list[list[float]]]] = []


class RecordingRunner(SharedRunner):
    """Right; keeps texts, drafts and the logits that they were sampled from."""

    def draft(self, texts: Sequence[DraftText]) -> list[list[int]]:
        self._seen = list[Tensor]()
        order = sorted(range(len(texts)), key=lambda i: -texts[i].window)
        drafts = super().draft(texts)
        for b, i in enumerate(order):
            logits = [seen[b].tolist() for seen in self._seen[: texts[i].window]]
            _recorded.append(([*texts[i].prompt_ids, *texts[i].output_ids], drafts[i], logits))
        return drafts

    def _sample(self, logits_BV: Tensor, batch: DraftBatch, depth: int) -> Tensor:
        self._seen.append(logits_BV.nan_to_num(neginf=-1e30))
        return super()._sample(logits_BV, batch, depth)


class Recording(Shared):
    head_runner_type = RecordingRunner


def _take(_: Any, __: bytes) -> bytes:
    taken = msgspec.msgpack.encode(_recorded)
    _recorded.clear()
    return taken


rank_calls.RANK_CALLS[RECORDED] = _take


class StaleRunner(SharedRunner):
    """Reads the target's states as they were when it drafted last: none of what was verified since."""

    _snapshot: Tensor | None = None

    def __init__(self, runner: Any, states: TargetStates) -> None:
        super().__init__(runner, states)
        states._states_SF.zero_()  # or those of the same requests, run before, lie at the same slots

    def _catch_up(self, batch: DraftBatch) -> Tensor:
        now = self._states._states_SF
        fresh, kept = now.clone(), self._snapshot
        if kept is not None:
            now.copy_(kept)
        logits_BV = super()._catch_up(batch)
        now.copy_(fresh)
        self._snapshot = fresh
        return logits_BV


class Stale(Shared):
    head_runner_type = StaleRunner


class _OfTheTokenItself:
    def __init__(self, states: TargetStates) -> None:
        self._of = states

    def of(self, table_R: Tensor, positions_R: Tensor) -> Tensor:
        return self._of.of(table_R, positions_R + 1)


class ShiftedRunner(SharedRunner):
    """Reads the target's states at each token, and not at the one before it."""

    def __init__(self, runner: Any, states: TargetStates) -> None:
        super().__init__(runner, _OfTheTokenItself(states))  # type: ignore[arg-type]


class Shifted(Shared):
    head_runner_type = ShiftedRunner


class SkippingRunner(SharedRunner):
    """Drafts are a position further than they are."""

    def _batch(self, tokens_R: Tensor, table_R: Tensor, positions: Positions) -> Any:
        batch = super()._batch(tokens_R, table_R, positions)
        if self._own_BH is not None:
            batch.positions = batch.positions + 1
        return batch


class Skipping(Shared):
    head_runner_type = SkippingRunner


class UnwrittenRunner(SharedRunner):
    """Leaves no keys of the tokens before the last that it is shown."""

    def _write_keys(self, batch: DraftBatch) -> None:
        for text in batch.texts:
            text.cache.cached = text.length - 1


class Unwritten(Shared):
    head_runner_type = UnwrittenRunner


class KeysAloneRunner(SharedRunner):
    """Right: reads the last token of a text in a pass of its own, also of few."""

    few_rows = 0


class KeysAlone(Shared):
    head_runner_type = KeysAloneRunner


class OwnStatesRunner(SharedRunner):
    """Drafts from the states that it began with, and not from its own."""

    def _logits(
        self, tokens_R: Tensor, table_R: Tensor, positions: Positions, wanted_B: Tensor | None = None
    ) -> Tensor:
        before = self._own_BH
        logits_BV = super()._logits(tokens_R, table_R, positions, wanted_B)
        if before is not None:
            self._own_BH = before
        return logits_BV


class OwnStates(Shared):
    head_runner_type = OwnStatesRunner


class UnreadRunner(SharedRunner):
    """Its graphs read the hidden states of the batch before."""

    def _replayed(self, batch: Any) -> Tensor | None:
        self._passed_RH = self._states.own_RH[: batch.batch_size]
        return DraftRunner._replayed(self, batch)


class Unread(Shared):
    head_runner_type = UnreadRunner


def _layers(rank: Any, payload: bytes) -> bytes:
    """From now on the target gives its states before these layers. Answers those before."""
    model = rank._scheduler.tp_worker.model_runner.model.model
    before, model.layers_to_capture = model.layers_to_capture, msgspec.json.decode(payload)
    return msgspec.json.encode(before)


rank_calls.RANK_CALLS["heads.layers"] = _layers


class ErringRunner(SharedRunner):
    """Right but for the token after every fourth position."""

    def _sample(self, logits_BV: Tensor, batch: DraftBatch, depth: int) -> Tensor:
        tokens_B = super()._sample(logits_BV, batch, depth)
        wrong_B = batch.base.plus(depth, len(tokens_B)).host % 4 == 3
        return tokens_B.where(~wrong_B.to(tokens_B.device), (tokens_B + 1) % logits_BV.shape[1])


class HeadErrs(Errs):
    head_runner_type = ErringRunner


class KeepingRunner(ErringRunner):
    keeps_drafts = True


class HeadErrsAndKeeps(ErrsAndKeeps):
    """Keys of rejected draft tokens count as those of the tokens that were emitted in their place."""

    head_runner_type = KeepingRunner


class SharedSlotsRunner(SharedRunner):
    """Keys lie at the slots of the tokens before theirs, as SGLang's own worker has them: at the last token of a
    prompt, all requests of the prompt write over each other's."""

    def __init__(self, runner: Any, states: TargetStates) -> None:
        super().__init__(runner, states)
        runner.req_to_token_pool.req_to_token = states._table


class SharedSlots(Shared):
    head_runner_type = SharedSlotsRunner

    def stop(self) -> None:
        table = self._runner._states._table  # type: ignore[attr-defined]
        self._runner._runner.req_to_token_pool.req_to_token = table[:, 1:]
