"""In which order problems are drawn, and the seed of each response. PURE.

The order is a function of (number of problems, seed): each epoch is a fresh permutation.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from specactor.errors import CheckpointError, ConfigError


class Visit(NamedTuple):
    problem: int
    epoch: int  # how often all problems of its set had been drawn before


class PromptStream:
    """Problems without end; within an epoch none comes twice."""

    def __init__(self, dataset_len: int, seed: int, *, shuffle: bool = True) -> None:
        """Raise ConfigError when there is nothing to draw from."""
        if dataset_len < 1:
            raise ConfigError.at("data.train", dataset_len, "at least one problem", "Give a file or task that has one.")
        self.dataset_len = dataset_len
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1
        self._move(epoch=0, position=0)

    @property
    def num_taken(self) -> int:
        return self._epoch * self.dataset_len + self._position

    def take(self, count: int) -> tuple[Visit, ...]:
        taken: list[Visit] = []
        while len(taken) < count:
            if self._position == self.dataset_len:
                self._move(epoch=self._epoch + 1, position=0)
            part = self._order[self._position : self._position + count - len(taken)]
            self._position += len(part)
            taken += [Visit(index, self._epoch) for index in part]
        return tuple(taken)

    def state(self) -> dict[str, int]:
        return {
            "dataset_len": self.dataset_len,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "epoch": self._epoch,
            "position": self._position,
        }

    def restore(self, state: object) -> None:
        """Go on from a `state`. Raises CheckpointError for one of another data set, seed or order."""
        keys = ("dataset_len", "seed", "shuffle", "epoch", "position")
        if not isinstance(state, Mapping) or any(type(state.get(key)) is not int for key in keys):
            raise CheckpointError(
                f"data position: got {state!r:.200}, expected integers {', '.join(keys)}. "
                "Resume from another checkpoint."
            )
        for key, own, remedy in (
            ("dataset_len", self.dataset_len, "Resume with the data that the run started with."),
            ("seed", self.seed, "Resume with the seed that the run started with."),
            ("shuffle", int(self.shuffle), "Resume with the data.order that the run started with."),
        ):
            if state[key] != own:
                raise CheckpointError(
                    f"data position: {key}: got {state[key]}, expected {own} as in this run. {remedy}"
                )
        self._move(epoch=state["epoch"], position=state["position"])

    def _move(self, *, epoch: int, position: int) -> None:
        self._position = position
        if epoch == self._epoch:  # dynamic sampling goes back in every step, and an order may have millions
            return
        self._epoch = epoch
        self._order = list(range(self.dataset_len))
        if self.shuffle:
            random.Random(_hash(b"epoch", self.seed, epoch)).shuffle(self._order)


class MixedStream:
    """Problems of several sets, numbered on. The next is of the set farthest behind its weight, so shares hold in every
    stretch with the same weights."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, *, shuffle: bool = True) -> None:
        self._streams = [PromptStream(size, seed + i, shuffle=shuffle) for i, size in enumerate(sizes)]
        self._offsets = [0, *accumulate(sizes)]
        self._weights = [*map(float, weights)]
        self._since = [0] * len(sizes)  # problems of each set that had been taken when these weights began

    def take(self, count: int) -> tuple[Visit, ...]:
        return tuple(self._next() for _ in range(count))

    def state(self) -> dict[str, object]:
        return {
            "sets": [stream.state() for stream in self._streams],
            "weights": self._weights,
            "since": self._since,
        }

    def restore(self, state: object) -> None:
        """As `PromptStream.restore`, of the same sets."""
        sets = state.get("sets") if isinstance(state, Mapping) else None
        if not isinstance(sets, list) or len(sets) != len(self._streams):
            raise CheckpointError(
                f"data position: got {state!r:.200}, expected those of {len(self._streams)} sets. Resume with the "
                "data.train and data.mix that the run started with."
            )
        for stream, of_set in zip(self._streams, sets, strict=True):
            stream.restore(of_set)
        taken = [stream.num_taken for stream in self._streams]
        # Shares by other weights begin here: else one set alone would be drawn until it has caught up with the others.
        assert isinstance(state, Mapping)
        same = state.get("weights", self._weights) == self._weights
        self._since = [*state.get("since", [0] * len(taken))] if same else taken

    def _next(self) -> Visit:
        num_taken = [stream.num_taken - since for stream, since in zip(self._streams, self._since, strict=True)]
        after = [(count + 1) / weight for count, weight in zip(num_taken, self._weights, strict=True)]
        chosen = after.index(min(after))
        [(index, epoch)] = self._streams[chosen].take(1)
        return Visit(self._offsets[chosen] + index, epoch)


class CurriculumStream:
    """Takes a problem of success rate p with chance 4 p (1 - p), a tenth at least, and always one never tried. p
    is its last mean score in 0..1, or its set's range."""

    def __init__(self, stream: PromptStream | MixedStream, seed: int, *, sizes: Sequence[int] = ()) -> None:
        self._stream, self._seed = stream, seed
        self._ends = [*accumulate(sizes)]
        self._looks = 0
        self._rates: dict[int, float] = {}
        self._known: dict[int, tuple[float, float]] | None = None  # ranges of these

    def take(self, count: int) -> tuple[Visit, ...]:
        taken: list[Visit] = []
        while len(taken) < count:
            self._known = self._known or self._ranges()
            [visit] = self._stream.take(1)
            index = visit.problem
            self._looks += 1
            low, high = self._known[bisect_right(self._ends, index)]
            rate = (self._rates[index] - low) / (high - low) if index in self._rates else 0.5
            if _hash(b"curriculum", self._seed, self._looks) < max(0.1, 4 * rate * (1 - rate)) * 2**64:
                taken.append(visit)
        return tuple(taken)

    def learn(self, index: int, mean: float) -> None:
        self._rates[index], self._known = mean, None

    def _ranges(self) -> dict[int, tuple[float, float]]:
        ranges = dict.fromkeys(range(len(self._ends) + 1), (0.0, 1.0))
        for index, mean in self._rates.items():
            low, high = ranges[of_set := bisect_right(self._ends, index)]
            ranges[of_set] = min(low, mean), max(high, mean)
        return ranges

    def state(self) -> dict[str, object]:
        return {"stream": self._stream.state(), "looks": self._looks, "rates": [*map(list, self._rates.items())]}

    def restore(self, state: object) -> None:
        """Continue from a `state`. Raises CheckpointError when it is of no curriculum, or of another stream."""
        if not isinstance(state, Mapping) or not {"stream", "looks", "rates"} <= state.keys():
            raise CheckpointError(
                f"data position: got {state!r:.200}, expected that of a curriculum. Resume with the data.order "
                "that the run started with."
            )
        self._stream.restore(state["stream"])
        self._looks, self._rates = int(state["looks"]), {int(i): float(rate) for i, rate in state["rates"]}
        self._known = None


def request_seed(run_seed: int, step: int, problem_index: int, sample_index: int) -> int:
    """Return a response's seed, a stable hash in [0, 2**31), the same after a resume."""
    return _hash(b"request", run_seed, step, problem_index, sample_index) >> 33


def turn_seed(session_seed: int, prompt_ids: Sequence[int], *numbers: int) -> int:
    """Return likewise a turn's seed; `numbers` tell equal prompts apart."""
    return _hash(b"turn", session_seed, *numbers, *prompt_ids) >> 33


def _hash(purpose: bytes, *numbers: int) -> int:
    packed = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=purpose).digest(), "little")
