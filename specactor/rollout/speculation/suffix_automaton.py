"""Every substring of a growing set of texts, and which token followed it most often. PURE: token ids in and out.

A generalised suffix automaton: a state stands for substrings that end at the same places, the longest of which has
`length` tokens; its suffix link leads to the longest substring that ends at more places. A text is known by its *end*,
the state of the whole text. Texts grow in any order, one token at a time, and a new one may begin at the end of another
(responses begin at the end of their prompt) or at `ROOT`. So a growing text needs no cursor: its end is one.

Invariants, tested against a naive search:
- `match(end)` is the longest suffix of the text, or of the substring, that was followed by something in any text;
- tokens of different texts never join: a substring lies within one text;
- `continuation` follows, token by token, the most frequent successor of the longest match, of equal ones the newest;
- appending costs amortised constant time, at most `COUNTED` steps of it for counting; drafting costs one step per token
  and one per text that ends where it passes.

Drafts follow transitions and not a stored text: a step knows all texts that share the context, so that the majority
decides, and a draft goes on in other texts where the text that it follows ends, which is usual beside running requests.

Source: Blumer et al., The smallest automaton recognizing the subwords of a text (1985); generalised as in Mohri et al.,
General suffix automaton construction algorithm and space bounds (2009). Counts along suffix links are ours.
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = 0
"""The empty substring."""
_NONE = ROOT
"""No transition leads to the root, so its number marks a missing target."""
COUNTED = 8
"""A token is counted for this many contexts, the longest. 4, 8 and 16 gave the same accept_length within 0.5 %."""


class SuffixAutomaton:
    """About 140 bytes per token of ordinary text. Nothing can be removed; build a new one instead."""

    def __init__(self, *, counted: int = COUNTED) -> None:
        self.num_tokens = 0
        """Appended so far, over all texts."""
        self._counted = counted
        # Per state:
        self._length = [0]
        self._link = [-1]
        self._token = [-1]  # the last token of its substrings; all end with the same one
        self._count = [0]  # how often its substrings were seen
        self._best = [_NONE]  # the target of its most frequent transition
        self._all: dict[int, dict[int, int]] = {}  # token -> target, for states with more than one transition

    @property
    def num_states(self) -> int:
        return len(self._length)

    def extend(self, end: int, tokens: Iterable[int]) -> int:
        """Append to the text that ends at `end`; returns its new end."""
        length, link, token_of = self._length, self._link, self._token
        count, best, transitions = self._count, self._best, self._all
        for token in tokens:
            self.num_tokens += 1
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
        self._length.append(length)
        self._link.append(ROOT)
        self._token.append(token)
        self._count.append(0)
        self._best.append(_NONE)
        return len(self._length) - 1
