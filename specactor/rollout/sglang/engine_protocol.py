"""What an engine is started with, and messages between a trainer rank and an engine's process, its *server*.

A call is answered by any number of `Finished` and `Progress`, then by one other message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import msgspec

from specactor.config import EngineConfig, SpeculationConfig
from specactor.errors import ConfigError, EngineError, did_you_mean
from specactor.parallel.layout import ENGINE_RESERVED_TOKENS
from specactor.rollout.decoupled.transport import DrafterAccess
from specactor.rollout.frames import Failed
from specactor.types import FinishReason, RolloutRequest


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    index: int  # of the engine in the job
    model_dir: str  # folder of a model in Hugging Face format
    dtype: str  # float32 or bfloat16
    tensor_parallel: int = 1
    devices: tuple[int | str, ...]  # one core (without a GPU) or GPU per tensor-parallel rank
    config: EngineConfig = field(default_factory=EngineConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    drafters: DrafterAccess = field(default_factory=DrafterAccess)  # processes that draft for it, in mode decoupled
    context_length: int  # longest sequence in tokens, prompt included
    reserved_tokens: int = ENGINE_RESERVED_TOKENS  # of that, what requests may not use; `layout.reserved_tokens`
    awaits_weights: bool = False
    """It gets all weights by a sync before its first request, and reads none from the folder."""
    kv_tokens: int = 0
    """On GPUs, the size of its KV pool: that of the engine that it replaces; 0: SGLang decides."""
    log_file: str
    random_seed: int = 0

    def __post_init__(self) -> None:
        if len(self.devices) != self.tensor_parallel:
            raise EngineError(
                f"engine {self.index}: got {len(self.devices)} devices, expected {self.tensor_parallel}, "
                "one per tensor-parallel rank. Fix EngineSpec.devices."
            )


@cache
def known_arguments() -> frozenset[str]:
    """Return the fields of SGLang's `ServerArgs`; none where it is not installed."""
    # Read from its files: its import takes seconds, and patches others.
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        return frozenset()
    texts = [file.read_text() for file in (Path(spec.origin).parent / "srt/arg_groups/fields").glob("[!_]*.py")]
    return frozenset(name for text in texts for name in re.findall(r"^    ([a-z]\w*): ", text, re.MULTILINE))


def check_extra_args(engine: EngineConfig) -> None:
    """Raise ConfigError for a name that SGLang does not know."""
    known = known_arguments()
    for name in engine.extra_args:
        if known and name not in known:
            hint = did_you_mean(name.replace("-", "_"), sorted(known), "Leave it out.")
            raise ConfigError.at("rollout.engine.extra_args", name, "an argument of SGLang's ServerArgs", hint)


class Generate(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Generate all of these, admitted together in this order."""

    requests: list[RolloutRequest]
    report_tokens: int = 0
    """Report what a running response has after every this many tokens; 0: only that there is progress."""


class RankCall(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Run a registered function in every tensor-parallel rank."""

    name: str
    payload: bytes
    timeout_s: float


class Command(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    verb: str
    request_ids: list[str] = []  # of ``abort_requests``; those that do not run are passed over


class Finished(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A response; ``request`` is its index in the call."""

    request: int
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    routed_experts: bytes = b""


class Progress(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The engine is moving in this call. If the call asked for it: what a running response got since its last news."""

    request: int | None = None
    token_ids: list[int] = []
    logprobs: list[float] = []


class Done(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The call was carried out."""

    replies: list[bytes] = []  # to a `RankCall`, one per rank


class Ready(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    scheduler_pids: list[int]
    max_sequence_tokens: int
    """Prompt and response together; the smaller of the context and what the KV pool lets one request use."""
    kv_tokens: int  # size of the KV pool


ToEngine = Generate | RankCall | Command
FromEngine = Ready | Finished | Progress | Done | Failed

SPEC: msgspec.msgpack.Decoder[EngineSpec] = msgspec.msgpack.Decoder(EngineSpec)  # of the first message
TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
