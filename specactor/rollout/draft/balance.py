"""What mode auto has won and lost against plain decoding; after losses it trusts predictions less. PURE.

A round with drafts takes longer than a plain one, and its tokens would have taken plain rounds: the difference is what
it won or lost, whatever the reason (drafts that were wrong, drafters that caught up, costs that were predicted too
low). A prediction that drafting is faster must be the better the more such predictions have cost: by `handicap` more
than plain decoding. So what cannot be won back is not tried again and again, and what is much faster is tried at once.
What looks cost says nothing of predictions; they are bounded by themselves (`looks`).

Invariants: memory is short. At most MOST plain rounds are kept, won or lost; what was lost is forgiven by TRIAL_SHARE
of plain rounds. One round wins or loses AT_ONCE plain rounds at most: more is a stall, which says nothing of drafts.
"""

from __future__ import annotations

MOST = 8.0
"""Plain rounds."""
AT_ONCE = 4.0
"""Plain rounds."""
TRIAL_SHARE = 0.01
"""Of plain rounds, what trials that lose may cost."""
HANDICAP = 0.15
"""Per plain round that was lost: by how much more drafting must promise."""
LOOKS_SHARE = 0.5
"""Of what rounds with drafts have won, what looks in every round may cost."""


class Balance:
    """Of one engine. `plain_s`: seconds of a plain round of as many requests."""

    def __init__(self) -> None:
        self._rounds = 0.0
        self._for_looks = 0.0

    @property
    def handicap(self) -> float:
        """By which predicted speed must be above that of plain decoding, beside other margins; 0 without losses."""
        return HANDICAP * max(0.0, -self._rounds)

    def drafted(self, won_s: float, *, plain_s: float) -> None:
        """A round with drafts won so much, or lost if less than 0."""
        self._add(won_s / plain_s)
        self._add_for_looks(LOOKS_SHARE * won_s / plain_s)

    def promised(self, won_s: float, *, plain_s: float) -> None:
        """Drafts of some tokens ago would have won so much: so may those of the next rounds, if one looks."""
        self._add_for_looks(LOOKS_SHARE * won_s / plain_s)

    def looked(self, cost_s: float, *, plain_s: float) -> None:
        """A round without drafts, in which there was a look, took so much longer than a plain one."""
        self._add_for_looks(-max(0.0, cost_s) / plain_s)

    def rested(self, round_s: float, *, plain_s: float, after_drafts: bool) -> None:
        """A plain round took `round_s`. `after_drafts`: it did some of the work of a round with drafts."""
        if after_drafts:
            self._add(min(0.0, 1.0 - round_s / plain_s))
        if self._rounds < 0:
            self._rounds = min(0.0, self._rounds + TRIAL_SHARE)

    def renewed(self, weight: float) -> None:
        """Drafters or the policy have other weights: what was won and lost before is worth so much now."""
        self._rounds *= weight

    def pays_for(self, look_s: float, *, plain_s: float) -> bool:
        """Whether drafts have won enough for such a look in the next round."""
        return self._for_looks * plain_s > look_s

    def _add(self, rounds: float) -> None:
        self._rounds = _within(self._rounds + _within(rounds, AT_ONCE), MOST)

    def _add_for_looks(self, rounds: float) -> None:
        self._for_looks = _within(self._for_looks + _within(rounds, AT_ONCE), MOST)


def _within(rounds: float, most: float) -> float:
    return min(max(rounds, -most), most)
