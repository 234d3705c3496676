"""The scheduler's loop of engines that speculate: a round is launched before SGLang hands out the tokens of the last.

A plain round reads them on the device. One with drafts follows them on the host, where they are looked at as far as
drafts, and whether a request may have ended, ask for.

Invariants: tokens are the same as without overlap; another kind of round, and all but new requests, wait for the one
under way. A request that has ended has at most one more row, in a plain round, whose slot a later owner overwrites, on
one stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specactor.rollout.sglang.verify_worker import Worker
VARIABLE = "SPECACTOR_OVERLAP"
"""Environment variable: 0 where no round is launched ahead (SGLang's argument disable_overlap_schedule)."""


def install(worker_of: Callable[[Any], Worker | None]) -> None:
    """Register the hook. Args: worker_of: of a scheduler, if it speculates."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import DynamicGradMode

    def loop(original: Callable[[Any], None], scheduler: Any) -> None:
        worker = worker_of(scheduler)
        if worker is None:
            original(scheduler)
            return
        with DynamicGradMode():
            Loop(scheduler, worker).run()

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.event_loop_normal", loop, HookType.AROUND)


def interrupts(message: Any) -> bool:
    """Return whether all tokens must have been looked at before this message."""
    from sglang.srt.managers.io_struct import BatchTokenizedGenerateReqInput, TokenizedGenerateReqInput

    return not isinstance(message, TokenizedGenerateReqInput | BatchTokenizedGenerateReqInput)


class Loop:
    def __init__(self, scheduler: Any, worker: Worker) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._under_way: deque[tuple[Any, Any]] = deque()
        """(batch, result) of rounds that were not handed out; two while the older one is."""
        scheduler.result_queue = self._under_way
        # A round's tokens are looked at when requests of it may have ended.
        scheduler.batch_result_processor = replace(scheduler.batch_result_processor, enable_overlap=True)
        worker.meanwhile = lambda: self.finish()  # as it is then
        self._take = scheduler.process_input_requests
        scheduler.process_input_requests = self.take

    def run(self) -> None:
        scheduler = self._scheduler
        while not scheduler.gracefully_exit:
            scheduler.ingest_requests()
            if scheduler._engine_paused:
                scheduler._record_scheduler_state_for_paused_engine()
            else:
                scheduler.last_batch = self.step()

    def take(self, messages: Sequence[Any]) -> None:
        if any(map(interrupts, messages)):  # who pushes weights or aborts finds no round under way
            self.finish()
            self._worker.was_interrupted()
        self._take(messages)

    def step(self) -> Any:
        """Return the batch that runs next, launched, or None."""
        scheduler, last = self._scheduler, self._scheduler.last_batch
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=last)
        scheduler.running_batch = plan.running_batch
        scheduler.cur_batch_for_debug = batch = plan.batch_to_run
        if not batch or not batch.forward_mode.is_decode():
            self.finish()
        if not batch:
            scheduler._sched_idled = True
            scheduler.on_idle()
            return None
        is_plain = batch.spec_algorithm.is_none()
        if self._under_way and is_plain:  # its requests are among those of the round that is under way
            batch.input_ids = scheduler.future_map.output_tokens_buf[batch.req_pool_indices]  # on the device
        result = scheduler.run_batch(batch)
        if not batch.forward_mode.is_decode():
            scheduler.process_batch_result(batch, result)
            return batch
        if is_plain:
            result.copy_done = scheduler.device_module.Event()
            result.copy_to_cpu(return_logprob=batch.return_logprob, return_hidden_states=batch.return_hidden_states)
            self.finish()  # which a round with drafts does itself
        self._under_way.append((batch.copy(), result))
        if not self.goes_on(batch):
            self.finish()
        return batch

    def goes_on(self, batch: Any) -> bool:
        """Return whether the next round can be launched before this one is handed out."""
        if not self._worker.overlaps or self._worker.decodes_plainly() != batch.spec_algorithm.is_none():
            return False
        if batch.spec_algorithm.is_none():
            goes_on = any(not (req.finished() or req.next_output_finishes_by_length()) for req in batch.reqs)
        else:
            goes_on = not self._worker.may_end()
        return bool(goes_on and batch.check_decode_mem())

    def finish(self) -> None:
        """Wait for the round under way, and hand out its tokens."""
        if self._under_way:
            batch, result = self._under_way.popleft()
            result.copy_done.synchronize()
            if batch.spec_algorithm.is_none():
                self._worker.end_plain_round(len(batch.reqs))
            self._scheduler.process_batch_result(batch, result)
