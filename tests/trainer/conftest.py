"""One start of 1, 2 and 4 trainer ranks serves all tests of the policy trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ending import end_all
from tests.lib.ranks import run_ranks

ROOT = Path(__file__).parents[2]
LIMIT_S = 600

EVERY_CASE = ["grpo", "dapo", "gspo_sequence_mean", "gspo_token_mean", "grpo_updates", "masked_sequences"]
FEW_CASES = ["grpo", "gspo_token_mean"]

LAYOUTS_2 = {
    "TP2": {"tensor": 2, "expert_tensor": 2},
    "PP2": {"pipeline": 2},
    "PP2xVPP2": {"pipeline": 2, "virtual_pipeline": 2},
    "EP2": {"expert": 2},
    "CP2": {"context": 2},
    "DP2": {},
    "TP2xEP2": {"tensor": 2, "expert": 2},
}
SOME_CASES = {name: ["grpo", EVERY_CASE[1 + i % 5]] for i, name in enumerate(LAYOUTS_2)}
"""By layout, in `make check`: every case is under some layout, and every layout has two."""
PARTS = ("picked", "replay", "ownership", "critic")
"""What else is looked at under a layout, see `layout_script`."""
FEWER = {
    "replay": ("PP2xVPP2", "CP2", "TP2xEP2"),
    "ownership": ("TP2", "PP2xVPP2", "EP2", "CP2", "DP2"),
    "critic": ("TP2", "PP2xVPP2", "EP2", "CP2"),
}
"""Layouts of two ranks for a part, in `make check`: every kind of parallelism is there, with `ALL_IN_ONE`. The others
are deep."""
LAYOUTS_4 = {
    "TP2xEP2 of 4": {"tensor": 2, "expert": 2},
    "TP2xPP2": {"tensor": 2, "expert_tensor": 2, "pipeline": 2},
    "PP2xEP2": {"pipeline": 2, "expert": 2},
    "TP2xCP2": {"tensor": 2, "expert_tensor": 2, "context": 2},
}
ALL_IN_ONE = "TP2xEP2 of 4"
"""Of four ranks, in `make check`: tensors, experts and data at once. The others are deep."""
DENSE = {"dense": ("TP2", "PP2"), "tied": ("PP2xVPP2", "TP2", "PP2")}
"""Models without experts, of which the first layout is in `make check`. One whose embeddings are tied has them on both
stages. With 3 layers the last of two stages has one less, with 6 the first and the last of four chunks."""

CRITICS = [("DP2", "PP2"), ("EP2", "TP2xEP2")]
"""A critic is saved under the first layout, and loaded under the second; the last two are deep."""

OPTIMIZER_STATES = ("float32", "bfloat16", "host")
OVERLAPPING = ("DP2", "PP2xVPP2", "EP2")
"""The last is deep."""


def with_part(part: str) -> list[Any]:
    """Layouts of two ranks, as parameters of a test of this part."""
    return [pytest.param(name, marks=[] if name in FEWER[part] else [pytest.mark.deep]) for name in LAYOUTS_2]


def has_deep(request: pytest.FixtureRequest) -> bool:
    return any(item.get_closest_marker("deep") for item in request.session.items)


def environment() -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }


def run(command: list[str]) -> None:
    """Bounded in time; nothing that it started is left."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        end_all(process)
        output, _ = process.communicate()
    finally:
        end_all(process)
    assert process.returncode == 0, output.decode()[-6000:]


def launch(world: int, spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Results by name of the entries of `spec`, from `world` ranks."""
    (folder / "spec.json").write_text(json.dumps({name: entry | {"world": world} for name, entry in spec.items()}))
    files = (folder / "spec.json", folder / "results.json")
    run_ranks(world, "tests.trainer.layout_script", *files, folder=folder)
    outcome = json.loads((folder / "results.json").read_text())
    assert outcome["alike"], "ranks disagree about a result"
    results: dict[str, Any] = outcome["results"]
    return results


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the models moe, dense and tied, and what transformers makes of them."""
    folder = tmp_path_factory.mktemp("reference")
    run([sys.executable, "-m", "tests.trainer.reference_script", str(folder)])
    return folder


@pytest.fixture(scope="session")
def two_ranks(
    request: pytest.FixtureRequest, reference: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    deep = has_deep(request)
    moe, folder = str(reference / "moe"), tmp_path_factory.mktemp("two")
    spec: dict[str, Any] = {}
    for name, parallel in LAYOUTS_2.items():
        parts = [part for part in PARTS if deep or name in FEWER.get(part, LAYOUTS_2)]
        entry = {"check": "layout", "model": moe, "parallel": parallel, "parts": parts}
        spec[name] = entry | {"cases": EVERY_CASE if deep else SOME_CASES[name]}
    spec["EP2"] |= {"more": True, "export": str(folder / "exported")}
    for model, name in [(model, name) for model, names in DENSE.items() for name in (names if deep else names[:1])]:
        entry = {"check": "layout", "model": str(reference / model), "cases": FEW_CASES}
        entry["parallel"] = LAYOUTS_2[name] | {"expert_tensor": 1}
        spec[f"{model} {name}"] = entry | {"parts": ["critic"] if model == "dense" or deep else []}
    for mistake in ("no_gradient_sync", "mean_per_rank"):
        spec[mistake] = {"check": "wrong", "mistake": mistake, "model": moe}
    wrong_critic = {"check": "wrong", "mistake": "critic_per_rank", "model": moe, "parallel": LAYOUTS_2["TP2"]}
    spec["critic_per_rank"] = wrong_critic
    for name in ("TP2", "EP2", "PP2xVPP2", "DP2"):
        spec[f"save {name}"] = {"check": "save", "model": moe, "parallel": LAYOUTS_2[name], "root": str(folder / name)}
    spec["save PP2xVPP2"]["model"] = tied = str(reference / "tied")
    for state in OPTIMIZER_STATES:
        entry = {"check": "optimizer", "state": state, "model": moe, "root": str(folder / state)}
        spec[f"optimizer {state}"] = entry
    for name in OVERLAPPING if deep else OVERLAPPING[:2]:
        spec[f"overlap {name}"] = {"check": "overlap", "model": moe, "parallel": LAYOUTS_2[name]}
    for saved, loaded in CRITICS if deep else CRITICS[:1]:
        root = folder / f"ppo {saved}"
        spec[f"save ppo {saved}"] = spec[f"save {saved}"] | {"critic": True, "root": str(root)}
        entry = {"check": "load", "model": moe, "parallel": LAYOUTS_2[loaded], "path": str(root / "step-000002")}
        spec[f"load ppo {saved}"] = entry | {"critic": True}
    tp2, ep2 = str(folder / "TP2" / "step-000002"), str(folder / "EP2" / "step-000002")
    spec["TP2 -> PP2"] = {"check": "load", "model": moe, "parallel": LAYOUTS_2["PP2"], "path": tp2}
    spec["EP2 -> TP2xEP2"] = {"check": "load", "model": moe, "parallel": LAYOUTS_2["TP2xEP2"], "path": ep2}
    pp2 = str(folder / "PP2xVPP2" / "step-000002")
    spec["PP2xVPP2 -> PP2"] = {"check": "load", "model": tied, "parallel": LAYOUTS_2["PP2"], "path": pp2}
    spec["TP2 -> EP2"] = {"check": "load", "model": moe, "parallel": LAYOUTS_2["EP2"], "path": tp2}
    return launch(2, spec, folder) | {"checkpoints": {"TP2": tp2, "EP2": ep2}}


@pytest.fixture(scope="session")
def one_rank(
    request: pytest.FixtureRequest, reference: Path, two_ranks: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    from tests.trainer.damage import damaged

    moe, folder = str(reference / "moe"), tmp_path_factory.mktemp("one")
    entry = {"check": "layout", "model": moe, "parts": ["replay", "critic"]}
    entry["cases"] = EVERY_CASE if has_deep(request) else FEW_CASES
    tp2, ep2 = two_ranks["checkpoints"]["TP2"], two_ranks["checkpoints"]["EP2"]
    spec: dict[str, Any] = {
        "single": entry | {"cases": EVERY_CASE, "parts": PARTS, "more": True, "export": str(folder / "exported")},
        "recompute full": entry | {"train": {"recompute": "full"}},
        "recompute selective": entry | {"train": {"recompute": "selective"}},
        "plain optimizer": entry | {"plain_optimizer": True},
        "one micro-batch": entry | {"train": {"tokens_per_microbatch": 4096}},
        "dense": entry | {"model": str(reference / "dense"), "cases": FEW_CASES, "parts": ["critic"]},
        "tied": entry | {"model": str(reference / "tied"), "cases": FEW_CASES, "parts": ["critic"]},
        "rope_theta": {"check": "wrong", "mistake": "rope_theta", "model": moe},
        "TP2 -> 1": {"check": "load", "model": moe, "path": tp2},
        "errors": {"check": "errors", "model": moe, "paths": damaged(Path(tp2), folder / "damaged") | {"EP2": ep2}},
        "foreign": {"check": "load", "model": str(reference / "dense"), "path": tp2},
        "no critic": {"check": "load", "model": moe, "path": tp2, "critic": True},
        "other attention": {"check": "load", "model": moe, "path": tp2, "engine": {"attention_backend": "intel_amx"}},
        "keep": {"check": "keep", "model": moe, "root": str(folder / "kept")},
    }
    return launch(1, spec, folder)


@pytest.fixture(scope="session")
def four_ranks(
    request: pytest.FixtureRequest, reference: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Of the layouts that are asked for."""
    spec = {
        name: {
            "check": "layout",
            "model": str(reference / "moe"),
            "parallel": parallel,
            "cases": FEW_CASES,
            "parts": PARTS,
        }
        for name, parallel in LAYOUTS_4.items()
        if name == ALL_IN_ONE or has_deep(request)
    }
    return launch(4, spec, tmp_path_factory.mktemp("four"))
