"""What tests look at and change inside an engine, as rank calls; engines get them by loading a drafter of this file."""

from __future__ import annotations

import importlib
import json
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers import sampler
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch

from specactor.rollout.sglang import overlap, responses, verify_worker
from specactor.rollout.sglang.overlap import Loop
from specactor.rollout.sglang.rank_calls import RANK_CALLS
from specactor.rollout.sglang.verify_batch import num_cached
from specactor.rollout.sglang.verify_worker import Worker
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.speculator import Speculator
from tests.rollout.sglang.drafters import HalfRight, Memory

_texts: dict[tuple[tuple[int, ...], int], list[int]] = {}
_seen = {"ahead": 0, "retracted": 0, "under_way": 0, "chunked": 0, "cached": 0, "longest_prefill": 0, "running": 0}
_rounds: list[tuple[bool, int]] = []
_undo: list[Callable[[], None]] = []


class Right(Memory):
    """Right about all that any of these drafters saw before."""

    name = "right"

    def __init__(self) -> None:
        self._texts = _texts


class Learning(Right):
    """Forgets all, and learns anew."""

    name = "learning"

    def __init__(self) -> None:
        _texts.clear()
        super().__init__()


class Half(HalfRight):
    name = "half"

    def __init__(self) -> None:
        self._texts = _texts


class Slow(Half):
    """Gives a test time to come in between."""

    name = "slow"
    pause_s = 0.1

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        time.sleep(self.pause_s)
        return super().propose(sequences, windows)


def call(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Registers function(context, argument), both ways JSON, as the rank call probe.NAME."""

    def answer(context: Any, payload: bytes) -> bytes:
        return json.dumps(function(context, json.loads(payload or b"null"))).encode()

    RANK_CALLS[f"probe.{function.__name__}"] = answer
    return function


@call
def seen(context: Any, _: object) -> dict[str, int]:
    """Since the last call: requests retracted, those of them while a round was under way, prefills of a part of a
    prompt, tokens found in the prefix cache, tokens of the longest prefill of one request, most requests that SGLang
    counts as running while a round is handed out."""
    counts = dict(_seen)
    for name in _seen:
        _seen[name] = 0
    return counts


@call
def free(context: Any, _: object) -> list[int]:
    """Slots of the KV pool, and rows of the page table, that nothing uses."""
    scheduler = context._scheduler
    return [scheduler.token_to_kv_pool_allocator.available_size(), len(scheduler.req_to_token_pool.free_slots)]


@call
def lengths(context: Any, _: object) -> list[int]:
    """Tokens that the running requests have emitted."""
    return [len(req.output_ids) for req in context._scheduler.running_batch.reqs]


@call
def change_weights(context: Any, _: object) -> list[int]:
    """Another policy; a second call brings the first one back. Returns `lengths` at the change."""
    with torch.no_grad():
        context.model.lm_head.weight.neg_()
    return lengths(context, None)


@call
def changes_told(context: Any, _: object) -> list[int]:
    """Return how often drafters hear of another policy in a flush, and in an update of weights, which flushes, too:
    first."""
    speculator, told = context.draft_worker.speculator, [0]

    def count() -> None:
        assert not context.draft_worker._running
        told[-1] += 1

    speculator.policy_changed = count
    context.flushed()
    told.append(0)
    context.draft_worker._running["left"] = None
    context.draft_worker._close = context.draft_worker._running.pop
    context.begin_weight_update()
    context.end_weight_update()
    context.flush_cache()
    del speculator.policy_changed, context.draft_worker._close
    return told


@call
def change_weights_at(context: Any, length: int) -> None:
    """Between two rounds of plain decoding, as soon as the only request has emitted `length` tokens."""
    right = Worker.forward_batch_generation

    def watched(worker: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
        if batch.forward_mode.is_decode() and _emitted(batch) == length:
            heal(context, None)
            change_weights(context, None)
        return right(worker, batch, *arguments, **named)

    _patch(Worker, "forward_batch_generation", watched)


def _emitted(batch: Any) -> int:
    """Tokens of the first request, that of a round under way included."""
    cached = int(batch.seq_lens_cpu[0]) - batch.spec_algorithm.is_none()
    return cached + 1 - len(batch.reqs[0].origin_input_ids)


@call
def slow_rounds(context: Any, _: object) -> None:
    """Plain ones, so that a test has time to come in between."""
    right = Worker._plain_round

    def slow(worker: Any, *arguments: Any) -> Any:
        time.sleep(0.03)
        return right(worker, *arguments)

    _patch(Worker, "_plain_round", slow)


@call
def abort_at(context: Any, length: int) -> None:
    """Every request, in the round that begins when it has emitted that many tokens or more."""
    right = Worker.forward_batch_generation

    def watched(worker: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
        for req in batch.reqs:
            if len(req.output_ids) >= length:
                req.to_finish = FINISH_ABORT()
        return right(worker, batch, *arguments, **named)

    _patch(Worker, "forward_batch_generation", watched)


@call
def triton_rows(context: Any, _: object) -> list[int]:
    """[rows that may run through Triton's attention, as SGLang makes it for this engine; requests that may run; whether
    it has a mask for verifications of SGLang's kind]."""
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup as setup

    runner = context._scheduler.tp_worker.model_runner
    before, chosen = dict(vars(runner)), setup.attention_backends
    setup.attention_backends = lambda: ("triton", "triton")
    try:
        runner.init_attention_backends()
        rows = len(runner.attn_backend.kv_indptr) - 1
        runner.attn_backend.init_cuda_graph_state(1, 1)
        masks = runner.attn_backend._verify_mask is not None
    finally:
        setup.attention_backends = chosen
        vars(runner).update(before)
    return [rows, runner.req_to_token_pool.size, masks]


@call
def overlap_rounds(context: Any, on: bool) -> int:
    """From now on, or not. Returns the rounds that were launched before the one before was handed out, since the last
    call."""
    context.draft_worker.overlaps = on
    count: int = _seen["ahead"]
    _seen["ahead"] = 0
    return count


@call
def promise_plain_rounds(context: Any, rounds: int) -> None:
    """After each round that was decided; `rounds_of_requests` then says which rounds there were."""
    drafts, plain_round = Worker._drafts, Worker._plain_round

    def decided(worker: Any, reqs: Any, running: Any) -> Any:
        _rounds.append((True, len(reqs)))
        return drafts(worker, reqs, running)

    def plain(worker: Any, batch: Any, *arguments: Any) -> Any:
        _rounds.append((False, len(batch.reqs)))
        return plain_round(worker, batch, *arguments)

    _rounds.clear()
    _patch(Worker, "_drafts", decided)
    _patch(Worker, "_plain_round", plain)
    _patch(Speculator, "plain_rounds_ahead", property(lambda _: rounds))


@call
def rounds_of_requests(context: Any, _: object) -> list[tuple[bool, int]]:
    """Of each round, whether it was decided what to draft, and for how many requests."""
    return _rounds


@call
def heal(context: Any, _: object) -> None:
    """Undo the wrong versions."""
    while _undo:
        _undo.pop()()


@call
def break_with(context: Any, name: str) -> None:
    """Put a wrong version of this file in place of the right one."""
    WRONG[name]()


def _patch(owner: Any, name: str, wrong: Any) -> None:
    kept = vars(owner)[name]
    setattr(owner, name, wrong)
    _undo.append(lambda: setattr(owner, name, kept))


def _original(owner: Any, name: str) -> Any:
    """What the plugin has wrapped."""
    return getattr(owner, name).__wrapped__


def stops_by_the_round() -> None:
    """SGLang's own search for stop strings."""
    own = _original(Req, "update_finish_state")

    def wrong(req: Any, new_tokens: int = 1) -> None:
        if req.sampling_params.stop_strs:
            req.tokenizer = responses._text()
        own(req, new_tokens)

    _patch(Req, "update_finish_state", wrong)


def experts_of_the_row_after() -> None:
    """As if slots and rows were numbered differently."""
    capturer = importlib.import_module("sglang.srt.state_capturer.base").BaseTopkCapturer
    right = capturer.on_forward_end

    def wrong(self: Any, forward_batch: Any, *arguments: Any, **named: Any) -> Any:
        if forward_batch.forward_mode.is_decode():
            rows = len(forward_batch.out_cache_loc)
            self.device_cache.buffer[:rows] = self.device_cache.buffer[:rows].roll(1, dims=0)
        return right(self, forward_batch, *arguments, **named)

    _patch(capturer, "on_forward_end", wrong)


def forgets_beginnings() -> None:
    """What a request brings along of its response counts as prompt."""
    _patch(responses, "begun_of", lambda _: array("q"))


def aborts_without_a_look() -> None:
    """SGLang's own: what the last round of an aborted request emits may go past its end."""
    _patch(Req, "update_finish_state", _original(Req, "update_finish_state"))


def goes_on_before_drafts() -> None:
    """A round with drafts is prepared while a plain one is under way."""
    _patch(Loop, "goes_on", lambda loop, batch: loop._worker.overlaps and batch.spec_algorithm.is_none())


def drafts_from_what_was_handed_out() -> None:
    """A round with drafts begins where SGLang's requests end, though one is under way."""
    right = verify_worker.spread

    def wrong(batch: Any, rows: Any, **named: Any) -> None:
        named["last_tokens"] = [req.output_ids[-1] for req in batch.reqs]
        right(batch, rows, **named | {"cached": [*map(num_cached, batch.reqs)]})

    _patch(verify_worker, "spread", wrong)


def verifies_for_the_ended() -> None:
    """A round with drafts is launched before it is known who goes on."""
    _patch(Worker, "may_end", lambda _: False)


def goes_on_in_a_full_pool() -> None:
    """A round is launched ahead though the next one may have to throw requests out."""
    right = Loop.goes_on

    def wrong(loop: Any, batch: Any) -> bool:
        batch.check_decode_mem = lambda: True
        try:
            return right(loop, batch)
        finally:
            del batch.check_decode_mem

    _patch(Loop, "goes_on", wrong)


def looks_at_the_ended() -> None:
    """Requests that have ended get the token of the round that was launched before that."""
    finish = Loop.finish

    def wrong(loop: Any) -> None:
        scheduler = loop._scheduler
        kept = scheduler.batch_result_processor
        scheduler.batch_result_processor = replace(kept, enable_overlap=False)
        try:
            finish(loop)
        finally:
            scheduler.batch_result_processor = kept

    _patch(Loop, "finish", wrong)


def keeps_keys_under_way() -> None:
    """SGLang's own: the last token of a response is in the prefix cache or is not, as its end was seen."""
    _patch(Worker, "prepare_for_kv_cache_release", lambda worker, req: None)


def reads_tokens_of_the_host() -> None:
    """Those of the round before the one that is under way."""
    right = Worker._plain_round

    def wrong(worker: Any, batch: Any, *arguments: Any) -> Any:
        batch.input_ids = None
        return right(worker, batch, *arguments)

    _patch(Worker, "_plain_round", wrong)


def messages_do_not_wait() -> None:
    _patch(overlap, "interrupts", lambda _: False)


def noise_begins_anew() -> None:
    """A request that goes on is sampled with the noise of a response that begins."""
    prefill, sample = Worker._prefill, sampler.Sampler._sample_from_probs
    begun: dict[int, int] = {}

    def noted(worker: Any, batch: Any, *arguments: Any) -> Any:
        begun.update({req.sampling_params.sampling_seed: len(responses.begun_of(req)) for req in batch.reqs})
        return prefill(worker, batch, *arguments)

    def wrong(own: Any, probs: Any, info: Any, positions: Any, simple: bool) -> Any:
        shift = torch.tensor([begun[int(seed)] for seed in info.sampling_seed])
        return sample(own, probs, info, positions - shift, simple)

    _patch(Worker, "_prefill", noted)
    _patch(sampler.Sampler, "_sample_from_probs", wrong)


WRONG = {
    wrong.__name__: wrong
    for wrong in (
        stops_by_the_round,
        experts_of_the_row_after,
        forgets_beginnings,
        noise_begins_anew,
        aborts_without_a_look,
        goes_on_before_drafts,
        drafts_from_what_was_handed_out,
        verifies_for_the_ended,
        goes_on_in_a_full_pool,
        looks_at_the_ended,
        keeps_keys_under_way,
        reads_tokens_of_the_host,
        messages_do_not_wait,
    )
}


def _count() -> None:
    retract, extend = ScheduleBatch.retract_decode, ScheduleBatch.prepare_for_extend
    plain_round, step, finish, loops = Worker._plain_round, Loop.step, Loop.finish, set[Loop]()

    def noted(loop: Loop) -> Any:
        loops.add(loop)
        under_way = bool(loop._under_way)
        batch = step(loop)
        if under_way and batch is not None and batch.forward_mode.is_decode():
            _seen["ahead"] += not batch.spec_algorithm.is_none()  # plain ones are counted below
        return batch

    def finished(loop: Loop) -> None:
        if loop._under_way:
            _seen["running"] = max(_seen["running"], len(loop._scheduler.running_batch.reqs))
        finish(loop)

    def retract_decode(batch: Any) -> Any:
        result = retract(batch)
        _seen["retracted"] += len(result[0])
        _seen["under_way"] += len(result[0]) * any(loop._under_way for loop in loops)
        return result

    def prepare_for_extend(batch: Any) -> Any:
        result = extend(batch)
        _seen["chunked"] += batch.chunked_req is not None
        _seen["cached"] += sum(batch.prefix_lens)
        _seen["longest_prefill"] = max(_seen["longest_prefill"], *batch.extend_lens)
        return result

    def counted(worker: Any, batch: Any, *arguments: Any) -> Any:
        _seen["ahead"] += batch.input_ids is not None
        return plain_round(worker, batch, *arguments)

    Loop.step, Loop.finish = noted, finished  # type: ignore[method-assign]
    Worker._plain_round = counted  # type: ignore[assignment, method-assign]
    ScheduleBatch.retract_decode = retract_decode
    ScheduleBatch.prepare_for_extend = prepare_for_extend


_count()
