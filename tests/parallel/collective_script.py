"""Run by test_collective on every rank: exercises `Collective` and prints one JSON line per rank."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401  (registers the backend "fake")

from specactor.errors import EngineError, PeerFailedError
from specactor.parallel import collective as module
from specactor.parallel.collective import Collective, leave
from specactor.types import VersionSpan
from tests.lib import nccl_rules
from tests.lib.simulated_cuda import Simulated


def main() -> None:
    if sys.argv[2] in ("late", "gone"):
        without_a_peer(sys.argv[2])
        return
    if sys.argv[2] == "gloo":
        dist.init_process_group("gloo")
    elif sys.argv[2].startswith("rules"):
        nccl_rules.install()
        dist.init_process_group("nccl")
        if sys.argv[2] == "rules, wrong":
            module.control_group = lambda *_: None
    else:
        # "fake" moves no data, as NCCL moves none without a GPU: whatever is exchanged through it is wrong.
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("fake", store=dist.PrefixStore("test", store), rank=rank, world_size=world)
    module.SIGN_OF_LIFE_S = 0.2
    collective = Collective()
    rank = collective.rank
    seen: dict[str, object] = {"rank": rank}
    seen["bytes"] = [len(part) for part in collective.gather_bytes(b"x" * (rank * 1000))]
    spans = collective.gather([VersionSpan(version=rank, start=0, end=1)], list[VersionSpan])
    seen["spans"] = [span.version for part in spans for span in part]
    seen["any"] = [collective.any(rank == 1), collective.any(False)]
    module._MESSAGE_BYTES = 1000
    given = torch.arange(2500 + rank).to(torch.uint8)
    taken = [torch.zeros(2501 - rank, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)]
    collective.pass_bytes([(given, 1 - rank), (given[5:8], 1 - rank)], [(part, 1 - rank) for part in taken])
    seen["passed"] = [taken[0].equal(torch.arange(2501 - rank).to(torch.uint8)), taken[1].tolist()]
    start = time.monotonic()
    seen["together"] = collective.together("long", lambda: time.sleep(2.0 * rank) or rank)
    seen["waited"] = time.monotonic() - start
    try:
        collective.together("doomed", lambda: fail() if rank == 1 else "fine")
    except PeerFailedError as error:
        seen["error"] = f"PeerFailedError: {error}"
    except EngineError as error:
        seen["error"] = f"EngineError: {error}"
    seen["after"] = collective.together("next", lambda: "goes on")
    seen["through NCCL"] = sorted({file for _, file, _ in nccl_rules.calls})
    if sys.argv[2] == "rules":
        seen["refused"] = refused()
    # One write: ranks share a pipe, and a line written in parts would mix with another rank's.
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()
    collective.barrier()  # nobody leaves while another still listens
    leave()


def without_a_peer(kind: str) -> None:
    """The second rank sends nothing: it is busy for longer than the group waits, or it ends."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
    collective, taken, error, start = Collective(), torch.zeros(9, dtype=torch.uint8), "", time.monotonic()
    collective.barrier()
    try:
        if collective.rank == 0:
            collective.pass_bytes([], [(taken, 1)])
    except RuntimeError as problem:
        error = str(problem)
    if collective.rank == 1 and kind == "late":
        time.sleep(10)
    sys.stdout.write(json.dumps({"rank": collective.rank, "error": error, "s": time.monotonic() - start}) + "\n")
    sys.stdout.flush()


def refused() -> list[object]:
    """What a group that stands for NCCL's says to a tensor of the host; and the sum of two on pretended devices."""
    nccl_rules.refuses = True
    try:
        dist.all_reduce(torch.ones(2))
        said = ""
    except RuntimeError as error:
        said = str(error)
    mine = torch.full((2,), 1.0 + dist.get_rank())
    dist.all_reduce(Simulated(mine, torch.device("cuda", dist.get_rank())))
    return [said, mine.tolist()]


def fail() -> str:
    time.sleep(0.5)
    raise EngineError("the engine is out of paper")


if __name__ == "__main__":
    sys.exit(main())
