"""Run by test_shared_folders on two ranks, each in a folder of its own: relative paths lead to what its host knows."""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from specactor import run
from specactor.data.dataset import Dataset
from specactor.errors import ConfigError, DataError, PeerFailedError
from specactor.parallel import collective as module
from specactor.parallel.collective import Collective
from specactor.recipes import load
from specactor.rollout.collector import check_same_problems
from specactor.run_folder import RunFolder
from specactor.run_owner import RunOwner
from specactor.trainer import warmup
from specactor.types import Problem

LATER_S = 2.0


def main(base: Path) -> None:
    dist.init_process_group("gloo")
    module.SIGN_OF_LIFE_S = 0.2
    collective = Collective()
    rank = collective.rank
    os.chdir(base / f"rank-{rank}")
    config = replace(load(["quickstart_plain", "--name", "x", "--resume", "auto"]), output_dir="runs")
    folder = RunFolder.of(config)
    found: dict[str, object] = {}
    with closing(RunOwner(folder.root, on_lost=print)) as owner:
        later(folder.checkpoints / "step-000020")
        found["resumes"] = str(run.enter_folder(config, folder, owner, collective))
        found["left"] = sorted(path.name for path in folder.checkpoints.iterdir())
        found["owns"] = (folder.root / "owner.json").exists()
    for name, answer in (("same problems", ""), ("other problems", str(rank))):
        of = Problem(index=0, prompt="1+1=", prompt_ids=(1,), answer=answer, verifier="exact", metadata={})
        try:
            check_same_problems([Dataset([of])], collective)
            found[name] = ""
        except DataError as error:
            found[name] = str(error)
    Path("file").touch()
    unwritable = replace(config, output_dir="file")
    try:
        nowhere = RunFolder.of(unwritable)
        run.enter_folder(unwritable, nowhere, RunOwner(nowhere.root, on_lost=print), collective)
    except (ConfigError, PeerFailedError) as error:
        found["unwritable"] = f"{type(error).__name__}: {error}"
    later(Path("made"))
    found["made"] = warmup._is_made(Path("made"), collective), Path("made").exists()
    found["unmade"] = warmup._is_made(Path("unmade"), collective)
    module.SEE_S = 0.5
    try:
        collective.path_of_first("warm-up", lambda: Path("never"))
    except (ConfigError, PeerFailedError) as error:
        found["never"] = f"{type(error).__name__}: {error}"
    Path(base, f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def later(path: Path) -> None:
    """Rank 1's host sees what rank 0's has only after a while."""
    if dist.get_rank() == 1:
        threading.Timer(LATER_S, path.mkdir).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
