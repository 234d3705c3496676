"""A drafter process to start, and its owner's messages, in `rollout.frames`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from specactor.rollout.decoupled.transport import Keys
from specactor.rollout.frames import Failed
from specactor.rollout.speculation.costs import METHOD, Point
from specactor.trace import Span


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """One drafter process. SGLang decides sizes of None."""

    index: int
    drafter: str = METHOD  # as engines call it, by its draft model: decoupled, decoupled:2, ..
    endpoint: str  # where it listens, the same after a restart
    keys: Keys | None = None
    model_dir: str  # folder of a dense model in Hugging Face format
    dtype: str  # float32 or bfloat16
    device: int  # A GPU, or without GPUs a core
    engine: int | None = None  # the engine that lends its device while idle; the drafter starts asleep
    core: int | None = None  # that it stays on; filled in by the owner
    context_length: int  # longest text in tokens
    kv_tokens: int | None = None  # size of the KV cache
    max_requests: int  # texts whose keys are held at once
    memory_fraction: float = 0.5  # share of a GPU's memory for weights and KV cache
    continuer: str = "model"  # the draft model, or a class that gets this spec, as ``package.module:Name``
    random_seed: int = 0
    log_file: str
    start_timeout_s: float = 180.0  # longest wait for it to listen
    max_restarts: int = 3


class Ask(msgspec.Struct, frozen=True):
    verb: Literal["work", "sleep", "wake", "renew", "alive"]
    """Work: say what you did. Sleep: forget all requests, stop listening, and free the device. Wake: listen at the same
    address, as a new incarnation. Renew: draft with these weights. Alive: say anything, as a sign of life."""
    weights: bytes = b""  # `DraftWeights` as JSON: its type comes with torch, which not every drafter needs
    trace: bool = False  # record spans from now on


class State(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The answer to a `DrafterSpec`, and to every `Ask` but for work."""

    endpoint: str = ""  # where it listens; as asked for, but with the number of the port
    version: int = 0  # of the weights that it drafts with
    asleep: bool = False
    wake_s: float = 0.0  # what the last waking took: weights back on the device, and a socket
    problem: str = ""  # why it did not take new weights


class Work(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    busy_s: float
    # (requests, draft tokens, seconds) of the latest whole turns that others followed at once
    turns: list[Point] = msgspec.field(default_factory=list)
    spans: list[Span]
    drops: dict[str, int] = {}  # frames, requests and connections that it dropped or refused, by reason


FromDrafter = State | Work | Failed

SPEC: msgspec.msgpack.Decoder[DrafterSpec] = msgspec.msgpack.Decoder(DrafterSpec)  # of the first message
TO_DRAFTER: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)
FROM_DRAFTER: msgspec.msgpack.Decoder[FromDrafter] = msgspec.msgpack.Decoder(FromDrafter)
