"""What a run records of every step, with its config and library versions. Invariants: a file is whole or not there; a
cut or changed one is refused by its digest.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from specactor.config import Config
from specactor.errors import DataError
from specactor.metrics import write_whole

FORMAT = 1
KEPT_STEPS = 2000  # newest steps whose records stay: a sampled step of 2,048 responses of 8k tokens takes 15 MB
BLOCK = 32  # tokens per digest: where tokens are not kept whole, a difference is located to so many
_MAGIC = b"SPAR"


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    request_id: str  # unique in the step; the same in every run that asks for the response
    group: int  # number of its group in the step that asked for it
    sample: int  # number in its group
    problem: int  # of the problem in its data set
    seed: int  # of the sampling noise
    spans: tuple[tuple[int, int, int], ...]  # (policy version, first token, end)
    finish_reason: str
    num_tokens: int  # of the response
    prompt: int  # digest of the prompt's token ids
    tokens: bytes  # of the response, 4 bytes per `BLOCK` tokens
    logprobs: bytes  # the same of their log-probabilities under the policy, as the engine gave them
    routing: int  # digest of the chosen experts; 0 where the engine does not return them
    score: float
    reward: float
    advantage: float
    prompt_len: int
    whole: bytes = b""
    """If kept whole: response token ids (int32), their log-probabilities (float32), prompt token ids (int32)."""
    seeded: int | None = None
    """Tokens of an agent's first turn, whose noise is of `seed`; later turns have other seeds. None: all tokens."""
    branches: int = 0  # digest of an agent's further sequences; 0: none

    @classmethod
    def of(
        cls,
        *,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        routed_experts: bytes,
        is_whole: bool,
        **rest: Any,
    ) -> SampleRecord:
        tokens, prompt = np.array(token_ids, np.int32), np.array(prompt_ids, np.int32)
        values = np.array(logprobs, np.float32)
        return cls(
            num_tokens=len(tokens),
            prompt=xxhash.xxh3_64_intdigest(prompt.tobytes()),
            prompt_len=len(prompt_ids),
            tokens=_blocks(tokens),
            logprobs=_blocks(values),
            routing=xxhash.xxh3_64_intdigest(routed_experts) if routed_experts else 0,
            whole=tokens.tobytes() + values.tobytes() + prompt.tobytes() if is_whole else b"",
            **rest,
        )

    @property
    def token_ids(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Int32 [T] of the response; empty where not kept whole."""
        return np.frombuffer(self.whole[: 4 * self.num_tokens], np.int32)

    @property
    def logprob_values(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Float32 [T]; empty where not kept whole."""
        return np.frombuffer(self.whole[4 * self.num_tokens : 8 * self.num_tokens], np.float32)

    @property
    def prompt_ids(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Int32 [prompt_len]; empty where not kept whole."""
        return np.frombuffer(self.whole[8 * self.num_tokens :], np.int32)


class RankWeights(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    place: tuple[int, int, int, int]
    """Rank in tensor, pipeline, expert and expert-tensor parallelism, which says which parameters are copies."""
    digests: dict[str, int]  # of each parameter, by Megatron's name
    optimizer: int = 0  # digest of the rank's moments and step counts


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One RL step; where a run begins or resumes, weights alone."""

    step: int
    version: int = 0  # of the policy that sampled, but for older spans
    samples: tuple[SampleRecord, ...] = ()
    metrics: dict[str, float] = {}  # what training was: loss, gradient norm, learning rate, tokens
    weights: tuple[RankWeights, ...] = ()  # after the step, by rank
    config: dict[str, Any] = {}
    libraries: dict[str, str] = {}  # name -> version of what computes
    engines: int = 1  # group g is meant for engine g % engines; while it waits, another with room may take it
    data: int = 0  # digest of where the data stream stands after the step, and of groups that go on; 0: not known


def _blocks(values: np.ndarray[Any, Any]) -> bytes:
    """Return a 4-byte digest per `BLOCK` values."""
    parts = (values[start : start + BLOCK].tobytes() for start in range(0, len(values), BLOCK))
    return b"".join(xxhash.xxh32_digest(part) for part in parts)


def file_of(run: Path, step: int) -> Path:
    return run / "records" / f"step-{step:06}.bin"


def write(run: Path, record: StepRecord) -> int:
    """Write a record, whole or not at all; return its bytes."""
    file = file_of(run, record.step)
    file.parent.mkdir(parents=True, exist_ok=True)
    body = zlib.compress(msgspec.msgpack.encode(record), 1)
    whole = _MAGIC + FORMAT.to_bytes(4, "little") + xxhash.xxh3_64_digest(body) + body
    write_whole(file, whole)
    return len(whole)


def read(file: Path) -> StepRecord:
    """Read a record. Raises DataError for a missing, damaged or foreign file."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise DataError(
            f"{file}: cannot be read ({error.strerror}). Runs keep records with tracking.record sampled or full."
        ) from error
    magic, form, digest, body = raw[:4], int.from_bytes(raw[4:8], "little"), raw[8:16], raw[16:]
    if magic == _MAGIC and form != FORMAT:
        raise DataError(f"{file}: got format {form}, expected {FORMAT}. Read it with the version that wrote it.")
    if magic != _MAGIC or digest != xxhash.xxh3_64_digest(body):
        raise DataError(f"{file}: got a record that was cut or changed after it was written. Use a copy of the run.")
    return msgspec.msgpack.decode(zlib.decompress(body), type=StepRecord)


def steps_of(run: Path) -> list[int]:
    return sorted(int(file.stem.removeprefix("step-")) for file in (run / "records").glob("step-*.bin"))


def reach(config: Config) -> str:
    """Say how far back steps can be repeated, and what that costs."""
    every, keep, steps = config.checkpoint.every, config.checkpoint.keep, config.train.steps
    if config.tracking.record == "off":
        return "replay: of no step, with tracking.record off"
    kept = min(keep, steps // every) if every else 0
    near = f"of the last {min(kept * every, steps)} steps from a checkpoint, with at most {every - 1} trained again; "
    rest = f"of the {min(steps, KEPT_STEPS):,} steps that have records" if kept * every < steps else ""
    far = f"{rest} from the start, with all before them; " if rest else ""
    return f"replay: {near if kept else ''}{far}checkpoint.every {every} and checkpoint.keep {keep} decide that"


def drop_before(run: Path, step: int) -> None:
    for old in steps_of(run):
        if old < step:
            file_of(run, old).unlink(missing_ok=True)
