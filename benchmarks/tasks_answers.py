"""Eight tasks of reasoning-gym as short prompts with worked answers, a token per character.

Their answers are of 20 to 110 tokens, and leave a little model sure or unsure: sums and bits are worked step by step,
a colouring has many right ones, a program is written out again with what it prints, a cipher is hard to learn.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.trained_models import task_recipe
from examples.quickstart_tasks import add, count_bits
from specactor.data.reasoning import create_task

Entry = Mapping[str, Any]
COLOURS = "rgb"


@dataclass(frozen=True, kw_only=True)
class Task:
    kind: str
    prompt: Callable[[Entry], str]
    answer: Callable[[Entry, random.Random], str]
    params: Mapping[str, object] = field(default_factory=dict)


def colouring(entry: Entry, rng: random.Random) -> str:
    """Colour vertex by vertex after naming the colours of its neighbours: ``0r1g2[0r1g]b``; any colouring is right."""
    edges = [tuple(edge) for edge in entry["metadata"]["puzzle"]["edges"]]
    vertices = entry["metadata"]["puzzle"]["vertices"]
    for _ in range(64):
        colours: dict[int, str] = {}
        steps = []
        for vertex in vertices:
            near = [other for other in colours if (other, vertex) in edges or (vertex, other) in edges]
            left = [c for c in COLOURS if all(colours[other] != c for other in near)]
            if not left:
                break
            colours[vertex] = rng.choice(left)
            seen = "".join(f"{other}{colours[other]}" for other in near)
            steps.append(f"{vertex}[{seen}]{colours[vertex]}" if near else f"{vertex}{colours[vertex]}")
        if len(colours) == len(vertices):
            return "".join(steps)
    known = entry["metadata"]["puzzle"].get("colors", entry["metadata"]["possible_answer"])
    return "".join(f"{vertex}{COLOURS[colour - 1]}" for vertex, colour in known.items())


def printing(entry: Entry, rng: random.Random) -> str:
    """Write the program again, with every printed character behind the command that prints it."""
    printed = iter(entry["answer"])
    return "".join(c + (next(printed, "") if c == "." else "") for c in entry["metadata"]["bf_program"])


def _rows(grid: Sequence[Sequence[int]]) -> str:
    return "/".join("".join(map(str, row)) for row in grid)


def _edges(entry: Entry) -> str:
    puzzle = entry["metadata"]["puzzle"]
    return f"g{len(puzzle['vertices'])}:" + ",".join(f"{a}{b}" for a, b in puzzle["edges"]) + "="


def _board(entry: Entry) -> str:
    """Read the board that only the question has."""
    rows = re.findall(r"\[([01](?:,[01])+)\]", str(entry["question"]).rpartition("\n\n")[2])
    return "l" + "/".join(row.replace(",", "") for row in rows) + "="


def _words(entry: Entry, key: str) -> str:
    return ",".join(entry["metadata"][key])


TASKS = {
    "count_bits": Task(
        kind="arithmetic",
        params={"min_n": 1, "max_n": 9999},
        prompt=lambda e: f"n{e['metadata']['number']}=",
        answer=lambda e, _: count_bits(e["metadata"]["number"]),
    ),
    "basic_arithmetic": Task(
        kind="arithmetic",
        params={k: v for k, v in task_recipe("B").data.params.items() if k != "size"},
        prompt=lambda e: f"s{e['metadata']['expression'].replace(' ', '')}=",
        answer=lambda e, _: add([int(term) for term in e["metadata"]["expression"].split("+")]),
    ),
    "graph_color": Task(
        kind="graphs",
        params={"min_num_vertices": 5, "max_num_vertices": 8, "num_colors": 3, "edge_probability": 0.3},
        prompt=_edges,
        answer=colouring,
    ),
    "bf": Task(
        kind="code", params={"difficulty": 1}, prompt=lambda e: f"p{e['metadata']['bf_program']}=", answer=printing
    ),
    "mini_sudoku": Task(
        kind="games",
        prompt=lambda e: f"m{_rows(e['metadata']['puzzle'])}=",
        answer=lambda e, _: _rows(e["metadata"]["solution"]),
    ),
    "game_of_life": Task(
        kind="games",
        params={"grid_size_x": 6, "grid_size_y": 6, "filled_cells_weights": 0.35, "simulation_steps": 1},
        prompt=_board,
        answer=lambda e, _: _rows(json.loads(e["answer"])),
    ),
    "caesar_cipher": Task(
        kind="text",
        params={"min_words": 3, "max_words": 6},
        prompt=lambda e: f"c{e['metadata']['rotation']}:{e['metadata']['cipher_text']}=",
        answer=lambda e, _: str(e["answer"]),
    ),
    "word_sorting": Task(
        kind="text",
        params={"min_words": 3, "max_words": 6, "min_word_length": 3, "max_word_length": 7},
        prompt=lambda e: f"w{e['metadata']['direction'][0]}:{_words(e, 'original_words')}=",
        answer=lambda e, _: _words(e, "sorted_words"),
    ),
}
MOST_PROMPT, MOST_ANSWER = 96, 96
"""Tokens. Longer problems are left out: they would make the batches of little models dear."""


def worked(task: str, *, size: int, seed: int) -> dict[str, str]:
    """Return different prompts with an answer each, in the order drawn."""
    known, rng = TASKS[task], random.Random(seed)
    found: dict[str, str] = {}
    for entry in create_task(task, known.params, size=size, seed=seed):
        prompt, answer = known.prompt(entry), known.answer(entry, rng)
        if len(prompt) <= MOST_PROMPT and len(answer) < MOST_ANSWER:
            found.setdefault(prompt, answer)
    return found
