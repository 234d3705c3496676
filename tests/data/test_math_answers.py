"""The child process of math-verify: bounded, replaceable, gone when its parent is."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from specactor.data import verifiers
from specactor.data.verifiers import MathAnswers
from specactor.errors import DataError

SLOW = r"\boxed{9^{9^{9^{9}}}}"
"""Takes far longer than any bound to compare."""


@pytest.fixture(scope="module")
def answers() -> Iterator[MathAnswers]:
    asked = MathAnswers(question_s=2)
    yield asked
    asked.close()


def child_of(answers: MathAnswers) -> int:
    assert answers._child is not None
    return answers._child.pid


def test_an_endless_comparison_is_not_equal_and_the_next_one_works(answers: MathAnswers) -> None:
    assert answers.equal("7", r"\boxed{7}")
    started = time.monotonic()
    assert not answers.equal("7", r"\boxed{\sum_{n=1}^{10^{9}} \sin(n^{n})}")
    assert not answers.equal("7", SLOW)
    assert time.monotonic() - started < 60
    assert answers.equal("7", r"\boxed{7}")


def test_a_child_that_even_its_alarm_cannot_end_is_ended(answers: MathAnswers) -> None:
    """A stopped process takes no signal but SIGKILL, which the parent sends when its own bound is reached."""
    assert answers.equal("1", "1")
    child = child_of(answers)
    os.kill(child, signal.SIGSTOP)
    assert not answers.equal("1", "1")
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert answers.equal("1", "1")


def test_a_child_that_fails_is_an_error_that_shows_the_question(answers: MathAnswers) -> None:
    assert answers.equal("1", "1")
    os.kill(child_of(answers), signal.SIGTERM)
    time.sleep(0.2)
    with pytest.raises(DataError, match=r"its process ended with status -15 at .*\"answer\": \"12345\""):
        answers.equal("12345", "1")
    assert answers.equal("1", "1")


def test_texts_with_line_ends_and_odd_characters_arrive_whole(answers: MathAnswers) -> None:
    assert answers.equal("7", "first\nsecond \u2028 \ud800 \x00 \\boxed{7}\r\n")


def test_an_answer_of_a_data_set_is_asked_about_once_and_an_integer_never(
    answers: MathAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million rows are looked at whenever a run starts."""
    asked: list[str] = []

    def readable(answer: str) -> bool:
        asked.append(answer)
        return answers.readable(answer)

    monkeypatch.setattr(verifiers, "MATH_ANSWERS", SimpleNamespace(readable=readable))
    verifiers._is_readable.cache_clear()
    said = ["7", "-12", r"\frac{1}{2}", "no answer", "0" * 18] * 3
    found = [verifiers._is_readable(answer) for answer in said]
    verifiers._is_readable.cache_clear()
    assert asked == [r"\frac{1}{2}", "no answer"]
    assert found == [answers.readable(answer) for answer in said]


def test_a_closed_one_leaves_no_process(answers: MathAnswers) -> None:
    assert answers.readable("7")
    child = child_of(answers)
    answers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_the_child_ends_when_its_parent_is_killed() -> None:
    script = (
        "import time; from specactor.data.verifiers import MATH_ANSWERS\n"
        "assert MATH_ANSWERS.readable('7'); print(MATH_ANSWERS._child.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 60
    while _alive(child):
        assert time.monotonic() < deadline, "the child outlives its parent"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_with_many_open_files_hears_its_child(answers: MathAnswers) -> None:
    """A rank among a thousand has sockets for each other one; `select` ends at file 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    held = [null]
    answers.close()
    try:
        while held[-1] < 1024:
            held.append(os.dup(null))
        assert answers.equal("1/2", "$0.5$")
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
