"""A drafter process as its owner sees it. No SGLang here.

Invariants: waits are bounded, and waking never waits; a late answer is heard; `stop` leaves no process, folder, address
or shared memory; it ends with its owner.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import msgspec

from specactor.cpu import sglang as cpu
from specactor.rollout.child_process import ChildDied, ChildProcess
from specactor.rollout.decoupled.spec import FROM_DRAFTER, Ask, DrafterSpec, FromDrafter, State, Work
from specactor.waits import GRACE_S, SIGN_OF_LIFE_S

if TYPE_CHECKING:
    from specactor.weights_sync.messages import DraftWeights


_Answer = TypeVar("_Answer", Work, State)


class DrafterProcess(ChildProcess[FromDrafter]):
    def __init__(self, spec: DrafterSpec) -> None:
        self.spec = spec
        self._renewed_to = 0  # version of the weights that it was given
        self.awake = spec.engine is None  # it was woken, and not asked to sleep since
        self.leaving = False  # it is to be asked to sleep, when it has answered what it was asked before
        self.wake_s = 1.0  # what waking is expected to take, before it was measured
        self._began_s = time.monotonic()
        self._sign: int | None = None  # number of the last call that was for a sign of life
        # Without a GPU a drafter keeps to one core, if there is such a one.
        core = spec.device if not cpu.has_gpu() and spec.device in os.sched_getaffinity(0) else None
        super().__init__(
            "specactor.rollout.decoupled.main:run",
            replace(spec, core=core),
            name=f"drafter {spec.index}",
            answers=FROM_DRAFTER,
            environment=cpu.process_environment((spec.device,)),
            log_file=spec.log_file,
        )

    def wait_ready(self, timeout_s: float | None = None) -> State:
        """Wait until it listens. Raises EngineError after `kill`."""
        if self.started is None:
            super().wait_ready(self.spec.start_timeout_s if timeout_s is None else timeout_s)
        assert self.started is not None
        return self.started

    @property
    def started(self) -> State | None:
        """Return what it said when it listened; one that failed to start is left to `wait_ready`."""
        return self.answer_to_start if isinstance(self.answer_to_start, State) else None

    @property
    def version(self) -> int:
        """Return the version of the weights that it drafts with, as it said last."""
        return self._renewed_to or (self.started.version if self.started is not None else 0)

    def work(self, *, trace: bool, timeout_s: float = GRACE_S) -> Work | None:
        """Return its `DrafterLoop.work`, None if too late: a batch that reads many prompts can take seconds."""
        work = self._ask(Ask("work", trace=trace), Work, timeout_s)
        return work if isinstance(work, Work) else None

    def renew(self, weights: DraftWeights, *, timeout_s: float) -> str:
        """Bring it new weights; return why it did not take them, or ""."""
        renewed = self._ask(Ask("renew", msgspec.json.encode(weights)), State, timeout_s)
        if isinstance(renewed, str):
            return f"drafter {self.spec.index}: {renewed}"
        self._renewed_to = renewed.version
        return f"drafter {self.spec.index}: {renewed.problem}" if renewed.problem else ""

    def wants(self, version: int) -> bool:
        """Return whether it could take this version, and has older weights."""
        return self.alive and self.started is not None and not self._is_silent() and self.version < version

    def can_wake(self) -> bool:
        return not self.awake and self.alive and self.started is not None and not self._is_silent()

    def wake(self) -> None:
        """Wake it, without waiting."""
        self.awake, self.leaving = True, False
        self._ask(Ask("wake"), State, 0.0)

    def sleep(self, *, timeout_s: float) -> bool:
        """Return whether it sleeps in time, or is gone; with 0 it may be `leaving`."""
        deadline = time.monotonic() + timeout_s
        self.awake, self.leaving = False, True
        while self.alive and self._is_silent():  # it has not woken yet
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        self.leaving = False
        if not self.alive:
            return True
        rested = self._ask(Ask("sleep"), State, deadline - time.monotonic())
        if not isinstance(rested, State):
            return not self.alive
        self.wake_s = rested.wake_s or self.wake_s
        return rested.asleep

    def hangs(self, limit_s: float) -> bool:
        """Return whether an answer, or the start, is late by `limit_s`; ask for a sign of life when due."""
        if self.started is None:
            return time.monotonic() - self._began_s > self.spec.start_timeout_s + limit_s
        if not self.unanswered() and self.heard_s() >= SIGN_OF_LIFE_S:
            self._sign = self._tell(Ask("alive"))
        return self.silent_s() > limit_s

    def _is_silent(self) -> bool:
        """Return whether an answer is due. It is asked nothing then, so a process that hangs costs one wait."""
        waited = self.unanswered()
        return not waited <= {self._sign} or self.silent_s() > GRACE_S

    def _ask(self, question: Ask, kind: type[_Answer], timeout_s: float) -> _Answer | str:
        if self.started is None:
            return "it has not started"
        if self._is_silent():
            return "it has not yet answered what it was asked before"
        try:
            answer = self.ask(question, timeout_s)
        except ChildDied:
            return "the process died"
        except TimeoutError as error:
            return str(error)
        return answer if isinstance(answer, kind) else f"unexpected answer {type(answer).__name__}"

    def _tell(self, question: Ask) -> int:
        with self.call(question) as call:
            return call.number
