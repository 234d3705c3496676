"""One drafter process to start, and how its start went."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from specactor.rollout.decoupled.transport import DrafterKeys

WORK = b"work"
"""What the process did since it was asked last."""
TRACE = b"trace"
"""The same, and record spans from now on."""
RENEW = b"renew "
"""New weights for its model; `DraftWeights` as JSON follow, in the same line."""
SLEEP = b"sleep"
"""Forget all requests, stop listening, and leave the device until WAKE."""
WAKE = b"wake"
"""Listen again, at the same address, as a new incarnation."""
ALIVE = b"alive"
"""Say anything, as a sign of life."""


@dataclass(frozen=True, kw_only=True)
class DrafterSpec:
    """Sizes None: SGLang decides."""

    index: int
    """Of the drafter in the job."""
    endpoint: str
    """Where it listens, the same after a restart."""
    keys: DrafterKeys | None = None
    model_dir: str
    """Folder of a dense model in Hugging Face format."""
    dtype: str
    """float32 or bfloat16."""
    device: int
    """A GPU, or without GPUs a core."""
    engine: int | None = None
    """Index of the engine whose device that is, if it drafts only while that engine has nothing to do; then it sleeps
    from its start on, until it is woken."""
    core: int | None = None
    """That it stays on; filled in by the owner."""
    context_length: int
    """Longest text in tokens."""
    kv_tokens: int | None = None
    """Size of the KV cache."""
    max_requests: int
    """Texts whose keys are held at once."""
    memory_fraction: float = 0.5
    """Share of a GPU's memory for weights and KV cache."""
    continuer: str = "model"
    """What drafts: the model, or the import path of a class, ``package.module:Name``, which gets this spec."""
    random_seed: int = 0
    log_file: str
    start_timeout_s: float = 180.0
    """Longest wait for it to listen."""
    max_restarts: int = 3
    """Times that it may be started again."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter process tells its owner. ``error`` is empty if it listens."""

    endpoint: str = ""
    """Where it listens; as asked for, but with the number of the port."""
    pid: int = 0
    version: int = 0
    """Of the weights that it drafts with."""
    error: str = ""


class Rested(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter process answers to SLEEP and WAKE, and to ALIVE."""

    asleep: bool
    wake_s: float
    """What the last waking took: weights back on the device, and a socket."""


class Renewed(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter process answers to RENEW."""

    version: int
    """Of the weights that it drafts with now."""
    problem: str = ""
    """Why it did not take the new ones."""
