"""Run by test_collective on every rank: exercises `Collective` and prints one JSON line per rank."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from specactor.errors import EngineError, PeerFailedError
from specactor.parallel import collective as module
from specactor.parallel.collective import Collective
from specactor.types import VersionSpan


def main() -> None:
    dist.init_process_group("gloo")
    module.HEARTBEAT_S = 0.2
    collective = Collective(torch.device("cpu"))
    rank = collective.rank
    seen: dict[str, object] = {"rank": rank}
    seen["bytes"] = [len(part) for part in collective.gather_bytes(b"x" * (rank * 1000))]
    spans = collective.gather([VersionSpan(version=rank, start=0, end=1)], list[VersionSpan])
    seen["spans"] = [span.version for part in spans for span in part]
    seen["any"] = [collective.any(rank == 1), collective.any(False)]
    start = time.monotonic()
    seen["together"] = collective.together("long", lambda: time.sleep(2.0 * rank) or rank)
    seen["waited"] = time.monotonic() - start
    try:
        collective.together("doomed", lambda: fail() if rank == 1 else "fine")
    except PeerFailedError as error:
        seen["error"] = f"PeerFailedError: {error}"
    except EngineError as error:
        seen["error"] = f"EngineError: {error}"
    seen["meanwhile"] = meanwhile(collective, Path(sys.argv[1]))
    seen["doomed"] = doomed(collective)
    seen["after"] = collective.together("next", lambda: "goes on")
    # One write: ranks share a pipe, and a line written in parts would mix with another rank's.
    sys.stdout.write(json.dumps(seen) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


def meanwhile(collective: Collective, told: Path) -> list[object]:
    """[results of work, pieces done meanwhile, whether they had ended when all went on, and what came of an error]

    Rank 1 works until it is told to end by what rank 0 does meanwhile.
    """
    pieces: list[bool] = []

    def work() -> str:
        while collective.rank == 1 and not told.exists():
            time.sleep(0.01)
        return "done"

    def wait(over: threading.Event) -> None:
        if collective.rank == 1:
            return
        while not over.wait(0.01):
            pieces.append(True)
            if len(pieces) == 3:
                told.touch()

    def wrong(over: threading.Event) -> None:
        if collective.rank == 0:
            raise EngineError("nobody is idle for free")

    result = collective.together("busy", work, meanwhile=wait)
    num_pieces = len(pieces)
    time.sleep(0.1)
    ended = len(pieces) == num_pieces
    try:
        collective.together("busy", lambda: None, meanwhile=wrong)
        caught = ""
    except (EngineError, PeerFailedError) as error:
        caught = f"{type(error).__name__}: {error}"
    return [result, num_pieces, ended, caught]


def doomed(collective: Collective) -> list[object]:
    """[what came of work that failed, whether the other rank knew that it was over]"""
    seen: list[bool] = []

    def work() -> None:
        if collective.rank == 1:
            fail()

    def wait(over: threading.Event) -> None:
        seen.append(over.wait(20))

    try:
        collective.together("doomed", work, meanwhile=wait)
        return ["", seen]
    except (EngineError, PeerFailedError) as error:
        return [type(error).__name__, seen]


def fail() -> str:
    time.sleep(0.5)
    raise EngineError("the engine is out of paper")


if __name__ == "__main__":
    sys.exit(main())
