"""Verifiers that raise, hang, exit and lie: each costs its own response, and leaves nothing behind."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from specactor.data import verifiers
from specactor.data.verifiers import get_verifier
from specactor.errors import DataError
from specactor.rollout import grading as module
from specactor.rollout import warm_starter
from specactor.rollout.grading import Grading, Scored
from specactor.rollout.process_guard import descendants
from specactor.types import Problem

HERE = "tests.rollout.verifiers"
LIMIT_S = 120.0
"""Against hanging."""


def problem(verifier: str, **metadata: object) -> Problem:
    name = verifier if "://" in verifier or verifier in ("exact", "number", "reasoning-gym") else f"{HERE}:{verifier}"
    return Problem(index=17, prompt="?", prompt_ids=(1,), answer="7", verifier=name, metadata=metadata)


@pytest.fixture
def grading() -> Iterator[Grading]:
    with Grading(timeout_s=5.0) as found:
        yield found
    assert children(found) == []


def children(grading: Grading) -> list[int]:
    """Pids of what is left of all processes: those that the warm starter forked are its own to reap."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        pids = [pid for child in grading._children for pid in (child.pid, *descendants(child.pid))]
        left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def scores(verdicts: list[Future[Scored]]) -> list[float | str]:
    found = [verdict.result(LIMIT_S) for verdict in verdicts]
    return [of.failure or of.score for of in found]


class Neighbours:
    """Gives each response the verdict of the one before it of the same verifier: a mistake put in on purpose."""

    def __init__(self, grading: Grading) -> None:
        self._grading, self._before = grading, {}  # type: ignore[var-annotated]

    def submit(self, response: str, problem: Problem) -> Future[Scored]:
        own = self._grading.submit(response, problem)
        before, self._before[problem.verifier] = self._before.get(problem.verifier, own), own
        return before


def test_the_score_of_another_response_is_noticed(grading: Grading) -> None:
    with pytest.raises(AssertionError):
        each_has_its_own(Neighbours(grading))


def test_each_response_has_its_own_score_and_failures_cost_their_own(grading: Grading) -> None:
    each_has_its_own(grading)


def each_has_its_own(grading: Grading | Neighbours) -> None:
    kinds = ("number_of", "raises", "number_of", "ends_its_process", "exits", "number_of", "nothing")
    verdicts = [grading.submit(str(i), problem(kinds[i % 7])) for i in range(140)]
    found = scores(verdicts)
    answers = f"{HERE}:{{}}: problem 17 (answer '7'): {{}}, on the response '"
    for i, of in enumerate(found):
        kind = kinds[i % 7]
        if kind == "number_of":
            assert of == float(i)
        elif kind == "ends_its_process":
            assert str(of).startswith(
                f"its process ended: verifier {HERE}:{kind}: problem 17 (answer '7'): its process"
            )
        elif kind == "nothing":
            assert str(of).startswith(
                f"DataError: verifier {HERE}:nothing: problem 17: it cannot be asked: got '{HERE}:"
            )
        else:
            error = "KeyError: 'a bug of the verifier'" if kind == "raises" else "SystemExit: 3"
            assert str(of).startswith(
                f"{error.partition(':')[0]}: verifier " + answers.format(kind, f"it raised {error}")
            )
    assert all("\n" not in str(of) for of in found)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_a_score_that_is_not_finite_is_refused_by_name(text: str, grading: Grading) -> None:
    [found] = scores([grading.submit(text, problem("number_of"))])
    assert str(found).startswith(
        f"no finite number: verifier {HERE}:number_of: problem 17 (answer '7'): it returned {text},"
    )


def test_any_finite_number_is_a_score(grading: Grading) -> None:
    assert scores([grading.submit(text, problem("number_of")) for text in ("-3.5", "1e300", "2")]) == [-3.5, 1e300, 2.0]


def test_where_memory_ends_verifiers_go_first(grading: Grading) -> None:
    """And not a rank: one that leaks costs its response."""
    assert scores([grading.submit("", problem("oom_score"))]) == [1000.0]


def test_what_they_print_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOG_BYTES", 100)
    monkeypatch.delenv(warm_starter.NAME, raising=False)  # what it forks says so in its log
    log = tmp_path / "verifiers.log"
    with Grading(timeout_s=60.0, log_file=str(log), most=1) as grading:
        sizes = []
        for word in ("x" * 60, "y" * 60, "z" * 60):
            grading.begin()
            assert scores([grading.submit(word, problem("prints"))]) == [1.0]
            sizes.append(log.stat().st_size)
    assert sizes == [61, 122, 61]
    assert log.read_text() == f"{'z' * 60}\n"


def test_one_that_hangs_is_ended_with_all_it_started_and_holds_up_no_other(grading: Grading, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    bad = [grading.submit(str(file), problem("leaves_a_child")), grading.submit("", problem("hangs"))]
    good = [grading.submit(str(i), problem("number_of")) for i in range(20)]
    assert scores(good) == [float(i) for i in range(20)]
    for name, of in zip(("leaves_a_child", "hangs"), scores(bad), strict=True):
        assert of == (f"no answer in time: verifier {HERE}:{name}: problem 17 (answer '7'): no answer within 5 s")
    assert not Path(f"/proc/{file.read_text()}").exists()
    assert scores([grading.submit("5", problem("number_of"))]) == [5.0], "another process has taken its place"


def test_one_that_always_hangs_is_asked_no_more_until_the_next_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HUNG", 2)
    with Grading(timeout_s=0.5, most=1) as grading:
        found = scores([grading.submit("", problem("hangs")) for _ in range(200)])
        assert [str(of).rpartition(": ")[2] for of in found] == ["no answer within 0.5 s"] * 2 + [
            "it hung 2 times in a row"
        ] * 198
        grading.begin()
        assert str(scores([grading.submit("", problem("hangs"))])[0]).endswith("no answer within 0.5 s")


def test_asynchronous_ones_wait_together_and_a_late_one_is_alone_in_that() -> None:
    with Grading(timeout_s=20.0, most=1) as grading:
        assert scores([grading.submit("0", problem("waits"))]) == [1.0]
        begun = time.monotonic()
        assert scores([grading.submit("1", problem("waits")) for _ in range(60)]) == [1.0] * 60
        assert time.monotonic() - begun < 40, "sixty, one after the other"
    with Grading(timeout_s=3.0, most=1) as grading:
        found = scores([grading.submit("600" if i == 5 else "0", problem("waits")) for i in range(10)])
        assert [of for i, of in enumerate(found) if i != 5] == [1.0] * 9
        assert str(found[5]).startswith("TimeoutError: verifier ")


def test_asynchronous_ones_may_share_a_client_and_none_ends_the_loop_of_others() -> None:
    with Grading(timeout_s=20.0, most=1) as grading:
        names = [name for _ in range(10) for name in ("shares", "ends_its_loop")]
        nested = grading.submit("0", problem("asks_another"))
        found = scores([grading.submit(str(i), problem(name)) for i, name in enumerate(names)])
        assert "asked this one through get_verifier" in str(scores([nested])[0]), "it does not wait for itself"
    assert found[::2] == [1.0] * 10
    assert all(str(of).startswith("RuntimeError: verifier ") for of in found[1::2]), found


def test_one_that_ends_the_process_of_others_costs_only_itself() -> None:
    with Grading(timeout_s=2.0, most=1) as grading:
        first = grading.submit("0", problem("waits"))
        found = scores([first, *[grading.submit("hang" if i == 5 else "", problem("blocks")) for i in range(10)]])
        assert [of for i, of in enumerate(found) if i != 6] == [1.0] + [2.0] * 9
        assert str(found[6]).startswith("no answer in time: ")


def test_at_most_so_many_processes_and_one_where_one_is_enough() -> None:
    with Grading(timeout_s=60.0) as grading:
        assert len({of for of in scores([grading.submit("", problem("who")) for _ in range(50)])}) <= 2
    with Grading(timeout_s=1.0, most=2) as grading:
        bad = [grading.submit("", problem("hangs")) for _ in range(3)]
        assert all(str(of).startswith("no answer in time") for of in scores(bad))
        assert len(grading._threads) <= 2


@pytest.mark.parametrize("waits", [True, False])
def test_none_waits_for_another_process_while_the_first_imports(monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """The other version starts one, which the last response waits for, after the first has answered."""
    monkeypatch.setattr(module, "LATE_S", 1e9 if waits else 0.0)
    with Grading(timeout_s=60.0, most=3) as grading:
        assert scores([grading.submit("7", problem("exact_later")) for _ in range(2)]) == [1.0] * 2
        assert (len(grading._threads) == 1) == waits


def test_a_problem_comes_as_it_is(grading: Grading) -> None:
    whole = problem("is_whole", pair=(1, (2, "x")), map={"1": [2, (3,)]}, text="é")
    assert scores([grading.submit("", whole)]) == [1.0]
    [found] = scores([grading.submit("", problem("is_whole", what=object()))])
    assert "problem 17: it cannot be asked: Encoding objects of type object is unsupported" in str(found)


def test_tasks_whose_entries_have_tuples_and_numpy_texts_score_as_in_one_process() -> None:
    for task in ("arc_agi", "knights_knaves"):
        entry = reasoning_gym.create_dataset(task, size=1, seed=3)[0]
        given = problem("reasoning-gym", task=task, params={}, entry=entry)
        with Grading(timeout_s=120.0) as grading:
            assert scores([grading.submit(entry["answer"], given)]) == [1.0]
        assert get_verifier("reasoning-gym")(entry["answer"], given) == 1.0


def test_what_waits_when_the_run_ends_has_failed_and_nothing_is_left() -> None:
    grading = Grading(timeout_s=600.0)
    verdicts = [grading.submit("", problem("hangs")) for _ in range(3)]
    deadline = time.monotonic() + LIMIT_S
    while not grading._children and time.monotonic() < deadline:
        time.sleep(0.01)
    grading.close()
    assert all(isinstance(of, str) for of in scores(verdicts))
    assert children(grading) == []


def test_each_response_has_a_verdict_where_no_process_can_be_started(tmp_path: Path) -> None:
    """Such as on a full disk; here a file is where the log's folder should be. Later ones are scored."""
    (tmp_path / "logs").touch()
    with Grading(timeout_s=60.0, log_file=str(tmp_path / "logs" / "verifiers.log"), most=1) as grading:
        found = scores([grading.submit("0", problem(kind)) for kind in ("waits", "number_of", "waits", "waits")])
        assert all(str(of).startswith("its process ended: verifier ") for of in found)
        assert all("File exists" in str(of) for of in found)
        (tmp_path / "logs").unlink()
        assert scores([grading.submit("3", problem("number_of"))]) == [3.0]


@pytest.mark.parametrize("begun", [0, 1])
def test_where_no_further_thread_can_be_started_those_there_are_go_on(
    monkeypatch: pytest.MonkeyPatch, begun: int
) -> None:
    """Without any, the run ends with the error."""
    monkeypatch.setattr(module, "LATE_S", 0.0)
    monkeypatch.setattr(module, "GROW_S", 0.0)
    begin, wanted = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("grading"):
            wanted.append(thread)
            if len(wanted) > begun:
                raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with Grading(timeout_s=60.0, most=3) as grading:
        if not begun:
            with pytest.raises(RuntimeError, match="can't start new thread"):
                grading.submit("1", problem("number_of"))
            return
        assert scores([grading.submit(str(i), problem("number_of")) for i in range(5)]) == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert len(wanted) > 1


class Judge(BaseHTTPRequestHandler):
    """Scores by the number in the response; what it says before that is in the path."""

    asked: dict[str, int]
    over: threading.Event

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = body["response"]
        self.asked[name] = self.asked.get(name, 0) + 1
        if self.path == "/busy" and self.asked[name] < 3:
            self.answer(503, b"busy")
        elif self.path == "/away" and self.asked[name] < 12:
            self.answer(502, b"it is started again")
        elif (self.path == "/gone" and self.asked[name] < 2) or self.path == "/falls":
            self.close_connection = True
        elif self.path == "/broken":
            self.answer(500, b"broken")
        elif self.path == "/refuses":
            self.answer(404, b"no such judge")
        elif self.path == "/late":
            self.over.wait(LIMIT_S)
            self.answer(200, b'{"score": 1}')
        elif self.path == "/lies":
            self.answer(200, body["metadata"]["says"].encode())
        elif self.path == "/pieces":
            self.answer(200, json.dumps({"score": float(name), "why": "it is " * 200}).encode(), pause_s=0.1)
        else:
            good = (body["prompt"], body["answer"], body["index"], body["metadata"]) == ("?", "7", 17, {})
            self.answer(200, json.dumps({"score": float(name) if good else None}).encode())

    def answer(self, status: int, body: bytes, pause_s: float = 0.0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if pause_s:
            self.wfile.write(body[:20])
            time.sleep(pause_s)
            body = body[20:]
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def serve(port: int = 0) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", port), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def judge() -> Iterator[str]:
    Judge.asked, Judge.over = {}, threading.Event()
    with serve() as server:
        yield f"http://127.0.0.1:{server.server_port}"
        Judge.over.set()
        server.shutdown()


def test_a_judge_behind_http_that_is_busy_gone_broken_late_and_lies(judge: str) -> None:
    with Grading(timeout_s=60.0) as grading, Grading(timeout_s=1.0) as hasty:
        paths = ("score", "busy", "gone", "pieces")
        good = [grading.submit(str(i), problem(f"{judge}/{paths[i % 4]}")) for i in range(60)]
        bad = {path: grading.submit(path, problem(f"{judge}/{path}")) for path in ("broken", "refuses", "falls")}
        bad["late"] = hasty.submit("late", problem(f"{judge}/late"))
        lies = ('{"score": "1"}', '{"score": null}', '{"score": 1e999}', '{"score": true}', "[1]", "", "\x00")
        says = [grading.submit("x", problem(f"{judge}/lies", says=text)) for text in lies]
        nowhere = hasty.submit("y", problem("http://127.0.0.1:1/"))
        assert scores(good) == [float(i) for i in range(60)]
        found = dict(zip(bad, scores(list(bad.values())), strict=True))
        assert str(found["broken"]).startswith(f"ClientResponseError: verifier {judge}/broken: problem 17")
        assert "404" in str(found["refuses"])
        assert str(found["late"]).startswith(("TimeoutError: verifier ", "no answer in time: verifier "))
        assert all(str(of).startswith(("ValidationError", "DecodeError")) for of in scores(says))
        # On a slow machine the second is over before it is known that nobody is there.
        wheres = [
            f"{kind}: verifier http://127.0.0.1:1/: problem 17" for kind in ("ClientConnectorError", "TimeoutError")
        ]
        assert str(scores([nowhere])[0]).startswith(tuple(wheres))
        assert str(found["falls"]).startswith("ServerDisconnectedError")
    assert [Judge.asked[name] for name in ("broken", "refuses", "falls", "1", "2")] == [4, 1, 4, 3, 2]


def test_a_judge_that_is_started_again_costs_time_and_no_reward(
    judge: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is asked until the verifier's time is over, by pauses that double, and one line says so."""
    monkeypatch.setattr(verifiers, "RETRY_PAUSE_S", 0.01)
    verify = get_verifier(f"{judge}/away", LIMIT_S)
    assert [verify(text, problem(f"{judge}/away")) for text in ("3", "4")] == [3.0, 4.0]
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("verifier ")]
    assert len(said) == 2, "once for each time that it was away"
    assert said[0].startswith(f"verifier {judge}/away: 502")
    assert said[0].endswith("It is asked again for 120 s.")

    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
    back = threading.Timer(1.0, lambda: served.append(serve(int(url.rpartition(":")[2][:-1]))))
    served: list[ThreadingHTTPServer] = []
    back.start()
    try:
        assert get_verifier(url, LIMIT_S)("5", problem(url)) == 5.0
    finally:
        back.join()
        served[0].shutdown()
        served[0].server_close()


def test_a_judge_that_stays_away_fails_its_response_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "RETRY_PAUSE_S", 0.05)
    began = time.monotonic()
    with pytest.raises(DataError, match="ClientConnectorError"):
        get_verifier("http://127.0.0.1:1/x", 2.0)("y", problem("http://127.0.0.1:1/x"))
    assert time.monotonic() - began > 0.8


def test_an_address_without_a_host_is_refused() -> None:
    with pytest.raises(DataError, match=r"got 'http://:80/x', expected the address of a verifier, as http://host:port"):
        get_verifier("http://:80/x")
