"""What `specactor replay` and `specactor diff` say and write without training anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from examples import quickstart
from specactor import recipes
from specactor.config import CheckpointConfig, Config, ModelConfig, TrackingConfig
from specactor.errors import ConfigError, DataError
from specactor.recipes import imports_of, keep_imports, to_json
from specactor.replay import command, records
from tests.replay.test_compare import RUN, Made, faulty, samples


def write_run(folder: Path, steps: list[records.StepRecord], config: Config | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_json(config or quickstart.plain())))
    for record in steps:
        records.write(folder, record)
    return folder


def called(what: Callable[[list[str], Console], int], *arguments: object) -> tuple[int, str]:
    shown = StringIO()
    code = what([str(argument) for argument in arguments], Console(file=shown, width=200))
    return code, shown.getvalue()


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be started."""
    started: list[Any] = []

    def run(words: list[str], *, env: dict[str, str], check: bool) -> Any:
        started.append((words, env))
        return SimpleNamespace(returncode=7)

    monkeypatch.setattr(command, "subprocess", SimpleNamespace(run=run))
    return started


def test_a_difference_has_a_page_with_the_token_in_its_context(tmp_path: Path) -> None:
    wrong = faulty(2, samples=samples(2, Made(wrong_at=20), lambda g, k: (g, k) == (1, 2)))
    a, b = write_run(tmp_path / "a<b", RUN), write_run(tmp_path / "other", wrong)
    code, shown = called(command.diff, a, b)
    assert code == 1
    assert f"page: {b / 'diff.html'}" in shown
    page = (b / "diff.html").read_text()
    assert "group 1, sample 2 (problem 1), token 20 of 40" in page
    assert "speculation: the second run emitted a token that its noise does not pick" in page
    assert page.count("<mark>") == 2, "in both responses"
    assert "20 differs" in page
    assert "a&lt;b: log-prob" in page
    assert "<script" not in page
    assert "default-src 'none'" in page
    code, shown = called(command.diff, a, a, "--out", tmp_path / "none.html")
    assert code == 0
    assert not (tmp_path / "none.html").exists()
    with pytest.raises(DataError, match=r"cannot be written \(No such file or directory\).*--out FILE"):
        called(command.diff, a, b, "--out", tmp_path / "gone" / "page.html")
    for record in RUN:
        records.write(b, record)
    assert called(command.diff, a, b)[0] == 0
    assert not (b / "diff.html").exists(), "it showed what is no more"


def test_a_difference_in_what_was_not_kept_has_a_page_too(tmp_path: Path) -> None:
    wrong = faulty(2, samples=samples(2, Made(model=1), is_whole=False))
    code, _ = called(command.diff, write_run(tmp_path / "a", RUN), write_run(tmp_path / "b", wrong))
    assert code == 1
    assert "not kept whole" in (tmp_path / "b" / "diff.html").read_text()
    other = faulty(2, metrics={**RUN[2].metrics, "loss": 7.0})
    code, _ = called(command.diff, tmp_path / "a", write_run(tmp_path / "c", other), "--out", tmp_path / "c.html")
    assert code == 1
    assert "training: loss or gradient" in (tmp_path / "c.html").read_text()


def test_a_replay_says_what_it_will_do(tmp_path: Path, torchrun: list[Any]) -> None:
    run, base = write_run(tmp_path / "run", RUN), '{"model": "runs/.warm-up/warmup-1"}'
    (run / "base.json").write_text(base)
    with pytest.raises(DataError, match="torchrun ended with 7"):
        called(command.replay, run, "--step", 3, "--sample", "1.2", "0.3")
    assert (tmp_path / "run.replay-000003" / "base.json").read_text() == base, "it starts from the same model"
    words, _ = torchrun[-1]
    assert words[words.index("--nproc-per-node") + 1] == "2", "as many as have weights in the records"
    assert words[words.index("--resume") + 1] == "off", "no checkpoint is kept"
    assert json.loads((tmp_path / "run.replay-000003" / "replay.json").read_text()) == {
        "step": 3,
        "alone": ["1.2", "0.3"],
    }
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    with pytest.raises(DataError, match="torchrun ended with 7"):
        called(command.replay, run, "--step", 3)
    words, _ = torchrun[-1]
    assert words[words.index("--resume") + 1].endswith("step-000002")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--step", 0), "--step: got 0, expected a step that sampled"),
        (("--step", 9), "cannot be read (No such file or directory). Runs keep records with tracking.record"),
        (("--step", 2, "--group", "4"), "--group and --sample: got '4', expected a group of 0..3"),
        (("--step", 2, "--sample", "1.9"), "--group and --sample: got '1.9', expected a group of 0..3"),
    ],
)
def test_what_was_not_recorded_is_one_line(tmp_path: Path, arguments: tuple[object, ...], told: str) -> None:
    with pytest.raises((ConfigError, DataError)) as error:
        called(command.replay, write_run(tmp_path / "run", RUN), *arguments)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    config = replace(quickstart.plain(), model=ModelConfig(path=str(tmp_path / "gone")))
    run = write_run(tmp_path / "run", RUN, config)
    with pytest.raises(ConfigError, match=r"model\.path: got .*gone.*Put it back, or name its copy with --model\.path"):
        called(command.replay, run, "--step", 2)


def test_groups_drawn_ahead_are_repeated_with_dynamic_sampling(tmp_path: Path, torchrun: list[Any]) -> None:
    """It keeps the first useful groups in the order of the data; without it the first that are complete are kept."""
    config = quickstart.plain()
    ahead = replace(config, rollout=replace(config.rollout, oversample=2.0))
    with pytest.raises(ConfigError, match=r"rollout\.oversample: got 2\.0, expected 1"):
        called(command.replay, write_run(tmp_path / "first", RUN, ahead), "--step", 2)
    dynamic = replace(ahead, algorithm=replace(ahead.algorithm, dynamic_sampling="unequal"))
    with pytest.raises(DataError, match="torchrun ended with 7"):
        called(command.replay, write_run(tmp_path / "dynamic", RUN, dynamic), "--step", 2)


def test_bits_are_promised_where_engines_have_them() -> None:
    plain = quickstart.plain()
    engine = replace(plain.rollout.engine, extra_args={"attention_backend": "triton"})
    assert command._guarantee(plain).startswith("same bits")
    other = replace(plain, rollout=replace(plain.rollout, engine=engine))
    assert command._guarantee(other).startswith("same law"), "float32 on CPUs, but not our own attention"


def test_a_missing_checkpoint_is_told_before_the_start(tmp_path: Path, torchrun: list[Any]) -> None:
    shown = StringIO()
    with pytest.raises(DataError):
        command.replay([str(write_run(tmp_path / "run", RUN)), "--step", "3"], Console(file=shown, width=300))
    assert "steps 1 to 3 from the start, with its warm-up, since no checkpoint before it is kept" in shown.getvalue()
    assert "--checkpoint.keep and --checkpoint.every keep more" in shown.getvalue()


def test_a_run_of_another_version_is_one_line(tmp_path: Path) -> None:
    newest = msgspec.structs.replace(RUN[-1], libraries={"specactor": "99.0"})
    run = write_run(tmp_path / "run", [*RUN[:-1], newest])
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "of_the_future": {"x": 1}}))
    with pytest.raises(DataError) as error:
        called(command.replay, run, "--step", 2)
    told = str(error.value)
    assert "unknown key of_the_future" in told
    assert "written by specactor 99.0; this is" in told
    assert told.endswith("to the version that wrote it.")
    file = records.file_of(run, 2)
    raw = file.read_bytes()
    file.write_bytes(raw[:4] + (9).to_bytes(4, "little") + raw[8:])
    with pytest.raises(DataError, match=r"got format 9, expected 1\. Read it with the version that wrote it"):
        called(command.diff, run, run)


def test_a_tampered_record_is_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", RUN)
    file = records.file_of(run, 2)
    raw = bytearray(file.read_bytes())
    raw[-9] ^= 1
    file.write_bytes(raw)
    with pytest.raises(DataError, match=r"cut or changed after it was written\. Use a copy of the run"):
        called(command.diff, run, run)


def test_hooks_beside_a_recipe_are_found_by_its_replay(
    tmp_path: Path, torchrun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From whatever folder it is started; and a folder that is gone is named."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "my_recipe.py").write_text("from examples.quickstart import recipe\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    recipes.load([str(mine / "my_recipe.py")])
    run = write_run(tmp_path / "run", RUN)
    keep_imports(run)
    assert str(mine) in imports_of(run)
    assert not any("site-packages" in folder for folder in imports_of(run))
    shown = StringIO()
    with pytest.raises(DataError):
        command.replay([str(run), "--step", "2"], Console(file=shown, width=300))
    assert str(mine) in torchrun[-1][1]["PYTHONPATH"].split(os.pathsep)
    assert "is gone" not in shown.getvalue()
    (mine / "my_recipe.py").unlink()
    for folder in mine.glob("__pycache__"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    mine.rmdir()
    with pytest.raises(DataError):
        command.replay([str(run), "--step", "2"], Console(file=shown, width=300))
    assert (
        f"{mine}: is gone. If the run imported functions or classes of yours from it, put it back" in shown.getvalue()
    )


def test_what_is_installed_is_not_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment may be the project's own folder, and names may begin alike."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {name: str(tmp_path / "lib" / "site-packages") for name in names} | {"data": str(tmp_path)}
    own = [tmp_path / "src", tmp_path / "lib" / "site-packages-of-mine"]
    folders = [*own, tmp_path / "lib" / "site-packages" / "deep"]
    for folder in folders:
        folder.mkdir(parents=True)
    monkeypatch.setattr(recipes.sysconfig, "get_paths", lambda: paths)
    monkeypatch.setattr(sys, "path", [str(folder) for folder in folders])
    keep_imports(tmp_path / "run")
    assert imports_of(tmp_path / "run") == [str(folder) for folder in own]


@pytest.mark.parametrize(
    ("every", "keep", "steps", "told"),
    [
        (10, 2, 40, "of the last 20 steps from a checkpoint, with at most 9 trained again; of the 40 steps that have"),
        (1, 9, 4, "replay: of the last 4 steps from a checkpoint, with at most 0 trained again; checkpoint.every 1"),
        (0, 2, 5000, "replay: of the 2,000 steps that have records from the start, with all before them; "),
    ],
)
def test_a_run_says_how_far_back_it_can_be_repeated(every: int, keep: int, steps: int, told: str) -> None:
    base = quickstart.plain()
    checkpoints = CheckpointConfig(every=every, keep=keep)
    config = replace(base, checkpoint=checkpoints, train=replace(base.train, steps=steps))
    assert told in records.reach(config)
    off = replace(config, tracking=TrackingConfig(record="off"))
    assert records.reach(off) == "replay: of no step, with tracking.record off"


WRITER = """
import os, sys, time
from pathlib import Path
import msgspec
from specactor.replay import records
run = Path(sys.argv[1])
record = records.read(records.file_of(run, 1))
def half(descriptor):
    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
    print("in work", flush=True)
    time.sleep(600)
for step in range(2, 7):
    if step == 6:
        os.fsync = half
    records.write(run, msgspec.structs.replace(record, step=step))
"""


def test_kill_9_while_writing_loses_at_most_the_step_in_work(tmp_path: Path) -> None:
    """It strikes when half of the record of step 6 is written."""
    records.write(tmp_path, RUN[1])
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "in work\n"
        os.kill(writer.pid, signal.SIGKILL)
    steps = records.steps_of(tmp_path)
    assert steps == [1, 2, 3, 4, 5]
    assert [records.read(records.file_of(tmp_path, step)).step for step in steps] == steps
    records.write(tmp_path, msgspec.structs.replace(RUN[1], step=6))
    assert records.steps_of(tmp_path) == [*steps, 6], "what was left of it is no hindrance"
