"""Several ranks: every layout learns the same as a single process, and exports what was loaded."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from specactor.parallel.layout import short_ends, stage_layers
from tests.trainer import policy_cases as cases
from tests.trainer.conftest import (
    ALL_IN_ONE,
    DENSE,
    EVERY_CASE,
    FEW_CASES,
    FEWER,
    LAYOUTS_2,
    LAYOUTS_4,
    SOME_CASES,
    with_part,
)

OF_FOUR = [pytest.param(name, marks=[] if name == ALL_IN_ONE else [pytest.mark.deep]) for name in LAYOUTS_4]

OF_DENSE = [
    pytest.param(model, name, marks=[] if name == names[0] else [pytest.mark.deep])
    for model, names in DENSE.items()
    for name in names
]
TIED_CRITIC = pytest.param("tied", "PP2xVPP2", marks=pytest.mark.deep)


def assert_same_step(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """All statistics but those that count this rank's micro-batches."""
    for name, value in expected.items():
        if name != "num_microbatches":
            assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-7, nan_ok=True), name


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=[] if case in SOME_CASES[name] else [pytest.mark.deep])
        for name in LAYOUTS_2
        for case in EVERY_CASE
    ],
)
def test_two_ranks_learn_like_one(one_rank: dict[str, Any], two_ranks: dict[str, Any], name: str, case: str) -> None:
    assert_same_step(two_ranks[name][case], one_rank["single"][case])


@pytest.mark.parametrize("name", with_part("critic"))
def test_two_ranks_learn_with_a_critic_like_one(one_rank: dict[str, Any], two_ranks: dict[str, Any], name: str) -> None:
    for got, expected in zip(two_ranks[name]["ppo"], one_rank["single"]["ppo"], strict=True):
        assert_same_step(got, expected)
    assert_same_step(two_ranks[name]["ppo_turns"], one_rank["single"]["ppo_turns"])


@pytest.mark.parametrize("case", FEW_CASES)
@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks_learn_like_one(one_rank: dict[str, Any], four_ranks: dict[str, Any], name: str, case: str) -> None:
    assert_same_step(four_ranks[name][case], one_rank["single"][case])


@pytest.mark.parametrize("case", FEW_CASES)
@pytest.mark.parametrize(("model", "name"), OF_DENSE)
def test_dense_models_learn_like_one(
    one_rank: dict[str, Any], two_ranks: dict[str, Any], model: str, name: str, case: str
) -> None:
    assert_same_step(two_ranks[f"{model} {name}"][case], one_rank[model][case])


@pytest.mark.parametrize("virtual", [None, 2, 3])
def test_stages_have_the_layers_that_megatron_gives_them(virtual: int | None) -> None:
    shorts = set()
    for layers, stages in product(range(1, 97), range(2, 9)):
        short = short_ends(layers, stages * (virtual or 1))
        if short is None:
            continue
        config = SimpleNamespace(
            num_layers=layers,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=virtual,
            pipeline_model_parallel_layout=None,
            num_layers_in_first_pipeline_stage=None,
            num_layers_in_last_pipeline_stage=None,
            account_for_loss_in_pipeline_split=short > 0,
            account_for_embedding_in_pipeline_split=short > 1,
        )
        places = list(product([None] if virtual is None else range(virtual), range(stages)))
        sizes = [get_num_layers_to_build(config, *place) for place in places]
        firsts = [get_transformer_layer_offset(config, *place) for place in places]
        assert firsts == [sum(sizes[:i]) for i in range(len(sizes))]
        assert min(sizes) > 0
        assert [sum(sizes[stage::stages]) for stage in range(stages)] == stage_layers(layers, stages)
        assert sum(sizes) == layers
        shorts.add(short)
    assert shorts == {0, 1, 2}


def everything(two_ranks: dict[str, Any], four_ranks: dict[str, Any]) -> dict[str, Any]:
    return {name: found for name, found in (two_ranks | four_ranks).items() if "wrong_weights" in found}


def test_logits_equal_transformers(two_ranks: dict[str, Any], four_ranks: dict[str, Any]) -> None:
    differences = {name: result["logits"] for name, result in everything(two_ranks, four_ranks).items()}
    assert max(differences.values()) < 1e-5, differences


def test_exported_weights_are_the_loaded_ones_bit_for_bit(
    two_ranks: dict[str, Any], four_ranks: dict[str, Any]
) -> None:
    wrong = {name: result["wrong_weights"] for name, result in everything(two_ranks, four_ranks).items()}
    assert not any(wrong.values()), wrong


def test_tokens_that_their_noise_does_not_pick_are_counted_in_every_layout(
    one_rank: dict[str, Any], two_ranks: dict[str, Any], four_ranks: dict[str, Any]
) -> None:
    compared = sum(s.response_len for s in cases.sequences()[:-1]) + 5 - 2
    layouts = [one_rank["single"], *everything(two_ranks, four_ranks).values()]
    found = [of["picked"] for of in layouts if "picked" in of]
    assert len(found) > 5
    assert {tuple(of["replaced"]) for of in found} == {(compared, len(cases.REPLACED))}
    [more] = [of for of in found if len(of) > 1 and of is not one_rank["single"]["picked"]]
    assert more["right"] == [compared, 0]
    first = sum(s.response_len for s in cases.sequences() if s.group_id == 0)
    assert more["several updates"] == [first, 0], "after an update the weights are not the sampler's"
    for wrong in ("other_seeds", "other_places"):
        assert more[wrong][1] > compared / 2, "most tokens are sampled, not certain"


def test_other_methods_agree_with_one_rank(one_rank: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    got, expected = two_ranks["EP2"], one_rank["single"]
    for a, b in zip(got["logprobs"], expected["logprobs"], strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    assert got["supervised"] == pytest.approx(expected["supervised"], rel=1e-4)
    for a, b in zip(got["kl"], expected["kl"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    assert got["wrong_export"] == []


def test_a_step_of_fewer_sequences_than_ranks_is_that_of_one_rank(
    one_rank: dict[str, Any], two_ranks: dict[str, Any]
) -> None:
    """As failures and filters may leave them, with fewer groups than updates."""
    assert_same_step(two_ranks["EP2"]["alone"], one_rank["single"]["alone"])


@pytest.mark.parametrize("mistake", ["no_gradient_sync", "mean_per_rank"])
def test_a_mistake_would_be_noticed(one_rank: dict[str, Any], two_ranks: dict[str, Any], mistake: str) -> None:
    with pytest.raises(AssertionError):
        assert_same_step(two_ranks[mistake]["grpo"], one_rank["single"]["grpo"])


def test_a_critic_that_ranks_update_each_for_itself_would_be_noticed(
    one_rank: dict[str, Any], two_ranks: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError):
        assert_same_step(two_ranks["critic_per_rank"]["ppo"][1], one_rank["single"]["ppo"][1])


@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks_learn_with_a_critic_like_one(
    one_rank: dict[str, Any], four_ranks: dict[str, Any], name: str
) -> None:
    for got, expected in zip(four_ranks[name]["ppo"], one_rank["single"]["ppo"], strict=True):
        assert_same_step(got, expected)
    assert_same_step(four_ranks[name]["ppo_turns"], one_rank["single"]["ppo_turns"])


@pytest.mark.parametrize(
    ("model", "name"), [case for case in OF_DENSE if case.marks or case.values[0] == "dense"] + [TIED_CRITIC]
)
def test_critics_of_dense_models_learn_like_one(
    one_rank: dict[str, Any], two_ranks: dict[str, Any], model: str, name: str
) -> None:
    for got, expected in zip(two_ranks[f"{model} {name}"]["ppo"], one_rank[model]["ppo"], strict=True):
        assert_same_step(got, expected)


@pytest.mark.parametrize("name", [*with_part("replay"), *OF_FOUR])
def test_given_experts_are_taken_by_the_token_that_they_are_of(
    one_rank: dict[str, Any], two_ranks: dict[str, Any], four_ranks: dict[str, Any], name: str
) -> None:
    """Where the trainer would choose the same ones, no bit differs; wrong ones are as wrong as on one rank."""
    got, expected = (two_ranks | four_ranks)[name]["replay"], one_rank["single"]["replay"]
    assert got["right"] == pytest.approx(got["free"], rel=0, abs=0, nan_ok=True)
    for wrong in ("swapped", "shifted"):
        assert_same_step(got[wrong], expected[wrong])
        with pytest.raises(AssertionError):
            assert_same_step(got[wrong], got["free"])
    assert got["missing"] == expected["missing"]


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        ("one_rank", ["single"]),
        ("two_ranks", list(FEWER["ownership"])),
        pytest.param("two_ranks", list(LAYOUTS_2), marks=pytest.mark.deep),
        ("four_ranks", [ALL_IN_ONE]),
        pytest.param("four_ranks", list(LAYOUTS_4), marks=pytest.mark.deep),
    ],
)
def test_tokens_by_owner_learn_what_tokens_everywhere_do(
    request: pytest.FixtureRequest, ranks: str, names: list[str]
) -> None:
    """Bit for bit: every figure, and every parameter of every rank."""
    for name in names:
        found = request.getfixturevalue(ranks)[name]["ownership"]
        assert found["by_owner"] == found["everywhere"], name
        assert found["exchanged"] != found["everywhere"], name
