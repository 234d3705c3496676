"""Questions over a socket whose answers come late, in parts, twice or never."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from specactor.rollout.decoupled import supervisor
from specactor.rollout.decoupled.supervisor import SIGN_EVERY_S, Talk

SOON_S, PATIENCE_S = 0.05, 10.0


class Ends:
    """The owner's talk, and the process's end of the socket."""

    def __init__(self) -> None:
        ours, self.process = socket.socketpair()
        self.ours = ours
        self.talk = Talk(ours)
        self.process.settimeout(PATIENCE_S)

    def say(self, text: bytes) -> None:
        self.process.sendall(text)

    def hears(self) -> bytes:
        return self.process.recv(1 << 16)

    def ask_in_vain(self) -> None:
        with pytest.raises(TimeoutError):
            self.talk.ask(b"work", SOON_S)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    with made.ours, made.process:
        yield made


def test_an_answer_repeats_the_number_of_its_question(ends: Ends) -> None:
    for number in (b"1", b"2"):
        ends.say(number + b" of " + number + b"\n")
        assert ends.talk.ask(b"work", PATIENCE_S) == b"of " + number + b"\n"
        assert ends.hears() == number + b" work\n"
        assert not ends.talk.is_silent()


def test_who_answers_late_is_heard_again(ends: Ends) -> None:
    assert not ends.talk.is_silent()
    ends.ask_in_vain()
    assert ends.talk.is_silent()
    ends.say(b"1 late\n")
    assert not ends.talk.is_silent()
    ends.say(b"2 in time\n")
    assert ends.talk.ask(b"work", PATIENCE_S) == b"in time\n"


def test_a_late_answer_is_not_taken_for_anothers(ends: Ends) -> None:
    ends.ask_in_vain()
    ends.say(b"1 late\n")
    assert not ends.talk.is_silent()
    ends.say(b"1 late, again\n2 in time\n")
    assert ends.talk.ask(b"work", PATIENCE_S) == b"in time\n"


def test_who_is_silent_is_asked_nothing_and_costs_no_time(ends: Ends) -> None:
    ends.ask_in_vain()
    assert ends.hears() == b"1 work\n"
    began_s = time.monotonic()
    with pytest.raises(TimeoutError, match="has not yet answered"):
        ends.talk.ask(b"work", PATIENCE_S)
    assert time.monotonic() - began_s < PATIENCE_S / 2
    ends.process.settimeout(SOON_S)
    with pytest.raises(TimeoutError):
        ends.hears()


def test_an_answer_may_come_in_parts(ends: Ends) -> None:
    ends.say(b"1 la")
    ends.ask_in_vain()
    ends.say(b"te\n2 in ")
    assert not ends.talk.is_silent()
    ends.say(b"time\n")
    assert ends.talk.ask(b"work", PATIENCE_S) == b"in time\n"


def test_a_question_that_did_not_go_through_is_ended_before_the_next(ends: Ends) -> None:
    """A process that does not read: the socket takes only a part of a long question."""
    long = b"renew " + b"x" * (2 << 20)
    with pytest.raises(TimeoutError):
        ends.talk.ask(long, SOON_S)
    heard = bytearray()
    while not heard.endswith(b"\n"):
        assert ends.talk.is_silent()
        heard += ends.hears()
    assert heard == b"1 " + long + b"\n"
    ends.say(b"1 late\n")
    assert not ends.talk.is_silent()


@pytest.mark.parametrize("garbage", [b"no number\n", b"\n", b""])
def test_one_that_dies_or_says_what_is_no_answer(ends: Ends, garbage: bytes) -> None:
    ends.say(garbage)
    ends.process.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError, match=r"unreadable answer" if garbage else r"the process died"):
        ends.talk.ask(b"work", PATIENCE_S)
    assert ends.talk.is_silent()


def test_a_sign_of_life_is_asked_for_in_time_and_holds_up_no_other_question(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock of the test's own."""
    assert ends.talk.silent_s() == 0.0
    now_s = time.monotonic()
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now_s))
    now_s += SIGN_EVERY_S + 1
    assert ends.talk.silent_s() == 0.0
    assert ends.hears() == b"1 alive\n"
    assert not ends.talk.is_silent()
    ends.say(b"1 yes\n2 done\n")
    assert ends.talk.ask(b"work", PATIENCE_S) == b"done\n"
    assert ends.hears() == b"2 work\n"
    assert ends.talk.silent_s() == 0.0, "it has just said something"
    now_s += SIGN_EVERY_S + 1
    assert ends.talk.silent_s() == 0.0
    now_s += SIGN_EVERY_S + 1
    assert ends.talk.silent_s() == pytest.approx(SIGN_EVERY_S + 1)
    assert ends.talk.is_silent(), "the sign is late"
    assert ends.hears() == b"3 alive\n", "and is not asked for again"
    ends.say(b"3 yes\n")
    assert ends.talk.silent_s() == 0.0
    assert not ends.talk.is_silent()


def test_an_answer_to_an_earlier_question_is_a_sign_of_life(ends: Ends) -> None:
    ends.ask_in_vain()
    time.sleep(0.2)
    assert ends.talk.silent_s() >= 0.2
    ends.say(b"1 late\n")
    assert ends.talk.silent_s() == 0.0
