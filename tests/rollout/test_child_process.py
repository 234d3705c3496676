"""Questions to a child process whose answers come late, in parts, twice, in another order, or never."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from specactor.errors import EngineError
from specactor.rollout import child_process, frames
from specactor.rollout.child_process import ChildDied, ChildProcess, StartRefusedError
from specactor.rollout.frames import Failed
from specactor.waits import LATE_S
from tests.rollout import puppet
from tests.rollout.conftest import Footprint

SOON_S, PATIENCE_S = 0.05, 60.0


class Text(msgspec.Struct, tag=True, frozen=True):
    text: str


DECODER: msgspec.msgpack.Decoder[Text | Failed] = msgspec.msgpack.Decoder(Text | Failed)


class Ends:
    """The owner's end, and the child's, which the test holds."""

    def __init__(self, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "s"))
            listener.listen()
            self.child = ChildProcess(
                f"{puppet.__name__}:run",
                Text("start"),
                name="puppet 3",
                answers=DECODER,
                environment={**os.environ, puppet.PATH: str(tmp_path / "s")},
                log_file=str(tmp_path / "log"),
            )
            listener.settimeout(PATIENCE_S)
            self.process, _ = listener.accept()
        self.process.settimeout(PATIENCE_S)

    def say(self, call: int, text: str, *, last: bool = True) -> None:
        self.process.sendall(frames.pack(call, Text(text), last=last))

    def hears(self) -> tuple[int, str]:
        frame = frames.read(self.process, DECODER)
        assert frame is not None
        call, _, message = frame
        assert isinstance(message, Text)
        return call, message.text

    def until_answered(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.child.unanswered():
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    footprint = Footprint.of(made.child.pid)
    with made.process:
        yield made
        made.child.kill()
    footprint.assert_gone(within_s=0.1)


@pytest.fixture
def ready(ends: Ends) -> Ends:
    assert ends.hears() == (0, "start")
    ends.say(0, "ready")
    assert ends.child.wait_ready(PATIENCE_S) == Text("ready")
    return ends


def test_answers_find_their_questions_in_any_order(ready: Ends) -> None:
    first, second = ready.child.call(Text("a")), ready.child.call(Text("b"))
    assert [ready.hears(), ready.hears()] == [(1, "a"), (2, "b")]
    ready.say(2, "of b")
    ready.say(1, "part of a", last=False)
    assert second.next(PATIENCE_S) == Text("of b")
    assert first.next(PATIENCE_S) == Text("part of a")
    assert ready.child.unanswered() == {1}
    ready.say(1, "of a")
    assert first.next(PATIENCE_S) == Text("of a")
    assert not ready.child.unanswered()


def test_a_late_answer_is_not_taken_for_anothers(ready: Ends) -> None:
    with pytest.raises(TimeoutError, match="no answer within"):
        ready.child.ask(Text("a"), SOON_S)
    assert ready.child.unanswered() == {1}
    assert ready.child.silent_s() >= SOON_S
    ready.say(1, "late")
    ready.until_answered()
    assert ready.child.silent_s() == 0.0
    with ready.child.call(Text("b")) as call:
        ready.say(1, "late, again")
        ready.say(2, "in time")
        assert call.next(PATIENCE_S) == Text("in time")


def test_an_answer_may_come_in_parts(ready: Ends) -> None:
    call = ready.child.call(Text("a"))
    data = frames.pack(1, Text("whole"))
    for part in (data[:3], data[3 : frames.HEADER_BYTES + 2]):
        ready.process.sendall(part)
        with pytest.raises(TimeoutError):
            call.next(SOON_S)
    ready.process.sendall(data[frames.HEADER_BYTES + 2 :])
    assert call.next(PATIENCE_S) == Text("whole")


def test_asking_one_that_does_not_read_waits_for_nothing(ready: Ends) -> None:
    long = "x" * (8 << 20)
    began_s = time.monotonic()
    calls = [ready.child.call(Text(long)), ready.child.call(Text("b"))]
    assert time.monotonic() - began_s < PATIENCE_S / 2
    with pytest.raises(TimeoutError):
        calls[1].next(SOON_S)
    assert ready.hears() == (1, long)
    assert ready.hears() == (2, "b")


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 40, frames.pack(1, frames.Failed(message="x"))[:-1] + b"\xc1"])
def test_one_that_ends_or_says_what_is_no_answer_is_dead_at_once(ready: Ends, garbage: bytes) -> None:
    calls = [ready.child.call(Text("a")), ready.child.call(Text("b"))]
    ready.process.sendall(garbage)
    if not garbage:
        ready.process.close()
    with pytest.raises(ChildDied, match=r"puppet 3 died\. The end of its log"):
        _ended(ready, calls[0])
    assert not ready.child.alive
    with pytest.raises(ChildDied):
        calls[1].next(PATIENCE_S)
    with pytest.raises(ChildDied):
        ready.child.ask(Text("c"), PATIENCE_S)


def _ended(ready: Ends, call: child_process.Call[Text | Failed]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while ready.child.alive:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    ready.child.kill()
    call.next(PATIENCE_S)


def test_a_start_that_fails_leaves_nothing(ends: Ends) -> None:
    ends.process.sendall(frames.pack(0, Failed(message="no such weights")))
    with pytest.raises(StartRefusedError, match=r"puppet 3 did not start: no such weights\. The end of its log"):
        ends.child.wait_ready(PATIENCE_S)
    assert not ends.child.alive


def test_a_death_is_a_death_also_where_its_log_cannot_be_read(ready: Ends) -> None:
    """Such as on a shared disk whose handle is stale; here a folder is in its place."""
    log = Path(ready.child.log_file)
    log.unlink()
    log.mkdir()
    call = ready.child.call(Text("a"))
    ready.process.close()
    with pytest.raises(ChildDied, match=r"(?s)puppet 3 died\. The end of its log.*\(no log: Is a directory\)"):
        _ended(ready, call)


def test_of_a_long_log_the_end_is_read(ready: Ends) -> None:
    with open(ready.child.log_file, "w") as log:
        log.write("x" * 1_000_000 + "\nthe last\n")
    told = ready.child.log_tail()
    assert told.endswith("\n  | the last")
    assert len(told) < 70_000


def test_a_start_that_takes_too_long_leaves_nothing(ends: Ends) -> None:
    assert ends.child.answer_to_start is None
    with pytest.raises(EngineError, match=r"did not start within 0\.05 s\. The end of its log"):
        ends.child.wait_ready(SOON_S)
    assert not ends.child.alive


def test_an_orderly_end_is_the_end_of_the_stream(ready: Ends) -> None:
    ready.child.call(Text("a"))
    began_s = time.monotonic()
    ready.child.stop()
    assert time.monotonic() - began_s < LATE_S, "it was not waited for in vain"
    assert ready.hears() == (1, "a"), "what was asked before arrives"
    assert not ready.child.alive
    ready.child.stop()
