"""An EAGLE-3 head that knows its target is right always, and any other one changes no token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from specactor.config import EngineConfig, SpeculationConfig
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.speculation.costs import CostTable
from specactor.trainer.drafter.init import read_draft, read_model
from specactor.weights_sync.draft_push import DraftSender, push_to_engine
from tests.lib.ranks import run_alone
from tests.rollout.conftest import request, two_ranks_are_deep
from tests.rollout.sglang.asking import assert_same, differs, in_background, probe, wait_for_tokens
from tests.rollout.sglang.test_model_drafter import (
    OFF,
    accept_rate,
    accepted_if_right,
    assert_always_right,
    assert_changes_no_token,
    batch,
    counts_by_drafter,
    counts_of,
    make_dense,
    policy_digests,
    pushes_to,
)
from tests.rollout.sglang.test_model_drafter import speculation as model_speculation
from tests.rollout.sglang.test_verify_worker import GRAPHS, configure, facts, in_graphs, report
from tests.trainer.drafter.reference_head import ReferenceHead

WRONG = "tests.rollout.sglang.wrong_heads"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a policy and of a head that knows it."""
    folder = tmp_path_factory.mktemp("toy")
    run_alone("tests.rollout.sglang.make_toy", folder / "policy", folder / "head")
    return str(folder / "policy"), str(folder / "head")


@pytest.fixture(scope="module")
def random_head(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the mixture of experts, with a vocabulary of 60 of 96 tokens."""
    folder = tmp_path_factory.mktemp("random") / "head"
    run_alone("tests.rollout.sglang.make_head", model_dir, folder, 60)
    return str(folder)


def speculation(head: str, window: int | None, drafter: str = "Shared", **fields: object) -> SpeculationConfig:
    name = drafter if drafter == "model" else f"{WRONG}:{drafter}"
    return model_speculation(head, window, drafter=name, **fields)


def spec_of(make_spec: Callable[..., EngineSpec], index: int, ranks: int, head: str, **fields: object) -> EngineSpec:
    config = EngineConfig(max_running_requests=32, max_total_tokens=6144)
    devices = tuple(range(ranks))
    usual = {"tensor_parallel": ranks, "devices": devices, "config": config, "speculation": speculation(head, 3)}
    return make_spec(index, **usual | fields)


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def knowing(
    request: pytest.FixtureRequest,
    make_spec: Callable[..., EngineSpec],
    toy: tuple[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Engine]:
    """An engine of the toy policy, with the head that knows it, and as `model:2` a draft model that does not."""
    dense = make_dense(tmp_path_factory.mktemp("dense"), "seed=5", "num_hidden_layers=1")
    config = replace(speculation(toy[1], 3), draft_model=(toy[1], dense))
    spec = spec_of(make_spec, 70 + request.param, request.param, toy[1], model_dir=toy[0], speculation=config)
    with running(spec) as engine:
        yield engine


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def strangers(
    request: pytest.FixtureRequest, make_spec: Callable[..., EngineSpec], random_head: str
) -> Iterator[Engine]:
    """A mixture of experts, and a head that has nothing to do with it. Prefills are made in parts."""
    config = EngineConfig(max_running_requests=32, max_total_tokens=6144, extra_args={"chunked_prefill_size": 48})
    with running(spec_of(make_spec, 80 + request.param, request.param, random_head, config=config)) as engine:
        yield engine


@two_ranks_are_deep("knowing")
@pytest.mark.parametrize(("window", "drafter"), [(1, "Shared"), (3, "Shared"), (8, "Shared"), (3, "KeysAlone")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_that_knows_its_target_is_always_right(
    knowing: Engine, toy: tuple[str, str], temperature: float, window: int, drafter: str
) -> None:
    """Also where a prompt was computed for another request, and where rounds were plain before."""
    assert_always_right(knowing, speculation(toy[1], window, drafter), batch(temperature))


@two_ranks_are_deep("knowing")
def test_a_head_in_graphs_drafts_the_same(knowing: Engine, toy: tuple[str, str]) -> None:
    """Graphs that keep the lengths, or the hidden states, of another batch are caught."""
    counts_of(knowing, replace(speculation(toy[1], 3), drafters=(f"{GRAPHS}:Half",)), batch(1.0))  # its module is there
    knowing.flush()
    with in_graphs(knowing, b"draft", beyond=16):
        assert_always_right(knowing, speculation(toy[1], 3), batch(1.0))
        unread = counts_of(knowing, speculation(toy[1], 3, "Unread"), batch(1.0))
    with in_graphs(knowing, b"draft, stale", beyond=0):
        stale = counts_of(knowing, speculation(toy[1], 3), batch(1.0))
    assert unread.failures == 0
    assert accept_rate(unread) < 0.9
    assert stale.failures or accept_rate(stale) < 0.9


@two_ranks_are_deep("knowing")
def test_rounds_in_which_it_does_not_draft_are_no_loss(knowing: Engine, toy: tuple[str, str]) -> None:
    knowing.flush()
    assert accept_rate(counts_of(knowing, speculation(toy[1], 3, "HeadRests"), batch(1.0))) >= 0.999


@two_ranks_are_deep("knowing")
@pytest.mark.parametrize("mistake", ["Stale", "Shifted", "Skipping", "OwnStates", "Unwritten"])
def test_mistakes_are_noticed(knowing: Engine, toy: tuple[str, str], mistake: str) -> None:
    knowing.flush()
    counts = counts_of(knowing, speculation(toy[1], 3, mistake), batch(1.0))
    assert counts.failures == 0
    assert accept_rate(counts) < 0.9


@two_ranks_are_deep("knowing")
def test_keys_that_requests_of_one_prompt_share_are_noticed(knowing: Engine, toy: tuple[str, str]) -> None:
    knowing.flush()
    counts = counts_of(knowing, speculation(toy[1], 3, "SharedSlots"), batch(1.0))
    assert counts.failures == 0
    assert accept_rate(counts) < 0.98


@two_ranks_are_deep("knowing")
@pytest.mark.parametrize("layers", [(0, 2, 3), (0, 1, 3), (0, 1, 2)])
def test_a_wrong_layer_is_noticed(knowing: Engine, toy: tuple[str, str], layers: tuple[int, ...]) -> None:
    configure(knowing, speculation(toy[1], 3))
    right = knowing.rank_call("heads.layers", msgspec.json.encode(layers), timeout_s=60)[0]
    try:
        knowing.flush()
        assert accept_rate(counts_of(knowing, speculation(toy[1], 3), batch(1.0))) < 0.9
    finally:
        knowing.rank_call("heads.layers", right, timeout_s=60)
    knowing.flush()
    assert accept_rate(counts_of(knowing, speculation(toy[1], 3), batch(1.0))) >= 0.999


@two_ranks_are_deep("knowing")
@pytest.mark.parametrize(("drafter", "right"), [("HeadErrs", True), ("HeadErrsAndKeeps", False)])
def test_keys_of_what_was_rejected_are_forgotten(
    knowing: Engine, toy: tuple[str, str], drafter: str, right: bool
) -> None:
    knowing.flush()
    requests = batch(1.0)
    counts = counts_of(knowing, speculation(toy[1], 8, drafter), requests)
    assert counts.failures == 0
    assert (counts.accepted >= 0.998 * accepted_if_right(requests, window=8)) == right


@two_ranks_are_deep("knowing")
def test_a_push_changes_drafts_and_no_token(
    knowing: Engine, toy: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of the head's weights; the policy's, and the embedding that they share, stay."""
    noise = tmp_path_factory.mktemp("noise") / "head"
    run_alone("tests.rollout.sglang.make_head", toy[0], noise)
    sender, requests, config = DraftSender(torch.float32), batch(1.0), speculation(toy[1], 3)
    push = pushes_to(knowing, sender)
    configure(knowing, OFF)
    plain, policy = facts(knowing.generate(requests)), policy_digests(knowing)
    rates = []
    for folder in (str(noise), toy[1]):
        assert push(folder) == ""
        configure(knowing, config)
        report(knowing)
        assert facts(knowing.generate(requests)) == plain
        rates.append(accept_rate(report(knowing)))
    sender.close()
    assert rates[0] < 0.5
    assert rates[1] >= 0.999
    assert policy_digests(knowing) == policy


@two_ranks_are_deep("strangers")
@pytest.mark.parametrize(("window", "drafter"), [(8, "model"), (1, "Shared"), (4, "Shared")])
def test_any_head_changes_no_token(strangers: Engine, random_head: str, window: int, drafter: str) -> None:
    assert_changes_no_token(strangers, speculation(random_head, window, drafter))


@two_ranks_are_deep("strangers")
def test_beside_other_drafters_and_plain_rounds_it_changes_no_token(strangers: Engine, random_head: str) -> None:
    config = speculation(random_head, None, "model")
    assert_changes_no_token(strangers, replace(config, mode="auto", fastest_of=2, drafters=("suffix", "model")))


@two_ranks_are_deep("knowing")
def test_in_auto_a_head_is_a_candidate_beside_others(knowing: Engine, toy: tuple[str, str]) -> None:
    """After a drafter that is hardly ever right. How often it drafts depends on what rounds cost here."""
    requests = batch(1.0)
    configure(knowing, OFF)
    knowing.flush()
    plain = facts(knowing.generate(requests))
    constant = "tests.rollout.sglang.drafters:Constant"
    configure(knowing, replace(speculation(toy[1], None), mode="auto", drafters=(constant, f"{WRONG}:Shared")))
    knowing.flush()
    counts_by_drafter(knowing)
    assert facts(knowing.generate(requests)) == plain
    counts = counts_by_drafter(knowing)
    assert counts["model"].accepted >= 0.999 * counts["model"].drafted > 0
    assert (counts["model"].failures, counts["constant"].failures) == (0, 0)


@two_ranks_are_deep("knowing")
@pytest.mark.parametrize("are_costs_known", [True, False])
def test_of_a_head_and_a_draft_model_the_better_drafts_a_fixed_window(
    knowing: Engine, toy: tuple[str, str], tmp_path: Path, are_costs_known: bool
) -> None:
    """Though the draft model is named first, and said to be cheaper. While costs are measured both have a turn."""
    requests, names = batch(1.0), ["model:2", f"{WRONG}:Shared"]
    table = tmp_path / "costs.json"
    verifies = [(n, n * rows, 0.05 + 1e-4 * n * rows) for n in (1, 32) for rows in (1, 5)]
    drafts = {
        name: [(n, n * w, s * w) for n in (1, 32) for w in (1, 4)] for name, s in (("model", 2e-3), ("model:2", 1e-3))
    }
    CostTable.fit(verifies, drafters=drafts).write(table)
    config = replace(
        speculation(toy[1], 4),
        mode="auto",
        drafters=tuple(names if are_costs_known else names[::-1]),
        draft_model=(toy[1], "second"),
        cost_table=str(table) if are_costs_known else "",
    )
    configure(knowing, OFF)
    knowing.flush()
    plain = facts(knowing.generate(requests))
    configure(knowing, config)
    knowing.flush()
    counts_by_drafter(knowing)
    assert facts(knowing.generate(requests)) == plain
    counts = counts_by_drafter(knowing)
    assert counts["model"].accepted >= 0.999 * counts["model"].drafted > 0
    assert counts["model:2"].drafted > 0
    assert (counts["model"].failures, counts["model:2"].failures) == (0, 0)
    if are_costs_known:
        assert counts["model:2"].drafted < 0.2 * counts["model"].drafted


@two_ranks_are_deep("strangers")
def test_a_push_to_a_head_of_a_reduced_vocabulary(strangers: Engine, random_head: str, model_dir: str) -> None:
    """As a run makes it, of the parameters alone: which tokens it drafts, and the policy's embedding, stay."""
    with torch.random.fork_rng(devices=[]):
        model = read_draft(Path(random_head), read_model(Path(model_dir)))
    sender, requests = DraftSender(torch.float32), batch(1.0)
    configure(strangers, OFF)
    strangers.flush()
    plain, policy = facts(strangers.generate(requests)), policy_digests(strangers)
    before = counts_of(strangers, speculation(random_head, 3), requests)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.0)
    weights = sender.pack(model.named_parameters(), version=1)
    assert push_to_engine(strangers, weights, timeout_s=60) == ""
    configure(strangers, speculation(random_head, 3))
    report(strangers)
    strangers.flush()
    assert facts(strangers.generate(requests)) == plain
    after = report(strangers)
    assert after.failures == 0
    assert after.accepted != before.accepted
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.0)
    assert push_to_engine(strangers, sender.pack(model.named_parameters(), version=2), timeout_s=60) == ""
    sender.close()
    assert policy_digests(strangers) == policy


@two_ranks_are_deep("strangers")
def test_logits_equal_those_of_transformers_parts(strangers: Engine, random_head: str, model_dir: str) -> None:
    """At every token of every draft, after prompts in parts, accepted and rejected drafts."""
    strangers.flush()
    configure(strangers, speculation(random_head, 4, "Recording"))
    strangers.rank_call("heads.recorded", b"", timeout_s=60)
    prompt = tuple(3 + (11 * j * j + 5 * j) % 93 for j in range(70))
    strangers.generate([*batch(1.0, count=3), replace(request(9, new=12), prompt_ids=prompt)])
    [recorded, *_] = strangers.rank_call("heads.recorded", b"", timeout_s=60)
    cases = msgspec.msgpack.decode(recorded, type=list[tuple[list[int], list[int], list[list[float]]]])
    assert len(cases) > 40
    reference = ReferenceHead(Path(random_head), read_model(Path(model_dir)))
    for text, drafts, logits in cases:
        expected = torch.stack(reference.drafted(text, drafts[:-1])).nan_to_num(neginf=-1e30)
        torch.testing.assert_close(torch.tensor(logits), expected, atol=1e-5, rtol=1e-5)


@two_ranks_are_deep("strangers")
def test_other_weights_of_the_policy_in_mid_response(strangers: Engine, random_head: str) -> None:
    """The response goes on as if plain decoding had changed there."""
    wanted = [request(0, new=100)]
    configure(strangers, speculation(random_head, 4))
    strangers.flush()
    [old] = strangers.generate(wanted)
    strangers.flush()
    thread, answers = in_background(strangers, wanted)
    wait_for_tokens(strangers, 20)
    [held] = probe(strangers, "change_weights")
    thread.join(60)
    probe(strangers, "change_weights")
    configure(strangers, OFF)
    strangers.flush()
    probe(strangers, "change_weights_at", held)
    [expected] = strangers.generate(wanted)
    probe(strangers, "change_weights")
    probe(strangers, "heal")
    assert_same(answers, [expected])
    assert differs(answers, [old]) == (held < 100)


@two_ranks_are_deep("strangers")
def test_memory_for_states_is_taken_from_the_pools(strangers: Engine, random_head: str) -> None:
    """Of a token: keys and values of the target and of the head, and the hidden states that it reads."""
    configure(strangers, speculation(random_head, 3))
    for answer in strangers.rank_call("probe.kv_bytes", b"", timeout_s=60):
        cell, target, head = msgspec.json.decode(answer)
        assert cell == target + head + 2 * 64 * 4


def test_a_small_pool_that_throws_requests_out_changes_no_token(
    make_spec: Callable[..., EngineSpec], random_head: str, engine: Engine
) -> None:
    requests = [request(i, new=100, ignore_eos=False, logit_bias=((1, -50.0),)) for i in range(16)]
    expected = engine.generate(requests)
    extra = {"schedule_conservativeness": 0.2}
    config = EngineConfig(max_running_requests=16, max_total_tokens=900, extra_args=extra)
    with running(spec_of(make_spec, 89, 1, random_head, config=config)) as small:
        probe(small, "seen")
        assert_same(small.generate(requests), expected)
        assert probe(small, "seen")["retracted"] > 0
        assert report(small).accepted > 0
