"""Drafts from text that was generated before: by the request itself, by its group, in earlier steps, for other prompts.

A group is all requests with equal prompts; its texts are one suffix automaton. A draft is what most often followed the
longest suffix of the request's text. Where that is shorter than `GROUP_MATCH` and the corpus has a longer one, the
draft is what followed that last. The corpus is the newest responses to all prompts, of those that have ended: taking
them in sooner cost time in every round, and on the responses of small models changed accept_length by 1 %.

Invariants, each with a test:
- a draft has at most the window's tokens, and at most `TOKENS_PER_MATCH` per token of the match that it follows: what
  follows a short match is a guess, and a wrong guess costs the verifier;
- tokens held: at most `max_tokens`, unless running requests have more than a third of that: then at most twice theirs
  and the corpus. Groups without a running request go first, the one used longest ago before the others; then ended
  responses of running groups, oldest first;
- the same calls give the same drafts; a new policy changes nothing: what the old one wrote is still a good guess.

Source: SuffixDecoding (arXiv 2411.04975) for the match and for drafts in proportion to it; DAS (arXiv 2511.13841) for
the earlier responses to a prompt. An automaton in place of suffix trees, and the corpus of n-grams, are ours.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from specactor.rollout.speculation.drafter import HISTORY_TOKENS, Drafter, DraftSequence

ROOT = 0
_NONE = ROOT
"""No transition leads to the root, so its number marks a missing target."""
COUNTED = 4
"""A token is counted for this many contexts, the longest. 4, 8 and 16 gave the same accept_length within 0.5 %."""


class SuffixAutomaton:
    """About 140 bytes per token of ordinary text. Nothing can be removed; build a new one instead."""

    def __init__(self, *, counted: int = COUNTED) -> None:
        self.num_tokens = 0
        """Appended so far, over all texts."""
        self._counted = counted
        self.num_states = 1
        # Per state, with room for more:
        self._length = [0]
        self._link = [-1]
        self._token = [-1]  # the last token of its substrings; all end with the same one
        self._count = [0]  # how often its substrings were seen
        self._best = [_NONE]  # the target of its most frequent transition
        self._all: dict[int, dict[int, int]] = {}  # token -> target, for states with more than one transition

    def extend(self, end: int, tokens: Sequence[int]) -> int:
        """Append to the text that ends at `end`; returns its new end."""
        length, link, token_of = self._length, self._link, self._token
        count, best, transitions = self._count, self._best, self._all
        self.num_tokens += len(tokens)
        for token in tokens:
            target = best[end]
            if token_of[target] != token:
                target = transitions[end].get(token, _NONE) if end in transitions else _NONE
            if target == _NONE:
                target = self._append(end, token)
            elif length[target] != length[end] + 1:
                target = self._split(end, target)
            state, previous, steps = end, _NONE, self._counted
            while state >= ROOT and steps:
                favourite = followed = best[state]
                if token_of[followed] != token:
                    followed = transitions[state][token]
                if followed != previous:  # several contexts may share a target
                    count[followed] += 1
                    previous = followed
                if favourite != followed and count[followed] >= count[favourite]:
                    best[state] = followed
                state = link[state]
                steps -= 1
            end = target
        return end

    def match(self, end: int) -> tuple[int, int]:
        """(state, length) of the longest suffix of a text that something followed; (ROOT, 0) when there is none."""
        best, link = self._best, self._link
        while best[end] == _NONE and end != ROOT:
            end = link[end]
        return end, self._length[end]

    def continuation(self, state: int, window: int, min_length: int = 1) -> list[int]:
        """At most `window` tokens that followed the substrings of `state`.

        It ends early where no text goes on after the last `min_length` tokens or more.
        """
        best, link, length, token_of = self._best, self._link, self._length, self._token
        tokens: list[int] = []
        while len(tokens) < window:
            while best[state] == _NONE and length[state] >= min_length:
                state = link[state]
            if length[state] < min_length:
                break
            state = best[state]
            tokens.append(token_of[state])
        return tokens

    def _append(self, end: int, token: int) -> int:
        """A state for a substring that is new as a whole, behind the text that ends at `end`."""
        token_of, best, transitions, link = self._token, self._best, self._all, self._link
        new = self._add_state(self._length[end] + 1, token)
        state, found = end, _NONE
        while state >= ROOT:
            found = best[state]
            if found == _NONE:
                best[state] = new
            elif token_of[found] == token:
                break
            else:
                targets = transitions.get(state)
                if targets is None:
                    transitions[state] = {token_of[found]: found, token: new}
                elif token in targets:
                    found = targets[token]
                    break
                else:
                    targets[token] = new
            state = link[state]
        if state < ROOT:
            link[new] = ROOT
        elif self._length[found] == self._length[state] + 1:
            link[new] = found
        else:
            link[new] = self._split(state, found)
        return new

    def _split(self, state: int, target: int) -> int:
        """A state of its own for those substrings of `target` that are a substring of `state` and a token."""
        best, transitions, link = self._best, self._all, self._link
        token = self._token[target]
        part = self._add_state(self._length[state] + 1, token)
        self._count[part] = self._count[target]
        best[part] = best[target]
        if target in transitions:
            transitions[part] = transitions[target].copy()
        link[part] = link[target]
        link[target] = part
        while state >= ROOT:
            targets = transitions.get(state)
            if best[state] == target:
                best[state] = part
            elif targets is None or targets.get(token) != target:
                break
            if targets is not None:
                targets[token] = part
            state = link[state]
        return part

    def _add_state(self, length: int, token: int) -> int:
        new = self.num_states
        if new == len(self._length):
            room = 16 + new // 8
            for states, empty in ((self._length, 0), (self._token, -1), (self._count, 0)):
                states += [empty] * room
            self._link += [ROOT] * room
            self._best += [_NONE] * room
        self._length[new], self._token[new] = length, token
        self.num_states = new + 1
        return new


TOKENS_PER_MATCH = 2
"""Of 1, 1.5, 2, 3 and no bound, 2 was the fastest or within 1 % of it where a draft token costs 2-10 % of a verify."""
CORPUS_MIN_N, CORPUS_MAX_N = 2, 5
"""Of 1, 2 and 3, and of 3, 4, 5 and 8; beyond 5 accept_length grew by less than 0.5 %."""
GROUP_MATCH = 3
"""A match of the group that is at least so long is followed, whatever the corpus has."""
CORPUS_TOKENS = 100_000
"""Of the corpus, and never more than a quarter of all."""

_END = -1
"""Ends each text in the corpus; no token."""
_MASK = 2**64 - 1
_WEIGHTS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
"""Odd numbers. The key of an n-gram is the sum, modulo 2^64, of its tokens (plus 1) times these, the last token first.
Two n-grams of one key would cost a wrong draft, and no more."""


class Corpus:
    """The newest place of every n-gram of `CORPUS_MIN_N` to `CORPUS_MAX_N` tokens in texts that have ended.

    Keys and places are integers, which Python's garbage collector does not visit. A place is the position of the token
    that followed, counted over all texts that there ever were.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._tokens = array("q")
        """All texts that have tokens which can be found, what precedes them included; each ends with `_END`."""
        self._dropped = 0
        """Tokens that were before these."""
        self._texts: deque[tuple[int, int, int]] = deque()
        """Of each text: where what precedes it begins, where the tokens begin that can be found, and its end."""
        self.num_tokens = 0
        """Tokens that can be found."""

    def add(self, context: Sequence[int], tokens: Sequence[int]) -> None:
        """Add a text. `context` precedes it, and is not found itself."""
        if not tokens:
            return
        start = self._dropped + len(self._tokens)
        self._tokens.extend((*context, *tokens, _END))
        self._texts.append((start, start + len(context), start + len(context) + len(tokens)))
        self.num_tokens += len(tokens)
        for keys, first, last in self._keys(*self._texts[-1]):
            self._places.update(zip(keys, range(first, last), strict=True))

    def find(self, context: Sequence[int], window: int, *, longer_than: int = 0) -> tuple[list[int], int]:
        """At most `window` tokens that followed the end of `context`, by its longest n-gram that is known and has more
        than `longer_than` tokens; and how long that n-gram is.

        They are at most `TOKENS_PER_MATCH` per token of the n-gram. One of `CORPUS_MAX_N` tokens may be longer than is
        known, and gives the whole window.
        """
        found, length, key, places = -1, 0, 0, self._places
        for n, (token, weight) in enumerate(zip(reversed(context), _WEIGHTS, strict=False), 1):
            key = (key + (token + 1) * weight) & _MASK
            if n < CORPUS_MIN_N or n <= longer_than:
                continue
            place = places.get(key, -1)
            if place < 0:
                break  # where an n-gram is known, its end is
            found, length = place, n
        if found < 0:
            return [], 0
        room = window if length == CORPUS_MAX_N else min(window, TOKENS_PER_MATCH * length)
        start = found - self._dropped
        draft = self._tokens[start : start + room].tolist()
        return (draft[: draft.index(_END)] if _END in draft else draft), length

    def shrink(self, max_tokens: int) -> None:
        """Forget the oldest tokens until `max_tokens` are left."""
        while self.num_tokens > max_tokens:
            begin, first, end = self._texts.popleft()
            left = min(end, first + self.num_tokens - max_tokens)
            for keys, start, stop in self._keys(begin, first, left):
                for key, place in zip(keys, range(start, stop), strict=True):
                    if self._places.get(key) == place:  # else it was seen again since
                        del self._places[key]
            self.num_tokens -= left - first
            if left < end:
                self._texts.appendleft((begin, left, end))
            else:
                del self._tokens[: end + 1 - self._dropped]
                self._dropped = end + 1

    def _keys(self, begin: int, first: int, end: int) -> Iterator[tuple[list[int], int, int]]:
        """Yield the keys of the n-grams that the tokens of a text from `first` to `end` follow, and which tokens."""
        tokens_N = np.array(self._tokens[begin - self._dropped : end - self._dropped], dtype=np.uint64) + np.uint64(1)
        keys_P = np.zeros(end - begin, dtype=np.uint64)  # of the tokens from `begin` on, each
        for n, weight in enumerate(_WEIGHTS[: max(0, end - begin - 1)], 1):
            keys_P[n:] += tokens_N[:-n] * np.uint64(weight)
            start = max(first, begin + n)
            if n >= CORPUS_MIN_N and start < end:
                yield keys_P[start - begin :].tolist(), start, end


_CONFIDENCE = (0, 0, 1, 2, 2, 2, 2, 2, 3)
"""How sure one may be of what followed a match, by its length, and longer ones as the last. The first draft token was
right in 0.2, 0.4, 0.7 and 0.95 of cases, on the responses of small models."""


@dataclass(slots=True)
class _Request:
    group: _Group
    end: int
    """Of its text in the group's automaton."""
    context: tuple[int, ...]
    """The end of its prompt."""
    output: list[int] = field(default_factory=list)


class _Group:
    """The texts that follow one prompt."""

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        self.prompt_ids = prompt_ids
        self.running: dict[str, _Request] = {}
        self.ended: deque[array[int]] = deque()
        """Responses that have ended, oldest first."""
        self.num_ended_tokens = 0
        self._begin()

    @property
    def num_tokens(self) -> int:
        return self.automaton.num_tokens

    def _begin(self) -> None:
        self.automaton = SuffixAutomaton()
        self.prompt_end = self.automaton.extend(ROOT, self.prompt_ids)

    def end(self, request_id: str) -> None:
        """The request is no longer running; its text stays."""
        request = self.running.pop(request_id)
        if request.output:
            self.ended.append(array("q", request.output))
            self.num_ended_tokens += len(request.output)

    def forget(self) -> None:
        """Drop at least half of what has ended, the oldest first, and build the automaton again."""
        aim = self.num_ended_tokens // 2
        while self.num_ended_tokens > aim:
            self.num_ended_tokens -= len(self.ended.popleft())
        self._begin()
        for tokens in self.ended:
            self.automaton.extend(self.prompt_end, tokens)
        for request in self.running.values():
            request.end = self.automaton.extend(self.prompt_end, request.output)


class SuffixDrafter(Drafter):
    """About 140 bytes of memory per token, and up to 500 more per token of the corpus."""

    name = "suffix"

    def __init__(self, *, max_tokens: int = HISTORY_TOKENS) -> None:
        self._corpus_tokens = min(CORPUS_TOKENS, max_tokens // 4)
        self._group_tokens = max_tokens - self._corpus_tokens
        self._corpus = Corpus()
        self._running: dict[str, _Request] = {}
        self._groups: dict[tuple[int, ...], _Group] = {}  # with running requests
        self._idle: OrderedDict[tuple[int, ...], _Group] = OrderedDict()  # without; the one used longest ago first
        self._num_tokens = 0  # of all groups
        self._num_running_tokens = 0  # of running requests, a prompt once per group

    @property
    def num_tokens(self) -> int:
        return self._num_tokens + self._corpus.num_tokens

    def open(self, sequence: DraftSequence) -> None:
        self.close(sequence)  # a request that was begun before: its first attempt stays, and foretells the second
        prompt = sequence.prompt_ids
        group = self._groups.get(prompt)
        if group is None:
            group = self._idle.pop(prompt, None)
            if group is None:
                group = _Group(prompt)
                self._num_tokens += group.num_tokens
            self._groups[prompt] = group
            self._num_running_tokens += len(prompt)
        request = _Request(group, group.prompt_end, prompt[-CORPUS_MAX_N:])
        self._running[sequence.request_id] = group.running[sequence.request_id] = request
        self._append(request, sequence.output_ids)

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        request = self._running.get(sequence.request_id)
        if request is not None:
            self._append(request, tokens)

    def close(self, sequence: DraftSequence) -> None:
        request = self._running.pop(sequence.request_id, None)
        if request is None:
            return
        group = request.group
        group.end(sequence.request_id)
        self._num_running_tokens -= len(request.output)
        if not group.running:
            self._num_running_tokens -= len(group.prompt_ids)
            self._idle[group.prompt_ids] = self._groups.pop(group.prompt_ids)
        self._forget()
        self._corpus.add(request.context, request.output)
        self._corpus.shrink(self._corpus_tokens)

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = []
        self.confidence: list[int] = []
        for sequence, window in zip(sequences, windows, strict=True):
            request = self._running.get(sequence.request_id) if window else None
            draft, length = self._draft(request, window) if request is not None else ([], 0)
            drafts.append(draft)
            self.confidence.append(_CONFIDENCE[length] if length < len(_CONFIDENCE) else _CONFIDENCE[-1])
        return drafts

    def _draft(self, request: _Request, window: int) -> tuple[list[int], int]:
        """And how long the match was that it follows."""
        automaton = request.group.automaton
        state, length = automaton.match(request.end)
        if length < GROUP_MATCH:
            end = request.output[-CORPUS_MAX_N:]
            if len(end) < CORPUS_MAX_N:
                end = [*request.context, *end]
            found = self._corpus.find(end, window, longer_than=length)
            if found[0]:
                return found
            if not length:
                return [], 0
        return automaton.continuation(state, min(window, TOKENS_PER_MATCH * length)), length

    def _append(self, request: _Request, tokens: Sequence[int]) -> None:
        request.end = request.group.automaton.extend(request.end, tokens)
        request.output.extend(tokens)
        self._num_tokens += len(tokens)
        self._num_running_tokens += len(tokens)
        if self._num_tokens > self._group_tokens:
            self._forget()

    def _forget(self) -> None:
        """Keep the bound. A group is built again only where most of its text has ended: 3 steps per token dropped."""
        while self._num_tokens > max(self._group_tokens, 2 * self._num_running_tokens):
            if self._idle:
                _, group = self._idle.popitem(last=False)
                self._num_tokens -= group.num_tokens
            else:
                group = max(self._groups.values(), key=lambda group: 2 * group.num_ended_tokens - group.num_tokens)
                self._num_tokens -= group.num_tokens
                group.forget()
                self._num_tokens += group.num_tokens
