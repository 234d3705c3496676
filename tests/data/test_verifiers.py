from __future__ import annotations

import math
import threading
from fractions import Fraction
from pathlib import Path

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st

from specactor.data.verifiers import answer_of, get_verifier
from specactor.errors import DataError
from specactor.types import Problem


def problem(answer: str, verifier: str = "exact", **metadata: object) -> Problem:
    return Problem(index=17, prompt="?", prompt_ids=(1,), answer=answer, verifier=verifier, metadata=metadata)


def score(verifier: str, response: str, answer: str) -> float:
    return get_verifier(verifier)(response, problem(answer, verifier))


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("1246a623b1h#7", "7"),
        ("so\n#### 7 \n", "7"),
        ("#3#7", "7"),
        (" 7\n", "7"),
        ("7#", ""),
        ("", ""),
        ("x = 7", "x = 7"),
    ],
)
def test_the_answer_of_a_response(response: str, answer: str) -> None:
    assert answer_of(response, problem("7")) == answer


def test_an_answer_with_a_hash_is_compared_whole() -> None:
    assert score("exact", "C# and F#", "C# and F#") == 1.0
    assert score("exact", "F#", "C# and F#") == 0.0


@pytest.mark.parametrize(
    ("response", "right"),
    [("a#red", 1), ("red", 1), (" red ", 1), ("red#", 0), ("Red", 0), ("red#blue", 0), ("reds", 0), ("", 0)],
)
def test_exact(response: str, right: int) -> None:
    assert score("exact", response, "red") == right


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("#0.50", "1/2", 1),
        ("5e-1", "0.5", 1),
        (".5", "0.5", 1),
        ("1,234,567", "1234567", 1),
        ("12,34", "1234", 0),
        ("-0", "0", 1),
        ("+7", "7", 1),
        ("0.333", "1/3", 0),
        ("0.1", "0.1000000000000000055511151231257827", 0),
        ("seven", "7", 0),
        ("7 apples", "7", 0),
        ("1/0", "7", 0),
        ("inf", "7", 0),
        ("nan", "7", 0),
        (".", "0", 0),
        ("", "0", 0),
        ("٧", "7", 0),
        ("1e999999999", "7", 0),
        ("9" * 100_000, "7", 0),
    ],
)
def test_number(response: str, answer: str, right: int) -> None:
    assert score("number", response, answer) == right


@given(st.integers(-(10**12), 10**12), st.integers(1, 999))
def test_number_agrees_with_exact_arithmetic(top: int, bottom: int) -> None:
    value = Fraction(top, bottom)
    assert score("number", f"work #{top}/{bottom}", str(value)) == 1.0
    assert score("number", f"work #{top}/{bottom}", str(value + Fraction(1, 10**15))) == 0.0
    assert score("number", str(top / 1000), str(Fraction(str(top / 1000)))) == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"Thus $\frac{1}{2}$.", "0.5", 1),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1),
        (r"\boxed{\frac12}", r"$\frac{1}{2}$", 1),
        ("The answer is 7.", "7", 1),
        (r"\boxed{8}", "7", 0),
        ("no idea", "7", 0),
        ("", "7", 0),
        (r"\boxed{\frac{", "7", 0),
    ],
)
def test_math_verify(response: str, answer: str, right: int) -> None:
    assert score("math-verify", response, answer) == right


def test_reasoning_gym_is_its_own_scorer() -> None:
    entry = reasoning_gym.create_dataset("count_bits", size=1, seed=3)[0]
    metadata = {"task": "count_bits", "params": {}, "entry": entry}
    own = reasoning_gym.create_dataset("count_bits", size=1, seed=3).score_answer
    verify = get_verifier("reasoning-gym")
    for answer in (entry["answer"], f"{entry['answer']} bits", "99", ""):
        given_problem = problem(entry["answer"], "reasoning-gym", **metadata)
        assert verify(f"work#{answer}", given_problem) == own(answer, entry)
    assert verify(f"#{entry['answer']}", given_problem) == 1.0


def test_reasoning_gym_scores_with_the_parameters_of_the_task() -> None:
    """The scorer of a task may read its parameters: the data set's own object is the reference."""
    params = {"min_words": 4, "max_words": 5}
    reference = reasoning_gym.create_dataset("letter_jumble", size=3, seed=3, **params)
    for entry in reference:
        metadata = {"task": "letter_jumble", "params": params, "entry": entry}
        for answer in (entry["answer"], entry["answer"].swapcase(), "wrong"):
            got = get_verifier("reasoning-gym")(answer, problem(entry["answer"], "reasoning-gym", **metadata))
            assert got == reference.score_answer(answer, entry)


OWN = """
from fractions import Fraction
import numpy as np
import torch
def half(response, problem): return 0.5
def first(response, problem): return response[0] == problem.answer
def two(response, problem): return 2
def nan(response, problem): return float("nan")
def words(response, problem): return "good"
def nothing(response, problem): pass
def text(response, problem): return "1"
def digits(response, problem): return b"1"
def infinite(response, problem): return float("inf")
def imaginary(response, problem): return 1j
def imaginary_array(response, problem): return np.complex64(1)
def several(response, problem): return np.ones(2)
def huge(response, problem): return 10**400
def listed(response, problem): return [1.0]
def true(response, problem): return True
def array(response, problem): return np.float32(0.25)
def flag(response, problem): return np.bool_(True)
def tensor(response, problem): return torch.tensor(0.5)
def fraction(response, problem): return Fraction(1, 4)
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_verifiers.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_verifiers"


def test_a_function_of_one_s_own(own_module: str) -> None:
    assert score(f"{own_module}:half", "x", "7") == 0.5
    assert score(f"{own_module}:first", "7x", "7") == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("two", 2.0), ("true", 1.0), ("array", 0.25), ("flag", 1.0), ("tensor", 0.5), ("fraction", 0.25)],
)
def test_a_score_may_be_any_number_or_a_bool(own_module: str, name: str, value: float) -> None:
    got = score(f"{own_module}:{name}", "x", "7")
    assert (got, type(got)) == (value, float)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("first", r"it raised IndexError: string index out of range, on the response ''\. Correct the verifier, or"),
        ("nan", r"it returned nan, which is of type float, expected a finite number"),
        ("words", r"it returned 'good', which is of type str, expected a finite number"),
        ("nothing", r"it returned None, which is of type NoneType, expected a finite number"),
        ("text", r"it returned '1', which is of type str, expected a finite number. Correct the verifier."),
        ("digits", r"it returned b'1', which is of type bytes, expected a finite number"),
        ("infinite", r"it returned inf, which is of type float, expected a finite number"),
        ("imaginary", r"it returned 1j, which is of type complex, expected a finite number"),
        ("imaginary_array", r"it returned .*, which is of type complex64, expected a finite number"),
        ("several", r"it returned .*, which is of type ndarray, expected a finite number"),
        ("huge", r"it returned 1000.*, which is of type int, expected a finite number"),
        ("listed", r"it returned \[1\.0\], which is of type list, expected a finite number"),
    ],
)
def test_a_function_that_fails_names_the_problem(own_module: str, name: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"^verifier {own_module}:{name}: problem 17 \(answer '7'\): {message}"):
        score(f"{own_module}:{name}", "", "7")


def test_a_reasoning_gym_problem_without_its_entry_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(DataError, match=r"problem 17 .*entry: missing"):
        score("reasoning-gym", "7", "7")


def test_a_response_that_a_task_s_scorer_cannot_read_scores_zero_and_a_bad_problem_is_an_error() -> None:
    """The scorer of prime_factorization raises ValueError on a text, the response or its own answer."""
    entry = reasoning_gym.create_dataset("prime_factorization", size=1, seed=3)[0]
    metadata = {"task": "prime_factorization", "params": {}}
    verify = get_verifier("reasoning-gym")
    good = problem(entry["answer"], "reasoning-gym", entry=entry, **metadata)
    assert [verify(text, good) for text in ("no idea", "[1,", f"so #{entry['answer']}")] == [0.0, 0.0, 1.0]
    bad = problem(entry["answer"], "reasoning-gym", entry={**entry, "answer": "two times three"}, **metadata)
    with pytest.raises(DataError, match=r"problem 17 .*it raised ValueError"):
        verify("2 × 3", bad)


def test_every_score_is_a_float_in_bounds_whatever_the_response() -> None:
    for verifier in ("exact", "number"):
        for response in ("\x00", "#" * 1000, "\ud800", "𝟕", "1e-400", "-" * 300):
            assert score(verifier, response, "7") == 0.0
            assert math.isfinite(score(verifier, response, "7"))


def test_math_verify_works_in_threads() -> None:
    scores: dict[int, float] = {}

    def verify(n: int) -> None:
        scores[n] = score("math-verify", rf"\boxed{{{n}/2}}", "2")

    threads = [threading.Thread(target=verify, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert scores == {n: float(n == 4) for n in range(8)}
