"""The job on two hosts: as right as on one, and whatever happens to a host or the link, it comes back by itself."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest

from benchmarks.disturbed_run import compared
from benchmarks.virtual_hosts import VirtualHosts
from specactor.data.tokenizer import VOCAB_SIZE
from specactor.metrics import Value, read_metrics
from specactor.parallel.failure import RESUME
from specactor.replay import records
from tests.cluster import moving_recipe
from tests.cluster.conftest import ROOT, ClusterJob
from tests.rollout.conftest import start_script

SHORT_CUT_S = 4.0
SILENT = "has not answered for 30 s: it died, or the network to it is cut."


@pytest.fixture(scope="session")
def draft_model(base: Path) -> str:
    """Folder of a draft model that has learned nothing."""
    folder = str(base / "draft")
    with start_script(
        "sglang/make_dense.py", folder, f"vocab_size={VOCAB_SIZE}", "max_position_embeddings=512"
    ) as process:
        assert process.wait(240) == 0
    return folder


@pytest.fixture(scope="module")
def moved(base: Path, draft_model: str) -> tuple[ClusterJob, Path, list[str]]:
    """A job of which the first host is behind, the second one drafts for the engines of both, and the link is cut for a
    moment; what its ranks sent their engines, and what was left."""
    drafting = ("--rollout.speculation.mode", "decoupled", "--rollout.speculation.draft-model", draft_model)
    drafters = ("--rollout.speculation.window", "4", "--parallel.drafters", "1", "--parallel.drafter-hosts", "1")
    with VirtualHosts(2) as hosts:
        job, folder = moving(hosts, base, "two", *drafting, *drafters)
        (folder / moving_recipe.GO).touch()
        job.wait_for("rollout", 2)
        hosts.cut.add(1)
        time.sleep(SHORT_CUT_S)
        hosts.cut.discard(1)
        assert job.wait() == [0, 0], job.output()
        return job, folder, job.left()


def moving(
    hosts: VirtualHosts,
    base: Path,
    name: str,
    *options: str,
    recipe: str = moving_recipe.__file__,
    restarts: int = 0,
) -> tuple[ClusterJob, Path]:
    """One group fits in an engine, so others wait. Returns where ranks write what they send their engines, too."""
    folder = base / f"{name}-sent"
    folder.mkdir()
    environ = {number: {"MOVING_FOLDER": str(folder)} for number in range(2)}
    options = ("--rollout.engine.max-running-requests", "8", *options)
    return ClusterJob(hosts, base, name, *options, recipe=recipe, restarts=restarts, environ=environ), folder


def unmoved(lines: list[dict[str, Value]]) -> list[dict[str, Value]]:
    return [{name: value for name, value in line.items() if name != "tail/groups_moved"} for line in lines]


def test_two_hosts_have_the_metrics_of_one(
    one_host: list[dict[str, Value]], moved: tuple[ClusterJob, Path, list[str]]
) -> None:
    job, _, left = moved
    assert unmoved(compared(job.folder)) == unmoved(one_host)
    lines = read_metrics(job.folder.root)[1:]
    assert all(line["speculation/decoupled/processes"] == 1 for line in lines)
    assert sum(float(str(line["speculation/decoupled/drafted_ahead"])) for line in lines) > 0
    assert (job.folder.checkpoints / "step-000003").is_dir()
    assert left == []


def test_groups_that_wait_move_to_the_host_that_has_room(
    base: Path, one_host: list[dict[str, Value]], moved: tuple[ClusterJob, Path, list[str]]
) -> None:
    """Each is begun once, and every response is that of one host, where none moved."""
    job, folder, _ = moved
    alone = base / "runs" / "one-2"
    for step, line in enumerate(read_metrics(job.folder.root)[1:], start=1):
        assert line["tail/groups_moved"] == moving_recipe.num_moved(folder, step) >= moving_recipe.NUM_MOVED
        here, there = (records.read(records.file_of(root, step)).samples for root in (job.folder.root, alone))
        assert [(s.request_id, s.token_ids.tolist(), s.score) for s in here] == [
            (s.request_id, s.token_ids.tolist(), s.score) for s in there
        ]
        assert moving_recipe.begun(folder, step) == sorted(s.request_id for s in there)
    assert all(line["tail/groups_moved"] == 0 for line in one_host[1:])


@pytest.mark.deep
def test_hosts_that_count_apart_are_caught(base: Path, two_hosts: VirtualHosts) -> None:
    """Both take the groups that wait; the second response to a request is an error."""
    job, _ = moving(two_hosts, base, "apart", "--train.steps", "1", recipe=f"{moving_recipe.__file__}:apart")
    assert all(code != 0 for code in job.wait()), job.output()
    messages = [*job.messages(0), *job.messages(1)]
    assert any("EngineError: a second response to request" in each for each in messages), job.output()
    assert job.left() == []


@pytest.mark.deep
@pytest.mark.parametrize("how", ["killed", "cut"])
def test_a_host_that_is_lost_with_groups_of_another_is_overcome(
    base: Path, one_host: list[dict[str, Value]], two_hosts: VirtualHosts, how: str
) -> None:
    """The step ends on all, as if none had moved."""
    job, folder = moving(two_hosts, base, f"moved-{how}", "--resume", "auto", restarts=3)
    job.wait_until(lambda: moving_recipe.num_moved(folder, moving_recipe.HELD) > 0, "that a group moves")
    lost, gone = (f"specactor: rank {1 - k}: n{k}, the host of rank {k}, {SILENT} {RESUME}" for k in (1, 0))
    wanted = [[lost], [gone] if how == "cut" else []]
    two_hosts.kill(1) if how == "killed" else two_hosts.cut.add(1)
    job.wait_until(lambda: [job.messages(0), job.messages(1)] == wanted, "its loss")
    (folder / moving_recipe.GO).touch()
    if how == "killed":
        two_hosts.boot(1)
        job.start(1, MOVING_FOLDER=str(folder))
    else:
        two_hosts.cut.discard(1)
    assert job.wait() == [0, 0], job.output()
    assert [job.messages(0), job.messages(1)] == wanted
    assert unmoved(compared(job.folder)) == unmoved(one_host)
    assert job.left() == []


@pytest.mark.deep
@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_host_is_overcome_without_a_person(
    base: Path, one_host: list[dict[str, Value]], two_hosts: VirtualHosts, number: int
) -> None:
    """What a scheduler does is to switch the host on again, and to start its share as at first. The ranks meet at the
    first host."""
    job = ClusterJob(two_hosts, base, f"killed-{number}", "--resume", "auto", restarts=3)
    job.wait_for("rollout", 2)
    two_hosts.kill(number)
    other = 1 - number
    lost = f"specactor: rank {other}: n{number}, the host of rank {number}, {SILENT} {RESUME}"
    job.wait_until(lambda: lost in job.messages(other), "its loss")
    two_hosts.boot(number)
    job.start(number)
    assert job.wait() == [0, 0], job.output()
    assert (job.messages(other), job.messages(number)) == ([lost], [])
    assert compared(job.folder) == one_host
    assert job.left() == []


@pytest.mark.deep
@pytest.mark.parametrize(("victim", "phase"), [(1, "rollout"), (2, "train")])
def test_a_killed_rank_of_several_is_overcome_without_a_person(
    base: Path, four_ranks: list[dict[str, Value]], two_hosts: VirtualHosts, victim: int, phase: str
) -> None:
    """All four ranks end; the other one of its host says why, once for all. The ranks meet again by themselves."""
    job = ClusterJob(two_hosts, base, f"rank-{victim}", "--resume", "auto", ranks=2, restarts=1)
    job.wait_for(phase, 2)
    lost = f"specactor: rank {victim ^ 1}: {job.kill_rank(victim)} was killed or crashed. {RESUME}"
    assert job.wait() == [0, 0], job.output()
    assert [*job.messages(0), *job.messages(1)] == [lost]
    assert compared(job.folder) == four_ranks
    assert job.left() == []


@pytest.mark.deep
@pytest.mark.parametrize("victim", [0, 1])
def test_a_hosts_only_rank_that_is_killed_is_overcome_without_a_person(
    base: Path, one_host: list[dict[str, Value]], two_hosts: VirtualHosts, victim: int
) -> None:
    """Nobody of its host can say what happened; the rank of the other one says what it saw."""
    job = ClusterJob(two_hosts, base, f"only-{victim}", "--resume", "auto", restarts=1)
    job.wait_for("rollout", 2)
    job.kill_rank(victim)
    assert job.wait() == [0, 0], job.output()
    [message] = [each for each in (*job.messages(0), *job.messages(1)) if ": no beat: " not in each]  # which may go on
    saw = ("a rank of another host was killed or crashed", "ended by SIGTERM: the launcher of rank 0 is gone")
    told = message.removeprefix(f"specactor: rank {1 - victim}: ")
    assert told.startswith(saw if victim == 0 else saw[0]), message  # its own launcher may notice first
    assert compared(job.folder) == one_host
    assert job.left() == []


@pytest.mark.deep
def test_a_cut_link_is_overcome_without_a_person(
    base: Path, one_host: list[dict[str, Value]], two_hosts: VirtualHosts
) -> None:
    """Each host notices by itself, ends its ranks, and meets the other as soon as that can be reached."""
    job = ClusterJob(two_hosts, base, "cut", "--resume", "auto", restarts=6)
    job.wait_for("rollout", 2)
    two_hosts.cut.add(1)
    lost = f"specactor: rank 0: n1, the host of rank 1, {SILENT} {RESUME}"
    gone = f"specactor: rank 1: n0, the host of rank 0, {SILENT} {RESUME}"
    job.wait_until(lambda: (job.messages(0), job.messages(1)) == ([lost], [gone]), "that both notice")
    two_hosts.cut.discard(1)
    assert job.wait() == [0, 0], job.output()
    assert (job.messages(0), job.messages(1)) == ([lost], [gone])
    assert compared(job.folder) == one_host
    assert job.left() == []


def test_two_versions_of_the_project_are_refused(base: Path, two_hosts: VirtualHosts) -> None:
    """The second host has the project in a folder of its own, with one more line. So are two settings."""
    other = base / "other"
    for folder in ("specactor", "examples"):
        shutil.copytree(ROOT / folder, other / folder, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "specactor" / "types.py").open("a") as file:
        file.write("# another version\n")
    job = ClusterJob(two_hosts, base, "versions", environ={1: {"PYTHONPATH": str(other)}})
    assert all(code != 0 for code in job.wait())
    [message] = [*job.messages(0), *job.messages(1)]
    assert "ConfigError: launcher: got specactor " in message
    assert " on n1 (rank 1), expected specactor " in message
    assert "Install one version on all hosts" in message
    assert job.left() == []


def test_hosts_of_another_key_are_refused(base: Path, two_hosts: VirtualHosts) -> None:
    """Nothing but the marks of the keys is told, and no weight was sent."""
    other = "another one, which is as long as that"
    job = ClusterJob(two_hosts, base, "keys", environ={1: {"SPECACTOR_KEY": other}})
    assert all(code != 0 for code in job.wait())
    [message] = [*job.messages(0), *job.messages(1)]
    assert re.search(r"ConfigError: SPECACTOR_KEY: got '\w{8}' on n1 \(rank 1\), expected '\w{8}' as on n0", message)
    assert other not in message
    assert job.left() == []
