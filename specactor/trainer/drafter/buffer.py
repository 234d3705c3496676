"""The newest rollouts, for the draft model to learn from. PURE.

Invariants: it never exceeds `max_tokens`; the oldest policy version leaves first, and of one version the shortest
response; a draw depends on seed, number and content; a restored state has equal bits.

Shapes: L tokens, R of the response, K top-k, F numbers of hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from specactor.errors import DataError
from specactor.replay import records
from specactor.types import TrainSequence

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class TopK:
    tokens: NDArray[np.int32]  # [R, K]
    logprobs: NDArray[np.float16]  # [R, K] of the whole distribution at the sampling temperature


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingExample:
    token_ids: NDArray[np.int32]  # [L] prompt and response
    prompt_len: int
    version: int  # of the policy that generated it
    temperature: float = 1.0
    top_k: TopK | None = None
    states: Tensor | None = None  # [L, F] the policy's hidden states, for a head; they are never stored

    @property
    def response_len(self) -> int:
        return len(self.token_ids) - self.prompt_len


def example_from(
    sequence: TrainSequence, top_k: TopK | None, *, version: int, temperature: float, states: Tensor | None = None
) -> TrainingExample:
    return TrainingExample(
        token_ids=np.array(sequence.token_ids, np.int32),
        prompt_len=sequence.prompt_len,
        version=version,
        temperature=temperature,
        top_k=top_k,
        states=states,
    )


def cut(example: TrainingExample, num_tokens: int) -> TrainingExample:
    """Keep the prompt, and the response's first tokens."""
    top_k, kept = example.top_k, num_tokens - example.prompt_len
    if top_k is not None:
        top_k = TopK(tokens=top_k.tokens[:kept].copy(), logprobs=top_k.logprobs[:kept].copy())
    states = example.states
    if states is not None and len(states) > num_tokens:
        states = states[:num_tokens].clone()
    return replace(example, token_ids=example.token_ids[:num_tokens].copy(), top_k=top_k, states=states)


class DraftBuffer:
    """The buffer of one run, the same on every rank. Examples over `max_example_tokens` are cut, or left out for their
    prompt."""

    def __init__(self, *, max_tokens: int, half_life_steps: float, seed: int, max_example_tokens: int) -> None:
        self._max_tokens, self._half_life, self._seed = max_tokens, half_life_steps, seed
        self._longest = min(max_example_tokens, max_tokens)
        self.examples: list[TrainingExample] = []
        self.too_long = 0  # examples left out so far
        self._known_chances: NDArray[np.float64] | None = None  # of the present content

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def num_tokens(self) -> int:
        return sum(len(example.token_ids) for example in self.examples)

    def add(self, examples: Sequence[TrainingExample]) -> int:
        """Add what fits of the examples, and count what is left out; the oldest leave. Return how many were cut."""
        num_cut = 0
        for example in examples:
            if len(example.token_ids) <= self._longest:
                self.examples.append(example)
            elif example.prompt_len < self._longest:
                self.examples.append(cut(example, self._longest))
                num_cut += 1
            else:
                self.too_long += 1
        self._evict()
        return num_cut

    def take(self) -> list[TrainingExample]:
        """Return all examples, and forget them."""
        taken, self.examples = self.examples, []
        return taken

    def draw(self, number: int, num_tokens: int) -> list[TrainingExample]:
        """Return examples of at most `num_tokens` together, or a longer one; [] when empty. They are drawn without
        replacement by exponential keys (Efraimidis and Spirakis, Inf. Proc. Letters 97, 2006)."""
        if not self.examples:
            return []
        chance = np.random.default_rng([self._seed, number])
        keys = chance.exponential(size=len(self.examples)) / self._chances()
        drawn: list[TrainingExample] = []
        left = num_tokens
        for index in np.argsort(keys, kind="stable"):
            example = self.examples[index]
            if drawn and len(example.token_ids) > left:
                break
            drawn.append(example)
            left -= len(example.token_ids)
        return drawn

    def state(self) -> bytes:
        return msgspec.msgpack.encode((self.too_long, [_Stored.of(example) for example in self.examples]))

    def restore(self, state: bytes) -> None:
        self.too_long, stored = msgspec.msgpack.decode(state, type=tuple[int, list[_Stored]])
        self.examples = [each.example() for each in stored]
        self._evict()

    def _chances(self) -> NDArray[np.float64]:
        if self._known_chances is not None:
            return self._known_chances
        # The policy has moved on from old responses, and long ones are what a rollout waits for.
        versions = np.array([example.version for example in self.examples])
        lengths = np.array([example.response_len for example in self.examples])
        chances: NDArray[np.float64] = lengths * 0.5 ** ((versions.max() - versions) / self._half_life)
        self._known_chances = np.maximum(chances, np.finfo(np.float64).tiny)
        return self._known_chances

    def _evict(self) -> None:
        self._known_chances = None
        too_many = self.num_tokens - self._max_tokens
        if too_many <= 0:
            return
        gone: set[int] = set()
        worst_first = sorted(
            range(len(self.examples)), key=lambda i: (self.examples[i].version, self.examples[i].response_len, i)
        )
        for i in worst_first:
            if too_many <= 0:
                break
            gone.add(i)
            too_many -= len(self.examples[i].token_ids)
        self.examples = [example for i, example in enumerate(self.examples) if i not in gone]


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    token_ids: bytes
    prompt_len: int
    version: int
    temperature: float
    top_k: tuple[bytes, bytes] | None  # tokens and log-probabilities

    @classmethod
    def of(cls, example: TrainingExample) -> _Stored:
        known = example.top_k
        top_k = None if known is None else (known.tokens.tobytes(), known.logprobs.tobytes())
        return cls(example.token_ids.tobytes(), example.prompt_len, example.version, example.temperature, top_k)

    def example(self) -> TrainingExample:
        token_ids, top_k = np.frombuffer(self.token_ids, np.int32), None
        if self.top_k is not None:
            rows = len(token_ids) - self.prompt_len
            tokens, logprobs = self.top_k
            top_k = TopK(
                tokens=np.frombuffer(tokens, np.int32).reshape(rows, -1),
                logprobs=np.frombuffer(logprobs, np.float16).reshape(rows, -1),
            )
        return TrainingExample(
            token_ids=token_ids,
            prompt_len=self.prompt_len,
            version=self.version,
            temperature=self.temperature,
            top_k=top_k,
        )


class RolloutLine(msgspec.Struct, frozen=True, kw_only=True):
    prompt_ids: list[int]
    token_ids: list[int]  # of the response
    version: int = 0
    reward: float = 0.0
    temperature: float = 1.0


def example_of(line: RolloutLine) -> TrainingExample:
    return TrainingExample(
        token_ids=np.array([*line.prompt_ids, *line.token_ids], np.int32),
        prompt_len=len(line.prompt_ids),
        version=line.version,
        temperature=line.temperature,
    )


def read_rollouts(paths: Sequence[Path]) -> list[RolloutLine]:
    """Return the responses with tokens in files, and in ``*.jsonl`` and ``step-*.bin`` of folders, by name. Raises
    DataError for an unreadable file, or no response."""
    files = [
        file
        for path in paths
        for file in (sorted([*path.rglob("*.jsonl"), *path.rglob("step-*.bin")]) if path.is_dir() else [path])
    ]
    lines = [line for file in files for line in (_recorded(file) if file.suffix == ".bin" else _lines(file))]
    if not (found := [line for line in lines if line.prompt_ids and line.token_ids]):
        raise DataError(f"{', '.join(map(str, paths))}: got no response with tokens, expected some. Give other files.")
    return found


def _recorded(file: Path) -> Iterator[RolloutLine]:
    record = records.read(file)
    for sample in record.samples:
        yield RolloutLine(
            prompt_ids=sample.prompt_ids.tolist(),
            token_ids=sample.token_ids.tolist(),
            version=sample.spans[-1][0] if sample.spans else 0,
            reward=sample.reward,
            temperature=record.config["rollout"]["temperature"],
        )


def _lines(file: Path) -> Iterator[RolloutLine]:
    decoder = msgspec.json.Decoder(RolloutLine)
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}). Give files or folders of JSON lines.") from error
    for number, raw in enumerate(lines, 1):
        try:
            yield decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DataError(
                f"{file}:{number}: got {error}, expected an object with prompt_ids and token_ids. "
                "Give files of rollouts."
            ) from error
