"""Plans for random pairs of layouts: every element of an engine is written once, with what its loader gives it."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor.errors import WeightSyncError
from specactor.weights_sync import plan
from specactor.weights_sync.digest import copy_and_digest, digest_spans
from specactor.weights_sync.memory import pull_on_device
from specactor.weights_sync.mirrors import crossings, taker
from specactor.weights_sync.plan import Block, Chunk, Held, Span, merged
from tests.weights_sync.plan_model import Loader, Pair, Trainer, whole

SMALL = st.sampled_from([1, 2, 4])


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    tensor, expert_tensor, engine, expert = draw(SMALL), draw(SMALL), draw(SMALL), draw(SMALL)
    unit = np.lcm.reduce([tensor, engine])
    expert_unit = np.lcm.reduce([expert_tensor, engine])
    groups = tensor * draw(st.integers(1, 2))
    heads = draw(st.integers(1, 3))
    while groups * heads % engine or (groups % engine and engine % groups):
        heads, groups = heads * 2, groups * 2
    return Pair(
        hidden=draw(st.integers(1, 9)),
        groups=groups,
        heads_per_group=heads,
        head_dim=draw(st.integers(1, 3)),
        ffn=int(unit) * draw(st.integers(1, 4)),
        expert_ffn=int(expert_unit) * draw(st.integers(1, 3)),
        experts=expert * draw(st.integers(0, 2)),
        vocab=draw(st.integers(1, 30)),
        layers=draw(st.integers(1, 4)),
        tensor=tensor,
        expert_tensor=expert_tensor,
        expert=expert,
        pipeline=draw(st.sampled_from([1, 2])),
        virtual=draw(st.sampled_from([1, 2])),
        data=draw(st.integers(1, 3)),
        engine=engine,
        seed=draw(st.integers(0, 2**16)),
    )


PAIR = Pair(
    hidden=8,
    groups=4,
    heads_per_group=2,
    head_dim=2,
    ffn=8,
    expert_ffn=8,
    experts=4,
    vocab=27,
    layers=3,
    tensor=2,
    expert_tensor=2,
    expert=2,
    pipeline=2,
    virtual=1,
    data=2,
    engine=2,
    seed=1,
)


def loaded(pair: Pair, rank: int) -> Loader:
    loader = Loader(pair, rank)
    loader.load(whole(pair))
    return loader


def all_of(pair: Pair) -> tuple[Held, ...]:
    trainer = Trainer(pair, whole(pair))
    return merged(trainer.parts(), trainer.hosts(), 0)


def flat(loader: Loader, chunk: Chunk) -> list[Any]:
    return [loader.parameters[name].reshape(-1).view(np.uint8) for name in chunk.parameters]


def times_written(loader: Loader, chunks: tuple[Chunk, ...]) -> dict[str, Any]:
    counts = {name: np.zeros(num_bytes, np.int64) for name, num_bytes in loader.sizes().items()}
    for chunk in chunks:
        for name, block in zip(chunk.parameters, chunk.blocks, strict=True):
            for run in range(block.span.count):
                counts[name][block.to + run * block.step :][: block.span.length] += 1
    return counts


@settings(max_examples=600 if settings.get_current_profile_name() == "deep" else 25)
@given(pairs(), st.sampled_from([16, 100, 2**20]))
def test_every_element_of_an_engine_is_written_once_with_what_its_loader_gives_it(pair: Pair, piece: int) -> None:
    trainer = Trainer(pair, whole(pair))
    memories, tensors = trainer.memories(), merged(trainer.parts(), trainer.hosts(), 0)
    for rank in range(pair.engine):
        loader = loaded(pair, rank)
        with mock.patch.object(plan, "CHUNK_BYTES", piece):
            chunks = plan.chunks(loader.copies, loader.sizes(), tensors)
        wanted = {name: value.copy() for name, value in loader.parameters.items()}
        written = times_written(loader, chunks)
        for name, value in wanted.items():
            assert np.array_equal(written[name], np.repeat(value.reshape(-1) != 0, 4))  # 0 is what was filled
            loader.parameters[name].fill(0)  # what was filled stays so
        for chunk in chunks:
            assert len({span.memory for span in chunk.spans}) == 1
            assert max(span.length * span.count for span in chunk.spans) <= max(piece, 1)
            copied = copy_and_digest(flat(loader, chunk), chunk.blocks, memories)
            assert copied == digest_spans(dict(enumerate(memories)), chunk.spans)
        for name, value in wanted.items():
            assert np.array_equal(loader.parameters[name], value), name


@settings(max_examples=400 if settings.get_current_profile_name() == "deep" else 8)
@given(pairs(), st.integers(2, 4), st.sampled_from([16, 2**20]))
def test_what_no_rank_of_a_host_has_crosses_to_it_once(pair: Pair, num_hosts: int, piece: int) -> None:
    """Every element is another number, so what crosses is known from numbers alone: those that the engines of a host
    hold and its ranks do not. An engine is then as its loader made it, by digests of the owners."""
    model = whole(pair)
    trainer = Trainer(pair, model, num_hosts)
    memories, hosts = trainer.memories(), trainer.hosts()
    by_host = [merged(trainer.parts(), hosts, host) for host in range(max(hosts) + 1)]
    loaders = [(rank, loaded(pair, number)) for rank in range(len(hosts)) for number in range(pair.engine)]
    with mock.patch.object(plan, "CHUNK_BYTES", piece):
        chunks = [plan.chunks(of.copies, of.sizes(), by_host[hosts[rank]]) for rank, of in loaders]
    places: dict[int, Any] = {}
    for (_, loader), made in zip(loaders, chunks, strict=True):
        assert places.setdefault(loader.rank, {chunk.place for chunk in made}) == {chunk.place for chunk in made}
    reads: list[list[tuple[Span, ...]]] = [[] for _ in hosts]
    for (rank, _), made in zip(loaders, chunks, strict=True):
        reads[rank] += [chunk.spans for chunk in made]
    crossed: dict[int, list[Any]] = {host: [] for host in hosts}
    seen = {host: dict(enumerate(memories)) for host in hosts}  # what engines of each host can open
    for host, visible in seen.items():
        visible.update({i: np.full_like(memories[i], 255) for i, of in enumerate(hosts) if of != host})
    for memory, owner, to, start, end in crossings(reads, range(len(hosts)), hosts):
        assert owner == memory
        seen[hosts[to]][memory][start:end] = memories[owner][start:end]
        crossed[hosts[to]].append(memories[owner][start:end].view(np.int32))
    for host, numbers in crossed.items():
        near = np.concatenate([memories[i].view(np.int32) for i, of in enumerate(hosts) if of == host])
        wanted = np.concatenate([value.ravel() for _, of in loaders for value in of.parameters.values()])
        found = np.sort(np.concatenate(numbers)) if numbers else np.zeros(0, np.int32)
        assert np.array_equal(found, np.setdiff1d(wanted[wanted > 0], near))
    for (rank, loader), made in zip(loaders, chunks, strict=True):
        wanted_now = {name: value.copy() for name, value in loader.parameters.items()}
        for value in loader.parameters.values():
            value.fill(0)
        for chunk in made:
            copied = copy_and_digest(flat(loader, chunk), chunk.blocks, list(seen[hosts[rank]].values()))
            assert copied == digest_spans(dict(enumerate(memories)), chunk.spans)
        assert all(np.array_equal(loader.parameters[name], value) for name, value in wanted_now.items())


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 4))
def test_owners_give_about_as_much_each(sizes: list[int], owners: int) -> None:
    """To a host that has nothing; it may not be their own, either."""
    tensors = [Held(str(i), n, (Block(Span(0, 0, 0, n, 1), 0, 0),)) for i, n in enumerate(sizes)]
    parts = [(1, tensors)] * owners + [(1, [])]
    last = merged(parts, range(owners + 1), owners)
    given = Counter({rank: 0 for rank in range(owners)})
    for tensor in last:
        given[tensor.blocks[0].span.memory] += tensor.num_bytes
    assert max(given.values()) - min(given.values()) <= max(sizes)
    assert sum(given.values()) == sum(sizes)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=10), st.integers(1, 4), st.integers(1, 6))
def test_owners_give_about_as_much_each_to_all_hosts(sizes: list[int], owners: int, empty: int) -> None:
    """Though each host is planned for on its own; and what is the same for all is checked once."""
    tensors = [Held(str(i), n, (Block(Span(0, 0, 0, n, 1), 0, 0),)) for i, n in enumerate(sizes)]
    parts = [(1, tensors)] * owners + [(1, [])] * empty
    given = Counter({rank: 0 for rank in range(owners)})
    for host in range(owners, owners + empty):
        with mock.patch.object(plan, "_check_once", wraps=plan._check_once) as check:
            for tensor in merged(parts, range(owners + empty), host):
                given[tensor.blocks[0].span.memory] += tensor.num_bytes
        assert check.call_count == len(sizes)
    assert max(given.values()) - min(given.values()) <= max(sizes)
    assert sum(given.values()) == empty * sum(sizes)


def test_ranks_of_a_host_take_turns() -> None:
    hosts = [0, 0, 0, 1, 1, 2]
    assert [taker(hosts, owner, 1) for owner in (0, 1, 2)] == [3, 4, 3]
    assert [taker(hosts, owner, 0) for owner in (3, 4)] == [0, 1]
    assert {taker(hosts, owner, 2) for owner in range(5)} == {5}


def swapped(tensors: list[Held]) -> list[Held]:
    """Two experts in each other's place."""
    names = {"0.0.down": "0.1.down", "0.1.down": "0.0.down"}
    return [Held(names.get(t.name, t.name), t.num_bytes, t.blocks) for t in tensors]


def transposed(tensors: list[Held]) -> list[Held]:
    """One tensor's columns for its rows."""
    order = np.arange(64).reshape(8, 8).T.reshape(-1)
    made = []
    for tensor in tensors:
        if tensor.name == "0.0.down":
            (block,) = tensor.blocks
            blocks = plan.held(plan.index([order]), range(64), memory=block.span.memory, at=block.span.at, item_bytes=4)
            tensor = Held(tensor.name, tensor.num_bytes, blocks)
        made.append(tensor)
    return made


@pytest.mark.parametrize("wrong", [swapped, transposed])
def test_a_wrong_plan_does_not_have_the_digests_of_what_was_loaded(wrong: Callable[[list[Held]], list[Held]]) -> None:
    assert differing(lambda tensors: tensors) == []
    assert "0.w2" in differing(wrong)


def differing(edit: Callable[[list[Held]], list[Held]]) -> list[str]:
    """Parameters that the loader filled with other bytes than the plan would."""
    pair = replace(PAIR, expert_tensor=1, engine=1, data=1, pipeline=1, expert=1)
    trainer = Trainer(pair, whole(pair))
    memories = trainer.memories()
    tensors = edit(list(merged(trainer.parts(), trainer.hosts(), 0)))
    loader = loaded(pair, 0)
    chunks = plan.chunks(loader.copies, loader.sizes(), tensors)
    return [
        name
        for chunk in chunks
        if copy_and_digest(flat(loader, chunk), chunk.blocks, None)
        != digest_spans(dict(enumerate(memories)), chunk.spans)
        for name in chunk.parameters
    ]


def test_a_missing_shard_is_refused() -> None:
    trainer = Trainer(PAIR, whole(PAIR))
    with pytest.raises(WeightSyncError, match="would not be written whole"):
        merged(trainer.parts()[1:], trainer.hosts()[1:], 0)


def test_a_part_that_is_in_two_cuts_is_refused() -> None:
    """Equal parts of two ranks are one; a whole tensor beside its shards is not."""
    [tensor] = (plan.held(plan.index([np.arange(8), np.zeros(0)]), range(8), memory=0, at=0, item_bytes=4),)
    [half] = (plan.held(plan.index([np.arange(8)]), range(4), memory=0, at=0, item_bytes=4),)
    whole_one, half_one = Held("x", 32, tensor), Held("x", 32, half)
    assert merged([(1, [whole_one]), (1, [whole_one])], [0, 0], 0) == (whole_one,)
    with pytest.raises(WeightSyncError, match="would be written twice from byte 0 on"):
        merged([(1, [whole_one]), (1, [half_one])], [0, 0], 0)


def test_a_memory_that_is_near_gives_what_it_has() -> None:
    """Of two halves it has one, at another place; a part of the same name that it lacks, or that is a memory's of which
    nothing is known, stays where it is."""
    [first] = plan.held(plan.index([np.arange(8)]), range(4), memory=0, at=128, item_bytes=4)
    [second] = plan.held(plan.index([np.array([4, 0, 5, 1, 6, 2, 7, 3])]), range(4), memory=1, at=64, item_bytes=4)
    [far] = plan.held(plan.index([np.arange(4)]), range(4), memory=3, at=64, item_bytes=4)
    tensors = (Held("x", 32, (first, second)), Held("y", 16, (first,)), Held("z", 16, (far,)))
    places = {0: {"other": 0, "x:0": 128}, 1: {"x:1": 0, "more": 4096}, 2: {"x:1": 640, "near alone": 0}}
    [near] = plan.nearer(tensors, places, 2)
    moved = Span(2, 640 + second.span.at, second.span.step, second.span.length, second.span.count)
    assert near == Held("x", 32, (first, Block(moved, second.to, second.step)))
    assert plan.nearer(tensors, places, 0) == ()
    assert plan.nearer(tensors, {**places, 2: {}}, 2) == ()


def test_a_tensor_that_no_rank_holds_is_refused() -> None:
    loader = loaded(PAIR, 0)
    tensors = [t for t in all_of(PAIR) if t.name != "1.2.up"]
    with pytest.raises(WeightSyncError, match=r"1\.2\.up is loaded by the engine and held by no rank"):
        plan.chunks(loader.copies, loader.sizes(), tensors)


@pytest.mark.parametrize("missing", [0, 3, -1])
def test_a_parameter_that_is_not_written_whole_is_refused(missing: int) -> None:
    loader, tensors = loaded(PAIR, 0), all_of(PAIR)
    loader.copies["0.w13"].pop(missing)
    with pytest.raises(WeightSyncError, match=r"0\.w13 would not be written whole"):
        plan.chunks(loader.copies, loader.sizes(), tensors)


def test_a_gpu_takes_halves_of_rows_that_change_places() -> None:
    """Its tensors have no steps back; an MTP layer's projection has such rows."""
    numbers = np.arange(5 * 2 * 3).reshape(5, 2, 3)[:, ::-1].reshape(-1)
    blocks = plan.held(plan.index([numbers]), range(numbers.size), memory=0, at=0, item_bytes=4)
    source = torch.arange(numbers.size, dtype=torch.int32).view(torch.uint8)
    loaded = plan.Copy("t", 0, 0, 4, (numbers.size,), (4,), (4,))
    chunks = plan.chunks({"p": [loaded]}, {"p": len(source)}, [Held("t", len(source), blocks)])
    target = torch.zeros_like(source)
    pull_on_device({"p": target}, chunks, [source])
    assert target.view(torch.int32).tolist() == numbers.tolist()


def test_evenly_spaced_runs_are_one_block() -> None:
    columns = np.arange(512 * 64).reshape(512, 64)[:, :32].reshape(-1)
    (block,) = plan.held(plan.index([columns]), range(512 * 64), memory=3, at=100, item_bytes=4)
    assert block == Block(Span(3, 100, 256, 128, 512), 0, 128)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 30), st.data())
def test_digits_say_where_each_element_lies(rows: int, columns: int, a_slice: int, data: st.DataObject) -> None:
    """However the elements were mixed, as if each one's number had been converted."""
    numbers = np.arange(rows * columns).reshape(rows, columns)
    kind = data.draw(st.sampled_from(["rows", "halves", "columns", "elements"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    mixed = {
        "rows": lambda grid: grid[rng.permutation(rows)],
        "halves": lambda grid: np.concatenate(np.array_split(grid, 2, axis=1)[::-1], axis=1),
        "columns": lambda grid: grid[:, rng.permutation(columns)],
        "elements": lambda grid: rng.permutation(grid.reshape(-1)),
    }[kind]
    state = rng.bit_generator.state
    wanted, parts = mixed(numbers).reshape(-1), []
    with mock.patch.object(plan, "_BASE", 4):
        for digit in plan.digits(rows, columns):
            rng.bit_generator.state = state
            values = mixed(np.broadcast_to(digit.values, (rows, columns))).reshape(-1)
            slices = (values[i : i + a_slice] for i in range(0, len(values), a_slice))
            parts.append(plan.index(slices, digit.weight, digit.step))
    start = data.draw(st.integers(0, rows * columns - 1))
    own = range(start, data.draw(st.integers(start + 1, rows * columns)))
    where = {"memory": 1, "at": 64, "item_bytes": 2}
    made = plan.held(plan.summed(parts), own, **where)
    found = np.full(rows * columns, -1)
    for span, to, step in map(msgspec.structs.astuple, made):
        for run in range(span.count):
            found[(to + run * step) // 2 :][: span.length // 2] = np.arange(span.length // 2) + (
                (span.at + run * span.step - 64) // 2
            )
    there = (wanted >= own.start) & (wanted < own.stop)
    assert np.array_equal(found, np.where(there, wanted - own.start, -1))
    assert made == plan.held(plan.index([wanted]), own, **where)


SPANS = st.builds(Span, st.just(0), st.integers(0, 40), st.integers(0, 12), st.integers(1, 12), st.integers(1, 5))


def bytes_of(span: Span) -> list[int]:
    return [span.at + run * span.step + i for run in range(span.count) for i in range(span.length)]


@given(st.lists(SPANS, min_size=1, max_size=12))
def test_what_spans_cover_is_in_the_fewest_pieces(spans: list[Span]) -> None:
    """Against a mark for every byte."""
    marks = np.zeros(200, bool)
    marks[[byte for span in spans for byte in bytes_of(span)]] = True
    edges = np.flatnonzero(np.diff(marks, prepend=False)).reshape(-1, 2)
    assert plan.covered(spans) == [(start, end) for start, end in edges.tolist()]


def test_columns_of_all_ranks_are_one_run() -> None:
    """Each row's part as a run of its own took minutes where columns of many experts are cut."""
    spans = [Span(0, 64 + 16 * rank, 128, 16, 4096) for rank in range(8)]
    with mock.patch.object(plan, "_expanded", wraps=plan._expanded) as expanded:
        assert plan.covered(spans) == [(64, 64 + 128 * 4096)]
    [[[block]]] = [call.args for call in expanded.call_args_list]
    assert block.span.count == 1


GRIDS = st.tuples(st.integers(0, 20), st.tuples(st.integers(0, 4), st.integers(0, 4)), st.permutations([1, 5]))


@given(GRIDS, st.lists(GRIDS, max_size=5))
def test_what_several_write_counts_once(own: Any, written: list[Any]) -> None:
    """Against a mark for every byte."""
    copies, marks = [], np.zeros((1 + len(written), 256), bool)
    for mark, (at, shape, (rows, columns)) in zip(marks, [own, *written], strict=True):
        steps = (4 * rows, 4 * columns)
        copies.append(plan.Copy("", 0, 4 * at, 4, shape, steps, steps))
        np.lib.stride_tricks.as_strided(mark[4 * at :], (*shape, 4), (*steps, 1))[...] = True
    assert plan.num_written(copies[0], copies[1:]) == (marks[0] & marks[1:].any(axis=0)).sum()


def test_runs_are_made_for_one_parameter_at_a_time() -> None:
    """Those of all, four numbers each, would be gigabytes where columns of many experts are cut."""
    rows, width, count = 2048, 8, 64
    tensors, copies = [], {}
    for i in range(count):
        at = i * rows * width
        cuts = (Block(Span(rank, at, width, width, rows), rank * width, 2 * width) for rank in (0, 1))
        tensors.append(Held(str(i), 2 * rows * width, tuple(cuts)))
        copies[str(i)] = [plan.Copy(str(i), 0, 0, 2, (rows, width), (2 * width, 2), (2 * width, 2))]
    tracemalloc.start()
    try:
        made = plan.chunks(copies, dict.fromkeys(copies, 2 * rows * width), tensors)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(made) == 2 * count
    assert peak < count * 2 * rows * 4 * 8 / 2
