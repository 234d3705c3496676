"""The filler fills every window, with tokens that exist."""

from __future__ import annotations

from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.registry import Filler


def test_every_window_is_filled_with_tokens_of_the_prompt() -> None:
    sequences = [DraftSequence(request_id=f"{i}", prompt_ids=(3, 4, 5)[: i + 1]) for i in range(3)]
    drafts = Filler().propose(sequences, [5, 0, 2])
    assert [len(draft) for draft in drafts] == [5, 0, 2]
    assert {token for draft in drafts for token in draft} <= {3, 4, 5}
