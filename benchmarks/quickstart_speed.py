"""Rollouts of the quickstart that draft with a model of the warm-up, beside plain ones: whole runs, in turns."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.drafter_refresh_runs import LENGTH, Run, differences, start
from benchmarks.results import Result, likely, publish

PLAIN = "plain"
DRAFTING = ("--rollout.speculation.drafters", "model", "--rollout.speculation.draft-model", "warm-up")
CONTESTANTS: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "coupled, window 4": (*DRAFTING, "--rollout.speculation.mode", "coupled", "--rollout.speculation.window", "4"),
    "coupled": (*DRAFTING, "--rollout.speculation.mode", "coupled"),
    "auto": (*DRAFTING, "--rollout.speculation.mode", "auto"),
}
"""Name -> settings beside the recipe's."""
AIM = 1.2


def speed(run: Run) -> float:
    """Return response tokens per second of all rollouts."""
    return run.total("rollout/tokens") / run.total("time/rollout_s")


def table(runs: Mapping[str, Sequence[Run]], *, steps: int, draft_s: float) -> Result:
    """Return the page.

    Args:
        runs: of each contestant, one per turn.
        draft_s: seconds that the first start took to make the draft model.
    """
    rows = []
    reached = []
    for name, own in runs.items():
        ratios = [speed(run) / speed(plain) for run, plain in zip(own, runs[PLAIN], strict=True)]
        lengths = [float(line[LENGTH]) for run in own for line in run.lines if LENGTH in line]
        drafted = sum(run.total("speculation/model/share_of_rounds") for run in own) / (steps * len(own))
        rows.append(
            [
                name,
                likely([speed(run) for run in own], "{:,.0f}"),
                likely(ratios),
                f"{sum(lengths) / len(lengths):.2f}" if lengths else "-",
                f"{drafted:.2f}" if lengths else "-",
            ]
        )
        reached += [f"{name} {likely(ratios)}"] if name != PLAIN else []
    wrong = [text for own in zip(*runs.values(), strict=True) for text in differences(own)]
    same = "All runs have the same responses, rewards and losses." if not wrong else f"DIFFERENT: {'; '.join(wrong)}."
    return Result(
        title="The quickstart with a draft model of the warm-up",
        verdict=f"Speed over plain, with a 95 % interval of the median: {', '.join(reached)} (aim: {AIM}). {same}",
        intro=f"{steps} steps of the quickstart per run, contestants in turns, {len(runs[PLAIN])} times. Tokens/s are "
        "those of rollouts. The draft model is that of `--rollout.speculation.draft-model warm-up`: one layer of the "
        "warmed-up policy, trained on the worked solutions. "
        f"Making it took {draft_s:.0f} s.",
        columns=("contestant", "rollout tokens/s", "over plain", "accept_length", "share of rounds with drafts"),
        rows=rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=6)
    options = parser.parse_args()
    runs: dict[str, list[Run]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory(prefix="quickstart-speed-") as temporary:

        def one(name: str, root: Path, *more: str) -> Run:
            start(root, [*CONTESTANTS[name], "--eval.problems", "0", "--train.steps", str(options.steps), *more])
            return Run.read(name, root)

        one(PLAIN, Path(temporary) / "policy", "--train.steps", "1")  # the warm-up of the policy
        draft_s = one("coupled", Path(temporary) / "draft", "--train.steps", "1").total("time/warm-up_s")
        for turn in range(options.turns):
            names = list(CONTESTANTS) if turn % 2 == 0 else list(CONTESTANTS)[::-1]
            for name in names:
                runs[name].append(one(name, Path(temporary) / f"{turn}-{name.replace(', ', '-').replace(' ', '-')}"))
    publish("quickstart_speed", table(runs, steps=options.steps, draft_s=draft_s))


if __name__ == "__main__":
    main()
