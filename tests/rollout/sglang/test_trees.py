"""Trees of several drafters' tokens, verified by a real engine: tokens and log-probabilities of plain decoding.

One engine of one rank, with a draft model that equals its (dense) target, and one of two ranks with experts.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from specactor.config import EngineConfig, SpeculationConfig
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.sglang.speculation_calls import REPORT
from specactor.rollout.speculation.counters import Counts
from specactor.rollout.speculation.windows import OFF as OFF_NAME
from specactor.types import RolloutRequest, Trajectory
from tests.rollout.conftest import request as request_of
from tests.rollout.conftest import two_ranks_are_deep
from tests.rollout.sglang.test_model_drafter import make_dense
from tests.rollout.sglang.test_seeded_faults import batch, continued, differing
from tests.rollout.sglang.test_verify_worker import MAX_WINDOW, configure

HERE = "tests.rollout.sglang.wrong_trees"
RIGHT = "tests.rollout.sglang.wrong_versions:right"
OFF = SpeculationConfig(mode="off", max_window=MAX_WINDOW)
WINDOW = 6
WITNESS = "SPECACTOR_TEST_WITNESS"
"""Environment variable: file in which the version `witnessed` counts."""

WRONG_TOKENS = [
    "keeps_nothing",
    "keeps_the_next_row",
    "keeps_a_slot_twice",
    "branches_read_the_first_path",
    "wrong_parents",
    "branches_forget_the_text",
    "noise_of_the_place",
    "forgets_whose_child_it_is",
]
HARMLESS = ["parents_are_lost"]


def trees(name: str, window: int | None = WINDOW, *further: str, **fields: object) -> SpeculationConfig:
    """`name` leads. With a fixed window, the others' drafts are in one tree with its (`wrong_trees`)."""
    drafters = (name if ":" in name else f"{HERE}:{name}", f"{HERE}:Second", f"{HERE}:Third", *further)
    base = replace(OFF, mode="coupled", drafters=drafters, window=window)
    return replace(base, **fields)  # type: ignore[arg-type]


def report(engine: Engine) -> dict[str, Counts]:
    """Of drafters, on rank 0."""
    counts = msgspec.json.decode(engine.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts])
    assert sum(c.failures for c in counts.values()) == 0
    return {name: c for name, c in counts.items() if name != OFF_NAME}


def run(engine: Engine, config: SpeculationConfig, requests: list[RolloutRequest] | None = None) -> list[Trajectory]:
    engine.flush()
    configure(engine, config)
    return engine.generate(requests or batch())


@pytest.fixture(scope="module")
def witness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("witness") / "seen"


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engine(
    request: pytest.FixtureRequest,
    make_spec: Callable[..., EngineSpec],
    tmp_path_factory: pytest.TempPathFactory,
    witness: Path,
) -> Iterator[Engine]:
    """What the drafters draft of `batch()` is rehearsed."""
    ranks: int = request.param
    dense = make_dense(tmp_path_factory.mktemp("dense")) if ranks == 1 else ""
    spec = make_spec(
        40 + ranks,
        **({"model_dir": dense} if dense else {}),
        tensor_parallel=ranks,
        devices=tuple(range(ranks)),
        config=EngineConfig(max_running_requests=32, max_total_tokens=6144),
        speculation=trees(RIGHT, draft_model=dense),
    )
    with running(spec, **{WITNESS: str(witness)}) as started:
        started.generate(batch())
        yield started


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[Trajectory]:
    return run(engine, OFF)


one_rank = pytest.mark.parametrize("engine", [1], indirect=True, ids=["tp1"])


@two_ranks_are_deep("engine")
@pytest.mark.parametrize("window", [1, 3, WINDOW, MAX_WINDOW])
def test_trees_change_nothing(engine: Engine, plain: list[Trajectory], window: int) -> None:
    """More requests than run at once: no page-table row is free at first, and more and more are later."""
    assert differing(run(engine, trees(RIGHT, window)), plain) == set()
    counts = report(engine)
    assert 0 < counts["second"].accepted < counts["second"].drafted
    for of in counts.values():
        assert of.drafted == sum(of.drafted_at)
        assert of.accepted == sum(of.accepted_at)
        assert of.emitted == of.accepted + of.verifies
        assert all(a <= d for a, d in zip(of.accepted_at, of.drafted_at, strict=True))


@two_ranks_are_deep("engine")
def test_branches_are_accepted_in_batches_of_all_kinds(engine: Engine, plain: list[Trajectory], witness: Path) -> None:
    few = batch()[:24]
    assert differing(run(engine, trees("witnessed"), few), plain[:24]) == set()
    counts = report(engine)
    seen, *others = [json.loads(file.read_text()) for file in sorted(witness.parent.glob("seen.*"))]
    assert others == [seen] * (len(engine.spec.devices) - 1)
    assert seen["trees"] > 50
    assert seen["branches"] > seen["trees"]
    assert seen["moved"] > 20
    assert seen["mixed"] > 0
    assert seen["drafted"] == sum(of.drafted for of in counts.values())
    assert sum(counts[name].accepted for name in ("second", "third")) >= seen["moved"]


def switching(version: str, mode: str = "auto") -> SpeculationConfig:
    """Two drafters in the engine and one that drafts ahead."""
    where = "tests.rollout.sglang.switching_versions"
    return replace(trees(f"{where}:{version}", None, mode=mode), drafters=_drafters(where, version))


def _drafters(where: str, version: str) -> tuple[str, ...]:
    return (f"{where}:{version}", f"{HERE}:Second", f"{where}:Ahead")


@two_ranks_are_deep("engine")
@pytest.mark.parametrize("mode", ["auto", "coupled"])
def test_requests_that_switch_change_nothing(engine: Engine, plain: list[Trajectory], mode: str) -> None:
    """Drafter, mode and window of each request change at random rounds, to trees and to nothing, too."""
    assert differing(run(engine, switching("switching", mode)), plain) == set()
    counts = report(engine)
    assert min(counts[name].accepted for name in ("rehearsed", "second", "ahead")) > 20
    assert sum(of.switches for of in counts.values()) > 20
    total = sum(counts.values(), Counts())
    assert total.emitted == total.accepted + total.verifies


@one_rank
def test_a_switch_that_is_trusted_is_caught(engine: Engine, plain: list[Trajectory]) -> None:
    assert "token_ids" in differing(run(engine, switching("trusts_after_a_switch")), plain)


@two_ranks_are_deep("engine")
@pytest.mark.parametrize("most", [1, 3])
def test_drafters_of_each_request_change_nothing(engine: Engine, plain: list[Trajectory], most: int) -> None:
    """As costs decide, with one drafter for a request or several."""
    config = trees(RIGHT, None, mode="auto", fastest_of=most)
    assert differing(run(engine, config), plain) == set()
    assert sum(of.drafted for of in report(engine).values()) > 0


@one_rank
@pytest.mark.parametrize("name", WRONG_TOKENS)
def test_wrong_versions_are_caught(engine: Engine, plain: list[Trajectory], name: str) -> None:
    assert "token_ids" in differing(run(engine, trees(name)), plain)
    report(engine)


@one_rank
@pytest.mark.parametrize("name", HARMLESS)
def test_slower_is_not_wrong(engine: Engine, plain: list[Trajectory], name: str) -> None:
    assert differing(run(engine, trees(name)), plain) == set()
    assert report(engine)["second"].drafted > 0


def cached_error(engine: Engine, plain: list[Trajectory], name: str) -> float:
    """Largest error of a log-probability on top of what a version left in the prefix cache; inf: of a token."""
    fresh = run(engine, OFF, continued(plain))
    left = run(engine, trees(name))
    if name == RIGHT:
        assert differing(left, plain) == set()
    configure(engine, OFF)
    cached = engine.generate(continued(plain))
    if differing(cached, fresh) - {"logprobs"}:
        return float("inf")
    return max(
        abs(a - b)
        for one, other in zip(cached, fresh, strict=True)
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
    )


@two_ranks_are_deep("engine")
def test_the_cache_holds_keys_of_committed_tokens(engine: Engine, plain: list[Trajectory]) -> None:
    assert cached_error(engine, plain, RIGHT) < 1e-5


@one_rank
def test_wrong_keys_in_the_cache_are_caught(engine: Engine, plain: list[Trajectory]) -> None:
    assert cached_error(engine, plain, "keeps_nothing") > 1e-2


@one_rank
@pytest.mark.parametrize(("drafter", "first", "right"), [("Shared", 100, True), ("SeesTheLastTokenAlone", 200, False)])
def test_a_draft_model_finds_its_keys_after_branches_were_accepted(
    engine: Engine, drafter: str, first: int, right: bool
) -> None:
    """Other texts for each, or the draft model would find keys of the one before."""
    requests = [request_of(i, temperature=1.0, new=50) for i in range(first, first + 20)]
    expected = run(engine, trees(RIGHT), requests)
    config = trees("turns", WINDOW, f"tests.rollout.sglang.wrong_model_drafters:{drafter}")
    assert differing(run(engine, config, requests), expected) == set()
    counts = report(engine)
    assert counts["second"].accepted + counts["third"].accepted > 50
    assert counts["model"].drafted > 200
    assert (counts["model"].accepted >= 0.998 * counts["model"].drafted) == right


@two_ranks_are_deep("engine")
def test_no_wrong_version_left_anything_behind(engine: Engine, plain: list[Trajectory]) -> None:
    assert differing(run(engine, trees(RIGHT)), plain) == set()
    assert report(engine)["second"].accepted > 0


def test_every_wrong_version_is_tried() -> None:
    file = Path(__file__).parent / "wrong_trees.py"
    names = [node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    versions = {name for name in names if not name.startswith("_")}
    assert sorted(versions - {"witnessed", "turns"}) == sorted([*WRONG_TOKENS, *HARMLESS])
