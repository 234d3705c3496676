"""One short run of the main job from the command line, shared by the tests of this folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from specactor.data.tokenizer import VOCAB_SIZE
from specactor.rollout.warm_starter import WarmStarter
from specactor.run_folder import WARM_UPS
from tests.lib.ranks import run_alone, torchrun

ROOT = Path(__file__).resolve().parent.parent.parent
TRAIN = ROOT / "launch" / "train_moe.py"
SHORT = (
    *("--train.steps", "2", "--warmup.steps", "40", "10", "--eval.problems", "64", "--checkpoint.every", "1"),
    *("--rollout.prompts-per-step", "8", "--data.params", "min_n=1", "max_n=9999", "size=2000"),
    *("--train.schedule", "constant"),  # some go on for more steps, and are compared with a run of as many
)
"""The quickstart, cut short: it need not learn."""


@dataclass(frozen=True)
class Launched:
    """A finished launch."""

    folder: Path
    code: int
    output: str


class Launcher:
    """Starts the main job as a user does; all launches share one cache of warmed-up models."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def run(self, name: str, *options: str, script: Path = TRAIN) -> Launched:
        """With ranks that are forked by a process that has imported what they need; in `faults/` torchrun starts."""
        where = ("--name", name, "--output-dir", str(self.base / "runs"))
        command = (script, "quickstart_plain", *where, *SHORT, *options)
        code, output = torchrun(2, *map(str, command), folder=self.base, WANDB_MODE="offline")
        return Launched(self.base / "runs" / name, code, output)


@pytest.fixture(scope="session")
def launcher(warm_starter: WarmStarter, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    launcher = Launcher(tmp_path_factory.mktemp("end_to_end"))
    if "PYTEST_XDIST_WORKER" in os.environ:  # the workers of a session share what warm-ups make, too
        shared = tmp_path_factory.getbasetemp().parent / WARM_UPS
        shared.mkdir(exist_ok=True)
        (launcher.base / "runs").mkdir()
        (launcher.base / "runs" / WARM_UPS).symlink_to(shared)
    return launcher


@pytest.fixture(scope="session")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a draft model that has learned nothing."""
    folder = str(tmp_path_factory.mktemp("draft"))
    run_alone("tests.rollout.sglang.make_dense", folder, f"vocab_size={VOCAB_SIZE}", "max_position_embeddings=512")
    return folder


@pytest.fixture(scope="session")
def finished(launcher: Launcher) -> Launched:
    """Two steps of the quickstart, to the end."""
    return launcher.run("finished", "--tracking.trace", "1")
