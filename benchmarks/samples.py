"""The samples of a step on their way from engines to trainer ranks: memory, bytes and seconds on 2, 8 and 64 ranks.

    python -m benchmarks.samples

Ranks are real processes of this machine that talk through gloo; responses are made up. Each rank has those of one
engine, and packs a share of all. Memory, processor time and bytes are of a rank; with more ranks than cores, the time
on a clock is of a machine that computes for all of them, and is left out.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import resource
import tempfile
import time
from array import array
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import mean

import numpy as np
import torch.distributed as dist

from benchmarks.results import Result, publish
from specactor import samples
from specactor.parallel.collective import Collective
from specactor.trainer import packing
from specactor.types import TrainSequence, Trajectory

RESPONSES, TOKENS, PROMPT = 2048, 8192, 512
VOCABULARY = 151_936
LAYERS, EXPERTS_PER_TOKEN, EXPERTS = 48, 8, 128
MICROBATCH = 16_384
WAYS = ("by owner", "everywhere", "by owner, experts")
MOST_BYTES = 14e9
"""Of all ranks together: where it needs more, fewer responses are made, and memory and time are scaled."""
NEEDED = {"by owner": 15, "everywhere": 230, "by owner, experts": 900}
"""Bytes per token that are on the machine at once, once by owner, on every rank else. Rounded up."""
COLUMNS = ("Ranks", "tokens are", "responses", "memory per rank MB", "processor s per rank", "received per rank MB")


def made_up(rank: int, world: int, count: int, *, experts: bool) -> list[Trajectory]:
    """The responses of this rank's engine, as tuples."""
    rng = np.random.default_rng(rank)
    width = LAYERS * EXPERTS_PER_TOKEN if experts else 0
    return [
        Trajectory(
            request_id=f"1.{i}.0",
            group_id=i,
            prompt_ids=tuple(rng.integers(VOCABULARY, size=PROMPT).tolist()),
            token_ids=tuple(rng.integers(VOCABULARY, size=TOKENS - PROMPT).tolist()),
            logprobs=tuple((-rng.random(TOKENS - PROMPT, np.float32)).tolist()),
            finish_reason="length",
            spans=(),
            routed_experts=rng.integers(EXPERTS, size=(TOKENS - 1) * width, dtype=np.int16).tobytes(),
        )
        for i in range(rank, count, world)
    ]


def learnable(responses: Sequence[Trajectory]) -> list[TrainSequence]:
    """As `specactor.actor` makes them."""
    return [
        TrainSequence(
            token_ids=samples.joined(t.prompt_ids, t.token_ids),
            prompt_len=len(t.prompt_ids),
            rollout_logprobs=t.logprobs,
            routed_experts=t.routed_experts,
        )
        for t in responses
    ]


def by_owner(own: list[Trajectory], collective: Collective) -> int:
    """What a step does; returns the bytes that this rank received."""
    held = [samples.packed(own.pop(0)) for _ in range(len(own))]  # as they finish
    responses = samples.told(held, collective)
    read = samples.fetch(responses, range(collective.rank, len(responses), collective.world), ("token_ids",))
    received = sum(_bytes(a.token_ids) for a, b in zip(read, responses, strict=True) if a is not b)
    del read  # it was scored
    batch = learnable(responses)
    plan = packing.balance([len(s.token_ids) for s in batch], collective.world, MICROBATCH)[collective.rank]
    delivered = samples.fetch(batch, chain(*plan), samples.OF_SEQUENCE)
    came = [a for a, b in zip(delivered, batch, strict=True) if a is not b]
    return received + sum(_bytes(getattr(s, name)) for s in came for name in samples.OF_SEQUENCE)


def everywhere(own: list[Trajectory], collective: Collective) -> int:
    """What a step did before: all ranks had all responses, as tuples."""
    parts = collective.gather(own, list[Trajectory])
    batch = learnable([response for part in parts for response in part])
    packing.balance([len(s.token_ids) for s in batch], collective.world, MICROBATCH)
    longest = max(sum(9 * len(t.logprobs) + 5 * (len(t.token_ids) + PROMPT) for t in part) for part in parts)
    return longest * (collective.world - 1)  # MessagePack; every part is padded to the longest


def _bytes(values: bytes | Sequence[float]) -> int:
    return values.itemsize * len(values) if isinstance(values, array) else 0


def _rank(rank: int, world: int, way: str, count: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    collective = Collective()
    collective.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _peak_bytes()
    own = made_up(rank, world, count, experts="experts" in way)
    collective.barrier()
    began_s = _processor_s()
    received = (everywhere if way == "everywhere" else by_owner)(own, collective)
    found = {"memory": _peak_bytes() - before, "processor_s": _processor_s() - began_s, "received": received}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    collective.barrier()
    dist.destroy_process_group()


def _peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(world: int, way: str, responses: int = RESPONSES) -> tuple[int, dict[str, float]]:
    """(how many responses were made, what a rank took on average, scaled to all of them)."""
    copies = world if way == "everywhere" else 1
    part = responses
    while part * TOKENS * NEEDED[way] * copies > MOST_BYTES and part > world:
        part //= 2
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.samples"])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, world, way, part, folder)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"{world} ranks, {way}: exit codes {[process.exitcode for process in ranks]}")
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    return part, {name: mean(of[name] for of in found) * responses / part for name in found[0]}


def main() -> None:
    rows, memory = [], {}
    for world in (2, 8, 64):
        for way in WAYS:
            began_s = time.perf_counter()
            part, found = measure(world, way)
            memory[world, way] = found["memory"]
            print(f"{world} ranks, {way}: {part} responses, {time.perf_counter() - began_s:.0f} s", flush=True)
            rows.append(
                [
                    str(world),
                    way,
                    f"{part:,}",
                    f"{found['memory'] / 1e6:,.0f}",
                    f"{found['processor_s']:.2f}",
                    f"{found['received'] / 1e6:,.0f}",
                ]
            )
    shares = {world: memory[world, "everywhere"] / memory[world, "by owner"] for world in (2, 8, 64)}
    told = ", ".join(f"{share:.0f} times less on {world}" for world, share in shares.items())
    publish(
        "samples",
        Result(
            title="Samples of a step by ownership",
            verdict=f"Tokens that stay with their owner take {told} ranks than tokens everywhere.",
            intro=f"A step of {RESPONSES:,} responses of {TOKENS:,} tokens; real ranks on one machine, made-up tokens. "
            f"`experts`: with those of {LAYERS} layers, {EXPERTS_PER_TOKEN} per token, in one byte each. Memory "
            "is what a rank's peak grows by, its own responses as tuples included, while samples are told, fetched for "
            "scoring and fetched for training.",
            columns=COLUMNS,
            rows=rows,
            notes=f"Where fewer than {RESPONSES:,} responses were made (third column), what does not fit this machine "
            "is scaled from them. `everywhere` is what a step did before. Seconds on a clock are left out: two cores "
            "compute for all ranks.",
        ),
    )


if __name__ == "__main__":
    main()
