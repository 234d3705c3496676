"""Prompt lookup: what followed the last few tokens when they were seen last, in any text.

A draft is a piece of a text. It begins where the longest known n-gram at the end of the request's text was followed by
something: at the newest place in the request's group, all requests with equal prompts, or else in any text.

Invariants, tested against a search through the texts: the longest n-gram decides, of its places the group's newest, and
then the newest of all; drafts of different ranks begin with different tokens; an index holds at most its limit of
tokens and forgets the oldest first; each added token costs constant time, the forgetting included.

Source: prompt lookup decoding (A. Saxena, 2023), widened to the texts of all requests. That n-grams give several
branches of a tree is in lookahead decoding (arXiv 2402.02057) and in SGLang's NGRAM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specactor.errors import ConfigError
from specactor.rollout.draft.drafter import Drafter, DraftSequence

TOKENS_PER_MATCH = 2
"""Draft tokens per token of an n-gram that is shorter than the longest: what follows a short one is a guess."""


def confidence(length: int) -> int:
    """How sure one may be of what followed a match of so many tokens: 1, 2, 3 to 7, or more. The first draft token was
    right in 0.2, 0.4, 0.7 and 0.95 of cases, on the responses of small models."""
    return (length > 1) + (length > 2) + (length > 7)


class Text:
    """A growing text of a group."""

    __slots__ = ("group", "ids")

    def __init__(self, context: Sequence[int], group: int | None = None) -> None:
        """`context` precedes the text: its n-grams are not indexed. `group`: a number < 0, which no token has; None:
        the text is found by all alike."""
        self.ids = list(context)
        self.group = group


@dataclass(slots=True)
class _Request:
    text: Text
    num_tokens: int = 0
    """With its prompt."""


_Place = tuple[Text, int]
"""A text, and the position in it of the token that followed an n-gram."""


class NgramIndex:
    """The newest place of every n-gram of `min_n` to `max_n` tokens, and the newest with another token there."""

    def __init__(self, *, min_n: int, max_n: int) -> None:
        self.min_n = min_n
        self.max_n = max_n
        self._places: dict[tuple[int, ...], tuple[_Place, _Place | None]] = {}
        self._oldest_first: deque[_Place] = deque()

    @property
    def num_tokens(self) -> int:
        """Tokens that can be found."""
        return len(self._oldest_first)

    def add(self, text: Text, tokens: Sequence[int]) -> None:
        """Append to a text."""
        ids, places, oldest_first = text.ids, self._places, self._oldest_first
        max_n = self.max_n
        for token in tokens:
            end = len(ids)
            place = (text, end)
            context = tuple(ids[-max_n:])
            for key in self._keys(context, text.group):
                known = places.get(key)
                if known is None:
                    places[key] = (place, None)
                else:
                    newest, other = known
                    places[key] = (place, other if newest[0].ids[newest[1]] == token else newest)
            ids.append(token)
            oldest_first.append(place)

    def find(
        self, context: Sequence[int], window: int, *, group: int | None = None, longer_than: int = 0, rank: int = 0
    ) -> tuple[list[int], int]:
        """At most `window` tokens that may follow `context`, by n-grams of more than `longer_than` tokens; and how long
        the n-gram was.

        Rank 0: at most `TOKENS_PER_MATCH` per token of the n-gram found first; one of `max_n` tokens may be longer than
        is known, and gives the whole window. Rank k: a draft that begins with another token than those of lower ranks;
        the longer the n-gram, the likelier is rank 0, and the shorter this draft.
        """
        end = tuple(context[-self.max_n :])
        others: list[int] = []  # first tokens of lower ranks
        room = 0
        for key in self._keys(end, group):
            n = len(key) - (key[0] == group)
            if n <= longer_than:
                break
            known = self._places.get(key)
            if known is None:
                continue
            room = room or (window - n if rank else window if n == self.max_n else min(window, TOKENS_PER_MATCH * n))
            if room <= 0:
                break
            for place in known:
                if place is None or (token := place[0].ids[place[1]]) in others:
                    continue
                if len(others) == rank:
                    return place[0].ids[place[1] : place[1] + room], n
                others.append(token)
        return [], 0

    def shrink(self, max_tokens: int) -> None:
        """Forget the oldest tokens until `max_tokens` are left."""
        places = self._places
        while len(self._oldest_first) > max_tokens:
            place = self._oldest_first.popleft()
            text, end = place
            context = tuple(text.ids[max(0, end - self.max_n) : end])
            for key in self._keys(context, text.group):
                known = places.get(key)
                if known is None:
                    continue
                if known[0] is place:  # not seen again since, so the other place is forgotten too
                    del places[key]
                elif known[1] is place:
                    places[key] = (known[0], None)

    def _keys(self, end: tuple[int, ...], group: int | None) -> list[tuple[int, ...]]:
        """Of the n-grams that `end` ends with, the longest first; of each the group's own before all texts'."""
        starts = range(len(end) - self.min_n + 1)
        if group is None:
            return [end[start:] for start in starts]
        keys = []
        for start in starts:
            key = end[start:]
            keys += [(group, *key), key]
        return keys


class NgramDrafter(Drafter):
    """Drafts of one rank. Those of rank 1 and 2 are for trees, beside a draft of rank 0 or of another drafter.

    Holds at most `max_tokens`, or as many as the running requests have with their prompts, if those are more."""

    name = "ngram"

    def __init__(self, *, max_tokens: int = 1_000_000, min_n: int = 1, max_n: int = 4, rank: int = 0) -> None:
        if not 1 <= min_n <= max_n:
            raise ConfigError.at("NgramDrafter.min_n", min_n, f"1..{max_n} (max_n)", "Lower it, or raise max_n.")
        if max_tokens < 0:
            raise ConfigError.at("NgramDrafter.max_tokens", max_tokens, ">= 0", "Use 0 to keep only what is running.")
        if rank < 0:
            raise ConfigError.at("NgramDrafter.rank", rank, ">= 0", "Leave it out for the likeliest draft.")
        self.name = "ngram" if rank == 0 else f"ngram_{rank + 1}"
        self._max_tokens = max_tokens
        self._rank = rank
        self._index = NgramIndex(min_n=min_n, max_n=max_n)
        self._running: dict[str, _Request] = {}
        self._running_tokens = 0
        self._group_sizes: dict[int, int] = {}  # group -> running requests

    @property
    def num_tokens(self) -> int:
        """Tokens held."""
        return self._index.num_tokens

    def open(self, sequence: DraftSequence) -> None:
        self.close(sequence)
        prompt = sequence.prompt_ids
        group = -1 - abs(hash(prompt))
        request = _Request(Text(prompt[-self._index.max_n :], group))
        self._running[sequence.request_id] = request
        self._group_sizes[group] = self._group_sizes.get(group, 0) + 1
        if self._group_sizes[group] == 1:
            self._index.add(Text((), group), prompt)
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
        group = request.text.group
        assert group is not None
        self._group_sizes[group] -= 1
        if not self._group_sizes[group]:
            del self._group_sizes[group]
        self._count(request, -request.num_tokens)

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        find, running, rank = self._index.find, self._running, self._rank
        drafts: list[list[int]] = []
        self.confidence: list[int] = []
        for sequence, window in zip(sequences, windows, strict=True):
            request = running.get(sequence.request_id) if window else None
            text = request.text if request is not None else None
            draft, length = find(text.ids, window, group=text.group, rank=rank) if text is not None else ([], 0)
            drafts.append(draft)
            self.confidence.append(confidence(length))
        return drafts

    def _append(self, request: _Request, tokens: Sequence[int]) -> None:
        self._index.add(request.text, tokens)
        self._count(request, len(tokens))

    def _count(self, request: _Request, num_tokens: int) -> None:
        request.num_tokens += num_tokens
        self._running_tokens += num_tokens
        self._index.shrink(max(self._max_tokens, self._running_tokens))
