"""What the sender asks of every engine rank. Each message is the payload of one rank call."""

from __future__ import annotations

import msgspec

from specactor.weights_sync.buckets import Slot
from specactor.weights_sync.memory import Address

CHECK = "weights.check"
"""Rank call: compare every tensor's digest; change nothing. Payload: `Round`."""
LOAD = "weights.load"
"""Rank call: check unless that was done, load into the model, read back. Payload: `Round`."""
COMMIT = "weights.commit"
"""Rank call: every parameter was written whole; drop the KV and prefix cache. Payload: `Commit`."""


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """A filled bucket."""

    version: int
    address: Address
    slots: tuple[Slot, ...]
    of_gpu: bool = False
    """Whether digests are those that GPUs make; then a reader brings the bytes to its own before it looks."""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """All buckets of a round."""

    buckets: tuple[Bucket, ...]
    checked: bool = False
    """Whether these very bytes were checked before. Their owner checks them once more after they were loaded."""


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a version's stream."""

    version: int


class DraftWeights(msgspec.Struct, frozen=True, kw_only=True):
    """All weights of a draft model, in one bucket. Its fields differ from those of the messages about the policy, so
    neither can be taken for the other."""

    draft_version: int
    address: Address
    slots: tuple[Slot, ...]

    def as_round(self) -> Round:
        """What it is to the receiver of one model."""
        return Round(buckets=(Bucket(version=self.draft_version, address=self.address, slots=self.slots),))


class CheckReply(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank found. An empty `problem` means that all is well."""

    problem: str = ""
