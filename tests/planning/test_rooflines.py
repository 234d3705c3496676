"""Shapes have the parameters of their names, figures are complete, and forwards cost what the parts of a layer do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.errors import PlanError
from specactor.planning.model_shapes import DRAFTERS, SHAPES, TransformerShape
from specactor.planning.plans import Cluster, from_table
from specactor.planning.rooflines import (
    DEVICES,
    PLAIN_BUCKETS,
    WINDOW_BUCKETS,
    Device,
    Roofline,
    cost_table,
    device,
    draft_grid,
    from_figures,
)
from specactor.planning.search import search
from specactor.rollout.speculation.acceptance import survival_of
from specactor.rollout.speculation.costs import CostTable, Grid, ProcessCosts

DENSE, ROUTED, SMALL = SHAPES["Qwen2.5-32B"], SHAPES["Qwen3-30B-A3B"], SHAPES["Qwen2.5-0.5B"]
SHARES = ("matmul_share", "weights_share", "attention_share", "link_share", "memory_share")
IDEAL = replace(
    device("H100"), **dict.fromkeys(SHARES, 1.0), **dict.fromkeys(("all_reduce_s", "kernel_s", "launch_s"), 0.0)
)


def roofline(shape: TransformerShape = DENSE, on: Device = device("H100"), **more: object) -> Roofline:  # noqa: B008
    return Roofline(shape, on, **{"devices": 4, "context": 2048, **more})  # type: ignore[arg-type]


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SHAPES if "A" not in name])
def test_parameters_are_those_of_the_name(name: str) -> None:
    billions = float(name.rpartition("-")[2].removesuffix("B"))
    assert SHAPES[name].params == pytest.approx(billions * 1e9, rel=0.09), "Qwen2.5-7B has 7.6"
    assert SHAPES[name].active_params <= SHAPES[name].params


def test_experts() -> None:
    """Model cards: 30.5 and 3.3 billion (29.9 and 3.0 without embeddings twice); 235 and 22."""
    assert ROUTED.params == pytest.approx(30.5e9, rel=0.005)
    assert ROUTED.active_params == pytest.approx(3.04e9, rel=0.005)
    assert SHAPES["Qwen3-235B-A22B"].params == pytest.approx(235e9, rel=0.005)
    assert SHAPES["Qwen3-235B-A22B"].active_params == pytest.approx(22e9, rel=0.03)
    assert ROUTED.distinct_experts(1) == pytest.approx(8)
    assert ROUTED.distinct_experts(2) == pytest.approx(128 * (1 - (120 / 128) ** 2))
    assert ROUTED.distinct_experts(10_000) == pytest.approx(128)
    assert DENSE.distinct_experts(7) == 0


def test_keys_and_values() -> None:
    assert DENSE.kv_bytes_per_token == 64 * 2 * 8 * 128 * 2


CONFIG = {
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "sliding_window": 4096,
    "use_sliding_window": False,
}


def test_a_config_is_read() -> None:
    assert TransformerShape.of_config(CONFIG, "Qwen3-30B-A3B") == ROUTED
    dense = {**CONFIG, "num_experts": 0, "head_dim": None, "tie_word_embeddings": True}
    read = TransformerShape.of_config(dense, "x")
    assert (read.head_dim, read.intermediate, read.experts, read.tied) == (64, 6144, 0, True)
    for name in ("num_local_experts", "n_routed_experts"):
        assert TransformerShape.of_config({**CONFIG, "num_experts": None, name: 128}, "Qwen3-30B-A3B") == ROUTED


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"decoder_sparse_step": 2}, "layers with and without experts"),
        ({"mlp_only_layers": [0]}, "layers with and without experts"),
        ({"num_experts": 0, "n_routed_experts": 8, "first_k_dense_replace": 1}, "layers with and without experts"),
        ({"n_shared_experts": 1}, "n_shared_experts"),
        ({"use_sliding_window": True}, "sliding_window"),
        ({"hidden_size": None}, "'hidden': None"),
        ({"num_hidden_layers": 0}, "'layers': 0"),
        ({"num_experts_per_tok": 129}, "got 129"),
    ],
)
def test_a_config_that_would_be_misread_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        TransformerShape.of_config({**CONFIG, **change}, "x")
    with pytest.raises(PlanError, match="vocab_size"):
        TransformerShape.of_config({k: v for k, v in CONFIG.items() if k != "vocab_size"}, "x")


def test_every_drafter_is_there_with_the_vocabulary_of_its_target() -> None:
    for target, names in DRAFTERS.items():
        assert all(abs(SHAPES[name].vocab - SHAPES[target].vocab) <= 128 for name in names), "padding differs"
        assert all(SHAPES[name].params < SHAPES[target].params for name in names)


# --- devices ----------------------------------------------------------------------------------------------------------


def test_figures_are_in_the_units_they_say() -> None:
    for known in DEVICES.values():
        assert 1e14 < known.flops < 3e15, "dense bfloat16, not sparse"
        assert 7e10 < known.memory_bytes < 2e11
        assert 3e12 < known.memory_bytes_per_s <= 8e12
        assert known.link_bytes_per_s in (450e9, 900e9), "one direction"
        assert all(0 < getattr(known, name) <= 1 for name in SHARES)
    assert device("h20") is DEVICES["H20"]
    with pytest.raises(PlanError, match="device: got 'A100', expected one of H100, H200, H20, B200"):
        device("A100")


# --- forwards ---------------------------------------------------------------------------------------------------------


def test_one_token_reads_the_weights_and_the_cache() -> None:
    """Ideal H100, one request: all weights but the embedding, the KV of the context, and the logits."""
    seconds = roofline(devices=1, on=IDEAL).forward_s(1)
    read = DENSE.active_params * 2 + 2048 * DENSE.kv_bytes_per_token + 2 * 4 * DENSE.vocab
    assert seconds == pytest.approx(read / 3.35e12, rel=1e-9)
    assert roofline(devices=4, on=IDEAL).forward_s(1) == pytest.approx(
        read / 3.35e12 / 4 + 64 * 2 * 1.5 * DENSE.hidden * 2 / 450e9, rel=1e-9
    ), "and two all-reduces per layer"


def test_many_rows_compute() -> None:
    seconds = roofline(devices=1, context=0, on=IDEAL).forward_s(512, 8, buckets=WINDOW_BUCKETS)
    logits = 2 * 4 * 4096 * DENSE.vocab / 3.35e12
    assert seconds == pytest.approx(2 * DENSE.active_params * 4096 / 989.4e12 + logits, rel=1e-9)


def test_experts_are_read_as_they_are_touched() -> None:
    """Ideal, one device, no context: 2 rows touch 15.5 experts of a layer, and compute nothing that shows."""
    one = roofline(ROUTED, devices=1, context=0, on=IDEAL)
    expert = 3 * 2048 * 768 * 2 / 3.35e12
    logits = 2 * 4 * ROUTED.vocab / 3.35e12
    grown = one.forward_s(1, 2) - one.forward_s(1, 1)
    assert grown == pytest.approx(48 * expert * (ROUTED.distinct_experts(2) - 8) + logits, rel=1e-9)


def test_every_row_of_a_verification_reads_its_keys() -> None:
    """As ours does; what reading them once would take can be asked for."""
    long = roofline(context=32_000, on=IDEAL)
    assert long.forward_s(16, 2, buckets=WINDOW_BUCKETS) > 1.5 * long.forward_s(16, 1)
    once = roofline(context=32_000, on=IDEAL, keys_once=True)
    assert once.forward_s(16, 2, buckets=WINDOW_BUCKETS) < 1.1 * once.forward_s(16, 1)
    assert once.forward_s(16, 1) == long.forward_s(16, 1)


def test_devices_beyond_the_key_value_heads_have_copies() -> None:
    """Of 4 heads 4 devices have one each, and 8 as well: each reads as much, and half as many requests fit."""
    four, eight = (roofline(ROUTED, devices=g, context=32_000, on=IDEAL) for g in (4, 8))
    none = [roofline(ROUTED, devices=g, context=0, on=IDEAL) for g in (4, 8)]
    read_s = 64 * 32_000 * ROUTED.kv_bytes_per_token / 3.35e12 / 4
    assert four.forward_s(64) - none[0].forward_s(64) == pytest.approx(read_s, rel=1e-9)
    assert eight.forward_s(64) - none[1].forward_s(64) == pytest.approx(read_s, rel=1e-9)
    options = from_figures(ROUTED, [], device("H100"), survivals={}, context=32_000, max_requests=64, sizes=(4, 8))
    for option in options.verifiers:
        left = option.capacity_bytes - ROUTED.weights_bytes
        each = 32_000 * ROUTED.kv_bytes_per_token * option.devices / 4
        assert option.requests() == int(left / each)


def test_requests_are_rounded_up_to_captured_sizes() -> None:
    unread = replace(DENSE, kv_heads=1)
    costs = roofline(unread, context=0)
    assert costs.forward_s(17) == costs.forward_s(24) > costs.forward_s(16)
    assert costs.forward_s(17, 2, buckets=WINDOW_BUCKETS) == costs.forward_s(18, 2, buckets=WINDOW_BUCKETS)
    assert PLAIN_BUCKETS[5:7] == (16, 24)
    assert list(PLAIN_BUCKETS) == sorted(set(PLAIN_BUCKETS))
    assert list(WINDOW_BUCKETS) == sorted(set(WINDOW_BUCKETS))


def test_small_kernels_have_a_floor() -> None:
    tiny = replace(SMALL, layers=24)
    floor = 24 * device("H100").kernel_s * device("H100").kernels_per_layer
    assert roofline(tiny, devices=1, context=0).forward_s(1) > floor
    assert roofline(tiny, devices=1, context=0, on=IDEAL).forward_s(1) < floor * 1.5


@given(
    st.sampled_from(list(SHAPES.values())),
    st.sampled_from(list(DEVICES.values())),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 600),
    st.integers(1, 8),
)
def test_more_work_is_never_faster(shape: TransformerShape, on: Device, g: int, requests: int, tokens: int) -> None:
    of = Roofline(shape, on, devices=g, context=1000)
    seconds = of.forward_s(requests, tokens)
    assert 0 < seconds <= of.forward_s(requests + 1, tokens)
    assert seconds <= of.forward_s(requests, tokens + 1)
    assert seconds <= Roofline(shape, on, devices=g, context=2000).forward_s(requests, tokens)


def test_an_engine_of_two_nodes_is_refused() -> None:
    with pytest.raises(AssertionError, match="16 of a node of"):
        roofline(devices=16)


# --- tables and candidates --------------------------------------------------------------------------------------------


def test_a_table_is_one_like_a_measured_one() -> None:
    target, small = roofline(), roofline(SMALL)
    table = cost_table(target, {"small": small}, max_window=4, max_requests=100)
    assert CostTable.from_json(table.to_json()) == table
    assert table.plain_s(16) == target.forward_s(16)
    assert table.verify_s(16, 16 * 4) == target.forward_s(16, 4, buckets=WINDOW_BUCKETS)
    assert table.verify.requests[-1] == 100
    assert table.draft_s("small", 8, 4) == pytest.approx(4 * table.draft_s("small", 8, 1))


def test_a_drafter_is_cut_or_copied_whichever_is_faster() -> None:
    """Two KV heads: it can be cut in two, not in four."""
    grid = draft_grid(roofline(SMALL, devices=2), max_window=1, max_requests=64)
    for n in (1, 64):
        copied = roofline(SMALL, devices=1).forward_s(-(-n // 2))
        cut = roofline(SMALL, devices=2).forward_s(n)
        assert grid.at(n, 1) == min(copied, cut)


def test_candidates_of_figures() -> None:
    found = from_figures(
        DENSE, [SMALL], device("H100"), survivals={SMALL.name: survival_of(0.8, 8)}, context=4096, max_requests=256
    )
    assert [v.devices for v in found.verifiers] == [1, 2, 4, 8], "65.5 of 72 GB: one device holds 6 requests"
    assert [v.requests() for v in found.verifiers[:2]] == [6, 73]
    with pytest.raises(PlanError, match="got 470 GB of weights"):
        from_figures(
            SHAPES["Qwen3-235B-A22B"], [], device("H100"), survivals={}, context=4096, max_requests=8, sizes=(1, 2, 4)
        )
    ranked = search(Cluster(devices=16, requests=256), found.verifiers, found.drafters)
    assert {plan.mode for plan in ranked} == {"off", "coupled", "decoupled"}


def test_the_hosts_time_counts_in_every_round() -> None:
    """Wrong would be one time for both kinds: then host time alone made drafts pay."""

    def gain(plain_s: float, drafted_s: float) -> float:
        found = from_figures(
            DENSE,
            [SMALL],
            device("H100"),
            survivals={SMALL.name: survival_of(0.8, 4)},
            context=1024,
            max_requests=64,
            sizes=(8,),
            host_s=(plain_s, drafted_s),
        )
        ranked = search(Cluster(devices=8, requests=8), found.verifiers, found.drafters)
        return next(plan.speedup for plan in ranked if plan.mode == "coupled")

    assert gain(0.0, 0.002) < gain(0.0, 0.0) < gain(0.002, 0.002)


def test_candidates_of_a_table() -> None:
    grid = Grid(requests=(1.0, 8.0), per_request=(1.0, 4.0), seconds=((0.01, 0.02), (0.02, 0.04)))
    table = CostTable(model="m", device="d", date="", verify=grid, plain=grid, drafters={"suffix": grid, "model": grid})
    found = from_table(table, devices=2, survivals={"suffix": (0.5,), "model": (0.6,)})
    assert [v.devices for v in found.verifiers] == [2]
    assert {d.name: [e.devices for e in d.engines] for d in found.drafters} == {"suffix": [], "model": [2]}
    assert found.verifiers[0].ahead_s is None


def test_a_measured_process_is_the_only_drafter_elsewhere() -> None:
    grid = Grid(requests=(1.0, 8.0), per_request=(1.0, 4.0), seconds=((0.01, 0.02), (0.02, 0.04)))
    token_s, ahead_s = (Grid(requests=(2.0,), per_request=(1.0,), seconds=((s,),)) for s in (0.003, 0.001))
    process = ProcessCosts(token_s=token_s, ahead_s=ahead_s)
    table = CostTable(
        model="m", device="d", date="", verify=grid, plain=grid, drafters={"model": grid}, process=process
    )
    found = from_table(table, devices=2, survivals={"model": (0.6,), "decoupled": (0.7,)})
    [model, elsewhere] = found.drafters
    assert (model.name, model.engines) == ("model", ())
    assert (elsewhere.name, elsewhere.survival) == ("decoupled", (0.7,))
    [engine] = elsewhere.engines
    assert (engine.devices, engine.token_s) == (1, token_s)
    assert engine.seconds.at(2, 5) == pytest.approx(5 * 0.003)
    assert found.verifiers[0].ahead_s == ahead_s
