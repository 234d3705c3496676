"""Run by test_seals on two ranks: messages with seals, then one that is changed after it was sealed."""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

from specactor.errors import PeerFailedError
from specactor.parallel import collective as module
from specactor.parallel.collective import Collective, leave
from specactor.parallel.seals import KEY, Seals


def main() -> None:
    os.environ[KEY] = "k" * 32
    module._MESSAGE_BYTES = 1000
    dist.init_process_group("gloo")
    collective = Collective()
    rank, error = collective.rank, ""
    given, taken = torch.arange(2500).to(torch.uint8) + rank, torch.zeros(2500, dtype=torch.uint8)
    collective.pass_bytes([(given, 1 - rank)], [(taken, 1 - rank)])
    passed = taken.equal(torch.arange(2500).to(torch.uint8) + 1 - rank)
    if rank == 1:
        seal = Seals.tag
        Seals.tag = lambda self, data, taker: seal(self, data + 1, taker)  # type: ignore[method-assign]
    try:
        collective.pass_bytes([(given, 1 - rank)], [(taken, 1 - rank)])
    except PeerFailedError as problem:
        error = str(problem)
    sys.stdout.write(json.dumps({"rank": rank, "passed": passed, "error": error}) + "\n")
    sys.stdout.flush()
    collective.barrier()
    leave()


if __name__ == "__main__":
    main()
