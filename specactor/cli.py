"""The ``specactor`` command. torchrun starts training itself, with launch/train_moe.py."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import specactor

if TYPE_CHECKING:
    from rich.console import Console

Command = Callable[[list[str]], int]


def doctor(argv: list[str]) -> int:
    """Say whether a run could start here, what is used, and the remedy for what is missing."""
    from rich.console import Console

    from specactor.doctor import examine, report
    from specactor.recipes import load_or_exit

    config = load_or_exit(argv, prog="specactor doctor") if argv else None
    return report(examine(config, os.environ), Console())


def recipes(argv: list[str]) -> int:
    """List the recipes, or with a recipe and overrides print the resolved config as JSON."""
    import json

    from specactor.recipes import load_or_exit, to_json, usage

    if not argv:
        print(usage("torchrun --nproc-per-node N launch/train_moe.py"))
    else:
        print(json.dumps(to_json(load_or_exit(argv, prog="specactor recipes")), indent=2))
    return 0


def report(argv: list[str]) -> int:
    """Write one HTML page of a run: its recipe, results and metrics over steps; by default RUN/report.html."""
    from pathlib import Path

    from specactor.errors import DataError
    from specactor.report import write

    parser = argparse.ArgumentParser(prog="specactor report", description=report.__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, for example runs/quickstart")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page; by default RUN/report.html")
    options = parser.parse_args(argv)
    try:
        print(write(options.run, options.out))
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def profile(argv: list[str]) -> int:
    """Measure what rounds of a recipe's engine cost, and write the table; by default RUN/costs.json.

    --out FILE       where to write it
    --limit SECONDS  longest time to measure; the engine's start comes on top, and half as long again for a drafter
                     process (default: 300)

    One engine of the recipe is measured over requests and tokens per request, and over requests and windows for every
    drafter of rollout.speculation.drafters; for decoupled, a drafter process on the next core or GPU over requests.
    Speculation reads the table with --rollout.speculation.cost-table FILE. Ctrl-C leaves nothing behind.
    """
    from pathlib import Path

    from specactor.recipes import load_or_exit

    parser = argparse.ArgumentParser(prog="specactor profile", add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=_positive, default=300.0, metavar="SECONDS")
    options, rest = parser.parse_known_args(argv)
    config = load_or_exit(rest, prog="specactor profile")

    def measure(_: list[str], console: Console) -> None:
        from specactor.planning import profile_command

        profile_command.run(config, out=options.out, limit_s=options.limit, console=console)

    return _guarded(measure, rest)


def plan(argv: list[str]) -> int:
    """Rank plans of a rollout, plain, coupled and decoupled, for a model and a cluster. Needs no GPU."""
    from specactor.planning import command as planning

    return _guarded(planning.run, argv)


def simulate(argv: list[str]) -> int:
    """Simulate RL steps of a cluster in virtual time, with the engines' own planner. Needs no GPU."""
    from specactor.simulator import command as simulating

    return _guarded(simulating.command, argv)


def drafter(argv: list[str]) -> int:
    """Make a draft model from the policy, train it on a run's rollouts, or measure how often it is right."""
    from specactor.trainer.drafter import command

    return _guarded(command.run, argv)


def replay(argv: list[str]) -> int:
    """Run steps of a run again, or one response of them, and compare them with what the run recorded.

    --step N            the last step to run again; steps since the nearest checkpoint are trained again
    --group G ...       of step N these groups alone, one after the other; they are not learned from
    --sample G.K ...    these responses of groups alone, likewise
    --nproc N           ranks; by default as many as the run had
    --key.path value    other settings, for example --rollout.speculation.mode off

    Exit code 0: all is equal; 1: something differs, and what, is said.
    """
    from specactor.replay import command

    return _guarded(command.replay, argv)


def diff(argv: list[str]) -> int:
    """Compare the records of two runs: the first step, sample, token or tensor that differs, and the cause.

    --out FILE    a page that shows it; by default diff.html in the second folder

    Exit code 0: all that both recorded is equal; 1: something differs.
    """
    from specactor.replay import command

    return _guarded(command.diff, argv)


def _guarded(run: Callable[[list[str], Console], int | None], argv: list[str]) -> int:
    from rich.console import Console

    from specactor.errors import ConfigError, SpecActorError

    try:
        code = run(argv, Console())
    except (SpecActorError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return code or 0


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"got {text}, expected seconds > 0")
    return value


def version(argv: list[str]) -> int:
    """Print the version."""
    print(f"specactor {specactor.__version__}")
    return 0


# Name -> function of the arguments after it, whose docstring is its help.
COMMANDS: dict[str, Command] = {
    "diff": diff,
    "doctor": doctor,
    "drafter": drafter,
    "plan": plan,
    "profile": profile,
    "recipes": recipes,
    "replay": replay,
    "report": report,
    "simulate": simulate,
    "version": version,
}
# What follows a name, where that is not a recipe.
ARGUMENTS = {
    "diff": "RUN RUN [--out FILE]",
    "drafter": "init|train|eval [...]",
    "plan": "[RECIPE [--key.path value]] [--model NAME|FOLDER] [--devices N] [--requests N] [--cost-table FILE] [...]",
    "profile": "RECIPE [--out FILE] [--limit SECONDS] [--key.path value ...]",
    "replay": "RUN --step N [--group G ... | --sample G.K ...] [--nproc N] [--key.path value ...]",
    "report": "RUN [--out FILE]",
    "simulate": "[--model NAME|FOLDER] [--devices N] [--modes MODE ...] [...]",
}
OWN_HELP = ("drafter", "plan", "simulate")  # their ``--help`` lists every setting
TRAIN = "Train with: torchrun --nproc-per-node N launch/train_moe.py"
RECIPE = "[RECIPE [--key.path value ...]]"


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 fine, 1 a problem was found, 2 the command line is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="specactor",
        description=specactor.__doc__,
        epilog=f"{TRAIN} {RECIPE[1:-1]}",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, function in COMMANDS.items():
        about = (function.__doc__ or "").partition("\n")[0]
        sub = commands.add_parser(name, help=about, description=about, add_help=False)
        sub.add_argument("rest", nargs=argparse.REMAINDER, metavar=ARGUMENTS.get(name, RECIPE))
    if len(words) == 2 and words[0] in COMMANDS and words[1] in ("-h", "--help") and words[0] not in OWN_HELP:
        print(f"usage: specactor {words[0]} {ARGUMENTS.get(words[0], RECIPE)}\n\n{inspect.getdoc(COMMANDS[words[0]])}")
        return 0
    if words and words[0] == "train":
        rest = " ".join(words[1:]) or "RECIPE [--key.path value ...]"
        print(f"error: specactor does not train. {TRAIN} {rest}", file=sys.stderr)
        return 2
    if words and words[0] in COMMANDS:
        return COMMANDS[words[0]](words[1:])
    parser.parse_args(words)
    return 2


if __name__ == "__main__":
    sys.exit(main())
