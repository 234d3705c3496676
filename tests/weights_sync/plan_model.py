"""A trainer and an engine made of arrays: what Megatron's cuts and SGLang's loaders do to the elements of a model.

Every element of the model is another number, so that no mistake hides. Nothing here is shared with what it checks.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specactor.weights_sync.plan import Copy, Held, held, index

Array = npt.NDArray[np.int32]
ITEM = 4
PAD = -1


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A model's shape, the trainer's layout, and the engine's."""

    hidden: int
    groups: int
    heads_per_group: int
    head_dim: int
    ffn: int
    expert_ffn: int
    experts: int
    """0: dense."""
    vocab: int
    layers: int
    tensor: int
    expert_tensor: int
    expert: int
    pipeline: int
    virtual: int
    data: int
    engine: int
    seed: int


def whole(pair: Pair) -> dict[str, Array]:
    """The model under its Hugging Face names."""
    p = pair
    q, kv = p.groups * p.heads_per_group * p.head_dim, p.groups * p.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed": (p.vocab, p.hidden), "lm_head": (p.vocab, p.hidden)}
    for layer in range(p.layers):
        shapes |= {
            f"{layer}.norm": (p.hidden,),
            f"{layer}.q": (q, p.hidden),
            f"{layer}.k": (kv, p.hidden),
            f"{layer}.v": (kv, p.hidden),
            f"{layer}.o": (p.hidden, q),
        }
        width = p.expert_ffn if p.experts else p.ffn
        mlps = [f"{layer}.{e}." for e in range(p.experts)] or [f"{layer}."]
        for mlp in mlps:
            shapes |= {mlp + "gate": (width, p.hidden), mlp + "up": (width, p.hidden), mlp + "down": (p.hidden, width)}
        if p.experts:
            shapes[f"{layer}.router"] = (p.experts, p.hidden)
    made, first = {}, 1
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        made[name] = np.arange(first, first + size, dtype=np.int32).reshape(shape)
        first += size
    return made


def _cut_qkv(pair: Pair, q: Array, k: Array, v: Array) -> list[Array]:
    """Groups of query heads with their key and value, by shard."""
    by_group = [part.reshape(pair.groups, -1, pair.hidden) for part in (q, k, v)]
    fused = np.concatenate(by_group, axis=1).reshape(-1, pair.hidden)
    return np.split(fused, pair.tensor)


def _cut_gated(gate: Array, up: Array, shards: int) -> list[Array]:
    return [np.concatenate(pair) for pair in zip(np.split(gate, shards), np.split(up, shards), strict=True)]


def _cut_vocab(pair: Pair, rows: Array) -> list[Array]:
    unit = 4 * pair.tensor
    padding = np.full((-len(rows) % unit, pair.hidden), PAD, np.int32)
    return np.split(np.concatenate([rows, padding]), pair.tensor)


def parameters(pair: Pair, model: dict[str, Array]) -> list[tuple[int, int, bool, list[Array], list[str]]]:
    """Megatron's: (pipeline stage, expert's rank, is of an expert, shards, the tensors in it)."""
    p, made = pair, []
    stages = p.pipeline * p.virtual
    for layer in range(p.layers):
        stage = layer * stages // p.layers % p.pipeline  # chunks of virtual stages go round
        t = {name.removeprefix(f"{layer}."): value for name, value in model.items() if name.startswith(f"{layer}.")}
        made.append((stage, 0, False, [t["norm"]], ["norm"]))
        made.append((stage, 0, False, _cut_qkv(p, t["q"], t["k"], t["v"]), ["q", "k", "v"]))
        made.append((stage, 0, False, np.split(t["o"], p.tensor, axis=1), ["o"]))
        if not p.experts:
            made.append((stage, 0, False, _cut_gated(t["gate"], t["up"], p.tensor), ["gate", "up"]))
            made.append((stage, 0, False, np.split(t["down"], p.tensor, axis=1), ["down"]))
        else:
            made.append((stage, 0, False, [t["router"]], ["router"]))
        for e in range(p.experts):
            rank = e // (p.experts // p.expert)
            gated = _cut_gated(t[f"{e}.gate"], t[f"{e}.up"], p.expert_tensor)
            made.append((stage, rank, True, gated, [f"{e}.gate", f"{e}.up"]))
            made.append((stage, rank, True, np.split(t[f"{e}.down"], p.expert_tensor, axis=1), [f"{e}.down"]))
        made[:] = [(*m[:4], [n if n in model else f"{layer}.{n}" for n in m[4]]) for m in made]
    made.append((0, 0, False, _cut_vocab(p, model["embed"]), ["embed"]))
    made.append((p.pipeline - 1, 0, False, _cut_vocab(p, model["lm_head"]), ["lm_head"]))
    return made


class Trainer:
    """Its ranks' memories, on some hosts, and what they hold in them: per host, one of each shard's equal copies."""

    def __init__(self, pair: Pair, model: dict[str, Array], num_hosts: int = 1) -> None:
        rng = random.Random(pair.seed)
        self.contents: dict[tuple[Any, ...], list[Array]] = defaultdict(list)
        """By rank: (pipeline, copy, shard) of the dense part, (..., expert) of the experts': two memories."""
        self.tensors: dict[tuple[Any, ...], list[Held]] = defaultdict(list)
        self._hosts: dict[tuple[Any, ...], int] = {}
        for turn, (stage, expert, of_expert, shards, names) in enumerate(parameters(pair, model)):
            numbers = np.concatenate([shard.ravel() for shard in shards])
            order = np.argsort(numbers, kind="stable")
            for shard, values in enumerate(shards):
                places = [(stage, copy, shard, expert, of_expert) for copy in range(pair.data)]
                for place in places:
                    self._hosts.setdefault(place, rng.randrange(num_hosts))
                for host in range(num_hosts):
                    equal = [place for place in places if self._hosts[place] == host]
                    if not equal:
                        continue
                    place = equal[turn % len(equal)]
                    padding = np.full(rng.randrange(4), PAD, np.int32)
                    self.contents[place] += [padding, values.ravel()]
                    at = ITEM * (sum(part.size for part in self.contents[place]) - values.size)
                    own = range(shard * values.size, (shard + 1) * values.size)
                    for name in names:
                        wanted = model[name].ravel()
                        index_N = order[np.searchsorted(numbers, wanted, sorter=order)]
                        assert np.array_equal(numbers[index_N], wanted)
                        blocks = held(index([index_N]), own, memory=0, at=at, item_bytes=ITEM)
                        self.tensors[place].append(Held(name, wanted.size * ITEM, blocks))

    def memories(self) -> list[npt.NDArray[np.uint8]]:
        return [np.concatenate(parts).view(np.uint8) for parts in self.contents.values()]

    def parts(self) -> list[tuple[int, list[Held]]]:
        return [(1, self.tensors[place]) for place in self.contents]

    def hosts(self) -> list[int]:
        """By rank, as `parts` are."""
        return [self._hosts[place] for place in self.contents]


class Loader:
    """An engine rank's parameters, and its loader, which notes what it does."""

    def __init__(self, pair: Pair, rank: int) -> None:
        self.pair, self.rank = pair, rank
        self.parameters: dict[str, Array] = {}
        self.copies: dict[str, list[Copy]] = defaultdict(list)

    def load(self, model: dict[str, Array]) -> None:
        p, n, r = self.pair, self.pair.engine, self.rank
        vocab = p.vocab + -p.vocab % (4 * n)
        for name in ("embed", "lm_head"):
            rows = vocab // n
            target = self._make(name, (rows, p.hidden))
            mine = range(r * rows, min((r + 1) * rows, p.vocab))
            self._copy(name, target[: len(mine)], name, model[name], model[name][mine.start : mine.stop])
            self._fill(name, target[max(0, len(mine)) :])
        kv = max(1, p.groups // n)
        q = p.groups * p.heads_per_group // n * p.head_dim
        for layer in range(p.layers):
            self._whole(f"{layer}.norm", model)
            fused = self._make(f"{layer}.qkv", (q + 2 * kv * p.head_dim, p.hidden))
            first_kv = r * p.groups // n * p.head_dim  # heads are given to several ranks where there are too few
            cuts = {"q": (0, r * q, q)}
            cuts["k"] = (q, first_kv, kv * p.head_dim)
            cuts["v"] = (q + kv * p.head_dim, first_kv, kv * p.head_dim)
            for part, (to, at, rows) in cuts.items():
                source = model[f"{layer}.{part}"]
                self._copy(f"{layer}.qkv", fused[to : to + rows], f"{layer}.{part}", source, source[at : at + rows])
            o = model[f"{layer}.o"]
            target = self._make(f"{layer}.o", (p.hidden, q))
            self._copy(f"{layer}.o", target, f"{layer}.o", o, o[:, r * q : (r + 1) * q])
            if p.experts:
                self._whole(f"{layer}.router", model)
            width = (p.expert_ffn if p.experts else p.ffn) // n
            experts = [f"{layer}.{e}." for e in range(p.experts)] or [f"{layer}."]
            w13 = self._make(f"{layer}.w13", (len(experts), 2 * width, p.hidden))
            w2 = self._make(f"{layer}.w2", (len(experts), p.hidden, width))
            own = slice(r * width, (r + 1) * width)
            for e, name in enumerate(experts):
                gate, up, down = (model[name + part] for part in ("gate", "up", "down"))
                self._copy(f"{layer}.w13", w13[e, :width], name + "gate", gate, gate[own])
                self._copy(f"{layer}.w13", w13[e, width:], name + "up", up, up[own])
                self._copy(f"{layer}.w2", w2[e], name + "down", down, down[:, own])

    def sizes(self) -> dict[str, int]:
        return {name: value.nbytes for name, value in self.parameters.items()}

    def _make(self, name: str, shape: Sequence[int]) -> Array:
        return self.parameters.setdefault(name, np.full(shape, -9, np.int32))

    def _whole(self, name: str, model: dict[str, Array]) -> None:
        self._copy(name, self._make(name, model[name].shape), name, model[name], model[name])

    def _copy(self, parameter: str, target: Array, tensor: str, of: Array, source: Array) -> None:
        target[...] = source
        at, to = _offset(source, of), _offset(target, self.parameters[parameter])
        self.copies[parameter].append(Copy(tensor, at, to, ITEM, target.shape, source.strides, target.strides))

    def _fill(self, parameter: str, target: Array) -> None:
        target[...] = 0
        to = _offset(target, self.parameters[parameter])
        self.copies[parameter].append(Copy("", 0, to, ITEM, target.shape, target.strides, target.strides))


def _offset(part: Array, of: Array) -> int:
    return int(part.__array_interface__["data"][0] - of.__array_interface__["data"][0])
