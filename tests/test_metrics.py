"""Metrics: names, the file that survives a crash, and the real wandb, offline."""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import specactor.metrics
from specactor.config import TrackingConfig
from specactor.errors import SpecActorError
from specactor.metrics import DRAFTER, METRICS, Tracker, read_metrics, rss_bytes
from specactor.planning.memory import PHASES

OFF = TrackingConfig(wandb="off")


def log_steps(run_dir: Path, done: int, last: int) -> None:
    """Steps 0..last of a new run (done = 0), or the steps after `done` of a resumed one."""
    with Tracker(run_dir, {"name": "x"}, OFF, resume_step=done) as tracker:
        for step in range(done + 1 if done else 0, last + 1):
            tracker.log(step, {"reward/mean": step / 7, "weights/version": step})


def test_a_resumed_file_equals_an_undisturbed_one(tmp_path: Path) -> None:
    log_steps(tmp_path / "whole", 0, 9)
    log_steps(tmp_path / "cut", 0, 7)  # the checkpoint holds steps 1..4; 5..7 are done again
    with (tmp_path / "cut/metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rew')  # killed in the middle of a line
    log_steps(tmp_path / "cut", 4, 9)
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    assert [line["step"] for line in read_metrics(tmp_path / "cut")] == list(range(10))


def test_a_new_run_starts_a_new_file(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, 3)
    log_steps(tmp_path, 0, 1)
    assert len(read_metrics(tmp_path)) == 2
    assert json.loads((tmp_path / "config.json").read_text()) == {"name": "x"}


def test_a_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, {}, OFF)
    tracker.log(0, {"reward/mean": 0.5})
    assert read_metrics(tmp_path) == [{"step": 0, "reward/mean": 0.5}]
    tracker.close()


def test_numbers_that_json_lacks_are_null_in_the_file(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, {}, OFF)
    tracker.log(0, {"policy/kl": math.inf})
    tracker.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "policy/kl": null}\n'
    assert math.isnan(float(read_metrics(tmp_path)[0]["policy/kl"]))


def test_unknown_names_and_repeated_steps_are_refused(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, {}, OFF)
    with pytest.raises(SpecActorError, match=r"unknown name 'reward/meen'. Did you mean reward/mean\?"):
        tracker.log(0, {"reward/meen": 1})
    assert read_metrics(tmp_path) == []
    tracker.log(0, {"reward/mean": 1})
    with pytest.raises(SpecActorError, match="got step 0 after 0"):
        tracker.log(0, {"reward/mean": 1})
    tracker.close()


def test_every_name_is_grouped_and_explained() -> None:
    for name, meaning in METRICS.items():
        assert name.count("/") == 1
        assert len(meaning) > 10
        assert not name.endswith("_s") or "second" in meaning


def test_summary_is_kept(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, {}, OFF)
    tracker.summary({"accuracy before": 0.5})
    tracker.close()
    tracker.close()
    assert json.loads((tmp_path / "summary.json").read_text()) == {"accuracy before": 0.5}


def run_python(code: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    home = {"HOME": str(cwd), "WANDB_CACHE_DIR": str(cwd / "cache"), "WANDB_CONFIG_DIR": str(cwd / "config")}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=cwd,
        env=clean | home | environ,
        capture_output=True,
        text=True,
        timeout=120,
    )


def records(file: Path) -> Iterator[bytes]:
    """Records of a .wandb file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    data, at, parts = file.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block that cannot hold a header is padding
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or last part
            yield parts
            parts = b""


def history(file: Path) -> list[dict[str, float]]:
    """Metrics in a .wandb file."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in records(file):
        items = wandb_internal_pb2.Record.FromString(data).history.item
        if items:
            rows.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items})
    return rows


def axes(file: Path) -> Iterator[tuple[str, str]]:
    """Which metrics a .wandb file shows over which other one."""
    from wandb.proto import wandb_internal_pb2

    for data in records(file):
        if (metric := wandb_internal_pb2.Record.FromString(data).metric).step_metric:
            yield metric.glob_name or metric.name, metric.step_metric


def test_wandb_offline_writes_a_run_and_a_resume_keeps_its_id(tmp_path: Path) -> None:
    code = """
        from pathlib import Path
        from specactor.config import TrackingConfig
        from specactor.metrics import Tracker
        for done in (0, 1):
            tracker = Tracker(Path("run"), {"seed": 7}, TrackingConfig(), resume_step=done)
            for step in (0, 1) if done == 0 else (2, 3):
                tracker.log(step, {"reward/mean": step / 2})
            tracker.summary({"best": 1.0})
            tracker.close()
    """
    done = run_python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "wandb" not in done.stdout + done.stderr  # quiet
    files = sorted(tmp_path.glob("run/wandb/offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1
    assert (tmp_path / "run/wandb_id.txt").read_text().strip() in files[0].name
    assert {axis for file in files for axis in axes(file)} == {("*", "step")}
    rows = [row for file in files for row in history(file)]
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]
    assert not any(str(tmp_path) in " ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))


def test_steps_that_run_again_after_a_resume_are_new_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that wandb has up to step 5, and whose last checkpoint is of step 2: it drops rows before its last."""
    rows: list[tuple[int, object]] = []
    server = SimpleNamespace(
        starting_step=6,
        log=lambda metrics, step: rows.append((step, metrics["step"])),
        finish=lambda exit_code: None,
    )
    monkeypatch.setattr(specactor.metrics, "_start_wandb", lambda *_, **__: server)
    with Tracker(tmp_path, {}, TrackingConfig(), resume_step=2) as tracker:
        for step in (3, 4, 9, 10):
            tracker.log(step, {"reward/mean": 0.5})
    assert rows == [(6, 3), (7, 4), (9, 9), (10, 10)]


@pytest.mark.parametrize(("first", "row"), [(3, (6, 3)), (2, (6, 2))])
def test_what_completes_a_line_is_of_its_row_or_a_new_one(
    first: int, row: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a row that another process has written, wandb would drop it."""
    rows: list[tuple[int, object]] = []
    server = SimpleNamespace(
        starting_step=6,
        log=lambda metrics, step: rows.append((step, metrics["step"])),
        finish=lambda exit_code: None,
    )
    log_steps(tmp_path, 0, 2)
    monkeypatch.setattr(specactor.metrics, "_start_wandb", lambda *_, **__: server)
    with Tracker(tmp_path, {}, TrackingConfig(), resume_step=2) as tracker:
        if first == 3:
            tracker.log(3, {"reward/mean": 0.5})
        tracker.complete({"accuracy/eval": 0.25})
        tracker.log(4, {"reward/mean": 0.5})
    assert rows[-2:] == [row, (7, 4)]
    assert [line for line in read_metrics(tmp_path) if "accuracy/eval" in line] == [
        {"step": first, "reward/mean": 0.5 if first == 3 else 2 / 7, "accuracy/eval": 0.25}
        | ({} if first == 3 else {"weights/version": 2})
    ]


def test_a_crash_while_a_line_is_completed_leaves_it_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Tracker(tmp_path, {}, OFF) as tracker:
        tracker.log(0, {"reward/mean": 0.5})

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(OSError, match="No space"):
                tracker.complete({"accuracy/eval": 0.25})
    assert read_metrics(tmp_path) == [{"step": 0, "reward/mean": 0.5}]


def test_an_empty_id_of_a_full_disk_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    wandb = SimpleNamespace(
        init=lambda **of: asked.append(of["id"]) or SimpleNamespace(define_metric=lambda *_, **__: None),
        Settings=dict,
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    (tmp_path / "wandb_id.txt").touch()
    specactor.metrics._start_wandb(tmp_path, {}, TrackingConfig(wandb="offline"), resuming=True)
    assert asked == [(tmp_path / "wandb_id.txt").read_text().strip()]
    assert asked[0]


def test_wandb_that_cannot_start_online_is_a_warning(tmp_path: Path) -> None:
    code = """
        import specactor.metrics
        from pathlib import Path
        from specactor.config import TrackingConfig
        specactor.metrics.SILENT_S = 1
        tracker = specactor.metrics.Tracker(Path("run"), {}, TrackingConfig(wandb="online"))
        tracker.log(0, {"reward/mean": 1.0})
        print("offline" if tracker._run.offline else "online")
        tracker.close()
    """
    done = run_python(code, tmp_path, WANDB_API_KEY="a" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "offline"
    assert "wandb could not start online" in done.stderr
    assert "it goes on offline" in done.stderr
    assert read_metrics(tmp_path / "run") == [{"step": 0, "reward/mean": 1.0}]


def test_memory_of_a_process_tree() -> None:
    block = bytearray(os.urandom(2**20) * 50)
    assert rss_bytes() > len(block)
    assert rss_bytes(children=True) >= rss_bytes() * 0.9
    assert rss_bytes(2**22 + 1) == 0


def test_what_is_logged_of_the_draft_model_is_known(tmp_path: Path) -> None:
    """Names that nobody declared are refused."""
    with Tracker(tmp_path, {}, TrackingConfig(wandb="off")) as tracker:
        for step, (family, names) in enumerate((("drafter/", DRAFTER), ("time/", ("refresh_s", "refresh_limit_s"))), 1):
            tracker.log(step, {family + name: 1.0 for name in names})
        with pytest.raises(SpecActorError, match="unknown name 'drafter/mood'"):
            tracker.log(3, {"drafter/mood": 1.0})
    lines = read_metrics(tmp_path)
    assert len(lines[0]) == 1 + len(DRAFTER)


def test_every_phase_whose_memory_is_planned_has_a_metric() -> None:
    """`_log` makes their names, which runs without a GPU never do."""
    assert {f"memory/gpu_{phase}_bytes" for phase in PHASES} <= set(METRICS)
