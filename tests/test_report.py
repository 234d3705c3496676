"""The page of a run, against metrics written by hand, read back as a browser would."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from specactor import report
from specactor.errors import DataError

EVIL = '<script>alert(1)</script> & "quotes" \''
Line = dict[str, object]

START: Line = {"step": 0, "accuracy/eval": 0.25, "time/data_s": 4.0, "time/eval_s": 6.0, "memory/rank_rss_bytes": 2**30}
STEPS: list[Line] = [
    {
        "step": step,
        "reward/mean": step / 20,
        "accuracy/train": 0.5,
        "policy/entropy": 0.1,
        "response/length_mean": 20.0,
        "agreement/logprob_gap_max": 1e-6 * step,
        "rollout/tokens": 100 * step,
        "rollout/tokens_per_s": 50.0 * step,
        "time/rollout_s": 2.0,
        "time/train_s": 1.0 if step > 1 else None,
        "memory/rank_rss_bytes": 3 * 2**29,
    }
    for step in range(1, 11)
]
OF_SUFFIX: Line = {
    "drafted": 60,
    "accepted": 40,
    "wasted": 20,
    "accept_rate": 2 / 3,
    "accept_length": 3.0,
    "share_of_rounds": 0.75,
    "draft_s": 0.5,
    "verify_s": 1.5,
    "predicted_s": 1.0,
    "measured_s": 2.0,
    "drafted_at_1": 40,
    "accepted_at_1": 30,
    "drafted_at_2": 20,
    "accepted_at_2": 10,
}


def speculative(values: Line = OF_SUFFIX, drafter: str = "suffix") -> Line:
    return {f"speculation/{drafter}/{key}": value for key, value in values.items()}


def write_run(folder: Path, lines: list[Line], *, config: object = None, summary: bool = False) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if summary:
        (folder / "summary.json").write_text("{}")
    return folder


class Page(HTMLParser):
    """What a browser would make of a page: its elements, tables and pictures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        """Of src, href and event handlers."""
        self.pictures: dict[str, bytes] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, list[str]] = {}
        self._caption = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = {name: value or "" for name, value in attrs}
        self.links += [value for name, value in given.items() if name in ("src", "href") or name.startswith("on")]
        if tag == "img" and given["src"].startswith("data:image/svg+xml;base64,"):
            self.pictures[given["alt"].partition(",")[0]] = base64.b64decode(given["src"].partition(",")[2])
        if tag == "tr":
            self.tables[self._caption].append([])
        if tag in ("th", "td"):
            self.tables[self._caption][-1].append("")

    def handle_data(self, data: str) -> None:
        tag = self.tags[-1] if self.tags else ""
        if not data.strip():
            return
        if tag in ("th", "td"):
            self.tables[self._caption][-1][-1] += data
        elif tag == "caption":
            self._caption = data
            self.tables[data] = []
        self.texts.setdefault(tag, []).append(data)

    def rows(self, caption: str) -> dict[str, list[str]]:
        return {row[0]: row[1:] for row in self.tables[caption]}


def read_page(folder: Path) -> Page:
    return Page(report.page(report.Run.read(folder)))


def drawn(run: report.Run, panels: list[report.Panel], title: str) -> Axes:
    draw: Callable[[Axes, report.Run], None] = next(panel[2] for panel in panels if panel[0] == title)
    axes = Figure().add_subplot()
    draw(axes, run)
    return axes


def curve(axes: Axes) -> tuple[list[float], list[float]]:
    x, y = axes.lines[0].get_data()
    return [float(v) for v in x], [float(v) for v in y]


def test_tables_hold_what_the_run_wrote(tmp_path: Path) -> None:
    config = {
        "name": "first",
        "seed": 7,
        "model": {"path": "/models/small", "dtype": "float32"},
        "data": {"train": "count_bits"},
        "parallel": {"tensor": 1, "pipeline": 2, "virtual_pipeline": None, "expert": 4, "engines": 3},
        "algorithm": {"advantage": "grpo", "loss": "gspo", "aggregation": "token_mean"},
        "rollout": {"speculation": {"mode": "auto", "drafters": ["suffix", "model"]}},
        "train": {"steps": 10, "max_logprob_gap": 1e-4},
    }
    lines = [START, *STEPS[:-1], STEPS[-1] | {"accuracy/eval": 0.75}]
    page = read_page(write_run(tmp_path / "a", lines, config=config, summary=True))

    assert page.texts["h1"] == ["first"]
    assert "Finished: 10 of 10 steps" in page.texts["p"]
    assert page.rows("Recipe") == {
        "Model": ["/models/small, float32"],
        "Task": ["count_bits"],
        "Layout": ["pipeline 2, expert 4"],
        "Engines": ["3"],
        "Algorithm": ["grpo, gspo, token_mean"],
        "Speculation": ["auto, suffix, model"],
        "Seed": ["7"],
        "Steps": ["10"],
    }
    assert page.rows("Results") == {
        "Held-out accuracy before": ["0.250"],
        "Held-out accuracy after": ["0.750 after step 10"],
        "Reward": ["0.150 in the first 5 steps, 0.400 in the last"],
        "Rollout tokens/s": ["275"],  # 5500 tokens in 20 s, not the mean of the steps' rates of 50 to 500
        "Largest engine-trainer gap, nats": ["1.0e-05"],
        "Bound of that gap": ["0.0001"],
    }
    assert page.rows("Seconds") == {
        "phase": ["in all", "per RL step"],
        "data": ["4.0", "-"],
        "rollout": ["20.0", "2.000"],
        "train": ["9.0", "0.900"],
        "eval": ["6.0", "0.000"],  # before the first step
    }


def test_pictures_are_whole_and_the_page_needs_nothing_else(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [START, STEPS[0] | speculative()])
    page = read_page(folder)
    assert list(page.pictures) == [
        *("Accuracy", "Reward", "Response length", "Entropy", "Engine against trainer", "Seconds per phase"),
        *("Rollout speed", "Memory", "Accept rate", "Accept length", "Draft tokens", "Acceptance by position"),
        *("Share of rounds", "Drafting and verifying", "Rounds"),
    ]
    for picture in page.pictures.values():
        root = ElementTree.fromstring(picture)
        assert root.tag.endswith("}svg")
        assert not any(element.tag.endswith(("}script", "}image")) for element in root.iter())
    assert not {"script", "link", "iframe", "object", "base"} & set(page.tags)
    assert page.links
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert "default-src 'none'" in report.page(report.Run.read(folder))
    assert report.page(report.Run.read(folder)) == report.page(report.Run.read(folder))


def test_texts_of_files_are_escaped(tmp_path: Path) -> None:
    config = {
        "name": EVIL,
        "model": {"path": "</td><script>x</script>"},
        "note": "</pre><script>y</script>",
        "seed": EVIL,
    }
    lines = [START, STEPS[0] | speculative(drafter="<img src=x onerror=z>") | speculative(drafter="$\\frac{$ </svg>")]
    folder = write_run(tmp_path / "a", lines, config=config)
    text = report.page(report.Run.read(folder))
    page = Page(text)

    assert "script" not in page.tags
    assert len(page.links) == len(page.pictures) == 15
    assert page.texts["h1"] == page.texts["title"] == [EVIL]
    assert page.rows("Recipe")["Seed"] == [EVIL]
    assert page.rows("Recipe")["Model"] == ["</td><script>x</script>"]
    assert json.loads("".join(page.texts["pre"])) == config
    assert "<img src=x onerror=z>" in page.rows("Over the run, means over its steps")

    wrong = Page(text.replace(report.escape(EVIL), EVIL))
    assert "script" in wrong.tags, "this parser sees a script that was not escaped"


def test_the_section_on_speculation_appears_only_with_its_metrics(tmp_path: Path) -> None:
    page = read_page(write_run(tmp_path / "off", [START, *STEPS]))
    assert page.texts["h2"] == ["Run", "Training"]

    off: Line = {"share_of_rounds": 0.5, "draft_s": 0.0, "verify_s": 2.0}
    lines = [
        STEPS[0] | speculative(),
        STEPS[1] | speculative(OF_SUFFIX | {"drafted": 140, "accepted": 10, "accept_length": None}),
        STEPS[2] | speculative(off, "off"),
    ]
    page = read_page(write_run(tmp_path / "on", [START, *lines]))
    assert page.texts["h2"] == ["Run", "Training", "Speculation"]
    head, *rows = page.tables["Over the run, means over its steps"]
    assert [dict(zip(head, row, strict=True)) for row in rows] == [
        {
            "drafter": "suffix",
            "drafted": "200",
            "accepted": "50",
            "wasted": "40",
            "draft s": "1.00",
            "verify s": "3.00",
            "predicted s / measured s": "0.500",
            "accept rate": "0.250",  # of the sums
            "mean accept length": "3.000",
            "mean share of rounds": "0.500",  # 0.75, 0.75 and none in the third step
        },
        dict.fromkeys(head, "-")
        | {"drafter": "off", "draft s": "0.00", "verify s": "2.00", "mean share of rounds": "0.167"},
    ]


def test_missing_metrics_are_not_drawn(tmp_path: Path) -> None:
    only = {"step": 1, "reward/mean": 1.0, "policy/entropy": None} | speculative({"accept_rate": 0.5})
    page = read_page(write_run(tmp_path / "a", [only]))
    assert list(page.pictures) == ["Reward", "Accept rate"]
    assert page.rows("Results")["Held-out accuracy before"] == ["-"]
    assert page.rows("Results")["Reward"] == ["1.000 on average"]
    assert "Recipe" not in page.tables


def test_each_held_out_set_is_shown_with_what_its_samples_say(tmp_path: Path) -> None:
    def evaluated(step: int, eval_: float, aime: float) -> Line:
        own = {"accuracy/eval": eval_, "accuracy/aime-24": aime, "score/eval": eval_, "accuracy/eval/pass@2": 1.0}
        return {"step": step} | own

    lines = [evaluated(0, 0.25, 0.125), STEPS[0], STEPS[1] | evaluated(2, 0.5, 0.375)]
    folder = write_run(tmp_path / "a", lines, config={"eval": {"samples": 2}})
    page, run = read_page(folder), report.Run.read(folder)
    assert page.rows("Results")["accuracy/aime-24"] == ["0.125 after step 0, 0.375 after step 2"]
    assert {"Accuracy", "One of K samples is right", "Held-out score"} <= page.pictures.keys()
    shown = drawn(run, report.training(), "Accuracy").lines
    assert [line.get_label() for line in shown] == ["training samples", "held-out, mean of 2", "aime-24"]
    assert [list(line.get_ydata()) for line in shown[1:]] == [[0.25, 0.5], [0.125, 0.375]]


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "running", [START, STEPS[0]], config={"train": {"steps": 10}})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    page = read_page(folder)
    assert page.texts["h1"] == ["running"]
    assert "Not finished: 1 of 10 steps" in page.texts["p"]
    assert page.rows("Results")["Held-out accuracy after"] == ["-"]

    (folder / "summary.json").write_text("{}")  # of the run before it was given more steps
    assert report.Run.read(folder).state == "Not finished: 1 of 10 steps"


def test_what_is_not_finite_is_a_hole_and_is_said(tmp_path: Path) -> None:
    lines = [*STEPS[:2], STEPS[2] | {"agreement/logprob_gap_max": None, "policy/entropy": math.inf}, STEPS[3]]
    run = report.Run.read(write_run(tmp_path / "a", lines, config={"train": {"max_logprob_gap": 1e-4}}))
    gap = dict(report.results(run))["Largest engine-trainer gap, nats"]
    assert gap == "4.0e-06, not finite at 1 of 4 steps"

    axes = drawn(run, report.training(), "Engine against trainer")
    steps, values = curve(axes)
    assert steps == [1, 2, 3, 4]
    assert values == pytest.approx([1e-6, 2e-6, math.nan, 4e-6], nan_ok=True)
    assert axes.get_yscale() == "log"
    assert list(axes.lines[1].get_ydata()) == [1e-4, 1e-4]
    assert curve(drawn(run, report.training(), "Entropy"))[1] == pytest.approx([0.1, 0.1, math.nan, 0.1], nan_ok=True)


def test_no_bound_is_drawn_where_there_is_none(tmp_path: Path) -> None:
    run = report.Run.read(write_run(tmp_path / "a", STEPS, config={"train": {"max_logprob_gap": math.inf}}))
    assert len(drawn(run, report.training(), "Engine against trainer").lines) == 1


def test_what_is_drawn(tmp_path: Path) -> None:
    lines = [START, *(line | speculative() for line in STEPS[:2])]
    run = report.Run.read(write_run(tmp_path / "a", lines))
    training, speculation = report.training(), report.speculation(run)

    assert curve(drawn(run, training, "Memory")) == ([0, 1, 2], [1.0, 1.5, 1.5])
    phases = stairs(drawn(run, training, "Seconds per phase"))
    assert phases == {"rollout": ([0.5, 1.5, 2.5], [2, 2], [0, 0]), "train": ([0.5, 1.5, 2.5], [2, 3], [2, 2])}
    tokens = stairs(drawn(run, speculation, "Draft tokens"))
    assert tokens["suffix: accepted"][1] == [40, 40]
    assert tokens["suffix: wasted"][1:] == ([60, 60], [40, 40]), "what is drafted is accepted or wasted"
    bars = drawn(run, speculation, "Acceptance by position").patches
    assert [bar.get_x() + bar.get_width() / 2 for bar in bars] == pytest.approx([1, 2])
    assert [bar.get_height() for bar in bars] == [0.75, 0.5]
    rounds = drawn(run, speculation, "Rounds")
    assert curve(rounds) == ([1.0, 1.0], [2.0, 2.0])
    assert (rounds.get_xlabel(), rounds.get_ylabel()) == ("predicted", "measured")


def stairs(axes: Axes) -> dict[str, tuple[list[float], list[float], list[float]]]:
    """Label -> (edges, top, base) of the layers of a stack."""
    layers: list[Any] = list(axes.patches)
    parts = [(str(layer.get_label()), layer.get_data()) for layer in layers]
    return {label: (list(data.edges), list(data.values), list(data.baseline)) for label, data in parts}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "got no metrics.jsonl, expected the folder of a run"),
        ({"metrics.jsonl": ""}, "got an empty metrics.jsonl"),
        ({"metrics.jsonl": '{"step": 1'}, "got an empty metrics.jsonl"),
        ({"metrics.jsonl": '{"loss": 1}\n'}, "KeyError"),
        ({"metrics.jsonl": "[1]\n"}, "AttributeError"),
        ({"metrics.jsonl": '{"step": 1}\n', "config.json": "{"}, "JSONDecodeError"),
        ({"metrics.jsonl": '{"step": 1}\n', "config.json": "[1]"}, "TypeError"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(files: dict[str, str], reason: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        report.write(tmp_path)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path}: got ")
    assert reason in said
    assert "\n" not in said
    assert "Name for example runs/quickstart" in said
    assert not (tmp_path / "report.html").exists()


def test_what_drafter_processes_say_is_drawn_where_they_are(tmp_path: Path) -> None:
    titles = ("Drafting ahead", "Late drafts and messages", "Drafter processes")
    figures = {"drafted_ahead": 90, "wasted_ahead": 30, "stale_tails": 3, "utilisation": 0.25}
    lines = [step | speculative(OF_SUFFIX | figures, "decoupled") for step in STEPS]
    with_them = report.page(report.Run.read(write_run(tmp_path / "with", [START, *lines])))
    bare = [step | speculative() for step in STEPS]
    without = report.page(report.Run.read(write_run(tmp_path / "without", [START, *bare])))
    assert [title in with_them for title in titles] == [True] * 3
    assert [title in without for title in titles] == [False] * 3
