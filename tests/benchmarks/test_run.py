"""Running several benchmarks: a failure is told at the end and stops nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import run


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Benchmarks named good, bad and last, in a package of their own; each leaves a file."""
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, code in (("good", 0), ("bad", 3), ("last", 0)):
        script = f"import sys\nopen({str(tmp_path / name)!r}, 'w').close()\nsys.exit({code})\n"
        (package / f"{name}.py").write_text(script)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "BENCHMARKS", {"good": "a", "bad": "b", "last": "c"})
    return tmp_path


def test_goes_on_after_a_failure_and_exits_non_zero(three: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([]) == 1
    assert (three / "last").exists()
    assert "failed: bad" in capsys.readouterr().err


def test_runs_only_the_named(three: Path) -> None:
    assert run.main(["last"]) == 0
    assert not (three / "good").exists()


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["nonsense"])
    assert "nonsense" in capsys.readouterr().err


def test_help_names_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text and meaning in text for name, meaning in run.BENCHMARKS.items())
