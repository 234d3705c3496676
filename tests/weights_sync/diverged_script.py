"""Two trainer ranks with equal weights, on a host each as far as they know, with an engine each. A bit of the second
rank's copy changes before a run's sync; rank 0 writes what came of it as JSON.

torchrun ... -m tests.weights_sync.diverged_script MODEL_DIR FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from specactor.actor import SpecActor
from specactor.config import WeightsSyncConfig
from specactor.device_memory import DeviceMemory
from specactor.errors import WeightSyncError
from specactor.parallel.collective import destroy_groups
from specactor.rollout.sglang.engine_client import EngineSpec
from specactor.trainer.shards import RankShards
from specactor.weights_sync.sender import WeightSender
from tests.trainer import policy_cases as cases
from tests.weights_sync.kills import states
from tests.weights_sync.sync_script import Bench


class TwoHosts(Bench):
    def specs(self) -> list[EngineSpec]:
        return [self.spec(self.collective.rank, 1)]

    def alike(self) -> bool:
        """Whether the engines of both hosts answer the same."""
        answers = [json.dumps(answer) for answer in states(self)]
        return len(set(self.collective.gather("".join(answers), str))) == 1

    def sync(self, shards: RankShards, sender: WeightSender) -> dict[str, Any]:
        """What comes of a run's own sync, which may start engines again."""
        self.version += 1
        notes = list[str]()
        actor = SpecActor(
            config=cases.config(str(self.model_dir), {}),
            trainer=self.trainer,
            devices=DeviceMemory(self.collective, self.pool, is_shared=False),
            rollouts=SimpleNamespace(pool=self.pool),  # type: ignore[arg-type]
            sender=sender,
            weights=shards,
            collective=self.collective,
            progress=SimpleNamespace(note=notes.append),  # type: ignore[arg-type]
            distillation=None,
            on_trace=lambda step, spans: None,
            recorder=None,  # type: ignore[arg-type]
            audit=None,  # type: ignore[arg-type]
            version=self.version,
        )
        try:
            told = [f"{actor.sync()}"]
        except WeightSyncError as error:
            told = [type(error).__name__, str(error)]
        everyone = self.collective.gather(told, list[str])
        return {"alike": all(each == told for each in everyone), "error": told, "notes": notes}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bench = TwoHosts(Path(sys.argv[1]), Path(sys.argv[2]))
    with bench.pool:
        bench.collective.together("start", bench.pool.wait_ready)
        bench.start("DP2", {})
        shards, sender = bench.apart(), WeightSender(WeightsSyncConfig(), bench.collective)
        first = [bench.push(shards, sender=sender)["num_rounds"] for _ in range(2)]
        found: dict[str, Any] = {"first": first, "same answers": [bench.alike()]}
        weights = next(p for name, p in shards._parameters if ".experts." in name).data.view(-1).view(torch.int32)
        weights[-1] ^= bench.collective.rank << 22
        found |= bench.sync(shards, sender)
        found["started"] = sum(bench.collective.gather(sum(map(len, bench.pool._restarts.values())), int))
        found["lost"] = sum(bench.collective.gather(bool(bench.pool.lost()), bool))
        weights[-1] ^= bench.collective.rank << 22
        bench.collective.together("restart", bench.pool.restart_lost)
        found["again"] = [bench.push(shards, sender=sender).get("num_rounds") for _ in range(2)]
        found["same answers"].append(bench.alike())
        sender.close()
        destroy_groups(keep_process_group=True)
    if bench.collective.rank == 0:
        Path(sys.argv[2], "results.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
