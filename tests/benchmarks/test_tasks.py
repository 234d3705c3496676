"""Worked answers are right, replays count what an engine would, and no rule sees what it is judged by."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from benchmarks import tasks
from benchmarks.acceptance import rounds
from benchmarks.tasks_answers import MOST_ANSWER, MOST_PROMPT, TASKS, colouring, printing, worked
from benchmarks.tasks_models import METHODS, MIX, WINDOW, Response, replay
from specactor.data.reasoning import create_task
from specactor.rollout.speculation.suffix import SuffixDrafter
from specactor.trainer.drafter.buffer import TrainingExample


@pytest.mark.parametrize("task", TASKS)
def test_worked_answers_are_short_and_plain(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    known = worked(task, size=30, seed=3)
    assert len(known) > 15
    assert known == worked(task, size=30, seed=3)
    assert all(len(p) <= MOST_PROMPT and len(a) < MOST_ANSWER for p, a in known.items())
    assert all((prompt + answer).isascii() and (prompt + answer).isprintable() for prompt, answer in known.items())


def test_a_colouring_gives_neighbours_different_colours() -> None:
    for entry in create_task("graph_color", TASKS["graph_color"].params, size=40, seed=1):
        text = re.sub(r"\[.*?\]", "", colouring(entry, random.Random(1)))
        colours = {int(v): c for v, c in re.findall(r"(\d)([rgb])", text)}
        assert sorted(colours) == entry["metadata"]["puzzle"]["vertices"]
        assert all(colours[a] != colours[b] for a, b in entry["metadata"]["puzzle"]["edges"])


def test_a_program_is_written_out_with_what_it_prints() -> None:
    entry = create_task("bf", {"difficulty": 1}, size=1, seed=5)[0]
    text = printing(entry, random.Random(0))
    assert re.sub(r"(?<=\.)\w", "", text) == entry["metadata"]["bf_program"]
    assert "".join(re.findall(r"\.(\w)", text)) == entry["answer"]


def example(response: list[int]) -> TrainingExample:
    return TrainingExample(token_ids=np.array([5, 6, 7, *response], np.int32), prompt_len=3, version=0)


def test_a_replayed_draft_model_takes_the_rounds_of_its_hits() -> None:
    draw = np.random.default_rng(0)
    responses = [example(draw.integers(10, 90, size).tolist()) for size in (2, 5, 30, 77)]
    hits = [draw.random(x.response_len) < 0.7 for x in responses]
    found, drafted = replay("model", None, responses, hits, 0)
    assert found == [len(rounds(own, WINDOW)) for own in hits]
    assert drafted == [WINDOW * number for number in found]


def test_text_that_was_seen_is_drafted_and_the_longer_right_draft_counts() -> None:
    response = list(range(10, 71))
    never = [np.zeros(61, np.bool_)]
    drafter = SuffixDrafter()
    first, _ = replay("suffix", drafter, [example(response)], never, 0)
    assert first == [60], "nothing was seen before"
    again, drafted = replay("suffix", drafter, [example(response)], never, 1)
    assert (again, drafted) == ([12], [12 * WINDOW]), "60 tokens, five a round"
    both, _ = replay("both", SuffixDrafter(), [example(response)], [np.ones(61, np.bool_)], 0)
    assert both == [12], "the draft model's were right"
    helped, _ = replay("both", drafter, [example(response)], never, 2)
    assert helped == [12], "the text's were right"


def response(task: str, prompt: int, visit: int, better: str, *, tokens: int = 60) -> Response:
    return Response(
        task=task,
        prompt=prompt,
        prompt_tokens=10 + prompt % 3,
        visit=visit,
        tokens=tokens,
        entropy=0.1,
        rounds={method: tokens // 5 if method == better else tokens for method in METHODS},
        drafted={method: tokens // 5 * 4 if method == better else 0 for method in METHODS},
    )


def two_tasks() -> list[Response]:
    """Text is right in one task, the draft model in the other."""
    ways = {"bf": "suffix", "mini_sudoku": "model"}
    return [
        response(task, prompt, visit, better)
        for task, better in ways.items()
        for prompt in range(20)
        for visit in range(2)
        for _ in range(4)
    ]


def known_of(responses: list[Response]) -> tasks.Known:
    return tasks.known(responses, tasks.seconds(responses, tasks.costs(), 8))


def test_seconds_are_those_of_the_table() -> None:
    table = tasks.costs()
    [row] = tasks.seconds([response("bf", 0, 0, "model")], table, 8)
    assert row[0] == pytest.approx(60 * table.plain_s(8) / 8)
    assert row[1] == pytest.approx(60 * table.verify_s(8, 8) / 8)
    assert row[2] == pytest.approx(12 * (table.verify_s(8, 8 * 5) + table.draft_s(tasks.DRAFT, 8, WINDOW)) / 8)


def test_where_tasks_differ_rules_that_see_it_win() -> None:
    rows = {row[2]: row for row in tasks.judged("x", 8, known_of(two_tasks()))}
    gains = {name: tasks._bounds(row[tasks.GAIN])[0] for name, row in rows.items()}
    assert gains[tasks.FIRST] == gains["prompt's length"] == gains["entropy of the last visit"] == 0.0
    for name in ("task", "the group's last visit", "siblings, all ended before", "all but siblings", tasks.LAST):
        assert gains[name] > 20, name
        assert tasks._bounds(rows[name][tasks.GAIN + 1])[0] == pytest.approx(0.0, abs=0.05)
    assert {name: rows[name][tasks.NAMED].partition(" ")[0] for name in ("one for all", "task", tasks.LAST)} == {
        "one for all": "50.0",
        "task": "100.0",
        tasks.LAST: "100.0",
    }
    assert rows["task"][-1] == "suffix 50%, model 50%"


def test_no_rule_sees_the_seconds_that_it_is_judged_by() -> None:
    of = known_of(two_tasks())
    changed = of.seconds_NM.copy()
    changed[~of.is_learned_N, 0] = 1e-9  # plain decoding would win wherever one looks
    other = replace(of, seconds_NM=changed)
    for name, rule in tasks.RULES.items():
        same = (rule(of) == rule(other)).all()
        assert same == (name != tasks.LAST), name


def test_a_response_is_not_its_own_sibling() -> None:
    responses = two_tasks()
    of = known_of(responses)
    last = len(responses) - 1
    changed = [*responses[:last], msgspec.structs.replace(responses[last], rounds=dict.fromkeys(METHODS, 1))]
    other = known_of(changed)
    assert other.beside_NM[-1] == pytest.approx(of.beside_NM[-1])
    assert (other.before_NM == of.before_NM).all()
    assert other.beside_NM[-2, 1] < of.beside_NM[-2, 1], "of its siblings it is one"


def test_the_page_says_what_is_best_and_whether_it_is_known_before() -> None:
    responses = two_tasks()
    made = tasks.page({MIX: responses, "bf": [r for r in responses if r.task == "bf"]})
    assert "0.0 % (0.0 to 0.0) at batch 64 with the eight models. What else " in made.verdict, "which are of one task"
    assert "0.0 % (0.0 to 0.0) at batch 64 with one model of all tasks" not in made.verdict
    assert " adds at most 0.0 points" in made.verdict, "where the task tells all"
    assert "one model of all tasks, batch 8: 50, 100, 100 (the task gains " in made.notes
    assert made.intro.endswith(f" Missing: {', '.join(task for task in TASKS if task != 'bf')}.")
    assert made.verdict.endswith("the best is suffix for 2 of 2 pairs of models.")
    assert all(len(row) == len(made.columns) for row in made.rows)
    row = dict(zip(made.columns, made.rows[1], strict=True))
    assert row["accept_length, suffix"] == "5.00"
    assert row["accept_rate, suffix"] == "1.00"
    assert row["best, batch 8"] == "suffix"
    assert made.summary is not None
    assert all(len(cells) == len(made.summary[0]) for cells in made.summary[1])
