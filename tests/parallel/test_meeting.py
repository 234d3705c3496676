"""Ranks meet in a real store; hosts that fall silent are missed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec
import pytest
from torch.distributed import PrefixStore, TCPStore

from specactor.config.rules import flat
from specactor.errors import ConfigError
from specactor.parallel import meeting
from specactor.parallel.failure import TICKETS
from specactor.parallel.meeting import Greeting, HostWatch, Meeting, difference, meet

CONFIG = {"name": "x", "train": {"steps": 3, "adam_betas": (0.9, 0.95)}}


@pytest.fixture
def port() -> Iterator[int]:
    """Of a store as torchrun keeps it."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store  # it serves until here


def ask(port: int, rank: int, world: int, config: dict[str, object] = CONFIG) -> Meeting:
    return meet("127.0.0.1", port, rank=rank, world=world, config=config)


def test_all_ranks_meet_in_a_store_of_their_own(port: int) -> None:
    """Though an earlier start of the same job has left its own there, and its verdict."""
    with ThreadPoolExecutor(3) as threads:
        first = list(threads.map(lambda rank: ask(port, rank, 3), range(3)))
        late = threads.submit(ask, port, 1, 2)  # reads what the first start has left, and must not go on with it
        time.sleep(0.5)
        second = [ask(port, 0, 2), late.result(30)]
    for ranks in (first, second):
        ranks[0].open_store().set("word", str(len(ranks)))
        assert [rank.open_store().get("word") for rank in ranks] == [str(len(ranks)).encode()] * len(ranks)
        assert len({rank.machines for rank in ranks}) == 1
    assert first[0].open_store().get("word") == b"3"


def test_all_ranks_are_told_what_differs(port: int) -> None:
    other: dict[str, object] = {"name": "x", "train": {"steps": 4, "adam_betas": (0.9, 0.95)}}
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(ask, port, rank, 2, config) for rank, config in enumerate((CONFIG, other))]
        messages = [str(each.exception(30)) for each in asked]
    host = os.uname().nodename
    expected = f"train.steps: got 4 on {host} (rank 1), expected 3 as on {host} (rank 0). Start all hosts with the same"
    assert messages[0] == messages[1]
    assert messages[0].startswith(expected)


def test_programs_are_compared_before_settings() -> None:
    one = Greeting(
        host="n0",
        machine="a",
        address="",
        program="specactor 1",
        settings={name: repr(value) for name, value in flat(CONFIG).items()},
    )
    assert difference([one, one]) == ""
    two = msgspec.structs.replace(one, host="n1", program="specactor 2", settings={})
    assert difference([one, one, two]).startswith(
        "launcher: got specactor 2 on n1 (rank 2), expected specactor 1 as on n0 (rank 0). Install one version"
    )
    missing = msgspec.structs.replace(one, host="n1", settings={"name": "'x'"})
    assert "train.adam_betas: got nothing on n1 (rank 1), expected (0.9, 0.95)" in difference([one, missing])


def test_a_launcher_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SILENT_S", 0.5)
    with pytest.raises(ConfigError, match=r"^launcher: got 'no answer on \S+ from no.such.host.invalid:1', .*--local"):
        meet("no.such.host.invalid", 1, rank=0, world=1, config={})


def test_a_rank_that_never_comes_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "BULK_S", 0.5)
    with pytest.raises(ConfigError, match=r"^launcher: got 'nothing from rank 1 of 2', .*The log of its host"):
        ask(port, 0, 2)


class Link:
    """A host's way to the store. While it is cut, what is asked hangs."""

    def __init__(self, port: int, *, breaks: int = 0) -> None:
        self.on = threading.Event()
        self.on.set()
        self._port, self._breaks = port, breaks

    def open(self) -> Link:
        self._store = PrefixStore("start", TCPStore("127.0.0.1", self._port, is_master=False))
        return self

    def add(self, key: str, amount: int) -> int:
        self.on.wait()
        if self._breaks:
            self._breaks -= 1
            raise RuntimeError("the connection broke")
        return self._store.add(key, amount)


def test_a_host_that_is_cut_off_is_missed_and_misses_the_first(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has left in good order is missed by nobody. Hosts have two ranks each, but for the first."""
    for name, seconds in (("SIGN_OF_LIFE_S", 0.05), ("MOMENT_S", 0.3), ("SILENT_S", 3.0)):
        monkeypatch.setattr(meeting, name, seconds)
    links: list[Link] = [Link(port) for _ in range(3)]
    missed: list[list[str]] = [[], [], []]
    reported = Counter[int]()
    hosts, machines = ("a", "b", "b", "c", "c"), ("0", "1", "1", "2", "2")

    def watch(host: int, rank: int) -> HostWatch:
        of_all = Meeting(open_store=links[host].open, hosts=hosts, machines=machines)  # type: ignore[arg-type]
        return HostWatch(of_all, rank, missed[host].append, lambda left: reported.update([rank]))

    with ExitStack() as stack:
        first, second, third = (stack.enter_context(watch(host, rank)) for host, rank in enumerate((0, 1, 3)))
        assert [thread.name for thread in watch(1, 2)._threads] == ["hosts-_beat"], "the first rank of a host watches"
        wait_for(lambda: set(first._beats) == {1, 3})
        second.__exit__(None, None, None)
        time.sleep(4.0)
        assert missed == [[], [], []]
        assert not reported
        Link(port).open().add(TICKETS, 1)
        wait_for(lambda: set(reported) == {0, 3})  # all whose hosts are there
        assert not first._stop.is_set()
        links[2].on.clear()
        wait_for(lambda: missed[0] and missed[2])
        links[2].on.set()
    lost = "has not answered for 3 s: it died, or the network to it is cut."
    assert set(missed[0]) == {f"c, the host of rank 3, {lost}"}
    assert missed[1] == []
    assert set(missed[2]) == {f"a, the host of rank 0, {lost}"}
    assert third._stop.is_set()


def test_a_rank_that_is_busy_and_a_connection_that_breaks_lose_no_host(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank of the second host beats never, as in a call that lets no thread run; its other rank's link
    breaks."""
    for name, seconds in (("SIGN_OF_LIFE_S", 0.05), ("MOMENT_S", 0.1), ("SILENT_S", 1.0)):
        monkeypatch.setattr(meeting, name, seconds)
    missed: list[str] = []
    with ExitStack() as stack:
        for rank, link in ((0, Link(port)), (2, Link(port, breaks=2))):
            of_all = Meeting(open_store=link.open, hosts=("a", "b", "b"), machines=("0", "1", "1"))  # type: ignore[arg-type]
            stack.enter_context(HostWatch(of_all, rank, missed.append, lambda left: None))
        time.sleep(3.0)
        assert missed == []


def test_a_host_that_left_because_it_failed_is_missed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("SIGN_OF_LIFE_S", 0.05), ("MOMENT_S", 0.1), ("SILENT_S", 1.0)):
        monkeypatch.setattr(meeting, name, seconds)
    missed: list[str] = []

    def watch(rank: int) -> HostWatch:
        of_all = Meeting(open_store=Link(port).open, hosts=("a", "b"), machines=("0", "1"))  # type: ignore[arg-type]
        return HostWatch(of_all, rank, missed.append, lambda left: None)

    with watch(0) as first:
        with pytest.raises(ZeroDivisionError), watch(1):  # noqa: PT012
            wait_for(lambda: first._beats.get(1))
            raise ZeroDivisionError
        wait_for(lambda: missed)
    assert missed[0].startswith("b, the host of rank 1, has not answered")


STUCK = """
import ctypes, sys
from torch.distributed import PrefixStore, TCPStore
from specactor.parallel import failure, meeting
failure.LATE_S, meeting.SIGN_OF_LIFE_S = 0.5, 0.05
def store():
    return PrefixStore("start", TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False))
of_all = meeting.Meeting(open_store=store, hosts=("a", "b"), machines=("0", "1"))
with failure.failure_guard(1, store()) as failures:
    failures.on_end = lambda: print("given back", flush=True)
    with meeting.HostWatch(of_all, 1, failures.on_silent, failures.on_reported):
        print("in", flush=True)
        ctypes.CDLL(None).pause()
"""


def test_a_rank_that_is_stuck_ends_when_another_one_has_reported(port: int) -> None:
    """As in a collective of NCCL, which notices a lost peer after half an hour; it says nothing more."""
    command = [sys.executable, "-c", STUCK, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as rank:
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "in\n"
            Link(port).open().add(TICKETS, 1)
            said, told = rank.communicate(timeout=60)
        finally:
            rank.kill()
    assert (rank.returncode, said) == (1, "given back\n")
    assert "specactor: rank 1: " not in told


def wait_for(there: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.05)
