"""What the sender asks of every engine rank, which gives an `Answer`."""

from __future__ import annotations

import msgspec

from specactor.weights_sync.buckets import Slot
from specactor.weights_sync.memory import Address
from specactor.weights_sync.plan import Chunk, Held

CHECK = "weights.check"
"""Rank call: compare every tensor's digest; change nothing. Payload: `Bucket`s."""
LOAD = "weights.load"
"""Rank call: check, load into the model, read back. Payload: `Bucket`s."""
PLAN = "weights.plan"
"""Rank call: learn from what was loaded for the open version how to pull the next. Payload: `Holding` of all ranks;
then, if anything crosses between hosts, one of the mirrors."""
PULL = "weights.pull"
"""Rank call: copy all parameters out of the trainer's memory, and digest what was copied. Payload: `Pull`."""
COMMIT = "weights.commit"
"""Rank call: every parameter was written whole; drop the KV and prefix cache. Payload: the version."""


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    address: Address
    slots: tuple[Slot, ...]
    of_gpu: bool = False
    """Whether digests are those that GPUs make; then a reader brings the bytes to its own before it looks."""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What one trainer rank, or all for one host, have in memory that others can read."""

    addresses: tuple[Address | None, ...]
    """None: of a memory that nothing on this host is taken from."""
    tensors: tuple[Held, ...]
    places: dict[str, int] = {}
    """On a GPU, the first byte of each of the rank's tensors in its memory, by a name that equal ones share."""
    near: dict[str, tuple[Held, ...]] = {}
    """By GPU: tensors that engines on it had better take from there than from where `tensors` has them."""
    refusals: dict[str, str] = {}
    """By GPU, "" where CUDA does not say which: why engines on it cannot read there what trainer ranks have on it."""
    planned: int = 0
    """Key of the plan, already made, that these memories, without tensors, are added to."""


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    key: int  # digest of the holding
    copy: bool = True  # if not, digest what the parameters hold already


class DraftWeights(msgspec.Struct, frozen=True, kw_only=True):
    """A push of a draft model. Its fields differ from those of the policy's messages, so none is mistaken."""

    draft_version: int
    address: Address
    slots: tuple[Slot, ...]

    def as_bucket(self) -> Bucket:
        return Bucket(version=self.draft_version, address=self.address, slots=self.slots)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine rank says to any call; a field that the call does not ask for has its default."""

    problem: str = ""
    refusal: str = ""  # why it has no plan
    chunks: tuple[Chunk, ...] = ()  # of its plan
    on_gpu: tuple[int, ...] = ()  # memories that it reads on its own GPU
    through_host: str = ""  # why it reads none there, where it could have
    digests: tuple[int, ...] = ()  # of the plan's chunks: what the parameters hold
    unplanned: bool = False  # whether this rank has no plan of that holding, and has done nothing
