"""The measures of a checkout, on one that is small enough to count by hand."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import measure
from specactor.recipes import load
from tests.test_recipes import count_leaves

ALONE = '''"""A module."""

LIMIT = -3


class Thing:
    """Of something."""

    # why
    def is_what(self) -> None:
        """It does two things."""
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    files = {
        "specactor/__init__.py": "",
        "specactor/alone.py": ALONE,
        "specactor/twice.py": "from specactor.alone import Thing\n\n\ndef f() -> None:\n" + "    f()\n" * 51,
        "specactor/never_added.py": "x = 1\n",
        "tests/test_alone.py": "\n\n",
        "README.md": "# Thing\n\n| a | b |\n| --- | --- |\n\n![picture](x.png)\n",
        "docs/guide.md": "three words here\n",
        "docs/results/speed.md": "two words\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for words in (["init", "-q"], ["add", *(name for name in files if "never" not in name)]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    return tmp_path


def test_measures_of_a_checkout_that_can_be_counted_by_hand(checkout: Path) -> None:
    assert measure.measure(checkout) == {
        "library files": 3,
        "library lines": 11 + 55,
        "library code lines": 3 + 53,
        "median code lines per file": 3,
        "files of 4-60 code lines": 1,
        "modules with one importer": 1,
        "classes": 1,
        "functions": 2,
        "functions over 50 lines": 1,
        "module-level numbers": 1,
        "docstring words": 2 + 2 + 4,
        "docstrings without a subject, share": 0.333,
        "comment lines": 1,
        "test lines": 2,
        "benchmark lines": 0,
        "README words": 2 + 5 + 5 + 1,
        "README table rows": 2,
        "README pictures": 1,
        "docs words": 3,
        "results words": 2,
    }


def test_settings_are_those_of_the_help_and_known_to_be_changed_or_not() -> None:
    config = load(["dapo", "--train.steps", "7"])
    changed = measure.changed_settings(config)
    assert len(changed) == count_leaves(config)
    assert changed["train.steps"]
    assert changed["algorithm.dynamic_sampling"]
    assert not changed["algorithm.kl_coef"]
    settings = measure.measure_settings()["settings"]
    assert settings == count_leaves(load(["quickstart_plain"]))
