"""What one verification round is to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from specactor.rollout.draft.trees import Drafts
from specactor.rollout.draft.verification import DraftTree, chain, merged


@dataclass(kw_only=True)
class Decision:
    """What one round verifies."""

    drafter: str
    """OFF, or who drafted."""
    windows: list[int]
    """Per request, the most draft tokens to verify."""
    depth: int = 0
    """The largest window that was drafted."""
    drafts: list[list[int]]
    """Per request; at most its window."""
    beside: Drafts = field(default_factory=dict)
    """Of further drafters: for other requests, or in the same trees."""
    kind: str = ""
    """As such rounds are called where their seconds are remembered; "": by the drafter."""
    together: bool = False
    """The drafts are still to be made, by `Speculator.draft`."""
    predicted_s: float = 0.0
    """Of the whole round, uncorrected; 0 where nothing is known."""
    draft_s: float = 0.0
    """Of drafting, and of deciding what to verify."""

    @property
    def timed_as(self) -> str:
        """What its seconds are those of."""
        return self.kind or self.drafter

    @property
    def trees(self) -> list[DraftTree]:
        """Per request."""
        if not self.beside:
            return [chain(draft) for draft in self.drafts]
        of_requests = ([draft for draft in of if draft] for of in zip(self.drafts, *self.beside.values(), strict=True))
        return [merged(drafts) if len(drafts) > 1 else chain(drafts[0] if drafts else ()) for drafts in of_requests]

    def take(self, drafts: Drafts) -> None:
        """Verify all of these. The first drafter leads."""
        for name, lists in drafts.items():
            if name == next(iter(drafts)):
                self.drafter, self.drafts = name, lists
            else:
                self.beside[name] = lists
