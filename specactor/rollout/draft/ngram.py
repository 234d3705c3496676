"""Prompt lookup: what followed the last few tokens when they were seen last, in a request's group and own text.

Invariants: the longest n-gram decides, of its places the newest; a draft is a piece of one text; an index holds at most
its limit of tokens and forgets the oldest first; each added token costs constant time, the forgetting included.

Source: prompt lookup decoding (A. Saxena, 2023), widened to the texts of all requests with the same prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specactor.errors import ConfigError
from specactor.rollout.draft.drafter import Drafter, DraftSequence


class Text:
    """A growing text whose n-grams are found by texts of the same scope."""

    __slots__ = ("ids", "scope")

    def __init__(self, scope: int, context: Sequence[int]) -> None:
        """`context` precedes the text: its n-grams are not indexed."""
        self.scope = scope
        self.ids = list(context)


@dataclass(slots=True)
class _Request:
    text: Text
    num_tokens: int = 0
    """With its prompt."""


_Place = tuple[Text, int]
"""A text, and the position in it of the token that followed an n-gram."""


class NgramIndex:
    """The newest place of every n-gram of `min_n` to `max_n` tokens."""

    def __init__(self, *, min_n: int, max_n: int) -> None:
        self.min_n = min_n
        self.max_n = max_n
        self._places: dict[tuple[int, ...], _Place] = {}
        self._oldest_first: deque[_Place] = deque()

    @property
    def num_tokens(self) -> int:
        """Tokens that can be found."""
        return len(self._oldest_first)

    def add(self, text: Text, tokens: Sequence[int]) -> None:
        """Append to a text."""
        ids, scope, places = text.ids, text.scope, self._places
        sizes = range(self.min_n, self.max_n + 1)
        for token in tokens:
            end = len(ids)
            place = (text, end)
            for n in sizes:
                if n > end:
                    break
                places[(scope, *ids[end - n :])] = place
            ids.append(token)
            self._oldest_first.append(place)

    def find(self, text: Text, window: int) -> list[int]:
        """At most `window` tokens that followed the end of `text` elsewhere, and at most two per token that matches.

        A match of `max_n` tokens may be longer than is known, and gives the whole window.
        """
        ids = text.ids
        for n in range(min(self.max_n, len(ids)), self.min_n - 1, -1):
            place = self._places.get((text.scope, *ids[-n:]))
            if place is not None:
                found, start = place
                return found.ids[start : start + (window if n == self.max_n else min(window, 2 * n))]
        return []

    def shrink(self, max_tokens: int) -> None:
        """Forget the oldest tokens until `max_tokens` are left."""
        places = self._places
        while len(self._oldest_first) > max_tokens:
            place = self._oldest_first.popleft()
            text, end = place
            for n in range(self.min_n, min(self.max_n, end) + 1):
                key = (text.scope, *text.ids[end - n : end])
                if places.get(key) is place:  # not seen again since
                    del places[key]


class NgramDrafter(Drafter):
    """Holds at most `max_tokens`, or as many as the running requests have with their prompts, if those are more."""

    name = "ngram"

    def __init__(self, *, max_tokens: int = 1_000_000, min_n: int = 1, max_n: int = 4) -> None:
        if not 1 <= min_n <= max_n:
            raise ConfigError.at("NgramDrafter.min_n", min_n, f"1..{max_n} (max_n)", "Lower it, or raise max_n.")
        if max_tokens < 0:
            raise ConfigError.at("NgramDrafter.max_tokens", max_tokens, ">= 0", "Use 0 to keep only what is running.")
        self._max_tokens = max_tokens
        self._index = NgramIndex(min_n=min_n, max_n=max_n)
        self._running: dict[str, _Request] = {}
        self._running_tokens = 0
        self._group_sizes: dict[int, int] = {}  # scope -> running requests

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return self._index.num_tokens

    def open(self, sequence: DraftSequence) -> None:
        self.close(sequence)
        prompt, scope = sequence.prompt_ids, hash(sequence.prompt_ids)
        request = _Request(Text(scope, prompt[-self._index.max_n :]))
        self._running[sequence.request_id] = request
        self._group_sizes[scope] = self._group_sizes.get(scope, 0) + 1
        if self._group_sizes[scope] == 1:
            self._index.add(Text(scope, ()), prompt)
        self._count(request, len(prompt))
        self._append(request, sequence.output_ids)

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        request = self._running.get(sequence.request_id)
        if request is not None:
            self._append(request, tokens)

    def close(self, sequence: DraftSequence) -> None:
        request = self._running.pop(sequence.request_id, None)
        if request is None:
            return
        scope = request.text.scope
        self._group_sizes[scope] -= 1
        if not self._group_sizes[scope]:
            del self._group_sizes[scope]
        self._count(request, -request.num_tokens)

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        find, running = self._index.find, self._running
        return [
            find(running[sequence.request_id].text, window) if window and sequence.request_id in running else []
            for sequence, window in zip(sequences, windows, strict=True)
        ]

    def _append(self, request: _Request, tokens: Sequence[int]) -> None:
        self._index.add(request.text, tokens)
        self._count(request, len(tokens))

    def _count(self, request: _Request, num_tokens: int) -> None:
        request.num_tokens += num_tokens
        self._running_tokens += num_tokens
        self._index.shrink(max(self._max_tokens, self._running_tokens))
