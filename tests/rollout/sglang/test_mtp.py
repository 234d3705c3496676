"""An MTP layer that knows its policy is right always, and any other one changes no token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from specactor.config import EngineConfig, SpeculationConfig
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from tests.lib.ranks import run_alone
from tests.rollout.conftest import request, two_ranks_are_deep
from tests.rollout.sglang.test_model_drafter import (
    MAX_WINDOW,
    accept_rate,
    accepted_if_right,
    assert_always_right,
    assert_changes_no_token,
    batch,
    counts_of,
)
from tests.rollout.sglang.test_verify_worker import GRAPHS, configure, in_graphs
from tests.trainer.reference_mimo import ReferenceMimo

WRONG = "tests.rollout.sglang.wrong_mtp"


def speculation(window: int | None, drafter: str = "Shared", **fields: object) -> SpeculationConfig:
    names = ("mtp",) if drafter == "mtp" else (f"{WRONG}:{drafter}",)
    usual: dict[str, object] = {"mode": "coupled", "drafters": names, "window": window, "max_window": MAX_WINDOW}
    return SpeculationConfig(**usual | fields)  # type: ignore[arg-type]


def spec_of(make_spec: Callable[..., EngineSpec], index: int, ranks: int, policy: str) -> EngineSpec:
    return make_spec(
        index,
        model_dir=policy,
        tensor_parallel=ranks,
        devices=tuple(range(ranks)),
        config=EngineConfig(max_running_requests=32, max_total_tokens=6144, extra_args={"chunked_prefill_size": 48}),
        speculation=speculation(3, "mtp"),
    )


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def knowing(
    request: pytest.FixtureRequest, make_spec: Callable[..., EngineSpec], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine of a toy policy with an MTP layer that knows it."""
    folder = str(tmp_path_factory.mktemp("toy") / "policy")
    run_alone("tests.rollout.sglang.make_mimo", folder, "toy", 96)
    with running(spec_of(make_spec, 120 + request.param, request.param, folder)) as engine:
        yield engine


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def strangers(
    request: pytest.FixtureRequest, make_spec: Callable[..., EngineSpec], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """A random policy with a random MTP layer."""
    folder = str(tmp_path_factory.mktemp("random") / "policy")
    run_alone("tests.rollout.sglang.make_mimo", folder, "random", 96)
    with running(spec_of(make_spec, 123 + request.param, request.param, folder)) as engine:
        yield engine


@two_ranks_are_deep("knowing")
@pytest.mark.parametrize(("window", "drafter"), [(1, "Shared"), (3, "Shared"), (8, "Shared"), (3, "KeysAlone")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_layer_that_knows_its_policy_is_always_right(
    knowing: Engine, temperature: float, window: int, drafter: str
) -> None:
    """Also where a prompt was computed for another request, and where rounds were plain before."""
    assert_always_right(knowing, speculation(window, drafter), batch(temperature))


@two_ranks_are_deep("knowing")
def test_a_layer_in_graphs_drafts_the_same(knowing: Engine) -> None:
    counts_of(knowing, speculation(3, drafters=(f"{GRAPHS}:Half",)), batch(1.0))  # its module is there
    knowing.flush()
    with in_graphs(knowing, b"draft", beyond=16):
        assert_always_right(knowing, speculation(3), batch(1.0))


@two_ranks_are_deep("knowing")
def test_rounds_in_which_it_does_not_draft_are_no_loss(knowing: Engine) -> None:
    knowing.flush()
    assert accept_rate(counts_of(knowing, speculation(3, "HeadRests"), batch(1.0))) >= 0.999


@two_ranks_are_deep("knowing")
@pytest.mark.parametrize("mistake", ["Stale", "Shifted", "Skipping", "OwnStates", "Unwritten"])
def test_mistakes_are_noticed(knowing: Engine, mistake: str) -> None:
    knowing.flush()
    counts = counts_of(knowing, speculation(3, mistake), batch(1.0))
    assert counts.failures == 0
    assert accept_rate(counts) < 0.9


@two_ranks_are_deep("knowing")
@pytest.mark.parametrize(("drafter", "right"), [("HeadErrs", True), ("HeadErrsAndKeeps", False)])
def test_keys_of_what_was_rejected_are_forgotten(knowing: Engine, drafter: str, right: bool) -> None:
    knowing.flush()
    requests = batch(1.0)
    counts = counts_of(knowing, speculation(8, drafter), requests)
    assert counts.failures == 0
    assert (counts.accepted >= 0.998 * accepted_if_right(requests, window=8)) == right


@two_ranks_are_deep("knowing")
def test_keys_that_requests_of_one_prompt_share_are_noticed(knowing: Engine) -> None:
    knowing.flush()
    counts = counts_of(knowing, speculation(3, "SharedSlots"), batch(1.0))
    assert counts.failures == 0
    assert accept_rate(counts) < 0.98


@two_ranks_are_deep("strangers")
@pytest.mark.parametrize(("window", "drafter"), [(8, "mtp"), (1, "Shared"), (4, "Shared")])
def test_any_layer_changes_no_token(strangers: Engine, window: int, drafter: str) -> None:
    assert_changes_no_token(strangers, speculation(window, drafter))


@two_ranks_are_deep("strangers")
def test_beside_other_drafters_and_plain_rounds_it_changes_no_token(strangers: Engine) -> None:
    config = speculation(None, "mtp")
    assert_changes_no_token(strangers, replace(config, mode="auto", fastest_of=2, drafters=("suffix", "mtp")))


@two_ranks_are_deep("strangers")
def test_logits_equal_those_of_its_definition(strangers: Engine) -> None:
    """At every token of every draft, after prompts in parts, accepted and rejected drafts."""
    strangers.flush()
    configure(strangers, speculation(4, "Recording"))
    strangers.rank_call("heads.recorded", b"", timeout_s=60)
    prompt = tuple(3 + (11 * j * j + 5 * j) % 93 for j in range(70))
    strangers.generate([*batch(1.0, count=3), replace(request(9, new=12), prompt_ids=prompt)])
    [recorded, *_] = strangers.rank_call("heads.recorded", b"", timeout_s=60)
    cases = msgspec.msgpack.decode(recorded, type=list[tuple[list[int], list[int], list[list[float]]]])
    assert len(cases) > 40
    reference = ReferenceMimo.read(Path(strangers.spec.model_dir))
    for text, drafts, logits in cases:
        torch.testing.assert_close(
            torch.tensor(logits), torch.stack(reference.drafted(text, drafts[:-1])), atol=1e-4, rtol=1e-4
        )
