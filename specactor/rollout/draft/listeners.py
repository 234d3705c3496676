"""The drafters of an engine, who hear of its requests at once, or later while nobody asks them for drafts.

To take in a text costs a drafter over text some microseconds per token, which is a tenth of plain decoding where many
requests run. So while decoding is plain it is told nothing, and then only of the prompts that it is asked for: of their
running requests, and of those that have ended since. One that drafts ahead, elsewhere, is told of the requests that it
is asked for alone.

Invariants: when a drafter is asked for a request, it knows all of its text, and the text of all requests with its
prompt that it has not forgotten; a drafter hears of a request in order (open, commit, close) and of each token once;
text that waits is at most `max_tokens`, and the oldest goes first. A drafter that raises loses its drafts, and is not
asked again after `FAILURES` times.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from specactor.rollout.draft.drafter import Drafter, DraftSequence

FAILURES = 3
"""A drafter that raised this often is not asked again."""

_LOG = logging.getLogger(__name__)
_Prompt = tuple[int, ...]


@dataclass(slots=True)
class _Told:
    """What some drafters know of a request."""

    tokens: int
    """Of its output."""
    is_open: bool = False


@dataclass(slots=True)
class _Heard:
    """What drafters know of a request."""

    sequence: DraftSequence
    texts: _Told
    """Drafters over text."""
    ahead: _Told
    """Those that draft ahead."""
    told_others: int
    """Tokens of its output that other drafters know, for whom it is open."""


class Listeners:
    """`on_failure` is called with the name of a drafter that raised."""

    def __init__(
        self, drafters: Sequence[Drafter], *, max_tokens: int, on_failure: Callable[[str], None] = lambda name: None
    ) -> None:
        self._ahead = [drafter for drafter in drafters if drafter.drafts_ahead]
        self._texts = [drafter for drafter in drafters if drafter.drafts_first and not drafter.drafts_ahead]
        self._others = [drafter for drafter in drafters if not (drafter.drafts_first or drafter.drafts_ahead)]
        self._max_tokens = max_tokens
        self._on_failure = on_failure
        self._failures = {drafter.name: 0 for drafter in drafters}
        self._running: dict[str, _Heard] = {}
        self._ended: OrderedDict[_Prompt, list[_Heard]] = OrderedDict()
        self._waiting_tokens = 0
        self.later = False
        """Whether drafters hear of requests later."""

    def works(self, name: str) -> bool:
        return self._failures[name] < FAILURES

    def open(self, sequence: DraftSequence) -> None:
        known = len(sequence.output_ids)
        heard = self._running[sequence.request_id] = _Heard(sequence, _Told(known), _Told(known), known)
        for drafter in self._others:
            self.call(drafter, drafter.open, sequence)
        if not self.later:
            self._tell_ended(sequence.prompt_ids)
            self._tell(heard)
            self._tell_ahead(heard)

    def commit(self, sequence: DraftSequence) -> None:
        """Tokens were appended to its output."""
        if not self.later:
            heard = self._running[sequence.request_id]
            self._tell(heard)
            self._tell_ahead(heard)
            self._tell_others(heard)

    def close(self, sequence: DraftSequence) -> None:
        heard = self._running.pop(sequence.request_id)
        if self.later:
            self._wait(heard)
        else:
            self._tell(heard)
            self._close(heard)
        self._tell_others(heard)
        for drafter in [*self._others, *(self._ahead if heard.ahead.is_open else ())]:
            self.call(drafter, drafter.close, sequence)

    def pause(self) -> None:
        """Nobody will be asked, until `resume`."""
        self.later = True

    def resume(self, sequences: Iterable[DraftSequence] | None = None) -> None:
        """These requests may be drafted for; None: all, and drafters hear of everything at once from now on."""
        if not self.later:
            return
        if sequences is None:
            self.later = False
            asked = told = list(self._running.values())
        else:
            asked = [self._running[sequence.request_id] for sequence in sequences]
            told = self._with_prompts_of(sequences)
        self._tell_group(told)
        for heard in told if sequences is None else ():
            self._tell_others(heard)
        for heard in asked:
            self._tell_ahead(heard)

    @contextmanager
    def earlier(self, sequences: Iterable[DraftSequence], tokens: int) -> Iterator[None]:
        """Drafters over text may be asked for these requests as if their last tokens were not there yet. These, and the
        others with their prompts, end `tokens` tokens before their end, or where drafters were last told of them."""
        told = self._with_prompts_of(sequences)
        taken = []
        for heard in told:
            output = heard.sequence.output_ids
            end = max(heard.texts.tokens, len(output) - tokens)
            taken.append(output[end:])
            del output[end:]
        try:
            self._tell_group(told)
            yield
        finally:
            for heard, last in zip(told, taken, strict=True):
                heard.sequence.output_ids.extend(last)

    def call(self, drafter: Drafter, action: Callable[..., object], *args: object) -> None:
        """A drafter that raises costs its drafts and no more."""
        if not self.works(drafter.name):
            return
        try:
            action(*args)
        except Exception:
            self._on_failure(drafter.name)
            self._failures[drafter.name] += 1
            _LOG.exception(
                "drafter %s failed (%d of %d); its drafts are lost, nothing else",
                drafter.name,
                self._failures[drafter.name],
                FAILURES,
            )

    def _with_prompts_of(self, sequences: Iterable[DraftSequence]) -> list[_Heard]:
        prompts = {sequence.prompt_ids for sequence in sequences}
        return [heard for heard in self._running.values() if heard.sequence.prompt_ids in prompts]

    def _tell_group(self, told: Sequence[_Heard]) -> None:
        """Drafters over text get what they do not know of these, and of those with their prompts that have ended."""
        for prompt in dict.fromkeys(heard.sequence.prompt_ids for heard in told):
            self._tell_ended(prompt)
        for heard in told:
            self._tell(heard)

    def _tell(self, heard: _Heard) -> None:
        """Drafters over text get what they do not know of a request."""
        if self._texts:
            self._tell_to(self._texts, heard.sequence, heard.texts)

    def _tell_ahead(self, heard: _Heard) -> None:
        if self._ahead:
            self._tell_to(self._ahead, heard.sequence, heard.ahead)

    def _tell_to(self, drafters: Sequence[Drafter], sequence: DraftSequence, told: _Told) -> None:
        fresh = sequence.output_ids[told.tokens :]
        if not told.is_open:
            told.is_open = True
            del sequence.output_ids[told.tokens :]  # when a request is opened, nothing of it was committed yet
            for drafter in drafters:
                self.call(drafter, drafter.open, sequence)
            sequence.output_ids.extend(fresh)
        told.tokens += len(fresh)
        for drafter in drafters if fresh else ():
            self.call(drafter, drafter.commit, sequence, fresh)

    def _tell_others(self, heard: _Heard) -> None:
        sequence = heard.sequence
        fresh = sequence.output_ids[heard.told_others :]
        heard.told_others += len(fresh)
        for drafter in self._others if fresh else ():
            self.call(drafter, drafter.commit, sequence, fresh)

    def _close(self, heard: _Heard) -> None:
        for drafter in self._texts:
            self.call(drafter, drafter.close, heard.sequence)

    def _wait(self, heard: _Heard) -> None:
        """The request has ended; drafters over text hear of it when its prompt is asked for."""
        if not self._texts:
            return
        self._ended.setdefault(heard.sequence.prompt_ids, []).append(heard)
        self._waiting_tokens += _waiting(heard)
        while self._waiting_tokens > self._max_tokens:
            _, dropped = self._ended.popitem(last=False)
            self._waiting_tokens -= sum(map(_waiting, dropped))
            for old in dropped:
                if old.texts.is_open:
                    self._close(old)

    def _tell_ended(self, prompt: _Prompt) -> None:
        for heard in self._ended.pop(prompt, ()):
            self._waiting_tokens -= _waiting(heard)
            self._tell(heard)
            self._close(heard)


def _waiting(heard: _Heard) -> int:
    """Tokens of its output that drafters over text do not know."""
    return len(heard.sequence.output_ids) - heard.texts.tokens
