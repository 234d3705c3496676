"""One trainer rank of the weight sync benchmark (under torchrun). Rank 0 prints one JSON line."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.gpu_sync import turns
from benchmarks.recipes import sync_config
from specactor.parallel.collective import Collective, destroy_groups, init_groups
from specactor.parallel.devices import gpu_uuid, gpus
from specactor.parallel.layout import ModelShape, check
from specactor.rollout.pool import EnginePool
from specactor.rollout.sglang.engine_client import Engine, EngineSpec
from specactor.trainer.policy import PolicyTrainer
from specactor.trainer.shards import RankShards
from specactor.weights_sync.sender import WeightSender


def private_bytes(name: str) -> int:
    """A figure of this process from smaps_rollup, in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """Peak resident bytes since `reset_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise KeyError("VmHWM")


class Memcpy:
    """Copies of as many bytes, in pages that exist."""

    def __init__(self, num_bytes: int) -> None:
        device = "cuda" if gpus() else "cpu"
        self._source, self._target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))

    def gb_per_s(self) -> float:
        start = time.perf_counter()
        self._target.copy_(self._source)
        if self._target.is_cuda:
            torch.cuda.synchronize()
        return self._source.numel() / (time.perf_counter() - start) / 1e9


def processor_s(pids: Sequence[int]) -> float:
    """Seconds that this process and others have computed."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def engine_loads(engine: Engine, model_dir: Path, repetitions: int) -> dict[str, list[float]]:
    """Seconds of SGLang's own load of the model, from memory and from disk; the slowest rank counts."""
    seconds: dict[str, list[float]] = {"tensor_load_s": [], "disk_load_s": []}
    for _ in range(repetitions):
        replies = engine.rank_call(
            "benchmarks.weights_sync_loads:seconds_to_load", str(model_dir).encode(), timeout_s=300
        )
        pairs = [msgspec.json.decode(reply, type=tuple[float, float]) for reply in replies]
        seconds["tensor_load_s"].append(max(memory for memory, _ in pairs))
        seconds["disk_load_s"].append(max(disk for _, disk in pairs))
    return seconds


def handed_over(pool: EnginePool, push: Callable[[], object]) -> dict[str, dict[str, float]]:
    """Seconds of each part of handing an engine's memory over, and GB that the device then has more."""
    found = {}
    parts = {"release": pool.release_memory, "resume weights": pool.resume_weights, "push": push}
    for name, act in (parts | {"resume the rest": pool.resume_memory}).items():
        before, start = _free_gb(), time.perf_counter()
        act()
        found[name] = {"seconds": time.perf_counter() - start, "gb": _free_gb() - before}
    return found


def _free_gb() -> float:
    return torch.cuda.mem_get_info()[0] / 1e9 if gpus() else 0.0


def main() -> None:
    model_dir, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    extra_args, pushes_alone = options.pop("extra_args", {}), options.pop("pushes_alone", False)
    limit_s = options.pop("limit_s", math.inf)
    config = sync_config(str(model_dir), **options)
    layout = check(config, options["world"], ModelShape.read(model_dir))
    init_groups(layout, config.parallel, seed=0, local_rank=int(os.environ["LOCAL_RANK"]))
    collective = Collective()
    trainer = PolicyTrainer(config, layout, model_dir)
    specs = [
        EngineSpec(
            index=0,
            model_dir=str(model_dir),
            dtype="float32",
            tensor_parallel=options["engine_tensor"],
            devices=tuple(gpu_uuid(i) if gpus() else i for i in range(options["engine_tensor"])),
            config=dataclasses.replace(config.rollout.engine, extra_args=extra_args),
            context_length=512,
            awaits_weights=pushes_alone,
            log_file=str(model_dir.parent / "engine.log"),
        )
    ]
    with EnginePool(specs if collective.rank == 0 else []) as pool:
        collective.together("engine start", pool.wait_ready)
        sender = WeightSender(config.weights_sync, collective)
        source = RankShards(trainer.policy, trainer.shared_parameters)
        reports, gathers = [], []
        first = sender.push(source, pool.engines, version=1)  # learns the plan, where there can be one
        sender.push(source, pool.engines, version=2)  # warms up
        sender.close()
        memcpy = Memcpy(first.num_bytes if collective.rank == 0 else 1)
        memcpy.gb_per_s()
        pids = [pid for engine in pool.engines if engine.ready is not None for pid in engine.ready.scheduler_pids]
        before = private_bytes("Rss")
        reset_peak()
        rates, computed = [], 0.0
        for repetition in turns(options["repetitions"], limit_s, collective.any):
            collective.barrier()
            start = processor_s(pids)
            reports.append(sender.push(source, pool.engines, version=3 + repetition))
            computed += processor_s(pids) - start
            rates.append(memcpy.gb_per_s())  # in turns: what else the machine does slows both
        extra = peak_rss() - before
        for _ in range(0 if pushes_alone else options["repetitions"]):
            collective.barrier()
            start = time.perf_counter()
            num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in trainer.named_weights())
            gathers.append(num_bytes / (time.perf_counter() - start) / 1e9)
        extras = collective.gather(extra, int)
        all_computed = sum(collective.gather(computed, float))
        if collective.rank == 0:
            seen = {
                "num_bytes": reports[0].num_bytes,
                "num_rounds": reports[0].num_rounds,
                "seconds": [r.seconds for r in reports],
                "gb_per_s": [r.gb_per_s for r in reports],
                "gather_gb_per_s": gathers,
                "extra_bytes": extras,
                "memcpy_gb_per_s": rates,
                "first_s": first.seconds,
                "processor_s_per_gb": all_computed / len(reports) / reports[0].num_bytes * 1e9,
                "through_host": first.through_host,
            }
            if not pushes_alone:
                seen |= engine_loads(pool.engines[0], model_dir, options["repetitions"])
            elif collective.world == 1:
                last = 3 + len(reports)
                seen["handed_over"] = handed_over(pool, lambda: sender.push(source, pool.engines, version=last))
            print("RESULT " + json.dumps(seen), flush=True)
        sender.close()
    destroy_groups()


if __name__ == "__main__":
    main()
