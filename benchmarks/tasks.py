"""Which draft method is best for which task, and whether anything known before a response tells which it will be.

    python -m benchmarks.tasks [--limit-s SECONDS] [--tasks NAME ...]

Models of eight tasks of reasoning-gym and of their mix are made at first use (`tasks_models`), which takes a few
minutes each; after `--limit-s` it ends between two of them, and goes on there when called again. Nothing is timed:
seconds are the planner's cost table for rounds and draft tokens that were counted.

Shape legend: N responses, M ways of drafting, P prompts, R resamples.
"""

# ruff: noqa: N815 - array fields carry shape suffixes

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.acceptance import RESAMPLES
from benchmarks.results import Result, Table, markdown, publish
from benchmarks.tasks_answers import TASKS
from benchmarks.tasks_models import (
    GROUP_SIZE,
    LEARNS,
    METHODS,
    MIX,
    RUNNING,
    SHAPE,
    VISITS,
    WINDOW,
    WORKED,
    Response,
    draft_of,
    responses_of,
    target_of,
)
from specactor.planning.model_shapes import SHAPES
from specactor.planning.rooflines import Roofline, cost_table, device
from specactor.rollout.speculation.costs import CostTable
from specactor.trainer.drafter import init

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
OFF = "off"
WAYS = (OFF, *METHODS)
TARGET, DRAFT, GPU, DEVICES, CONTEXT = "Qwen2.5-32B", "Qwen2.5-1.5B", "H100", 8, 4096
BATCHES = (8, 64)  # requests of an engine
BINS = 4  # quantiles of lengths and entropies
BOUND = "siblings, all ended before"
PRIOR = 2.0  # responses that the mean of all counts as, beside siblings
RIDGE = 1.0
ALONE = "the eight models"


def costs() -> CostTable:
    """Return what rounds cost by the roofline of published figures."""
    roofline = Roofline(SHAPES[TARGET], device(GPU), devices=DEVICES, context=CONTEXT, keys_once=True)
    beside = Roofline(SHAPES[DRAFT], device(GPU), devices=DEVICES, context=CONTEXT)
    return cost_table(roofline, {DRAFT: beside}, max_window=8, max_requests=max(BATCHES))


def seconds(responses: Sequence[Response], table: CostTable, batch: int) -> Floats:
    """Return [N, M] seconds of an engine, a request's share of a batch whose requests are all like it."""
    found = np.empty((len(responses), len(WAYS)))
    for row, of in zip(found, responses, strict=True):
        row[0] = of.tokens * table.plain_s(batch)
        for at, method in enumerate(METHODS, 1):
            rounds = of.rounds[method]
            draft_s = 0.0 if method == "suffix" else table.draft_s(DRAFT, batch, WINDOW)
            row[at] = rounds * (table.verify_s(batch, batch * (1 + of.drafted[method] / rounds)) + draft_s)
    return found / batch


# -------------------------------------------------------------------------------------------- what is known beforehand


@dataclass(frozen=True, kw_only=True)
class Known:
    """Responses of the second visit, and what was seen in the first one."""

    seconds_NM: Floats
    prompt_N: Ints  # 0, 1, ..
    is_learned_N: NDArray[np.bool_]  # its prompt is one of those that rules are made from
    task_N: Ints
    length_N: Floats  # tokens of the prompt
    entropy_N: Floats  # mean of the prompt's responses, last visit
    before_NM: Floats  # seconds over plain decoding's, mean of the prompt's responses, last visit
    beside_NM: Floats  # the same of its siblings of this visit


def known(responses: Sequence[Response], seconds_NM: Floats) -> Known:
    """Args: of both visits, of one or several models."""
    tasks = list(dict.fromkeys(r.task for r in responses))
    keys = {key: i for i, key in enumerate(dict.fromkeys((r.task, r.prompt) for r in responses))}
    prompt_A = np.array([keys[r.task, r.prompt] for r in responses])
    visit_A = np.array([r.visit for r in responses])
    relative_AM = seconds_NM / seconds_NM[:, :1]
    entropy_A = np.array([r.entropy for r in responses])
    now_N = np.flatnonzero((visit_A == 1) & np.isin(prompt_A, prompt_A[visit_A == 0]))
    prompt_N = prompt_A[now_N]

    def mean(values: Floats, visit: int) -> Floats:
        """By prompt."""
        sums = np.zeros((len(keys), *values.shape[1:]))
        np.add.at(sums, prompt_A[visit_A == visit], values[visit_A == visit])
        numbers = np.bincount(prompt_A[visit_A == visit], minlength=len(keys)).astype(np.float64)
        return sums / np.maximum(numbers, 1.0).reshape(-1, *[1] * (values.ndim - 1))

    numbers_N = np.bincount(prompt_N, minlength=len(keys))[prompt_N][:, None]
    sums_NM = mean(relative_AM, 1)[prompt_N] * numbers_N
    return Known(
        seconds_NM=seconds_NM[now_N],
        prompt_N=prompt_N,
        is_learned_N=prompt_N % 2 == 0,
        task_N=np.array([tasks.index(responses[i].task) for i in now_N.tolist()]),
        length_N=np.array([float(responses[i].prompt_tokens) for i in now_N.tolist()]),
        entropy_N=mean(entropy_A, 0)[prompt_N],
        before_NM=mean(relative_AM, 0)[prompt_N],
        beside_NM=(sums_NM - relative_AM[now_N]) / np.maximum(numbers_N - 1, 1),
    )


def one_for_all(of: Known) -> Ints:
    """Choose the way that is fastest in all."""
    return np.full(len(of.prompt_N), int(of.seconds_NM[of.is_learned_N].sum(0).argmin()))


def in_bins(of: Known, bin_N: Ints) -> Ints:
    """Choose in every bin the way that is fastest there; where nothing was learned, the one for all."""
    chosen_N = one_for_all(of)
    for at in np.unique(bin_N):
        here_N = bin_N == at
        if (here_N & of.is_learned_N).any():
            chosen_N[here_N] = of.seconds_NM[here_N & of.is_learned_N].sum(0).argmin()
    return chosen_N


def quantiles(of: Known, values_N: Floats) -> Ints:
    """Return the bin of each value."""
    edges = np.quantile(values_N[of.is_learned_N], np.arange(1, BINS) / BINS)
    return np.searchsorted(edges, values_N, side="right").astype(np.int64)


def by_others(of: Known, others_NM: Floats) -> Ints:
    """Choose what was fastest for other responses to the prompt, GROUP_SIZE of them, and a few average ones."""
    relative_NM = of.seconds_NM / of.seconds_NM[:, :1]
    mean_M = relative_NM[of.is_learned_N].mean(0)
    way_N: Ints = ((GROUP_SIZE * others_NM + PRIOR * mean_M) / (GROUP_SIZE + PRIOR)).argmin(1)
    return way_N


def by_all(of: Known) -> Ints:
    """Choose by a ridge regression on everything that is known before any sibling has begun."""
    tasks_NT = np.eye(int(of.task_N.max()) + 1)[of.task_N]
    plain_NF = np.column_stack([np.log(of.length_N), of.entropy_N, of.before_NM[:, 1:]])
    centre_F, scale_F = plain_NF[of.is_learned_N].mean(0), plain_NF[of.is_learned_N].std(0) + 1e-9
    x_NF = np.column_stack([np.ones(len(tasks_NT)), tasks_NT, (plain_NF - centre_F) / scale_F])
    y_NM = of.seconds_NM / of.seconds_NM[:, :1]
    x, y = x_NF[of.is_learned_N], y_NM[of.is_learned_N]
    weights_FM = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ y)
    way_N: Ints = (x_NF @ weights_FM).argmin(1)
    return way_N


RULES: Mapping[str, Callable[[Known], Ints]] = {
    "one for all": one_for_all,
    "task": lambda of: in_bins(of, of.task_N),
    "prompt's length": lambda of: in_bins(of, quantiles(of, of.length_N)),
    "entropy of the last visit": lambda of: in_bins(of, quantiles(of, of.entropy_N)),
    "the group's last visit": lambda of: by_others(of, of.before_NM),
    BOUND: lambda of: by_others(of, of.beside_NM),
    "all but siblings": by_all,
    "best in hindsight": lambda of: of.seconds_NM.argmin(1),
}
FIRST, LAST = "one for all", "best in hindsight"


def resampled(of: Known, values_N: Floats) -> Floats:
    """Return [1 + R] sums over held-out responses: of all prompts, then of resampled ones, the same at each call."""
    test_N = ~of.is_learned_N
    prompts, place_N = np.unique(of.prompt_N[test_N], return_inverse=True)
    picked = np.random.default_rng(0).integers(len(prompts), size=(RESAMPLES, len(prompts)))
    by_prompt = np.bincount(place_N, weights=values_N[test_N], minlength=len(prompts))
    return np.concatenate([[by_prompt.sum()], by_prompt[picked].sum(1)])


def likely(values: Floats) -> str:
    """Show the value of all, and where 95 % of the resampled ones are, in percent."""
    low, high = np.percentile(values[1:], [2.5, 97.5])
    return f"{100 * values[0]:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def judged(pool: str, batch: int, of: Known) -> list[list[str]]:
    """Return rows: how often each rule names the best way, what it gains on one for all, and loses to hindsight."""
    chosen = {name: rule(of) for name, rule in RULES.items()}
    own = {name: of.seconds_NM[np.arange(len(way_N)), way_N] for name, way_N in chosen.items()}
    found = {name: resampled(of, seconds_N) for name, seconds_N in own.items()}
    number = resampled(of, np.ones(len(of.prompt_N)))
    test_N = ~of.is_learned_N
    rows = []
    for name, way_N in chosen.items():
        used_M = np.bincount(way_N[test_N], minlength=len(WAYS)) / test_N.sum()
        shares = [f"{way} {share:.0%}" for way, share in zip(WAYS, used_M.tolist(), strict=True) if share >= 0.005]
        is_best_N = (own[name] <= own[LAST]).astype(np.float64)  # several may be
        rows.append(
            [
                pool,
                str(batch),
                name,
                likely(resampled(of, is_best_N) / number),
                likely(found[FIRST] / found[name] - 1),
                likely(found[name] / found[LAST] - 1),
                ", ".join(shares),
            ]
        )
    return rows


# ------------------------------------------------------------------------------------------------------------ the page

COLUMNS = (
    "task",
    "kind",
    "tokens per response",
    "entropy, nats per token",
    *(f"accept_length, {method}" for method in METHODS),
    *(f"accept_rate, {method}" for method in METHODS),
    *(text for batch in BATCHES for text in (f"best, batch {batch}", f"gain, batch {batch}")),
)
RULED = (
    "models",
    "batch",
    "chosen by",
    "best named, %",
    "over one for all, %",
    "loss to hindsight, %",
    "what is chosen",
)
NAMED, GAIN = 3, 4  # columns


def task_row(task: str, responses: Sequence[Response], table: CostTable) -> list[str]:
    """Return the row of one pair of models."""
    tokens = sum(r.tokens for r in responses)
    rounds = {method: sum(r.rounds[method] for r in responses) for method in METHODS}
    drafted = {method: sum(r.drafted[method] for r in responses) for method in METHODS}
    best: list[str] = []
    for batch in BATCHES:
        sum_M = seconds(responses, table, batch).sum(0)
        best += [WAYS[sum_M.argmin()], f"{sum_M[0] / sum_M.min():.2f}"]
    return [
        task,
        TASKS[task].kind if task in TASKS else "all",
        f"{tokens / len(responses) + 1:.0f}",
        f"{sum(r.entropy * r.tokens for r in responses) / tokens:.2f}",
        *(f"{tokens / rounds[method]:.2f}" for method in METHODS),
        *(f"{(tokens - rounds[method]) / max(1, drafted[method]):.2f}" for method in METHODS),
        *best,
    ]


def verdict(rows: Sequence[Sequence[str]], ruled: Sequence[Sequence[str]]) -> str:
    """Say what knowing the task gains, whether anything else adds to it, and what is best where."""
    at = COLUMNS.index(f"best, batch {BATCHES[-1]}")
    best = [f"{way} for {count}" for way in WAYS if (count := [row[at] for row in rows].count(way))]
    named = by_name(ruled)
    gains: defaultdict[str, list[str]] = defaultdict(list)
    for row in named["task"]:
        gains[row[0]].append(f"{row[GAIN].replace(' (', ' % (')} at batch {row[1]}")
    more = max(
        _bounds(row[GAIN])[0] - _bounds(of_task[GAIN])[0]
        for name in RULES
        if name not in ("task", BOUND, LAST)
        for row, of_task in zip(named[name], named["task"], strict=True)
    )
    return (
        "By prediction, not timed, choosing by task gains, on one method for all requests, "
        f"{'; '.join(' and '.join(of) + f' with {pool}' for pool, of in gains.items())}. "
        f"What else is known before the first token adds at most {max(more, 0.0):.1f} points. "
        f"At batch {BATCHES[-1]} the best is {' and '.join(best)} of {len(rows)} pairs of models."
    )


def by_name(ruled: Sequence[Sequence[str]]) -> dict[str, list[Sequence[str]]]:
    """Return rows of `judged` by rule."""
    return {name: [row for row in ruled if row[2] == name] for name in RULES}


def answer(ruled: Sequence[Sequence[str]]) -> str:
    """Say how often the rules name the best method."""
    named = by_name(ruled)
    cells = [
        f"{of[0][0]}, batch {of[0][1]}: {', '.join(f'{_bounds(row[NAMED])[0]:.0f}' for row in of[:-1])} "
        f"(the task gains {_bounds(of[1][GAIN])[0]:.1f} % where hindsight gains {_bounds(of[-1][GAIN])[0]:.1f} %)"
        for of in zip(*(named[name] for name in (FIRST, "task", "all but siblings", LAST)), strict=True)
    ]
    return (
        "**Does anything known before the first token tell the best method?** Percent of held-out responses whose best "
        "method in hindsight is that of one for all, of their task, of all that is known before siblings begin: "
        f"{'; '.join(cells)}.\n\n"
    )


def _bounds(cell: str) -> tuple[float, float, float]:
    """Return the figures of `likely`."""
    value, _, rest = cell.partition(" (")
    low, _, high = rest.rstrip(")").partition(" to ")
    return float(value), float(low), float(high)


INTRO = f"""\
Each task has a dense model of {SHAPE.num_layers} layers that learned {WORKED} worked answers in {LEARNS.steps} \
updates of {LEARNS.batch_size} and its first layer as a draft model, distilled from it on such \
answers; the mix is one more pair, which learned all tasks. \
They sample {GROUP_SIZE} responses to each held-out prompt in each of \
{VISITS} visits at temperature 1; the policy stays the same, so an earlier visit tells as much as it can. Responses \
are replayed in rounds, {RUNNING} together, with a window of {WINDOW}: `suffix` drafts itself and keeps its text, \
`model` is right where its token with the policy's noise is the response's, `both` verifies the two drafts as a tree. \
Gains are tokens over plain decoding's in the same seconds, by the planner's cost table for {TARGET} with {DRAFT} \
drafting on {DEVICES} {GPU} at {CONTEXT} tokens of context, \
keys read once per verification. Nothing is timed: rounds and draft tokens are counted, so other work on the machine \
changes no figure. The first table is of both visits, the second of the last one, where \
`suffix` knows earlier responses of the same policy."""

NOTES = """\
A rule is made from the second visit to half of the prompts and judged on the other half: percent of the responses \
whose best method it names, percent more tokens per second than with one method for all requests, and percent more \
seconds than the best for each request in hindsight, with 95 % intervals from resampled prompts. *Siblings, all ended \
before* is a bound: siblings run together, so they have ended only where they were over-sampled or begun earlier. A \
request's seconds are its share of a batch whose requests all draft alike; in a mixed batch a draft model's step costs \
nearly as much for half of the requests, so choosing brings less than here. A run has one policy, as *one model of all \
tasks* has; of *the eight models* the task also tells which model. The shipped planner learns a request's acceptance \
while it runs; how much of these gains that already takes is not in these figures. What is known before would go into \
the acceptance that the planner believes of a request that has not drafted yet, by data set in place of one for all.

"""


def ruled_rows(found: Mapping[str, Sequence[Response]], table: CostTable) -> list[list[str]]:
    """Return the judgements: on the model of all tasks, and on the models of one task together."""
    alone = [r for task, responses in found.items() if task != MIX for r in responses]
    pools = {"one model of all tasks": found.get(MIX, []), ALONE: alone}
    return [
        row
        for pool, responses in pools.items()
        if responses
        for batch in BATCHES
        for row in judged(pool, batch, known(responses, seconds(responses, table, batch)))
    ]


def page(found: Mapping[str, Sequence[Response]]) -> Result:
    table = costs()
    rows = [task_row(task, responses, table) for task, responses in found.items()]
    ruled = ruled_rows(found, table)
    missing = [task for task in (*TASKS, MIX) if task not in found]
    shown: Table = (
        [*COLUMNS[:4], *(f"accept_length (accept_rate), {method}" for method in METHODS), *COLUMNS[10:]],
        [[*row[:4], *(f"{a} ({b})" for a, b in zip(row[4:7], row[7:10], strict=True)), *row[10:]] for row in rows],
    )
    return Result(
        title="Which draft method for which task",
        verdict=verdict(rows, ruled),
        intro=INTRO + (f" Missing: {', '.join(missing)}." if missing else ""),
        columns=COLUMNS,
        rows=rows,
        summary=shown,
        notes=answer(ruled) + NOTES + markdown(RULED, ruled),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tasks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no further model after so long")
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, MIX], default=[*TASKS, MIX], help="of the page")
    options = parser.parse_args(arguments)
    end_s = time.monotonic() + options.limit_s
    found: dict[str, list[Response]] = {}
    torch.set_num_threads(1)
    init.quiet()
    for task in options.tasks:
        for make in (target_of, draft_of, responses_of):
            if time.monotonic() > end_s:
                print(f"{task} is next: call it again", flush=True)
                return
            make(task)
        found[task] = responses_of(task)
        print(f"{task}: {len(found[task])} responses", flush=True)
    publish("tasks", page(found))


if __name__ == "__main__":
    main()
