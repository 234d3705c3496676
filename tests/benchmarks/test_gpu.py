"""What is run on a machine with a GPU: its stages go through on a CPU, in small; what differs there is told."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_large, gpu_sync
from benchmarks.gpu_sync import turns

EQUAL = {"responses": 8, "tokens": 160, "differ": 0, "bits": 0}


@pytest.mark.deep
@pytest.mark.processes
def test_all_stages_go_through_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sync, "LIMIT_S", 0.0)
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in gpu.STAGES}
    assert found["exact"]["acceptance 0.9, window 4"]["accepted"] > found["exact"]["acceptance 0, window 4"]["accepted"]
    assert {"1 x 0", "8 x 4"} <= set(found["rows"])
    assert found["job"]["float32"]["steps"] == 2
    assert {"1", "3", "8"} == set(found["speed"]["rates"])
    assert {"1", "8", "4 long"} == set(found["large"]["rates"])
    assert found["speed"]["differ"] == found["large"]["differ"] == 0
    sync = found["sync"]
    assert set(sync) == set(gpu_sync.FIGURES)
    assert len(sync["seconds"]) == len(sync["memcpy_gb_per_s"]) == 1, "its time was over after the first push"
    assert list(sync["handed_over"]) == ["release", "resume weights", "push", "resume the rest"]


def test_pushes_end_with_their_time_whatever_they_take() -> None:
    """Ranks stop at the same push: each asks all of them before it."""
    asked: list[bool] = []

    def is_over(here: bool) -> bool:
        asked.append(here)
        return here or len(asked) == 4

    assert list(turns(500, 1e9, is_over)) == [0, 1, 2, 3], "another rank's time is over"
    assert asked == [False] * 4
    assert list(turns(500, 0.0, is_over)) == [0], "one is measured in any case"
    assert list(turns(3, 1e9, lambda here: here)) == [0, 1, 2]


def test_the_line_of_a_sync_has_every_figure() -> None:
    of = {"seconds": 0.25, "gb": 12.5}
    found = {"seconds": [0.1, 0.2, 0.3], "gb_per_s": [13.0, 12.0, 11.0], "memcpy_gb_per_s": [900.0, 901.0, 902.0]}
    found |= {"first_s": 3.5, "extra_bytes": [2**21], "through_host": "", "handed_over": {"release": of}}
    assert gpu.verdict({"sync": found}) == [
        ("sync", "3 pushes: 12.00 GB/s, memcpy 901.00, first 3.50 s, 2 MiB more; release 0.25 s +12.5 GB")
    ]
    [(_, text)] = gpu.verdict({"sync": found | {"through_host": "expandable segments"}})
    assert "12.00 GB/s through host memory (expandable segments)" in text


def test_a_model_that_has_no_room_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 85_000_000_000))
    with ExitStack() as stack:
        found = {"large": gpu_large.large(gpu.Bench("cuda", tmp_path, stack))}
    assert gpu.verdict(found) == [("large", "left out: the device has less than 135 GB")]
    assert gpu.is_right(found)


@pytest.mark.processes
def test_the_stage_of_kernels_in_the_interpreter(tmp_path: Path) -> None:
    found = gpu.run("cpu", tmp_path, ["kernels"])["kernels"]
    assert found == {name: {**case, "differ": 0, "bits": 0} for name, case in found.items()}
    assert sorted(found) == ["norms of 100", "products of 256 by 64", "sampling", "tiles of 2 heads, float32"]
    assert not gpu.is_right({"kernels": {"sampling": {"rows": 4, "differ": 0, "bits": 1}}})


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {"probe": {"machine": "a"}, "exact": {"batches of 1": EQUAL}, "job": {"error": "none"}}

    def fails(bench: gpu.Bench) -> gpu.Found:
        raise RuntimeError("no memory\nat all")

    made = {name: lambda bench, name=name: found[name] for name in ("probe", "exact")}
    monkeypatch.setattr(gpu, "STAGES", {**made, "job": fails})
    return found


def test_a_stage_that_fails_stops_no_other_and_is_run_again(tmp_path: Path, stages: dict[str, Any]) -> None:
    found = gpu.run("cpu", tmp_path, ["job", "probe", "exact"])
    assert found == stages | {"job": {"error": "RuntimeError: no memory"}}
    assert not gpu.is_right(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exact.json", "probe.json"]
    stages["exact"] = None
    assert gpu.run("cpu", tmp_path, ["probe", "exact"])["exact"] == {"batches of 1": EQUAL}, "what is there stays"


@pytest.mark.parametrize("wrong", ["differ", "bits"])
def test_what_differs_is_told_and_fails(wrong: str) -> None:
    found = {"exact": {"without graphs": EQUAL | {wrong: 3}, "batches of 3": EQUAL}}
    [(_, text)] = gpu.verdict(found)
    assert text.startswith("DIFFERENT: without graphs: ")
    assert not gpu.is_right(found)
    assert gpu.is_right({"exact": {"batches of 3": EQUAL}, "job": {"float32": {"steps": 2, "differ": 0, "bits": 0}}})
    assert not gpu.is_right({"job": {"float32": {"steps": 2, "differ": 1, "bits": 0}}})
    assert not gpu.is_right({"speed": {"differ": 1, "rates": {}}})


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "--device cpu" in capsys.readouterr().err
