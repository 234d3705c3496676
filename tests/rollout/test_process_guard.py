"""Whatever ends a guarded process, nothing of its tree stays: children, orphans, folders, shared memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specactor.rollout import process_guard
from specactor.waits import GRACE_S
from tests.rollout.conftest import process_exists

SCRIPT = Path(__file__).parent / "guard_script.py"


class Tree:
    """A guard, its process, a child of it, and an orphaned grandchild in a session of its own."""

    def __init__(self, folder: Path, behaviour: str) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            self.guard = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(theirs.fileno()), str(folder), behaviour],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        deadline = time.monotonic() + 120
        while not (folder / "pids").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        *pids, temporary = (folder / "pids").read_text().split()
        self.guarded, self.child, self.orphan = map(int, pids)
        self.temporary = Path(temporary)
        deadline = time.monotonic() + 60
        while f"_{self.child}_" not in (self.temporary / process_guard.SHARED_FILES).read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.shared = Path(f"/dev/shm/sgl_shm_test_{self.child}_0")
        self.shared.write_text("x")

    def assert_gone(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while True:
            left: list[object] = [p for p in (self.guarded, self.child, self.orphan) if process_exists(p)]
            left += [path for path in (self.temporary, self.shared) if path.exists()]
            if not left:
                return
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)


@pytest.fixture
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Tree]:
    tree = Tree(tmp_path, getattr(request, "param", "stay"))
    yield tree
    tree.guard.terminate()  # a guard that is killed leaves the child and the orphan
    tree.guard.wait(60)
    tree.connection.close()


def test_death_of_the_trainer_rank(tree: Tree) -> None:
    assert tree.temporary.is_dir()
    tree.connection.close()
    tree.assert_gone(GRACE_S + 30)  # this one ignores the end of the stream, so it gets its full time
    assert tree.guard.wait(60) == 0


def test_death_of_the_guarded_process_is_seen_when_all_is_gone(tree: Tree) -> None:
    os.kill(tree.guarded, signal.SIGKILL)
    tree.connection.settimeout(60)
    assert tree.connection.recv(1) == b""
    tree.assert_gone(0.0)


@pytest.mark.parametrize("tree", ["exit"], indirect=True)
def test_end_of_the_guarded_process(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "exit").touch()
    tree.assert_gone(60)


def test_sigterm_ends_all_at_once(tree: Tree) -> None:
    tree.guard.terminate()
    tree.assert_gone(0.9 * GRACE_S)


@pytest.mark.parametrize("by", ["age", "pid"])
def test_a_killed_guard_takes_its_process_along_and_is_swept_later(tree: Tree, by: str) -> None:
    os.kill(tree.guard.pid, signal.SIGKILL)
    tree.guard.wait(60)
    deadline = time.monotonic() + 60
    while process_exists(tree.guarded):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for pid in (tree.child, tree.orphan):  # SGLang's own processes die with their parents; these do not
        os.kill(pid, signal.SIGKILL)
    process_guard.sweep()
    assert tree.temporary.exists(), "too young to judge"
    if by == "age":
        os.utime(tree.temporary, (0, 0))
        process_guard.sweep()
    else:
        process_guard.sweep(tree.guard.pid)
    tree.assert_gone(60)


def test_sweep_leaves_living_guards_alone(tree: Tree) -> None:
    os.utime(tree.temporary, (0, 0))
    process_guard.sweep()
    assert (tree.temporary / "rubbish").exists()
    assert tree.shared.exists()


def test_descendants_may_end_while_they_are_listed() -> None:
    endless = subprocess.Popen(["sh", "-c", "while :; do (true; (true)); done"])
    try:
        seen = [set(process_guard.descendants(os.getpid())) for _ in range(300)]
    finally:
        endless.kill()
        endless.wait()
    assert len(set.union(*seen)) > 2  # some ended on the way
    assert all(endless.pid in pids for pids in seen)


def test_sweep_follows_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may write to /tmp."""
    monkeypatch.setattr(process_guard, "TEMPORARY", tmp_path)
    own, link = tmp_path / "own", tmp_path / f"{process_guard._PREFIX}1-x"
    own.mkdir()
    link.symlink_to(own)
    process_guard.sweep(1)
    assert list(own.iterdir()) == []
    assert link.is_symlink()


def test_a_folder_goes_though_a_shared_file_of_its_names_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may have a file of that name: whoever ends a process goes on."""
    monkeypatch.setattr(process_guard, "TEMPORARY", tmp_path)
    folder = tmp_path / f"{process_guard._PREFIX}1-x"
    folder.mkdir()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as held:  # a folder cannot be removed as a file, either
        (folder / process_guard.SHARED_FILES).write_text(f"{held}\n")
        process_guard.sweep(1)
        assert not folder.exists()


def test_a_full_disk_does_not_end_the_guard(tmp_path: Path) -> None:
    """Else it would end what it guards, such as an engine in the midst of a rollout."""
    noted: set[int] = set()
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            (tmp_path / process_guard.SHARED_FILES).symlink_to("/dev/full")
            process_guard._note_pids(tmp_path, noted)
            assert noted == set()
            (tmp_path / process_guard.SHARED_FILES).unlink()
            process_guard._note_pids(tmp_path, noted)
            assert child.pid in noted
            assert f"_{child.pid}_" in (tmp_path / process_guard.SHARED_FILES).read_text()
        finally:
            child.kill()
