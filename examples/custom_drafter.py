r"""A draft method of one's own: what followed the last occurrence of the current token in the group's text.

    torchrun --nproc-per-node 2 launch/train_moe.py quickstart_plain --rollout.speculation.mode coupled \
        --rollout.speculation.drafters examples.custom_drafter:LastFollower

Any class that can be imported will do. Whatever a drafter proposes, it changes the speed and never a token.
"""

from collections.abc import Sequence
from itertools import pairwise

from specactor.rollout.speculation.drafter import Drafter, DraftSequence


class LastFollower(Drafter):
    name = "last_follower"

    def __init__(self) -> None:
        self.followers: dict[tuple[int, ...], dict[int, int]] = {}  # prompt -> token -> the token after it

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        start = len(sequence.output_ids) - len(tokens)
        text = [*(sequence.output_ids[start - 1 : start] if start else sequence.prompt_ids[-1:]), *tokens]
        self.followers.setdefault(sequence.prompt_ids, {}).update(pairwise(text))

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        for draft, sequence, window in zip(drafts, sequences, windows, strict=True):
            followers = self.followers.get(sequence.prompt_ids, {})
            current = [*(sequence.output_ids or sequence.prompt_ids)[-1:]]
            while len(draft) < window and current and current[0] in followers:
                current = [followers[current[0]]]
                draft += current
        return drafts

    def policy_changed(self) -> None:
        self.followers.clear()  # or they would grow with every prompt
