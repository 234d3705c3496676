"""Worked solutions of two reasoning-gym tasks, for the supervised warm-up of a tiny model.

count_bits, prompt ``1246=`` (prompt_template "{number}="): halve the number again and again, and after each number
tally, as a letter (a is 0), how many odd ones there were so far:

    1246a623b311c155d77e38e19f9g4g2g1h#7

basic_arithmetic with + only, prompt ``7+4+4+10=`` (prompt_template "{expression:compact}="): add term by term,
digits reversed so that a carry is known before the next digit is written; sums have three digits, terms two or more:

    700+40=110+40=510+01=520#25

Both are mechanical, one small step per token, so a tiny model can learn them. The lazy style is the answer alone
(``#7``), which is a guess. A model warmed up on a mix knows how to work and often guesses, above all where working is
long; reinforcement learning teaches it to work.
"""

import random
import string

from specactor.errors import DataError
from specactor.types import Problem

LAZY_HARD, LAZY_EASY = 0.7, 0.15
"""Chance of the lazy style in stage 1, for long and for short worked solutions."""


def solve(problem: Problem, rng: random.Random, stage: int) -> str:
    """A correct response: worked in stage 0; from stage 1 on lazy by chance."""
    task, values = _entry(problem)
    lazy_chance = 0.0 if stage == 0 else LAZY_HARD if _is_hard(task, values) else LAZY_EASY
    if rng.random() < lazy_chance:
        return f"#{problem.answer}"
    if task == "count_bits":
        return count_bits(int(str(values["number"])))
    return add([int(term) for term in str(values["expression"]).split("+")])


def count_bits(number: int) -> str:
    """1246 -> 1246a623b311c155d77e38e19f9g4g2g1h#7"""
    steps, ones = [], 0
    while number:
        ones += number % 2
        steps.append(f"{number}{string.ascii_letters[ones]}")
        number //= 2
    return f"{''.join(steps)}#{ones}"


def add(terms: list[int]) -> str:
    """[7, 4, 4, 10] -> 700+40=110+40=510+01=520#25"""
    total = terms[0]
    text = _reversed(total, 3)
    for term in terms[1:]:
        total += term
        text += f"+{_reversed(term, 2)}={_reversed(total, 3)}"
    return f"{text}#{total}"


def _reversed(number: int, digits: int) -> str:
    return f"{number:0{digits}d}"[::-1]


def _is_hard(task: str, values: dict[str, object]) -> bool:
    return int(str(values["number"])) > 3999 if task == "count_bits" else int(str(values["num_terms"])) > 3


def _entry(problem: Problem) -> tuple[str, dict[str, object]]:
    """Name of the task, and the values that its question was made of. Raises DataError for other tasks."""
    entry = problem.metadata.get("entry")
    values = entry.get("metadata") if isinstance(entry, dict) else None
    task = problem.metadata.get("task")
    only_plus = isinstance(values, dict) and not set(str(values.get("expression", ""))) - set("0123456789+ ")
    if not isinstance(values, dict) or task not in ("count_bits", "basic_arithmetic") or not only_plus:
        raise DataError(
            f"warmup.solver: problem {problem.index} is of task {task!r}, expected count_bits, or basic_arithmetic "
            'with params operators="+", allow_parentheses=False, allow_negation=False. Write a solver for other tasks.'
        )
    return task, values
