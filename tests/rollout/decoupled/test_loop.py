"""Real drafter processes behind real sockets: drafts come, whatever happens to the processes in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from specactor.errors import ConfigError
from specactor.rollout.decoupled.protocol import MAX_FRAME_BYTES, Drops, Header, Pulse, encode
from specactor.rollout.decoupled.transport import Address, Hub, Keys, ZmqLink, local_endpoint, make_keys
from specactor.waits import MOMENT_S
from tests.rollout.decoupled.live import DrafterProcess, Engine

Start = Callable[..., DrafterProcess]
Connect = Callable[..., Engine]


@pytest.fixture
def start() -> Iterator[Start]:
    processes: list[DrafterProcess] = []

    def go(endpoint: str = "", **options: object) -> DrafterProcess:
        processes.append(DrafterProcess(endpoint or local_endpoint(), **options))  # type: ignore[arg-type]
        return processes[-1]

    yield go
    for process in processes:
        if process.process.poll() is None:
            process.kill()


@pytest.fixture
def connected() -> Iterator[Connect]:
    engines: list[Engine] = []

    def go(*endpoints: str, **options: object) -> Engine:
        engines.append(Engine(list(endpoints), **options))  # type: ignore[arg-type]
        return engines[-1]

    yield go
    for engine in engines:
        engine.drafter.stop()


def until_it_holds_nothing(process: DrafterProcess, connected: Connect) -> None:
    """As it tells an engine without requests."""
    looker = connected(process.endpoint, name="looker")
    tails = looker.drafter.tails
    looker.until(lambda: tails.live == [0] and tails._drafters[0].others == 0, "something is held")
    looker.drafter.stop()


def test_two_drafters_at_two_addresses_serve_two_engines(start: Start, connected: Connect) -> None:
    first, second = start("tcp://127.0.0.1:*", step_s=0.002), start("tcp://127.0.0.2:*", step_s=0.002)
    engines = [connected(first.endpoint, second.endpoint, name=f"engine {i}") for i in range(2)]
    for engine in engines:
        engine.open(6)
    for _ in range(3):
        for engine in engines:
            engine.until_drafts()
    for engine in engines:
        tails = engine.drafter.tails
        engine.until(lambda tails=tails: tails.wasted > 0, "drafters do not say what they do")  # type: ignore[misc]
        engine.until(lambda tails=tails: len(tails.live) == 2, "one of them is missed")  # type: ignore[misc]
        assert engine.drafter.proposed >= engine.accepted > 0
        assert tails.drafted > tails.wasted
        engine.close()
        engine.drafter.stop()
    for process in (first, second):
        until_it_holds_nothing(process, connected)
        said = process.end()
        assert said["calls"] > 0, "both drafted"
        assert said["held"] == 0, "the continuer was not told"


def test_a_killed_drafter_is_missed_and_its_successor_is_used(start: Start, connected: Connect) -> None:
    process = start()
    engine = connected(process.endpoint)
    engine.open(4)
    engine.until_drafts()
    process.kill()
    engine.until(lambda: not engine.drafter.tails.live, "not missed")
    before = engine.drafter.proposed
    engine.round()
    assert engine.drafter.proposed == before
    again = start(process.endpoint)
    engine.until_drafts()
    engine.close()
    engine.drafter.stop()
    until_it_holds_nothing(again, connected)


def test_a_quick_successor_is_told_everything(start: Start, connected: Connect) -> None:
    """Before anybody has noticed that the first one is gone."""
    process = start()
    engine = connected(process.endpoint)
    engine.open(4)
    engine.until_drafts()
    process.kill()
    start(process.endpoint)
    engine.until_drafts()


def test_a_stopped_drafter_costs_no_time_and_comes_back(start: Start, connected: Connect) -> None:
    sleeper, other = start(), start()
    engine = connected(sleeper.endpoint, other.endpoint)
    engine.open(6)
    engine.until(lambda: engine.drafter.tails.live == [0, 1], "not there")
    engine.until_drafts()
    os.kill(sleeper.process.pid, signal.SIGSTOP)
    try:
        engine.longest_round_s = 0.0
        engine.until(lambda: engine.drafter.tails.live == [1], "not missed")
        engine.until_drafts()
        assert engine.longest_round_s < MOMENT_S / 2
    finally:
        os.kill(sleeper.process.pid, signal.SIGCONT)
    engine.until(lambda: engine.drafter.tails.live == [0, 1], "not back")
    engine.until_drafts()
    engine.close()
    engine.drafter.stop()
    for process in (sleeper, other):
        until_it_holds_nothing(process, connected)


def test_an_engine_that_is_gone_or_begun_anew_leaves_nothing(start: Start, connected: Connect) -> None:
    process = start()
    first = connected(process.endpoint)
    first.open(5)
    first.until_drafts()
    second = connected(process.endpoint)  # of the same name, and the first has closed nothing
    second.open(2)
    second.until_drafts()
    second.until(lambda: second.drafter.tails._drafters[0].others == 0, "requests of the first are kept")
    second.drafter.stop()
    until_it_holds_nothing(process, connected)


def test_garbage_changes_nothing(start: Start, connected: Connect) -> None:
    process = start()
    engine = connected(process.endpoint)
    engine.open(3)
    engine.until_drafts()
    session = engine.drafter.tails.session
    mistaken = encode(
        Header(sender=session, receiver=0, number=1 << 50), [Pulse(version=0, requests=0, drafted=0, wasted=0)]
    )
    forged = encode(Header(sender=session, receiver=0, number=1 << 50), [])
    with zmq.Context() as context:
        for name in (b"", b"x", b"V12345678", b"W" * 255):
            with context.socket(zmq.DEALER) as rubbish:
                rubbish.linger = 1000
                if name:
                    rubbish.setsockopt(zmq.IDENTITY, name)
                rubbish.connect(process.endpoint)
                for parts in (
                    [b""],
                    [b"SADP"],
                    [os.urandom(500)],
                    [b"a", b"b", b"c"],
                    [mistaken],
                    [forged],
                    [b"x" * 100_000],
                ):
                    rubbish.send_multipart(parts)
    for _ in range(3):
        engine.until_drafts()
    engine.close()
    engine.drafter.stop()
    until_it_holds_nothing(process, connected)


def test_only_those_with_the_keys_are_heard(start: Start, connected: Connect) -> None:
    engine_keys, drafter_keys = make_keys()
    strangers, _ = make_keys()
    process = start(keys=drafter_keys)
    unknown = Keys(
        public=strangers.public, secret=strangers.secret, peer=engine_keys.peer
    )  # knows where, but is not known
    misled = Keys(
        public=engine_keys.public, secret=engine_keys.secret, peer=strangers.peer
    )  # takes another one for the drafter
    refused = [
        connected(process.endpoint, keys=keys, name=f"engine {i}") for i, keys in enumerate((unknown, misled, None))
    ]
    admitted = connected(process.endpoint, keys=engine_keys)
    for engine in (*refused, admitted):
        engine.open(2)
    for _ in range(3):
        admitted.until_drafts()
        for engine in refused:
            engine.round()
    time.sleep(0.5)
    for engine in refused:
        engine.round()
        assert (engine.drafter.tails.live, engine.drafter.proposed) == ([], 0)


def test_a_wrong_key_is_one_line_with_a_way_out(caplog: pytest.LogCaptureFixture) -> None:
    engine_keys, drafter_keys = make_keys()
    strangers, _ = make_keys()
    drops = Drops("drafter 0")
    hub = Hub("tcp://127.0.0.1:*", keys=drafter_keys, drops=drops)
    wrong = Keys(public=strangers.public, secret=strangers.secret, peer=engine_keys.peer)
    link = ZmqLink(7, [Address(endpoint=hub.endpoint, keys=wrong)])
    deadline = time.monotonic() + 60
    while not caplog.records:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    link.close()
    hub.close()
    assert caplog.messages[0] == (
        f"drafter 0: dropped refused, 1 so far; a connection with the key {strangers.public}, of another run; end that "
        "one"
    )


def test_a_frame_above_the_limit_does_not_arrive_and_ends_no_more_than_its_connection() -> None:
    engine_keys, drafter_keys = make_keys()
    hub = Hub("tcp://127.0.0.1:*", keys=drafter_keys)
    links = [ZmqLink(session, [Address(endpoint=hub.endpoint, keys=engine_keys)]) for session in (7, 8)]

    def arrives(session: int, frame: bytes, *, within_s: float = 60.0) -> bool:
        """Sent until it arrives, since a connection that was ended needs a while to come about again."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            links[session - 7].send(0, frame)
            hub.wait(0.05)
            got = hub.receive()
            assert all(len(data) <= MAX_FRAME_BYTES for _, data in got)
            if (session, frame) in got:
                return True
        return False

    try:
        assert arrives(7, bytes(MAX_FRAME_BYTES))
        assert arrives(8, b"here")
        links[0].send(0, bytes(MAX_FRAME_BYTES + 1))
        assert not arrives(7, bytes(MAX_FRAME_BYTES + 1), within_s=0.5)
        for session in (8, 7):
            assert arrives(session, b"still here")
    finally:
        for link in links:
            link.close()
        hub.close()


def test_the_end_of_its_owner_is_its_end(start: Start) -> None:
    process = start()
    assert process.process.stdin is not None
    process.process.stdin.close()
    assert process.process.wait(60) == 0


FIRST_LINK = """
import sys, time
from specactor.rollout.decoupled.transport import Address, ZmqLink
link = ZmqLink(7, [Address(endpoint=sys.argv[1])])
while not link.send(0, b"before"):
    time.sleep(0.01)
time.sleep(600)
"""


def test_an_engine_that_comes_back_is_heard_though_its_old_connection_seems_alive() -> None:
    """As after a host was cut off: its old connection says no goodbye, and ZeroMQ would ignore the new one."""
    hub = Hub("tcp://127.0.0.1:*")
    link = ZmqLink(7, [Address(endpoint="tcp://127.0.0.1:9")])

    def hears(frame: bytes, *, send: bool) -> bool:
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            if send:
                link.send(0, frame)
            hub.wait(0.1)
            if (7, frame) in hub.receive():
                return True
        return False

    first = subprocess.Popen([sys.executable, "-c", FIRST_LINK, hub.endpoint])
    try:
        assert hears(b"before", send=False)
        first.send_signal(signal.SIGSTOP)
        link.close()
        link = ZmqLink(7, [Address(endpoint=hub.endpoint)])
        assert hears(b"after", send=True)
        assert hub.send(7, b"answer")
        answers: list[tuple[int, bytes]] = []
        deadline = time.monotonic() + 60.0
        while not answers and time.monotonic() < deadline:
            answers = link.receive()
        assert answers == [(0, b"answer")]
    finally:
        first.kill()
        first.wait()
        for end in (link, hub):
            end.close()


def test_an_address_that_others_reach_needs_keys() -> None:
    for endpoint in ("tcp://0.0.0.0:*", "tcp://*:*", "tcp://192.0.2.1:5000", "tcp://host:5000", "pgm://127.0.0.1:1"):
        with pytest.raises(ConfigError, match="CURVE"):
            Hub(endpoint)
    Hub("tcp://0.0.0.0:*", keys=make_keys()[1]).close()
    taken = Hub("tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match="free address"):
        Hub(taken.endpoint)
    taken.close()


def test_secrets_are_not_shown() -> None:
    for keys in make_keys():
        assert keys.secret not in repr(keys)
        assert keys.public in repr(keys)
