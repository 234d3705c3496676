"""Where the time of a round goes, of the contestants of `speculation_speed`: what explains its aims that are missed.

    python -m benchmarks.speculation_speed_profile [--models B heavy] [--batches 1 16 ...] [--contestants off auto ...]
        [--beside CHECKOUT]

`--beside`: the same contestants on engines of another checkout, in turns with these; then no page is written.

Invariants: seconds are the scheduler's processor time, under a profiler that makes Python look slower than it is, so
they are compared with each other and not with the clock; all contestants emit the same number of tokens.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks import speculation_speed_server as server
from benchmarks.results import Result, publish
from benchmarks.speculation_speed import (
    BUILTINS,
    GROUP_SIZE,
    OURS,
    Contestant,
    Work,
    contestants,
    fixed_lengths,
    models_of,
    reference,
    works,
)

ROOT = Path(__file__).resolve().parent.parent
BATCHES = {"B": (1, 16, 64, 256), "heavy": (1, 16)}  # by model
NAMES = ("off", "suffix", "model", "auto", "SGLang NGRAM")
REPETITIONS = 2  # the last one is profiled, after the others warmed up
SHOWN = ("contestant", "s", "rounds", "ms", "target", "draft")
TOLD = (": plain", ": auto")  # what the page shows; the file has the rest
COLUMNS = ("around", "target", "rows", "emit", "learn", "tell", "draft", "decide")


def profiles(players: Sequence[Contestant], todo: Sequence[Work]) -> Iterator[tuple[str, int, server.Profile]]:
    """(contestant, batch, profile of the last repetition), after the others warmed it up."""
    expected = reference(players[0].engine, todo)
    last = max(work.repetition for work in todo)
    for work in todo:
        fixed = fixed_lengths(work, expected)
        for player in players:
            if work.repetition < last:
                player.run(fixed, expected)
                continue
            player.begin()
            player.engine.rank_call(server.PROFILE, b"begin", timeout_s=60)
            for phase in fixed.phases:
                for requests in fixed.calls(phase):
                    player.engine.generate(requests)
            [answer] = player.engine.rank_call(server.PROFILE, b"end", timeout_s=60)
            yield player.name, work.batch, msgspec.json.decode(answer, type=server.Profile)


@contextmanager
def engines_of(checkout: Path) -> Iterator[None]:
    """Within, engines that start run the library of another checkout, under the process of this one."""
    before, path = os.getcwd(), os.environ.get("PYTHONPATH", "")
    with tempfile.TemporaryDirectory(prefix="beside-") as folder:
        for name, root in {"specactor": checkout, "benchmarks": ROOT, "examples": ROOT}.items():
            (Path(folder) / name).symlink_to(root.resolve() / name)
        os.chdir(folder)  # Python looks for modules there first
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, path])
        try:
            yield
        finally:
            os.chdir(before)
            os.environ["PYTHONPATH"] = path


def profile_row(model: str, name: str, batch: int, profile: server.Profile) -> list[str]:
    """Seconds in all, rounds (prefills count), and milliseconds per round of its parts."""
    parts = dict(profile.parts_s)
    tell_s, close_s = parts.get("tell", 0.0), parts.pop("close", 0.0)
    parts["decide"] = parts.pop("decide and draft", 0.0) - parts.get("draft", 0.0) - tell_s
    parts["around"] = profile.total_s - parts.pop("worker", parts.get("target", 0.0)) - close_s
    parts["tell"] = tell_s + close_s + parts.pop("commits", 0.0)
    parts["rows"], parts["emit"] = (parts.pop(part, 0.0) for part in ("spread", "accept and emit"))
    rounds = max(1, profile.batches)
    return [
        f"{model}, batch {batch}: {name}",
        f"{profile.total_s:.2f}",
        str(profile.batches),
        f"{1e3 * profile.total_s / rounds:.2f}",
        *(f"{1e3 * parts.get(part, 0.0) / rounds:.2f}" for part in COLUMNS),
    ]


def verdict(rows: Sequence[Sequence[str]]) -> str:
    """Processor time of `auto` over plain decoding, and what a round gets longer by."""
    of = {row[0]: row for row in rows}
    places = [name.removesuffix(": plain") for name in of if name.endswith(": plain") and f"{name[:-5]}auto" in of]
    pairs = {place: (of[f"{place}: auto"], of[f"{place}: plain"]) for place in places}
    spent = ", ".join(f"{float(a[1]) / float(p[1]):.2f} ({place})" for place, (a, p) in pairs.items())
    longer = [float(a[3]) / float(p[3]) for a, p in pairs.values()]
    if not pairs:
        return "Plain decoding or `auto` was not profiled, so there is nothing to compare."
    return (
        f"Processor time of `auto` over plain decoding: {spent}. A round takes {min(longer):.2f} to "
        f"{max(longer):.2f} times as long, so drafts pay where they save more rounds than that."
    )


def page(rows: Sequence[Sequence[str]], load: float) -> Result:
    all_columns = ("contestant", "s", "rounds", "ms", *COLUMNS)
    return Result(
        title="Where a round's time goes",
        verdict=verdict(rows),
        intro=(
            "The contestants and requests of [speculation_speed](speculation_speed.md), one repetition of both steps "
            "under a profiler, after a warm-up. `s`: the scheduler's processor time for as many tokens. Milliseconds "
            "per round (prefills count as rounds): `target` is the target's forward pass and sampling, `draft` the "
            "drafting with the draft model's passes. The file has the rest: SGLang's scheduling and output (`around`), "
            "laying out `rows`, finding and handing out what was accepted (`emit`), accounting for it (`learn`), "
            "telling drafters (`tell`), choosing windows (`decide`). The profiler makes Python look slower than it is, "
            "the target's kernels not. Of SGLang's NGRAM only `target` is measured apart."
        ),
        columns=all_columns,
        rows=rows,
        summary=(SHOWN, [[row[all_columns.index(name)] for name in SHOWN] for row in rows if row[0].endswith(TOLD)]),
        notes=f"Load average before the start: {load:.1f}.",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=["A", "B", "heavy"], default=list(BATCHES))
    parser.add_argument("--batches", nargs="+", type=int, help="default: those that show most, by model")
    parser.add_argument("--contestants", nargs="+", choices=[*OURS, *BUILTINS], default=list(NAMES))
    parser.add_argument("--beside", type=Path, help="another checkout, whose engines take turns with this one's")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that engines are stopped
    load = os.getloadavg()[0]
    rows: list[list[str]] = []
    for model in options.models:
        batches = options.batches or BATCHES.get(model, BATCHES["B"])
        models = models_of(model)
        todo = works(models, "A" if model == "A" else "B", batches, REPETITIONS)
        with (
            tempfile.TemporaryDirectory(prefix="speculation-speed-") as temporary,
            ExitStack() as stack,
        ):
            most, folder = max(*batches, GROUP_SIZE), Path(temporary)
            players = stack.enter_context(contestants(models, most, folder, options.contestants))
            if options.beside:
                stack.enter_context(engines_of(options.beside))
                names = [name for name in options.contestants if name in OURS]
                others = stack.enter_context(contestants(models, most, folder / "beside", names))
                players += [replace(player, name=f"{player.name} of {options.beside.name}") for player in others]
            for name, batch, profile in profiles(players, todo):
                rows.append(profile_row(model, name, batch, profile))
                print(" | ".join(rows[-1]), flush=True)
    if not options.beside:
        publish("speculation_speed_profile", page(rows, load))


if __name__ == "__main__":
    main()
