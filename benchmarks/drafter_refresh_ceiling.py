"""How far the draft model could have come back after a jump: offline, on what a run of `drafter_refresh_recovery` left.

On the run's last rollout: the draft model as it was at the jump and as the run has taught it; one that is distilled
anew on the policy at the run's end, just as the first was on the policy at its start; and the policy as its own
drafter. accept_length as `specactor drafter eval` measures it; engines sharpen the noise and reach a little more, so
these figures compare with each other alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.trained_models import DraftShape, distil
from specactor.run_folder import RunFolder
from specactor.trainer.distillation import init
from specactor.trainer.distillation.acceptance import measure
from specactor.trainer.distillation.refresh import FOLDER
from specactor.trainer.distillation.rollout_files import lesson_of, read_rollouts
from specactor.trainer.distillation.train import WEIGHTS


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """accept_length on the last rollout, offline."""

    untaught: float
    """Of the draft model at the jump."""
    taught: float
    """Of that at the end of the run."""
    anew: float
    """Of one that is distilled on the policy at the end of the run."""
    policy: float
    """Of that policy. One version newer than what generated the responses, so not all are accepted."""

    def text(self) -> str:
        shape = DraftShape()
        return (
            f"Offline, on the last rollout, without the engines' sharpening: {self.untaught:.2f} with the draft model "
            f"of before the jump, {self.taught:.2f} as the run taught it, {self.anew:.2f} with one that is distilled "
            f"anew, as the first was before the run, for {shape.steps} updates of {shape.batch_size} new responses, "
            f"and {self.policy:.2f} with the policy itself."
        )


def ceilings(root: Path, draft: Path, *, jump_step: int, window: int) -> Ceilings:
    """Args: folder of a run that was exported; the draft model that it began with; the step of the jump."""
    init.quiet()
    folder = RunFolder(root=root)
    lessons = [lesson_of(line) for line in read_rollouts([sorted((root / "rollouts").glob("*.jsonl"))[-1]])]
    policy = init.read_model(folder.export)
    distil(folder.export, root / "anew", DraftShape(), "A")
    checkpoints = sorted(folder.checkpoints.glob("step-*"))
    at_jump = next(path for path in checkpoints if path.name == f"step-{jump_step:06d}")

    def measured(model: Any) -> float:
        return measure(policy, model, lessons, window=window, seed=0).accept_length

    return Ceilings(
        untaught=measured(of_checkpoint(draft, at_jump)),
        taught=measured(of_checkpoint(draft, checkpoints[-1])),
        anew=measured(init.read_model(root / "anew")),
        policy=measured(policy),
    )


def of_checkpoint(draft: Path, checkpoint: Path) -> Any:
    """The draft model in a run's checkpoint. Args: that which the run began with."""
    model = init.read_model(draft)
    model.load_state_dict(load_file(checkpoint / FOLDER / WEIGHTS), strict=False)  # tied heads are saved once
    return model
