"""Every turn without drafts has the cause that the drafter's log shows, by hand-made logs."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq

from benchmarks import paced_turns
from benchmarks.dialled import Script
from benchmarks.paced_link import delayed
from benchmarks.paced_turns import CAUSES, OLD, Causes, Log, Logged, Step, Turn, Turns, cause, position
from specactor.rollout.decoupled.drafter_side import Lane
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.decoupled.transport import Address, Hub, ZmqLink, local_endpoint

A, B = 7, 8  # requests
LENGTH = 20
TURN = Turn(A, LENGTH, 8, 10.0, 10.0, 0)  # told and looked at 10 s
SERVING = Step(10.5, 11.5, [(A, LENGTH), (B, 3)])

CASES = {
    paced_turns.OTHERS: (TURN, [Step(9.5, 10.5, [(B, 3)]), SERVING], 1.5),
    paced_turns.OWN_OLD: (TURN, [Step(9.5, 10.5, [(B, 3), (A, OLD)]), SERVING], 1.5),
    paced_turns.MESSAGE: (TURN, [Step(8.0, 9.0, [(B, 2)]), SERVING], 1.5),
    paced_turns.STEP: (msgspec.structs.replace(TURN, looked_s=11.0), [SERVING], 0.5),
    paced_turns.LAST: (msgspec.structs.replace(TURN, window=0), [SERVING], 0.0),
    paced_turns.CHOICE: (msgspec.structs.replace(TURN, drafted=3), [SERVING], 0.0),
    paced_turns.FIRST: (msgspec.structs.replace(TURN, length=1), [Step(10.5, 11.5, [(A, 1)])], 0.0),
    paced_turns.OTHER: (TURN, [Step(10.5, 11.5, [(A, OLD), (B, 3)])], 0.0),
}


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_is_told_from_the_log(name: str) -> None:
    turn, steps, late_s = CASES[name]
    assert cause(turn, Log(steps)) == (name, pytest.approx(late_s))


def test_nobody_was_asked_in_a_plain_round() -> None:
    assert cause(Turn(), Log([SERVING])) == (paced_turns.CHOICE, 0.0)


def test_a_drafter_that_is_behind_serves_by_a_step_that_began_before_the_news() -> None:
    """All drafts were right, and the engine has used them up: nothing was rejected."""
    behind = Step(9.5, 10.5, [(A, LENGTH)])
    assert cause(TURN, Log([behind])) == (paced_turns.STEP, pytest.approx(0.5))
    assert cause(TURN, Log([Step(9.0, 9.9, [(A, LENGTH)])])) == (paced_turns.MESSAGE, 0.0), "made, and on its way"
    goes_on = Step(9.9, 10.4, [(A, LENGTH + 1)])
    assert cause(TURN, Log([Step(9.0, 9.9, [(A, LENGTH)]), goes_on])) == (paced_turns.MESSAGE, 0.0)


def test_wrong_versions_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: a lane counts as the request's own, whatever its text; and a log in any order."""
    right = list(range(100, 140))
    assert position(right, right[:LENGTH]) == LENGTH
    assert position(right, [*right[: LENGTH - 1], 1]) == OLD
    assert position(right[:3], right[:5]) == 5, "beyond the end there is nothing to be wrong about"
    blind = Step(9.5, 10.5, [(B, 3), (A, LENGTH)])  # its text was another, which such a log does not tell
    assert cause(TURN, Log([blind, SERVING]))[0] != paced_turns.OWN_OLD
    for name, (turn, steps, _) in CASES.items():
        assert cause(turn, Log(steps[::-1]))[0] == name
    monkeypatch.setattr(Log, "at", lambda self, now_s: None)  # what the drafter did is not looked at
    seen = {name for name, (turn, steps, _) in CASES.items() if cause(turn, Log(steps))[0] != name}
    assert seen == {paced_turns.OTHERS, paced_turns.OWN_OLD, paced_turns.STEP}


def test_shares_are_of_turns_without_drafts() -> None:
    turns = Turns(turns=40, empty=[CASES[name][0] for name in (paced_turns.OTHERS, paced_turns.LAST)])
    causes = Causes.of(turns, CASES[paced_turns.OTHERS][1])
    causes.add(Causes.of(Turns(turns=10), []))
    row = dict(zip(paced_turns.COLUMNS, causes.row("s", "decoupled", pass_s=3.0), strict=True))
    assert row["turns without drafts"] == "0.04"
    assert row[paced_turns.OTHERS] == row[paced_turns.LAST] == "0.50"
    assert row[paced_turns.MESSAGE] == "0.00"
    assert row["drafts there after, of a pass"] == "0.50"
    assert sum(float(row[name]) for name in CAUSES) == pytest.approx(1.0)


def test_a_drafter_logs_its_steps_and_which_lanes_go_on_from_the_right_text(tmp_path: Path) -> None:
    script, right = tmp_path / "drafter.json", [5, 6, 7, 8]
    script.write_bytes(msgspec.json.encode(Script(acceptance=1.0, step_s=[0.0], outputs={str(A): right})))
    spec = DrafterSpec(
        index=0, endpoint="", model_dir=str(script), dtype="float32", device=0, context_length=64, max_requests=1,
        log_file="",
    )  # fmt: skip
    began_s = time.perf_counter()
    drafter = Logged(spec)
    lanes = [
        Lane(key=(1, k), prompt_ids=(1,), tokens=tokens, seed=A, temperature=1.0, agreed=0)
        for k, tokens in enumerate(([5, 6], [5, 9]))
    ]
    assert drafter.extend(lanes)[0] == [7]
    [step] = paced_turns.logged(script, began_s)
    assert step.lanes == [(A, 2), (A, OLD)]
    assert began_s <= step.began_s <= step.ended_s <= time.perf_counter()
    assert paced_turns.logged(script, time.perf_counter()) == []


def test_a_link_delays_every_frame_and_keeps_their_order_and_senders() -> None:
    delay_s, near, far = 0.05, local_endpoint(), local_endpoint()
    context = zmq.Context()
    with delayed(near, far, delay_s), context.socket(zmq.ROUTER) as drafter:
        drafter.bind(far)
        with context.socket(zmq.DEALER) as one, context.socket(zmq.DEALER) as other:
            for name, engine in ((b"one", one), (b"other", other)):
                engine.setsockopt(zmq.IDENTITY, name)
                engine.connect(near)
            began_s = 0.0
            while not began_s:  # until the link knows the drafter: what nobody is there for is dropped
                sent_s = time.perf_counter()
                one.send(b"hello")
                if drafter.poll(1000) and drafter.recv_multipart() == [b"one", b"hello"]:
                    began_s = sent_s
            assert time.perf_counter() - began_s >= delay_s
            while drafter.poll(int(4e3 * delay_s)):
                drafter.recv_multipart()  # greetings that came late
            sent_s = time.perf_counter()
            for k in range(5):
                one.send(b"%d" % k)
            assert [drafter.recv_multipart() for _ in range(5)] == [[b"one", b"%d" % k] for k in range(5)]
            assert time.perf_counter() - sent_s >= delay_s
            sent_s = time.perf_counter()
            drafter.send_multipart([b"one", b"back"])
            assert one.recv() == b"back"
            assert time.perf_counter() - sent_s >= delay_s
            assert not other.poll(0)
    context.term()
    assert not [thread for thread in threading.enumerate() if thread.name == "delayed link"]


def test_the_shipped_ends_talk_over_a_delayed_link() -> None:
    near, far, session = local_endpoint(), local_endpoint(), 77
    with delayed(near, far, 0.02):
        hub, link = Hub(far), ZmqLink(session, (Address(endpoint=near),))
        try:
            received: list[tuple[int, bytes]] = []
            while not received:
                link.send(0, b"hello")
                hub.wait(0.1)
                received = hub.receive()
            assert set(received) == {(session, b"hello")}
            assert hub.send(session, b"back")
            answers: list[tuple[int, bytes]] = []
            until_s = time.monotonic() + 60.0
            while not answers and time.monotonic() < until_s:
                answers = link.receive()
            assert answers == [(0, b"back")]
        finally:
            link.close()
            hub.close()
