"""What the README shows is so: its Python runs, its pictures are of stored results, its links lead somewhere."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pictures import PICTURES, spans, stored_trace
from benchmarks.plots import CONTESTANTS, speeds
from benchmarks.results import stored
from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer
from specactor.data.verifiers import get_verifier
from specactor.errors import DataError
from specactor.recipes import load
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.registry import check_drafters
from specactor.run import _problems
from specactor.types import Problem

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_its_reward_and_its_drafter_run() -> None:
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    mine: dict[str, Any] = {}
    exec(code, mine)
    problem = Problem(index=0, prompt="37=", prompt_ids=(1,), answer="73", verifier="exact", metadata={})
    assert [mine["score"](text, problem) for text in ("73", "37")] == [1.0, 0.0]
    assert get_verifier("exact")("73", problem) == 1.0
    sequence = DraftSequence(request_id="a", prompt_ids=(1, 2), output_ids=[5, 6])
    assert mine["Repeat"]().propose([sequence], [3]) == [[6, 6, 6]]


def test_its_data_can_be_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own recipe and settings, with its row, and its reward and drafter in the folder where the run starts."""
    [code] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    [(row, words)] = re.findall(r"^# (\{.*\}) +(\w+ --data.*)$", code, re.MULTILINE)
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another test
    (tmp_path / "problems.jsonl").write_text(row)
    (tmp_path / "held_out.jsonl").write_text(row.replace("37", "48"))
    make_char_tokenizer(tmp_path)
    others = [folder for folder in sys.path if folder and not Path(folder, "mine.py").exists()]  # "": wherever it is
    monkeypatch.setattr(sys, "path", others)
    monkeypatch.chdir(tmp_path)
    problems, held_out = _problems(load(words.split()), load_tokenizer(tmp_path))
    assert [problem.prompt for problem in (*problems, *held_out["eval"])] == ["37=", "48="]
    [drafters] = re.findall(r"^# (--rollout.speculation.mode .*)$", code, re.MULTILINE)
    drafting = load([*words.split(), *drafters.split()])
    check_drafters(drafting.rollout.speculation)
    with pytest.raises(DataError, match="prompt_template"):  # which a recipe of another task has
        _problems(load(["dapo", *words.split()[1:]]), load_tokenizer(tmp_path))


def test_pages_stay_short() -> None:
    """So that somebody reads them: what a page gains another loses."""
    assert len(README.split()) <= 1_000
    assert sum(len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")) <= 9_000


def test_tables_have_as_many_columns_as_heads() -> None:
    """Or they are shown as text."""
    for page in [ROOT / "README.md", ROOT / "tests" / "README.md", *(ROOT / "docs").rglob("*.md")]:
        lines = page.read_text().splitlines()
        for head, line in itertools.pairwise(lines):
            if re.fullmatch(r"\|( ?:?-+:? ?\|)+", line):
                assert line.count("|") == re.sub(r"`[^`]*`", "", head).count("|"), (page, head)


def anchors(page: Path) -> set[str]:
    """Places in a page that a link can name, as GitHub writes headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_its_links_lead_to_headings() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = [
        (page, page.parent / file if file else page, anchor)
        for page in pages
        for file, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)]+)\)", page.read_text())
    ]
    assert len(named) > 10
    assert [(page.name, anchor) for page, target, anchor in named if anchor not in anchors(target)] == []


def test_its_links_lead_to_files() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.name}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert broken == []


def test_its_pictures_are_of_stored_results() -> None:
    by_contestant = speeds(stored("speculation_speed"))
    assert list(by_contestant) == list(CONTESTANTS)
    # Four cells of batch 16: two models, new prompts and known ones.
    assert by_contestant["auto"][16] == pytest.approx((1.12 * 1.26 * 1.64 * 2.16) ** (1 / 4))
    rounds = [event for event in spans(stored_trace()) if event["name"] == "verify"]
    assert rounds[0]["start"] == 0.0
    assert sum(event["args"]["rows"] > event["args"]["requests"] for event in rounds) > 20
    assert {f"{name}.svg" for name in re.findall(r"docs/pictures/(\w+)\.svg", README)} == {
        path.name for path in PICTURES.iterdir()
    }
