"""The draft model in a run: it learns after a step, its new weights reach whoever drafts, and checkpoints hold it.

Invariants:
1. Every rank calls the same methods with the same values.
2. Tokens, rewards and losses of the policy are those of a run without it.
3. What goes wrong here costs speed: a refresh that fails leaves the weights there are, whoever refuses a push goes on
   with its own and is asked again after the next step. Memory is excepted: torch.OutOfMemoryError in a refresh ends
   the run, since a rank that raises it is missing in the reduction of gradients, where the others wait for it.
4. With `idle`, ranks learn alone, each in a copy of its own, while others roll out; when all are done they take the
   copy that learned most, so outside a rollout all copies are the same.
5. After `save` and `load` it goes on as if it had not stopped; engines and drafter processes that were started anew
   get the version there is.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from specactor.config import Config
from specactor.errors import CheckpointError, PeerFailedError, SpecActorError
from specactor.parallel.collective import Collective
from specactor.trainer.distillation import held_out, init
from specactor.trainer.distillation.budget import Account, Decision, Outlook, decide, time_limit_s
from specactor.trainer.distillation.buffer import Law, Lesson, lesson_from
from specactor.trainer.distillation.history import Drafted, History
from specactor.trainer.distillation.step import Step
from specactor.trainer.distillation.top_k import LawRecorder
from specactor.trainer.distillation.train import DrafterTrainer, Learned, RefreshStats
from specactor.trainer.distillation.watch import Clock
from specactor.weights_sync.draft_sender import DraftSender, num_bytes, push_to_engine
from specactor.weights_sync.messages import DraftWeights
from specactor.weights_sync.sender import TargetEngine

SOON_S = 0.05
"""Of waiting for others, after which a rank learns: the last one to be done does not begin."""
FOLDER = "drafter"
"""In a checkpoint."""


class DrafterProcesses(Protocol):
    """Those of this rank."""

    def want(self, version: int) -> bool: ...

    def renew(self, weights: DraftWeights) -> tuple[list[str], float]: ...

    def oldest_version(self) -> int | None: ...


class _Alone(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did with the draft model while others rolled out."""

    updates: int
    learned: Learned
    problem: str


class Distillation:
    """One per rank, with a copy of the draft model."""

    def __init__(
        self,
        config: Config,
        collective: Collective,
        *,
        recorder: LawRecorder | None,
        vocab_size: int,
        engines: Callable[[], Sequence[TargetEngine]],
        processes: DrafterProcesses,
        note: Callable[[str], None] = lambda text: None,
        device: torch.device | str = "cpu",
        clock: Clock = time.perf_counter,
    ) -> None:
        """Collective. Args: of the policy; this rank's engines that hold a draft model, as of now; its drafter
        processes; what is said to people. Raises ConfigError for a draft model that does not fit the policy."""
        self.config, self.recorder = config.distillation, recorder
        self.history = History()
        self.reason = ""
        """Of the last decision."""
        self._collective = collective
        self._temperature = config.rollout.temperature
        self._timeout_s = config.weights_sync.timeout_s
        self._folder = Path(config.rollout.speculation.draft_model)
        self._engines, self._processes = engines, processes
        self._note, self._clock = note, clock
        self._held: WeakKeyDictionary[TargetEngine, int] = WeakKeyDictionary()
        """Versions that engines took; others hold the weights that they were started with, version 0."""
        self._account = Account()
        self._in_vain_s = 0.0
        """That the last push waited for those who did not answer."""
        self._alone, self._problem = 0, ""
        """Updates that this rank has made alone in this rollout, and why it stopped, if it had to."""
        self._idle_updates, self._settle_s = 0, 0.0
        """Since the last refresh: updates made while others rolled out, and seconds of taking them over."""
        self._stream: torch.cuda.Stream | None = None
        init.quiet()
        model = collective.together("draft model", lambda: init.read_fitting(self._folder, vocab_size, device))
        group = dist.group.WORLD if collective.world > 1 else None
        self.drafter = DrafterTrainer(self.config, model, seed=config.seed, group=group)
        self._sender = DraftSender(getattr(torch, config.model.dtype))

    def meanwhile(self, *, has_engines: bool) -> Callable[[threading.Event], None]:
        """What this rank does while others roll out (`Collective.together`), before all `settle`.

        Args: whether it drives engines. One that does not has lent its device to another's, and does not know when that
        has run dry.
        """
        return self.learn_alone if has_engines else lambda over: None

    def learn_alone(self, over: threading.Event) -> None:
        """While other ranks roll out: learn until it is over, as seen between two micro-batches, between two refreshes
        from at most as many tokens as the buffer holds. Not collective; in another thread than all other calls."""
        most = self.drafter.buffer.num_tokens // self.drafter.tokens_per_update - self._idle_updates
        if most <= 0 or over.wait(SOON_S):
            return
        try:
            with self._own_stream():
                self._alone = self.drafter.learn_alone(over.is_set, max_updates=most).updates
        except (SpecActorError, RuntimeError) as error:
            self._problem = str(error)

    def settle(self) -> None:
        """All ranks take the copy that learned most while others rolled out. Collective."""
        began_s = self._clock()
        own = _Alone(updates=self._alone, learned=self.drafter.learned(), problem=self._problem)
        ranks = self._collective.gather(own, _Alone)
        for rank, of in enumerate(ranks):
            if of.problem:
                self._note(f"distillation.idle: rank {rank} had to stop learning in this rollout: {of.problem}")
        most = max(range(len(ranks)), key=lambda rank: (ranks[rank].updates, not ranks[rank].problem))
        if any(of.updates or of.problem for of in ranks):
            self.drafter.adopt(most, ranks[most].learned)
        self._alone, self._problem = 0, ""
        self._idle_updates += ranks[most].updates
        self._settle_s += self._clock() - began_s

    def refresh(self, step: Step) -> dict[str, float]:
        """After an RL step: remember it, learn if that is worth its time, push. Returns metrics. Collective."""
        began_s, lessons = self._clock(), self._lessons(step)
        self.history.rollout(Drafted.of(step.counts, sum(lesson.response_len for lesson in lessons)))
        fitting, num_cut = self._fitting(lessons)
        others, unseen = held_out.split(fitting) if self.config.refresh == "auto" else (fitting, [])
        self.drafter.buffer.add(others)
        rises, share_s = self.drafter.is_warming_up, self._share_s(step)
        plan = self._plan(step, share_s, self._settle_s + self._clock() - began_s)
        self.reason = plan.reason
        stats, failed = self._learn(plan.limit_s, unseen) if plan.refresh else (None, False)
        self.drafter.buffer.add(unseen)
        refreshed = stats is not None and stats.updates > 0
        if refreshed or self._idle_updates:
            seen = (stats.overlap_before, stats.overlap_after) if stats else (math.nan, math.nan)
            self.history.refreshed(*seen, counts=not rises)
        pushed = self.push()
        if not pushed["drafter/pushed_bytes"]:
            self._account.push_s /= 2
        metrics: dict[str, float] = {
            "drafter/version": self.drafter.version,
            "drafter/refreshed": int(refreshed),
            "drafter/failed": int(failed),
            "drafter/idle_updates": self._idle_updates,
            "drafter/buffer_tokens": self.drafter.buffer.num_tokens,
            "drafter/cut_responses": num_cut,
            "time/refresh_limit_s": plan.limit_s,
            "time/refresh_saves_s": plan.saved_s,
            "time/idle_settle_s": self._settle_s,
        }
        self._account.ended(share_s, self._settle_s + self._clock() - began_s - self._in_vain_s)
        self._idle_updates, self._settle_s = 0, 0.0
        return metrics | pushed | (_of_stats(stats) if stats is not None else {})

    def push(self) -> dict[str, float]:
        """Bring the draft model's version to all that draft with an older one. Collective."""
        began_s, version = self._clock(), self.drafter.version
        behind = [engine for engine in self._engines() if self._held.get(engine, 0) < version]
        wanting = bool(behind) or self._processes.want(version)
        metrics: dict[str, float] = {"drafter/refused": 0, "drafter/pushed_bytes": 0}
        self._in_vain_s = 0.0
        if self._collective.any(wanting) and self._is_sound():
            weights = self._sender.pack(self.drafter.named_weights(), version=version)
            packed_s = self._clock()

            def hand_over() -> tuple[list[str], float]:
                said = [problem for engine in behind if (problem := self._hand(engine, weights))]
                engines_s = self._clock() - packed_s
                refused, processes_s = self._processes.renew(weights)
                return said + refused, engines_s + processes_s

            own = self._collective.together("draft push", hand_over)
            ranks = self._collective.gather(own, tuple[list[str], float])
            problems = [problem for part, _ in ranks for problem in part]
            for problem in problems:
                self._note(f"draft model, version {version}: {problem}. It goes on with the weights that it has.")
            metrics = {"drafter/refused": len(problems), "drafter/pushed_bytes": num_bytes(weights)}
            self._account.push_s = packed_s - began_s + max(spent_s for _, spent_s in ranks)
            self._in_vain_s = self._clock() - began_s - self._account.push_s
        return metrics | {"drafter/oldest_version": self._oldest()}

    def save(self, folder: Path) -> None:
        """Into a checkpoint's folder, unless weights are not finite. Collective; raises CheckpointError where the disk
        fails."""
        own = folder / FOLDER
        if not self._is_sound():
            return  # a run that resumes there begins with the draft model of the config

        def make() -> None:
            if self._collective.rank == 0:
                own.mkdir()

        def write() -> None:
            self.drafter.save(own)

        with _written(own):
            self._collective.together("checkpoint", make)
            if self.config.zero_stage:  # its ranks meet while they save, which they cannot within `together`
                write()
            else:
                self._collective.together("checkpoint", write)

    def load(self, checkpoint: Path) -> None:
        """Of a checkpoint; one of a run without refreshes has nothing, and the draft model starts anew. Collective."""
        folder = checkpoint / FOLDER
        if self._collective.any(not folder.is_dir()):
            self._note(f"{checkpoint} holds no draft model: it starts from {self._folder}")
        elif self.config.zero_stage:
            self.drafter.load(folder)
        else:
            self._collective.together("checkpoint", lambda: self.drafter.load(folder))

    def state(self) -> dict[str, Any]:
        """What a checkpoint's own state keeps."""
        return self.history.state() | self._account.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.history, self._account = History.of(state), Account.of(state)

    def export(self, folder: Path) -> bool:
        """In Hugging Face format, unless weights are not finite; returns whether it was. Collective; raises
        CheckpointError where the disk fails."""
        if not self._is_sound():
            return False
        weights = dict(self.drafter.named_weights())

        def write() -> None:
            if self._collective.rank == 0:
                init.write_model(self.drafter.model, folder, tokenizer=self._folder, weights=weights)

        with _written(folder):
            self._collective.together("draft model export", write)
        return True

    def close(self) -> None:
        self._sender.close()

    def _fitting(self, lessons: Sequence[Lesson]) -> tuple[list[Lesson], int]:
        """(as the buffer keeps them, how many of them were cut)"""
        buffer = self.drafter.buffer
        already = buffer.too_long
        found = buffer.fitting(lessons)
        if buffer.too_long and not already:
            self._note(
                "draft model: responses to prompts of distillation.tokens_per_microbatch "
                f"({self.config.tokens_per_microbatch}) or more are not learned from. Raise it."
            )
        return found

    def _lessons(self, step: Step) -> list[Lesson]:
        laws: list[Law] | list[None] = [None] * len(step.sequences)
        if self.recorder is not None:
            laws = self.recorder.take(step.sequences)
        return [
            lesson_from(sequence, law, version=step.version, reward=reward, temperature=self._temperature)
            for sequence, law, reward in zip(step.sequences, laws, step.rewards, strict=True)
            if sequence.response_len
        ]

    def _share_s(self, step: Step) -> float:
        """Of the step's time, what the refresh may take."""
        lost = self.config.recovery_time_share if self.history.is_lost else 0.0
        return time_limit_s(step.seconds, max(self.config.max_time_share, lost))

    def _plan(self, step: Step, share_s: float, spent_s: float) -> Decision:
        """Rank 0's. Args: what this step's refresh may take, and has taken."""
        usual_s = time_limit_s(step.seconds, self.config.max_time_share)
        now = Outlook(
            gain=self.history.gain,
            refreshes=self.history.refreshes,
            is_warming_up=self.drafter.is_warming_up,
            drafted_s=self.history.share * step.rollout_s,
            limit_s=self._account.limit_s(share_s, spent_s),
            cost_s=max(usual_s, spent_s + self._account.push_s),
            steps_since=self.history.steps_since,
            steps_left=step.steps_left,
        )
        own = decide(self.config.refresh, now, explore_every=self.config.explore_every)
        return self._collective.gather(own, Decision)[0]

    def _learn(self, limit_s: float, unseen: Sequence[Lesson]) -> tuple[RefreshStats | None, bool]:
        """(statistics, whether it failed). Args: responses to see on what it is worth."""
        tokens = self.drafter.tokens_per_update
        judges = held_out.sample(unseen, tokens)
        try:
            stats = self.drafter.refresh(limit_s=limit_s, clock=self._clock, held_out=judges)
        except SpecActorError as error:  # on every rank alike, since what went wrong is a sum over ranks
            self._note(str(error))
            return None, True
        if self.drafter.tokens_per_update < tokens:
            self._note(
                f"draft model: no update of {tokens} tokens fitted {limit_s:.3g} s; the next draws "
                f"{self.drafter.tokens_per_update}. Lower distillation.tokens_per_update, or raise "
                "distillation.max_time_share."
            )
        return stats, False

    def _is_sound(self) -> bool:
        """Whether the weights may be drafted with later; says so if not. Collective."""
        sound = not self._collective.any(not self.drafter.is_finite())
        if not sound:
            self._note("draft model: has weights that are not finite. They are neither pushed, saved nor exported.")
        return sound

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """On a GPU, what a second thread does would queue behind the exchange in which the first one waits for others.
        (The weights were written long before: they have been copied to the host since, to be pushed.)"""
        if self.drafter.device.type != "cuda":
            yield
            return
        torch.cuda.set_device(self.drafter.device)
        self._stream = self._stream or torch.cuda.Stream(self.drafter.device)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()

    def _hand(self, engine: TargetEngine, weights: DraftWeights) -> str:
        problem = push_to_engine(engine, weights, timeout_s=self._timeout_s)
        if not problem:
            self._held[engine] = weights.draft_version
        return problem

    def _oldest(self) -> int:
        own = [self._held.get(engine, 0) for engine in self._engines()]
        of_processes = self._processes.oldest_version()
        own += [] if of_processes is None else [of_processes]
        return min((v for part in self._collective.gather(own, list[int]) for v in part), default=0)


def left_behind(checkpoint: Path, draft_model: str) -> str:
    """What is to be said of a run that resumes there without refreshes, and drafts with `draft_model`, if anything."""
    if not draft_model or not (checkpoint / FOLDER).is_dir():
        return ""
    return (
        f"{checkpoint} holds a draft model that was kept fresh; without refreshes drafts come from {draft_model}. "
        "Set --distillation.refresh to go on with it."
    )


@contextmanager
def _written(what: Path) -> Iterator[None]:
    """Raises CheckpointError, on every rank, where the disk of one fails."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{what}: could not be written: {error}. Free disk space.") from error
    except PeerFailedError as error:
        raise CheckpointError(str(error)) from error


def _of_stats(stats: RefreshStats) -> dict[str, float]:
    if not stats.updates:
        return {"drafter/updates": 0, "drafter/tokens": 0}
    judged = {"drafter/overlap_before": stats.overlap_before, "drafter/overlap_after": stats.overlap_after}
    return {name: value for name, value in judged.items() if not math.isnan(value)} | {
        "drafter/updates": stats.updates,
        "drafter/tokens": stats.tokens,
        "drafter/loss": sum(stats.losses) / len(stats.losses),
        "drafter/law_loss": stats.law_loss,
        "drafter/overlap": stats.overlap,
        "drafter/grad_norm": stats.grad_norm,
    }
