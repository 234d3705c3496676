"""Rollouts of the quickstart that draft with a model of the warm-up, beside plain ones: whole runs, in turns.

    python -m benchmarks.quickstart_speed [--steps N] [--turns N] [--contestants NAME ...]

The policy after its warm-up is kept under .cache/benchmarks; draft models are made anew. With `--turns 0` nothing is
measured.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.drafter_refresh_runs import LENGTH, Run, differences, start
from benchmarks.results import Result, likely, publish
from benchmarks.trained_models import CACHE
from specactor.run_folder import WARM_UPS

PLAIN = "plain"
COUPLED = ("--rollout.speculation.drafters", "model", "--rollout.speculation.mode", "coupled")
LAYER = (*COUPLED, "--rollout.speculation.draft-model", "warm-up", "--rollout.speculation.window", "4")
HEAD = (*COUPLED, "--rollout.speculation.draft-model", "warm-up-head", "--rollout.speculation.window", "4")
CONTESTANTS: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "layer": LAYER,
    "head": HEAD,
    "head, auto": (*HEAD[:-2], "--rollout.speculation.mode", "auto"),
    "head that learns": (*HEAD, "--distillation.refresh", "0.03"),
}
"""Name -> settings beside the recipe's."""
MEASURED = (PLAIN, "layer", "head")
"""Unless others are asked for."""
POLICY = CACHE / "quickstart-policy"
AIM = 1.2
WHY = (
    "Where a rollout's time goes, in a trace of step 4 (2026-11-26): 128 responses of 42 tokens take 663 ms "
    "plainly, in rounds of 11 ms, and 623 ms with the head, in 11 rounds of 49 ms: 27 verify 640 rows, 16 draft, "
    "5 lie between two rounds. Prefills take 85 ms. One core computes rows at the price of rows, and of five all "
    "but .3 are emitted: drafts that cost nothing would give 1.5. So 1.4 takes fewer requests per device, or a "
    "device on which a verification costs what a plain round does. A second measurement, of three turns: 1.05, "
    "1.17, 1.09; with an engine on each of the two cores (`--parallel.engines 2`), two turns: 1.09, 1.05. A third, of "
    "window 4, 8 and 12: 1.06, 1.25, 1.07; .89, 1.06, .98; .67, .78, .75. A head's 400 updates took 48 s there; now "
    "it makes 320. An engine alone on one core (2026-11-27, five turns): 1.27 with 128 requests (1.14 to 1.41), 1.41 "
    "with 64 (1.27 to 1.47), 1.63 with 32 (1.31 to 2.24). But in a run "
    "(one each) a step of 64 took .99 s and one of 128 1.35 s: smaller steps gain more, at fewer tokens per second."
)


def speed(run: Run) -> float:
    """Return response tokens per second of all rollouts."""
    return run.total("rollout/tokens") / run.total("time/rollout_s")


def table(runs: Mapping[str, Sequence[Run]], *, steps: int, made_s: Mapping[str, float]) -> Result:
    """Return the page.

    Args:
        runs: of each contestant, one per turn.
        made_s: seconds that the warm-up of its draft model took.
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
                f"{made_s[name]:.0f}" if name in made_s else "-",
            ]
        )
        if name != PLAIN:
            reached.append(f"{name} {likely(ratios)}{'' if median(ratios) >= AIM else ', missed'}")
    wrong = [text for own in zip(*runs.values(), strict=True) for text in differences(own)]
    same = "All runs have the same responses, rewards and losses." if not wrong else f"DIFFERENT: {'; '.join(wrong)}."
    return Result(
        title="The quickstart with a draft model of the warm-up",
        verdict=f"Speed over plain, with a 95 % interval of the median: {', '.join(reached)} (aim: {AIM}). {same}",
        intro=f"{steps} steps of the quickstart per run, contestants in turns, {len(runs[PLAIN])} times. Tokens/s are "
        "those of rollouts. Draft models are made by the warm-up from the worked solutions: one layer of the policy "
        "(`--rollout.speculation.draft-model warm-up`), or an EAGLE-3 head (`warm-up-head`). Window 4.",
        columns=(
            "contestant",
            "rollout tokens/s",
            "over plain",
            "accept_length",
            "share of rounds with drafts",
            "s to make",
        ),
        rows=rows,
        notes=WHY,
    )


def one(name: str, folder: Path, steps: int) -> Run:
    """Run a contestant. Its warm-up is found, or made, beside the folder."""
    start(folder, [*CONTESTANTS[name], "--eval.problems", "0", "--train.steps", str(steps)])
    return Run.read(name, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--contestants", nargs="+", choices=list(CONTESTANTS), default=list(MEASURED))
    options = parser.parse_args()
    names = list(dict.fromkeys([PLAIN, *options.contestants]))
    runs: dict[str, list[Run]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="quickstart-speed-") as temporary:
        place = Path(temporary)
        if POLICY.exists():
            shutil.copytree(POLICY, place / WARM_UPS)
        one(PLAIN, place / "policy", 1)
        shutil.copytree(place / WARM_UPS, POLICY, dirs_exist_ok=True)
        if not options.turns:
            return
        made_s = {name: one(name, place / f"make-{i}", 1).total("time/warm-up_s") for i, name in enumerate(names) if i}
        for turn in range(options.turns):
            for i, name in list(enumerate(names))[:: 1 if turn % 2 == 0 else -1]:
                runs[name].append(one(name, place / f"run-{turn}-{i}", options.steps))
    publish("quickstart_speed", table(runs, steps=options.steps, made_s=made_s))


if __name__ == "__main__":
    main()
