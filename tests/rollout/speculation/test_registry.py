"""Names of drafters: those that no engine could make a drafter of are refused before one starts, and none is made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specactor import run
from specactor.config import Config, SpeculationConfig
from specactor.errors import ConfigError, SpecActorError
from specactor.recipes import load
from specactor.rollout.speculation.registry import check_drafters

CODE = """
from specactor.rollout.speculation.drafter import Drafter

class Repeat(Drafter):
    name = "repeat"
    def __init__(self): raise AssertionError("made")

class Wants(Drafter):
    def __init__(self, needed): pass

class Other: pass

def made(): return Repeat()
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with drafters of a user's."""
    (tmp_path / "my_drafters.py").write_text(CODE)
    (tmp_path / "forgets_an_import.py").write_text("class Repeat(Drafter): pass")
    (tmp_path / "only_in_an_engine.py").write_text("raise RuntimeError('no scheduler here')")
    monkeypatch.syspath_prepend(tmp_path)
    return "my_drafters"


def with_drafters(*names: str, **fields: object) -> Config:
    base = load(["quickstart_plain"])
    speculation = SpeculationConfig(mode="auto", drafters=names, **fields)  # type: ignore[arg-type]
    return replace(base, rollout=replace(base.rollout, speculation=speculation))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("sufix", "Did you mean suffix?"),
        ("suffix,model", "Separate names by blanks."),
        ("no_such_module:Repeat", "No module named 'no_such_module'"),
        ("my_drafters:Repeet", "has no attribute 'Repeet'"),
        ("my_drafters:Wants", "missing a required argument: 'needed'"),
        ("forgets_an_import:Repeat", "name 'Drafter' is not defined"),
        ("my_drafters:Other", "expected a subclass of specactor.rollout.speculation.drafter.Drafter"),
    ],
)
def test_a_run_refuses_a_wrong_name_before_an_engine_starts(name: str, told: str, mine: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout.speculation.drafters: got ") as caught:
        run._checked(with_drafters("suffix", name), 2)
    assert told in str(caught.value)


def test_what_engines_can_make_passes(mine: str) -> None:
    names = ("suffix", "previous", f"{mine}:Repeat", f"{mine}:made", "only_in_an_engine:Repeat")
    run._checked(with_drafters(*names), 2)
    check_drafters(SpeculationConfig(mode="off", drafters=("sufix",)))


@pytest.mark.parametrize("text", ["", "{}", '{"version": 0}'])
def test_a_cost_table_is_read_in_every_mode(text: str, tmp_path: Path) -> None:
    table = tmp_path / "costs.json"
    if text:
        table.write_text(text)
    for mode in ("coupled", "auto"):
        with pytest.raises(SpecActorError, match=r"cost.table: got"):
            check_drafters(SpeculationConfig(mode=mode, cost_table=str(table)))  # type: ignore[arg-type]
