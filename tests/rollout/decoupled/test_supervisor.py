"""A drafter process drafts, and whatever ends it leaves nothing: no process, folder or address."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from specactor.errors import EngineError
from specactor.rollout.decoupled import supervisor
from specactor.rollout.decoupled.remote_drafter import Decoupled, connect
from specactor.rollout.decoupled.spec import Ask, DrafterSpec, State, Work
from specactor.rollout.decoupled.supervisor import DrafterProcess
from specactor.rollout.decoupled.transport import Address, Keys, ZmqLink, local_endpoint, make_keys, new_session
from specactor.rollout.process_guard import descendants
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.weights_sync.draft_push import DraftSender
from tests.rollout.conftest import Footprint, process_exists
from tests.rollout.decoupled.hosted import WAKE_S
from tests.rollout.decoupled.scripted import script

HOSTED = "tests.rollout.decoupled.hosted"
ENGINE_KEYS, DRAFTER_KEYS = make_keys()
CORE = max(os.sched_getaffinity(0))
PATIENCE_S = 60.0


@pytest.fixture
def make_drafter_spec(tmp_path: Path) -> Callable[..., DrafterSpec]:
    def make(continuer: str = "scripted", **overrides: object) -> DrafterSpec:
        fields: dict[str, object] = {
            "index": 0,
            "endpoint": local_endpoint(),
            "keys": DRAFTER_KEYS,
            "model_dir": "",
            "dtype": "float32",
            "device": CORE,
            "context_length": 64,
            "max_requests": 4,
            "continuer": f"{HOSTED}:{continuer}",
            "log_file": str(tmp_path / "drafter.log"),
            "start_timeout_s": PATIENCE_S,
        }
        return DrafterSpec(**fields | overrides)  # type: ignore[arg-type]

    return make


@pytest.fixture
def drafter(make_drafter_spec: Callable[..., DrafterSpec]) -> Iterator[DrafterProcess]:
    drafter = DrafterProcess(make_drafter_spec())
    try:
        drafter.wait_ready()
        yield drafter
    finally:
        drafter.kill()


def address(spec: DrafterSpec) -> Address:
    return Address(endpoint=spec.endpoint, keys=ENGINE_KEYS)


def is_listening(spec: DrafterSpec) -> bool:
    return spec.endpoint.removeprefix("ipc://") in Path("/proc/net/unix").read_text()


def ask(engine: Decoupled, sequence: DraftSequence) -> list[int]:
    """The first draft that arrives."""
    deadline = time.monotonic() + PATIENCE_S
    while not (drafts := engine.propose([sequence], [4]))[0]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return drafts[0]


def assert_drafts(spec: DrafterSpec) -> None:
    engine = connect([address(spec)], engine="e", window=4)
    sequence = DraftSequence(request_id="r", prompt_ids=(3, 1, 4))
    engine.open(sequence)
    draft = ask(engine, sequence)
    assert draft == script((3, 1, 4), [], len(draft))
    engine.close(sequence)
    engine.stop()


def test_questions_that_arrive_together_are_all_answered(drafter: DrafterProcess) -> None:
    """As when a push comes while the process has still to say that it is alive."""
    questions = (Ask("alive"), Ask("alive"), Ask("work"))
    calls = [drafter.call(question) for question in questions]
    assert [type(call.next(PATIENCE_S)) for call in calls] == [State, State, Work]


def test_a_sign_of_life_is_asked_for_in_time_and_holds_up_no_other_question(
    drafter: DrafterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SIGN_OF_LIFE_S", 0.5)
    monkeypatch.setattr(supervisor, "GRACE_S", 1.0)
    assert not drafter.hangs(0.0), "it was asked nothing"
    assert drafter._sign is None, "nor is it time"
    time.sleep(0.6)
    assert not drafter.hangs(PATIENCE_S)
    assert drafter._sign is not None
    assert drafter.work(trace=False, timeout_s=PATIENCE_S) is not None
    os.kill(child_of(drafter), signal.SIGSTOP)
    try:
        time.sleep(0.6)
        assert not drafter.hangs(PATIENCE_S)
        sign = drafter._sign
        assert drafter.wants(drafter.version + 1), "the sign is not late yet"
        time.sleep(1.1)
        assert not drafter.wants(drafter.version + 1), "it is"
        assert drafter.hangs(0.5)
        assert drafter._sign == sign, "it is not asked for again"
    finally:
        os.kill(child_of(drafter), signal.SIGCONT)
    deadline = time.monotonic() + PATIENCE_S
    while drafter.hangs(0.0):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert drafter.work(trace=False, timeout_s=PATIENCE_S) is not None


def child_of(drafter: DrafterProcess) -> int:
    return descendants(drafter.pid)[0]


def wakes(pid: int) -> int:
    """Times that its main thread went to sleep."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def is_at_rest(pid: int) -> bool:
    """For longer than one that looks around now and then."""
    before = wakes(pid)
    time.sleep(1.2)
    return wakes(pid) == before


def assert_takes_no_time(pid: int) -> None:
    """As soon as it has done what it was about to do."""
    assert any(is_at_rest(pid) for _ in range(5))


def test_it_drafts_on_its_core_with_one_thread_and_stops(drafter: DrafterProcess) -> None:
    assert drafter.alive
    assert_drafts(drafter.spec)
    assert os.sched_getaffinity(child_of(drafter)) == {CORE}
    environment = Path(f"/proc/{child_of(drafter)}/environ").read_bytes()
    is_forked = "forked by the warm starter" in drafter.log_tail()
    assert b"OMP_NUM_THREADS=1\0" in environment or is_forked, "a fork's title took its place"
    footprint = Footprint.of(drafter.pid)
    assert child_of(drafter) in footprint.pids
    assert footprint.folders
    assert is_listening(drafter.spec)
    started = time.monotonic()
    drafter.stop()
    assert time.monotonic() - started < 9, "it ends by itself"
    footprint.assert_gone(within_s=0.1)
    assert not is_listening(drafter.spec)
    assert not drafter.alive
    drafter.stop()


def test_one_that_sleeps_takes_nothing_and_drafts_when_it_is_woken(
    make_drafter_spec: Callable[..., DrafterSpec],
) -> None:
    """Also right after it was asked to sleep, and with an engine that looks for it all the time."""
    drafter = DrafterProcess(make_drafter_spec("Sleeping", engine=3))
    engine = connect([address(drafter.spec)], engine="looker", window=4)
    sequence = DraftSequence(request_id="r", prompt_ids=(3, 1, 4))
    engine.open(sequence)
    try:
        assert not drafter.can_wake(), "it has not started"
        drafter.wait_ready()
        for _ in range(2):
            assert drafter.can_wake()
            assert not is_listening(drafter.spec)
            assert_takes_no_time(child_of(drafter))
            began_s = time.monotonic()
            drafter.wake()
            assert time.monotonic() - began_s < WAKE_S / 2, "nobody waits until it drafts"
            assert drafter.awake
            assert not drafter.can_wake()
            draft = ask(engine, sequence)
            assert draft == script((3, 1, 4), [], len(draft))
            assert not all(is_at_rest(child_of(drafter)) for _ in range(5))
            assert drafter.sleep(timeout_s=PATIENCE_S)
            assert drafter.wake_s >= WAKE_S
        drafter.wake()
        assert not drafter.sleep(timeout_s=0.0), "it has not woken yet"
        assert drafter.leaving
        assert not drafter.can_wake()
        assert drafter.sleep(timeout_s=PATIENCE_S)
        assert not drafter.leaving
        assert drafter.work(trace=False) is not None, "its owner is heard"
    finally:
        engine.stop()
        drafter.kill()
    assert drafter.sleep(timeout_s=0.0), "it is gone"
    assert not drafter.can_wake()


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("whom", ["the process", "its guard"])
def test_deaths(drafter: DrafterProcess, whom: str, signal_: signal.Signals) -> None:
    footprint = Footprint.of(drafter.pid)
    os.kill(child_of(drafter) if whom == "the process" else drafter.pid, signal_)
    deadline = time.monotonic() + PATIENCE_S
    while drafter.alive:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    drafter.stop()
    footprint.assert_gone()
    while is_listening(drafter.spec):  # the main thread is gone before those that hold the socket
        assert time.monotonic() < deadline + PATIENCE_S
        time.sleep(0.02)


def test_one_that_hangs_is_ended_all_the_same(drafter: DrafterProcess) -> None:
    footprint = Footprint.of(drafter.pid)
    os.kill(child_of(drafter), signal.SIGSTOP)
    started = time.monotonic()
    drafter.stop()
    assert time.monotonic() - started < 20
    footprint.assert_gone(within_s=0.1)


@pytest.mark.parametrize(
    ("continuer", "message"),
    [
        ("broken", "did not start: ValueError: no such weights"),
        ("deadly", "did not start: the process died"),
        ("missing", "did not start: AttributeError"),
    ],
)
def test_failing_to_start(make_drafter_spec: Callable[..., DrafterSpec], continuer: str, message: str) -> None:
    drafter = DrafterProcess(make_drafter_spec(continuer, index=7))
    footprint = Footprint.of(drafter.pid)
    deadline = time.monotonic() + PATIENCE_S
    while drafter.alive:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert drafter.started is None, "and its answer is left to who waits for it"
    with pytest.raises(EngineError, match=f"(?s)drafter 7 {message}.*The end of its log"):
        drafter.wait_ready()
    footprint.assert_gone(within_s=0.1)


def test_starting_for_too_long(make_drafter_spec: Callable[..., DrafterSpec]) -> None:
    drafter = DrafterProcess(make_drafter_spec("endless", start_timeout_s=1.5))
    footprint = Footprint.of(drafter.pid)
    with pytest.raises(EngineError, match=r"drafter 0 did not start within 1.5 s. The end"):
        drafter.wait_ready()
    footprint.assert_gone(within_s=0.1)


def test_an_address_that_is_taken(drafter: DrafterProcess, make_drafter_spec: Callable[..., DrafterSpec]) -> None:
    second = DrafterProcess(make_drafter_spec(endpoint=drafter.spec.endpoint))
    with pytest.raises(EngineError, match="a free address of this host"):
        second.wait_ready()
    assert_drafts(drafter.spec)


def test_a_model_that_raises_ends_the_process(make_drafter_spec: Callable[..., DrafterSpec]) -> None:
    drafter = DrafterProcess(make_drafter_spec("Crashing"))
    try:
        drafter.wait_ready()
        engine = connect([address(drafter.spec)], engine="e", window=4)
        sequence = DraftSequence(request_id="r", prompt_ids=(3, 1, 4))
        engine.open(sequence)
        deadline = time.monotonic() + PATIENCE_S
        while drafter.alive:
            assert engine.propose([sequence], [4]) == [[]]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert "a bug of the model" in drafter.log_tail()
        engine.stop()
    finally:
        drafter.kill()


def test_an_owner_that_is_killed_leaves_nothing(make_drafter_spec: Callable[..., DrafterSpec]) -> None:
    spec = make_drafter_spec()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.rollout.decoupled.owner_script", msgspec.json.encode(spec).decode()],
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        footprint = Footprint.of(int(owner.stdout.readline()))
        assert all(process_exists(pid) for pid in footprint.pids)
        owner.kill()
    footprint.assert_gone()
    assert not is_listening(spec)


def test_new_weights_reach_a_process_that_drafts(make_drafter_spec: Callable[..., DrafterSpec]) -> None:
    """Damaged ones are refused, and it goes on with those that it has; what engines hear says which these are."""
    drafter, sender = DrafterProcess(make_drafter_spec("Renewing")), DraftSender(torch.float32)
    try:
        drafter.wait_ready()
        assert not drafter.wants(0)
        for version, damaged, held in ((1, False, 1), (2, True, 1), (3, False, 3)):
            weights = sender.pack([("norm", torch.full((5,), float(version)))], version=version)
            if damaged:
                assert sender._buffer is not None
                sender._buffer.data[7] ^= 1
            assert drafter.wants(version)
            problem = drafter.renew(weights, timeout_s=PATIENCE_S)
            assert problem == ("drafter 0: norm arrived with a wrong digest" if damaged else "")
            assert drafter.version == held
            assert drafter.work(trace=False) is not None
            assert_drafts(drafter.spec)
        assert not drafter.wants(3)
    finally:
        drafter.kill()
        sender.close()
    assert not drafter.wants(4)


def test_a_process_without_weights_says_so(drafter: DrafterProcess) -> None:
    sender, version = DraftSender(torch.float32), drafter.version
    weights = sender.pack([("norm", torch.ones(5))], version=version + 1)
    assert drafter.renew(weights, timeout_s=PATIENCE_S) == "drafter 0: its continuer has no weights"
    assert drafter.version == version
    assert_drafts(drafter.spec)
    sender.close()


def test_what_it_drops_and_refuses_is_told_once(drafter: DrafterProcess) -> None:
    def told(reason: str) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while not (count := work().get(reason, 0)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return count

    def work() -> dict[str, int]:
        said = drafter.work(trace=False, timeout_s=PATIENCE_S)
        assert said is not None
        return said.drops

    assert work() == {}
    strangers = make_keys()[0]
    wrong = Keys(public=strangers.public, secret=strangers.secret, peer=ENGINE_KEYS.peer)
    stranger = ZmqLink(new_session(), [Address(endpoint=drafter.spec.endpoint, keys=wrong)])
    assert told("refused") > 0
    stranger.close()
    member = ZmqLink(new_session(), [address(drafter.spec)])
    deadline = time.monotonic() + PATIENCE_S
    while not member.send(0, b"rubbish"):
        assert time.monotonic() < deadline
    assert told("malformed") == 1
    member.close()
    assert_drafts(drafter.spec)
    assert work() == {}


def test_one_that_answers_late_is_heard_again(drafter: DrafterProcess) -> None:
    os.kill(child_of(drafter), signal.SIGSTOP)
    try:
        assert drafter.work(trace=False, timeout_s=0.2) is None
        assert not drafter.wants(drafter.version + 1)
    finally:
        os.kill(child_of(drafter), signal.SIGCONT)
    deadline = time.monotonic() + PATIENCE_S
    while not drafter.wants(drafter.version + 1):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert drafter.work(trace=False, timeout_s=PATIENCE_S) is not None
    assert_drafts(drafter.spec)
