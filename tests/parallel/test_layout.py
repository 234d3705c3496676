"""Layouts: what divides what, and the way out when it does not."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.config import Config, ParallelConfig
from specactor.errors import ConfigError
from specactor.parallel.failure import Member
from specactor.parallel.layout import (
    ModelShape,
    check,
    engine_devices,
    engine_owner,
    longest_prompt,
    longest_text,
    own_device,
    place_engine,
    prompt_limit,
)
from specactor.recipes import load
from specactor.rollout.drafter_start import check_in_engines, draft_shape

MOE = ModelShape(num_layers=4, num_heads=4, num_kv_heads=2, num_experts=8, vocab_size=96, max_position=512)
DENSE = replace(MOE, num_experts=0)


QUICKSTART = load(["quickstart_plain"])


def config(**parallel: Any) -> Config:
    return replace(QUICKSTART, parallel=ParallelConfig(**parallel))


@pytest.mark.parametrize(
    ("world", "parallel", "data"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (2, {"expert": 2}, 2),
        (2, {"tensor": 2, "expert_tensor": 2}, 1),
        (2, {"pipeline": 2}, 1),
        (2, {"context": 2}, 1),
        (4, {"tensor": 2, "expert": 2}, 2),
        (4, {"tensor": 2, "pipeline": 2, "expert_tensor": 2}, 1),
        (4, {"pipeline": 2, "expert": 2}, 2),
        (2, {"pipeline": 2, "virtual_pipeline": 2}, 1),
        (3, {"pipeline": 3}, 1),
        (4, {"expert": 4, "engines": 2, "engine_tensor": 2}, 4),
    ],
)
def test_layouts_that_work(world: int, parallel: dict[str, int], data: int) -> None:
    assert check(config(**parallel), world, MOE).data == data


@pytest.mark.parametrize(
    ("world", "parallel", "shape", "message"),
    [
        (
            3,
            {"tensor": 2, "expert_tensor": 2},
            MOE,
            "torchrun --nproc-per-node: got 3, expected a multiple of tensor x pipeline x context = 2. "
            "Start more ranks, or lower one of --parallel.tensor, --parallel.pipeline, --parallel.context.",
        ),
        (
            2,
            {"expert": 4},
            MOE,
            "torchrun --nproc-per-node: got 2, expected a multiple of expert x expert_tensor x pipeline = 4. "
            "Start more ranks, or lower --parallel.expert.",
        ),
        (
            2,
            {"expert": 2},
            DENSE,
            "parallel.expert: got 2, expected 1 for a dense model. Use --parallel.expert 1.",
        ),
        (
            3,
            {"expert": 3},
            MOE,
            "parallel.expert: got 3, expected a divisor of the model's 8 experts. Choose a divisor.",
        ),
        (
            2,
            {"tensor": 2},
            MOE,
            "parallel.expert_tensor: got 1, expected parallel.tensor = 2 when parallel.expert = 1. "
            "Use --parallel.expert-tensor 2, or --parallel.expert > 1.",
        ),
        (
            4,
            {"expert": 2, "expert_tensor": 2},
            MOE,
            "parallel.expert_tensor: got 2, expected 1 when parallel.tensor = 1. "
            "Use --parallel.expert-tensor 1 with a larger --parallel.expert, or --parallel.tensor > 1.",
        ),
        (
            4,
            {"tensor": 4, "expert_tensor": 4},
            MOE,
            "parallel.tensor: got 4, expected a divisor of 4 heads and 2 key-value heads. "
            "Choose a smaller tensor parallelism.",
        ),
        (
            2,
            {"tensor": 2, "expert_tensor": 2},
            replace(MOE, vocab_size=97),
            "parallel.tensor: got 2, expected a divisor of the vocabulary of 97. Choose a divisor.",
        ),
        (
            5,
            {"pipeline": 5},
            MOE,
            "parallel.pipeline: got 5, expected one of [1, 2, 3, 4]: stages (times virtual_pipeline) divide the "
            "model's 4 layers, or 1 or 2 more, and none is empty. Choose one.",
        ),
        (
            4,
            {"pipeline": 4, "virtual_pipeline": 2},
            MOE,
            "parallel.pipeline: got 4, expected one of [2]: stages (times virtual_pipeline) divide the model's 4 "
            "layers, or 1 or 2 more, and none is empty. Choose one, or another --parallel.virtual-pipeline.",
        ),
        (
            2,
            {"engines": 2, "engine_tensor": 2},
            MOE,
            "parallel.engines: got 2, expected engines x engine_tensor <= 2 ranks. "
            "Engines run on the trainer's own devices: lower --parallel.engines, or start more ranks.",
        ),
        (
            4,
            {"engine_tensor": 3},
            MOE,
            "parallel.engine_tensor: got 3, expected a divisor of 4 heads. Choose one.",
        ),
        (
            7,
            {"engine_tensor": 7},
            replace(DENSE, num_heads=28, num_kv_heads=4),  # Qwen2.5-7B
            "parallel.engine_tensor: got 7, expected a divisor or a multiple of 4 key-value heads. Choose one.",
        ),
        (
            4,
            {"engine_tensor": 4},
            replace(DENSE, mlp_width=18),
            "parallel.engine_tensor: got 4, expected a divisor of an MLP's width of 18. Choose one.",
        ),
        (
            256,
            {},
            MOE,
            "rollout.prompts_per_step: got 16, expected at least 256 sequences per update, one per data-parallel rank. "
            "Ask for more prompts, or use fewer data-parallel ranks.",
        ),
        (
            1,
            {},
            replace(MOE, max_position=64),
            "rollout.max_new_tokens: got 64, expected < the model's context length 64. Shorten the responses.",
        ),
    ],
)
def test_layouts_that_do_not(world: int, parallel: dict[str, int], shape: ModelShape, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config(**parallel), world, shape)
    assert str(caught.value) == message


SIZES = st.sampled_from([1, 2, 3, 4])


@given(world=st.integers(1, 16), tensor=SIZES, pipeline=SIZES, context=SIZES, expert=SIZES, expert_tensor=SIZES)
def test_an_accepted_layout_uses_every_rank(
    world: int, tensor: int, pipeline: int, context: int, expert: int, expert_tensor: int
) -> None:
    sizes = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
    try:
        layout = check(config(**sizes, expert_tensor=expert_tensor), world, MOE)
    except ConfigError:
        return
    assert layout.data * tensor * pipeline * context == world
    assert world % (expert * expert_tensor * pipeline) == 0


@pytest.mark.parametrize("experts", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_shape_of_a_model_folder(tmp_path: Path, experts: str) -> None:
    """GLM-4 counted as dense: it was trained under layouts that mix up experts, and refused under others."""
    raw = {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        experts: 8,
        "vocab_size": 96,
        "max_position_embeddings": 512,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelShape.read(tmp_path) == MOE
    with pytest.raises(ConfigError, match=r"^parallel.expert_tensor: got 1, expected parallel.tensor = 2"):
        check(config(tensor=2), 2, ModelShape.read(tmp_path))
    assert check(config(expert=8), 8, ModelShape.read(tmp_path)).expert == 8
    del raw[experts]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelShape.read(tmp_path) == DENSE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            None,
            "expected a folder with config.json, tiny, or tiny:LAYERS. "
            "Give the folder of a model in Hugging Face format with --model.path; nothing is downloaded.",
        ),
        ("{", "expected the config.json of a language model. It has JSONDecodeError"),
        ('{"vocab_size": 3}', "It has KeyError: 'num_hidden_layers'."),
    ],
)
def test_a_folder_without_a_model(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        ModelShape.read(tmp_path)
    assert str(caught.value).startswith("model.path: got ")
    assert message in str(caught.value)


def test_the_first_rank_of_a_host_owns_its_pooled_engines() -> None:
    hosts = ["a"] * 4 + ["b"] * 4
    assert places(hosts, pooled=False) == [(0, 0), (2, 2), (4, 0), (6, 2)]
    assert places(hosts, pooled=True) == [(0, 0), (0, 2), (4, 0), (4, 2)]


def test_two_launchers_on_a_host_that_see_other_devices() -> None:
    """Each counts its devices from 0, and a rank can only use those that it sees."""
    views = [Member(machine="a", pid=i, visible="0,1,2,3" if i < 4 else "4,5,6,7").view for i in range(8)]
    assert places(views, pooled=False) == [(0, 0), (2, 2), (4, 0), (6, 2)]
    assert places(views, pooled=True) == [(0, 0), (0, 2), (4, 0), (4, 2)]


def test_two_launchers_on_a_host_that_see_the_same_devices() -> None:
    """A rank's own device, as its launcher numbered it."""
    assert places(["a"] * 8, pooled=False) == [(0, 0), (2, 2), (4, 0), (6, 2)]
    assert places(["a"] * 8, pooled=True) == [(0, 0), (0, 2), (0, 0), (0, 2)]


def places(views: Sequence[Hashable], *, pooled: bool) -> list[tuple[int, int]]:
    """Of four engines of two devices, on ranks of two launchers with four ranks each."""
    local_ranks = [*range(4), *range(4)]
    return [place_engine(i, views, local_ranks, engine_tensor=2, pooled=pooled) for i in range(4)]


def test_a_member_says_which_devices_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    everything = Member.here(3)
    assert (everything.device, Member.here(3, gpu="GPU-a").device) == (3, "GPU-a")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    some = Member.here(3)
    assert (everything.local_rank, everything.visible, some.visible) == (3, None, "4,5")
    assert everything.machine == some.machine
    assert everything.view != some.view


def cluster(hosts: int, ranks: int, *, gpus: int, one_visible: bool = False) -> tuple[list[str], list[int | str]]:
    """(host of each rank, UUID of the GPU that it trains on): each launcher's ranks see all GPUs, or one each."""
    machines: list[str] = []
    devices: list[int | str] = []
    for host in range(hosts):
        for local_rank in range(ranks):
            number = local_rank if one_visible else own_device(local_rank, gpus)
            machines.append(f"host {host}")
            devices.append(f"GPU-{host}.{number}")
    return machines, devices


@pytest.mark.parametrize(
    ("hosts", "ranks", "gpus", "one_visible", "engines", "size"),
    [
        (1, 1, 1, False, 1, 1),
        (1, 8, 8, False, 2, 4),
        (2, 8, 8, False, 4, 4),
        (2, 4, 8, False, 2, 4),  # half of the GPUs of each host
        (1, 8, 8, True, 8, 1),  # srun --gpus-per-task=1
        (1, 8, 8, True, 2, 4),
    ],
)
def test_an_engine_runs_on_the_devices_that_its_ranks_train_on(
    hosts: int, ranks: int, gpus: int, one_visible: bool, engines: int, size: int
) -> None:
    machines, devices = cluster(hosts, ranks, gpus=gpus, one_visible=one_visible)
    assert len(set(devices)) == hosts * ranks
    for engine in range(engines):
        first = engine * size
        found = engine_devices(engine, machines, devices, engine_tensor=size)
        assert found == tuple(devices[first : first + size])


@pytest.mark.parametrize(("size", "engine"), [(16, 0), (3, 2)])
def test_an_engine_over_two_hosts_is_refused(size: int, engine: int) -> None:
    machines, devices = cluster(2, 8, gpus=8)
    with pytest.raises(ConfigError, match=f"parallel.engine_tensor: got {size}, .*several hosts.*Choose one that div"):
        engine_devices(engine, machines, devices, engine_tensor=size)


def test_two_ranks_on_one_gpu_are_refused() -> None:
    machines, devices = ["a", "a"], ["GPU-0", "GPU-0"]
    with pytest.raises(ConfigError, match=r"got 'ranks \[0, 1\] on GPU GPU-0', expected one GPU per rank"):
        engine_devices(0, machines, devices, engine_tensor=1)
    assert engine_devices(0, machines, [0, 0], engine_tensor=1) == (0,)  # cores may be shared


def test_a_ranks_own_device() -> None:
    assert [own_device(local_rank, 8) for local_rank in range(8)] == [*range(8)]
    assert own_device(5, 1) == 0  # the only one that it was given
    with pytest.raises(ConfigError, match="got 'a rank 4', expected at most 4 ranks"):
        own_device(4, 4)


def test_engines_start_at_multiples_of_their_size() -> None:
    assert [engine_owner(i, engine_tensor=2) for i in range(3)] == [0, 2, 4]


@pytest.mark.parametrize(
    ("microbatch", "kv", "expected"),
    [(8192, None, 512 - 2 - 64), (8192, 300, 300 - 2 - 64), (100, 300, 100 - 1 - 64)],
)
def test_a_prompt_must_fit_model_cache_and_micro_batch_beside_the_response(
    microbatch: int, kv: int | None, expected: int
) -> None:
    base = config()
    engine = replace(base.rollout.engine, max_total_tokens=kv)
    run = replace(
        base,
        rollout=replace(base.rollout, max_new_tokens=64, engine=engine),
        train=replace(base.train, tokens_per_microbatch=microbatch),
    )
    assert longest_prompt(run, 512) == expected
    assert longest_text(run, 512) == min(512, kv or 512, microbatch - 1 + 2), "room for both, and what SGLang keeps"


def test_whole_pages_leave_a_prompt_less_room() -> None:
    """300 tokens are 18 pages of 16, and SGLang sets two aside but for a token of each."""
    base = config()
    engine = replace(base.rollout.engine, max_total_tokens=300, extra_args={"page_size": 16})
    rollout = replace(base.rollout, max_new_tokens=64, engine=engine)
    run = replace(base, rollout=rollout, train=replace(base.train, tokens_per_microbatch=8192))
    assert longest_prompt(run, 512) == 288 - 2 * 15 - 2 - 64
    with pytest.raises(ConfigError, match="'page_size=0', expected a whole number >= 1"):
        replace(engine, extra_args={"page-size": 0})


@pytest.mark.parametrize("kv", [None, 300])
def test_a_response_that_may_go_on_later_has_less_room(kv: int | None) -> None:
    """SGLang takes 6 tokens less input than there is room, and at least one token is to follow."""
    base = config(engines=2)
    engine = replace(base.rollout.engine, max_total_tokens=kv)
    rollout = replace(base.rollout, max_new_tokens=64, engine=engine, oversample=1.5, partial=True)
    run = replace(base, rollout=rollout, train=replace(base.train, tokens_per_microbatch=8192))
    assert longest_prompt(run, 512) == (kv or 512) - 6 - 64


@pytest.mark.parametrize(
    ("microbatch", "kv", "limit"),
    [
        (8192, None, "the model's context length 512"),
        (300, None, "train.tokens_per_microbatch x parallel.context"),
        (8192, 300, "rollout.engine.max_total_tokens"),
    ],
)
def test_what_leaves_a_prompt_no_more_room_is_named(microbatch: int, kv: int | None, limit: str) -> None:
    base = config()
    engine = replace(base.rollout.engine, max_total_tokens=kv)
    run = replace(
        base,
        rollout=replace(base.rollout, max_new_tokens=64, engine=engine),
        train=replace(base.train, tokens_per_microbatch=microbatch),
    )
    way_out = "." if limit.startswith("the model") else ", or raise that limit."
    told = f"({limit} less rollout.max_new_tokens). Shorten it, or lower rollout.max_new_tokens"
    assert f"{prompt_limit(run, 512)}." == told + way_out


def test_no_room_for_any_prompt_names_the_limit() -> None:
    base = config()
    run = replace(
        base, rollout=replace(base.rollout, max_new_tokens=64), train=replace(base.train, tokens_per_microbatch=65)
    )
    with pytest.raises(ConfigError, match=r"rollout.max_new_tokens: got 64, expected < 64, so that a prompt fits.*"):
        longest_prompt(run, 512)


def test_routing_replay_needs_experts() -> None:
    replayed = load(["quickstart_plain", "--parallel.expert", "1", "--train.routing-replay", "r3"])
    assert check(replayed, 1, MOE).world == 1
    with pytest.raises(ConfigError, match=r"train.routing_replay: got 'r3', expected off for a dense model. It has"):
        check(replayed, 1, DENSE)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            None,
            "expected a folder with config.json. Give that of a model in Hugging Face format with "
            "--rollout.speculation.draft-model; nothing is downloaded. Or draft without one: "
            "--rollout.speculation.mode auto --rollout.speculation.drafters suffix.",
        ),
        ("{", "expected the config.json of a language model. It has JSONDecodeError"),
        ('{"architectures": ["Any"], "mtp_num_layers": 1}', "expected a model without, or MiMo's with one."),
    ],
)
def test_a_folder_without_a_draft_model_is_not_told_of_the_policy(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^rollout\.speculation\.draft_model: got ") as caught:
        draft_shape(str(tmp_path))
    assert told in str(caught.value)
    assert "model.path" not in str(caught.value)


def test_drafting_without_a_draft_model_can_be_done_as_that_says() -> None:
    """In any mode that needs one."""
    for recipe, *words in (["quickstart"], ["qwen3_8b"], ["qwen3_8b", "--rollout.speculation.mode", "coupled"]):
        told = ["--rollout.speculation.mode", "auto", "--rollout.speculation.drafters", "suffix"]
        check_in_engines(load([recipe, *words, *told]), MOE)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1 in"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers 2 in"),
        ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "DeepseekV3ForCausalLMNextN in"),
        ({"architectures": ["Glm4MoeForCausalLM"], "num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1 in"),
        ({"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2 in"),
    ],
)
def test_multi_token_prediction_is_refused(tmp_path: Path, fields: dict[str, object], named: str) -> None:
    """For a policy, and for a draft model."""
    raw = {"num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(raw | dict.fromkeys(fields, 0) | {"architectures": ["Any"]}))
    assert ModelShape.read(tmp_path).num_layers == 4
    (tmp_path / "config.json").write_text(json.dumps(raw | fields))
    for read in (ModelShape.read, lambda folder: draft_shape(str(folder))):
        with pytest.raises(ConfigError, match=rf"MTP\) layers, {named}.*EAGLE-3 head"):
            read(tmp_path)


def test_mimo_with_one_such_layer_is_a_policy_and_no_draft_model(tmp_path: Path) -> None:
    raw = {"num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 96, "max_position_embeddings": 512}
    raw |= {"num_key_value_heads": 2, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    mimo = ModelShape.read(tmp_path)
    assert mimo == replace(DENSE, has_mtp=True)
    with pytest.raises(ConfigError, match=r"a policy with an MTP layer .* drafter mtp"):
        draft_shape(str(tmp_path))
    drafting = load(
        ["quickstart_plain", "--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "mtp"]
    )
    check_in_engines(drafting, mimo)
    with pytest.raises(ConfigError, match=r"drafters: got 'mtp', expected others, since .* has no MTP layer.*EAGLE-3"):
        check_in_engines(drafting, DENSE)


@pytest.mark.parametrize("dimension", ["pipeline", "context"])
def test_a_layer_that_learns_is_on_one_rank_with_its_hidden_states(dimension: str) -> None:
    run = config(**{dimension: 2})
    assert check(run, 2, DENSE).world == 2
    with pytest.raises(ConfigError, match=rf"parallel.{dimension}: got 2, expected 1 for a policy with an MTP layer"):
        check(run, 2, replace(DENSE, has_mtp=True))
