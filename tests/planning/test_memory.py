"""What a device's memory holds: the figures that were worked out by hand, the shipped recipes, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from examples import qwen3_30b_a3b_node
from specactor.config import Config
from specactor.errors import ConfigError
from specactor.parallel.layout import Layout, longest_text
from specactor.planning.command import show_memory
from specactor.planning.memory import (
    LENT,
    MICRO_BATCH,
    PHASES,
    Memory,
    Phase,
    host_memory_of,
    memory_of,
    of_job,
    parameters,
)
from specactor.planning.model_shapes import SHAPES, TransformerShape
from specactor.recipes import load, recipes, to_json
from tests.test_step_memory import DRAFT_MICRO_BATCH

ROOT = Path(__file__).parents[2]
H100 = 80e9
MOE = SHAPES["Qwen3-30B-A3B"]


def layout(world: int, **sizes: int) -> Layout:
    return Layout(**{"world": world, "tensor": 1, "pipeline": 1, "context": 1, "expert": 1, "expert_tensor": 1} | sizes)


def job(world: int, *, recipe: str = "qwen3_30b_a3b", **sizes: int) -> Memory:
    return of_job(load([recipe]), layout(world, **sizes), MOE, H100)


@pytest.mark.parametrize(("world", "tensor", "known_gb"), [(8, 2, 88.8), (8, 4, 80.7), (16, 2, 66.0), (64, 4, 41.0)])
def test_peaks_of_training_are_those_worked_out_by_hand(world: int, tensor: int, known_gb: float) -> None:
    trained = job(world, tensor=tensor, expert=8).of("train", without=("rows of rounds", "logits in graphs"))
    assert trained == pytest.approx(known_gb * 1e9, rel=0.05)


def test_parameters_are_all_on_some_rank() -> None:
    whole = job(1).rows["policy, trainer"]["train"]
    assert whole == pytest.approx(MOE.weights_bytes)
    divided = job(64, tensor=4, expert=16, pipeline=2).rows
    assert divided["policy, trainer"]["train"] < whole / 8
    # Adam's state of what 32 ranks of a stage hold between them is that of half the model, and one embedding.
    assert "rollout" not in divided["optimizer"], "it is in host memory"
    assert 32 * divided["optimizer"]["train"] == pytest.approx(12 * (MOE.params / 2), rel=0.02)


def test_the_fullest_stage_is_one_between_where_the_ends_have_a_layer_less() -> None:
    """Qwen3-235B-A22B's 94 layers over 8 stages: 11, 12 six times, and 11."""
    large, stages = SHAPES["Qwen3-235B-A22B"], layout(8, pipeline=8)
    held = [sum(of_stage) for of_stage in parameters(large, stages)]
    assert sum(held) == large.params
    layer = (large.params - 2 * large.head_params) / 94
    assert held == [11 * layer + large.head_params, *[12 * layer] * 6, 11 * layer + large.head_params]
    rows = of_job(load(["qwen3_30b_a3b"]), stages, large, H100).rows
    assert rows["policy, trainer"]["train"] == 2 * 12 * layer
    config = load(["qwen3_30b_a3b", "--model.path", large.name, "--parallel.pipeline", "8"])
    assert memory_of(config, 256, H100).rows["policy, trainer"]["train"] < 2 * 12 * layer / 4


def test_in_float32_the_optimizer_stays() -> None:
    config = load(["qwen3_30b_a3b"])
    float32 = replace(config, model=replace(config.model, dtype="float32"))
    rows = of_job(float32, layout(64, tensor=4, expert=8), MOE, H100).rows
    assert set(rows["optimizer"]) == set(PHASES)


def test_rows_of_rounds_have_logits_and_lists_of_keys() -> None:
    """2,304 rows of 151,936 logits in float32, as 4 ranks gather them in bfloat16, and a rank's own of them, and the
    places of 16,384 keys and what they are rounded up to. Triton's attention keeps what 64 parts of those give to 8
    heads, too. A draft model has as much of 512 rows, but gathers as many; float32 logits are shared in a
    vocabulary."""
    config = load(["qwen3_30b_a3b", "--distillation.refresh", "0"])
    context, vocab = longest_text(config, 40_960), 151_936
    small, other = SHAPES["Qwen3-0.6B"], replace(SHAPES["Qwen3-0.6B"], vocab=1000)
    assert small.vocab == vocab
    assert (small.heads, small.head_dim) == (16, 128)

    def found(attention: str, *drafts: TransformerShape, mode: Literal["off", "auto"] = "auto") -> tuple[float, float]:
        engine = replace(config.rollout.engine, extra_args={"attention_backend": attention})
        speculation = replace(config.rollout.speculation, mode=mode)
        of = replace(config, rollout=replace(config.rollout, engine=engine, speculation=speculation))
        rows = of_job(of, layout(64, tensor=4, expert=8), MOE, H100, drafts).rows
        assert set(rows["rows of rounds"]) == set(PHASES), "SGLang does not release it"
        assert set(rows["logits in graphs"]) == {"rollout", "sync"}
        return rows["rows of rounds"]["train"], rows["logits in graphs"]["sync"]

    assert 16_000 < context <= 16_384
    assert found("fa3") == (2304 * (4 * vocab + 2 * vocab + 4 * context), 2304 * 2 * vocab / 4)
    assert found("fa3", mode="off") == (256 * (4 * vocab + 2 * vocab + 4 * context), 256 * 2 * vocab / 4)
    triton = 2304 * (4 * vocab + 2 * vocab + 8 * context + 4 * 64 * 8 * 128)
    assert found("triton") == found("tiles") == (triton, 2304 * 2 * vocab / 4)
    kept, held = (a - b for a, b in zip(found("fa3", small), found("fa3"), strict=True))
    assert (kept, held) == (2304 * 2 * vocab + 512 * 4 * context, 512 * 2 * vocab / 4)
    assert found("triton", small)[0] - triton == 2304 * 2 * vocab + 512 * (8 * context + 4 * 64 * 4 * 128)
    assert found("fa3", other)[0] - found("fa3")[0] == 2304 * (4 + 2) * 1000 + 512 * 4 * context
    assert found("fa3", replace(small, reads=1)) == found("fa3", small), "a head has graphs as well"


def test_draft_models_in_an_engine_are_added_up() -> None:
    base = load(["qwen3_30b_a3b"])
    names, ranks = ("Qwen3-0.6B", "Qwen3-4B"), base.parallel.engine_tensor

    def rows(*folders: str) -> Mapping[str, Mapping[Phase, float]]:
        drafters = ("model", "model:2")[: len(folders)]
        speculation = replace(base.rollout.speculation, drafters=drafters, draft_model=folders)
        return memory_of(replace(base, rollout=replace(base.rollout, speculation=speculation)), 64, H100).rows

    one, two = rows(*names[:1]), rows(*names)
    assert one["draft model"]["rollout"] == pytest.approx(SHAPES[names[0]].weights_bytes / ranks)
    assert two["draft model"]["rollout"] == pytest.approx(sum(SHAPES[name].weights_bytes for name in names) / ranks)
    pool, smaller = (of["keys and values"]["rollout"] + of["draft model"]["rollout"] for of in (one, two))
    assert smaller == pytest.approx(pool)


@pytest.mark.parametrize("name", ["tensor", "pipeline", "expert", "context"])
def test_more_devices_in_a_dimension_never_take_more(name: str) -> None:
    few, many = job(64, **{name: 1}), job(64, **{name: 2})
    for what, row in few.rows.items():
        for phase, size in row.items():
            assert many.rows[what][phase] <= size * 1.001, (what, phase)  # ranks of one group all hold the router


def test_stages_keep_as_many_micro_batches_as_there_are_stages() -> None:
    one, four = (job(64, pipeline=pipeline).rows["activations"]["train"] for pipeline in (1, 4))
    assert four == one, "of a quarter of the layers"


def test_context_parallelism_lengthens_what_a_micro_batch_holds() -> None:
    """Not its tokens on a rank, by which activations and logits go."""
    one, four = (job(64, tensor=4, expert=8, context=context).rows for context in (1, 4))
    assert (four["activations"], four["logits"]) == (one["activations"], one["logits"])
    assert one["logits"]["train"] == 10 * 16_384 * 151_936 / 4


@pytest.mark.parametrize(("dtype", "stays"), [("bfloat16", False), ("float32", True)])
def test_a_critic_takes_what_the_policy_takes_to_learn(dtype: Literal["bfloat16", "float32"], stays: bool) -> None:
    config = load(["qwen3_8b"])
    config = replace(config, model=replace(config.model, dtype=dtype))
    of_critic = replace(config, algorithm=replace(config.algorithm, advantage="gae"))
    without, memory = memory_of(config, 8, H100), memory_of(of_critic, 8, H100)
    learning = sum(without.rows[name]["train"] for name in ("policy, trainer", "gradients", "optimizer"))
    assert memory.of("train") - without.of("train") == pytest.approx(learning)
    assert (memory.of("rollout") > without.of("rollout")) == stays, "in float32 moments stay, as the policy's do"


@pytest.mark.parametrize("recipe", recipes())
def test_shipped_recipes_fit_the_devices_that_they_name(recipe: str) -> None:
    memory = memory_of(
        load([recipe]), {"qwen3_30b_a3b": 64, "qwen3_30b_a3b_node": 8, "qwen3_8b": 8}.get(recipe, 2), H100
    )
    assert {phase: memory.of(phase) <= H100 for phase in PHASES} == dict.fromkeys(PHASES, True)


@pytest.mark.parametrize(
    ("state", "device_bytes", "host_bytes"), [("float32", 12, 12), ("bfloat16", 8, 8), ("host", 0, 16)]
)
def test_where_the_optimizer_is_decides_what_fits(state: str, device_bytes: int, host_bytes: int) -> None:
    """Bytes per parameter of the experts, of which 8 devices have one copy; on the host Adam has gradients, too."""
    config = load(["qwen3_30b_a3b_node", "--train.optimizer-state", state, "--distillation.refresh", "0"])
    of_devices, of_host = memory_of(config, 8, H100), host_memory_of(config, 8, 8)
    assert of_devices.rows["optimizer"]["train"] == pytest.approx(device_bytes * MOE.params / 8, rel=0.02)
    on_host = sum(of_host.rows[name]["train"] for name in ("optimizer", "gradients") if name in of_host.rows)
    assert on_host == pytest.approx(host_bytes * MOE.params, rel=0.02)
    assert of_devices.fits == (state != "float32")


@pytest.mark.parametrize("devices", [8, 64])
def test_a_host_has_the_policy_once_for_its_engines(devices: int) -> None:
    """From its own ranks or from those of other hosts (`test_hosts.test_what_a_host_lacks_crosses_once`)."""
    config = load(["qwen3_30b_a3b", "--parallel.engines", str(devices // 4)])
    row = host_memory_of(config, devices, 8).rows["policy, for engines"]
    assert row == dict.fromkeys(PHASES, pytest.approx(MOE.weights_bytes))


def test_the_page_says_what_is_predicted() -> None:
    said = (ROOT / "docs" / "gpu.md").read_text().partition("## Predicted peaks")[2].partition("\n## ")[0]
    hosts = re.findall(r"([\d,]+) GB of memory, ([\d,]+) at a checkpoint;.* 64 devices (\d+) and (\d+)\.", said)
    of = [host_memory_of(load([name]), n, 8) for name, n in (("qwen3_30b_a3b_node", 8), ("qwen3_30b_a3b", 64))]
    assert hosts == [tuple(f"{memory.of(phase) / 1e9:,.0f}" for memory in of for phase in ("rollout", "train"))]
    rows = re.findall(r"\| (qwen\w+)([^|]*) \| (\d+) \| ([\d.]+) \| ([\d.]+)(, refused)? \| ([\d.]+) \|", said)
    assert len(rows) == 5
    for name, settings, devices, rollout, train, refused, sync in rows:
        words = [] if name == "qwen3_8b" else ["--parallel.engines", str(int(devices) // 4)]
        memory = memory_of(load([name, *settings.strip(" `").split(), *words]), int(devices), H100)
        assert [f"{memory.of(phase) / 1e9:.1f}" for phase in PHASES] == [rollout, train, sync]
        assert bool(refused) != memory.fits
        with pytest.raises(ConfigError) if refused else nullcontext():
            memory.check()


def test_one_node_says_what_it_takes() -> None:
    said = re.sub(r"\s+", " ", qwen3_30b_a3b_node.__doc__ or "")
    config = load(["qwen3_30b_a3b_node"])
    of_host, of_device = host_memory_of(config, 8, 8), memory_of(config, 8, H100)
    for memory, figures in (
        (of_host, re.findall(r"\((\d+) GB in all, (\d+) at a checkpoint\)", said)[0]),
        (of_device, re.findall(r"at most ([\d.]+) of 80 GB", said)),
    ):
        digits = 1 if memory is of_device else 0
        of = sorted({f"{memory.of(phase) / 1e9:.{digits}f}" for phase in PHASES}, key=float)
        assert of[-len(figures) :] == [*figures], (of, figures)


def test_one_node_differs_from_eight_in_what_it_must() -> None:
    one, eight = to_json(load(["qwen3_30b_a3b_node"])), to_json(load(["qwen3_30b_a3b"]))
    for section, key in (("parallel", "engines"), ("train", "optimizer_state")):
        assert one[section].pop(key) != eight[section].pop(key)
    assert one | {"name": eight["name"]} == eight


def on_eight() -> Config:
    config = load(["qwen3_30b_a3b", "--distillation.refresh", "0"])
    return replace(config, parallel=replace(config.parallel, engines=2))


def test_what_cannot_fit_is_refused_with_what_takes_most() -> None:
    with pytest.raises(ConfigError, match=r"^parallel: got .74 GB per device in phase train \(optimizer 46, gr"):
        memory_of(on_eight(), 8, 60e9).check()
    memory = memory_of(on_eight(), 8, H100)
    memory.check()  # what is certain fits, and estimates refuse nothing
    assert not memory.fits
    assert {phase: memory.of(phase) > 0 for phase in PHASES} == dict.fromkeys(PHASES, True)


def test_plan_prints_a_recipes_memory(capsys: pytest.CaptureFixture[str]) -> None:
    show_memory(["qwen3_30b_a3b", "--devices", "8", "--parallel.engines", "2", "--device", "h200"], Console(width=100))
    said = capsys.readouterr().out
    assert "qwen3_30b_a3b: GB on each of 8 H200" in said
    assert "optimizer" in said
    assert "GB in the memory of a host with 8" in said
    assert "What a host's processes take themselves comes on top." in said
    assert "It fits in 141 GB; activations, logits, draft micro-batch, overhead are estimates." in said
    words = ["qwen3_30b_a3b", "--devices", "8", "--parallel.engines", "2"]
    show_memory([*words, "--distillation.refresh", "0"], Console(width=100))
    assert "It does not fit in 80 GB" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^parallel: got .86 GB per device in phase train"):
        show_memory(words, Console(width=100))
    assert "draft model, trainer" in capsys.readouterr().out, "the table is printed before it is refused"


def test_a_draft_model_that_learns_is_counted() -> None:
    """Float32 weights and moments; its gradients, and DDP's. DeepSpeed keeps what it has while engines generate. Its
    micro-batch is there instead of the policy's."""
    size = SHAPES["Qwen3-0.6B"].params

    def row(*words: str) -> Mapping[Phase, float]:
        return memory_of(load(["qwen3_8b", *words]), 8, H100).rows.get("draft model, trainer", {})

    assert row() == {"train": 20 * size}
    with_drafts, without = (
        memory_of(load(["qwen3_8b", "--distillation.refresh", refresh]), 8, H100) for refresh in ("0.03", "0")
    )
    of_policy = sum(without.rows[name]["train"] for name in ("activations", "logits"))
    assert with_drafts.of("train") - without.of("train") == pytest.approx(20 * size + DRAFT_MICRO_BATCH - of_policy)
    fewer = load(["qwen3_8b", "--train.tokens-per-microbatch", "65536"])
    assert memory_of(fewer, 8, H100).rows[MICRO_BATCH]["train"] == 0, "the policy's takes more"
    assert row("--distillation.refresh", "0") == {}
    assert row("--distillation.zero", "2") == dict.fromkeys(PHASES, pytest.approx(9.5 * size))
    assert row("--distillation.zero", "2_offload") == dict.fromkeys(PHASES, 8 * size)
    on_host = {
        zero: host_memory_of(load(["qwen3_8b", "--distillation.zero", zero]), 16, 8).rows.get("draft model, trainer")
        for zero in ("off", "2", "2_offload")
    }
    assert on_host["off"] == dict.fromkeys(PHASES, 8 * 12 * size), "locked memory of 8 ranks"
    assert on_host["2"] is None
    assert on_host["2_offload"] is not None


def test_a_head_is_counted_with_what_it_reads() -> None:
    """Its weights, and in the pool of keys and values the policy's states at every token."""
    config = load(["qwen3_30b_a3b"])
    head = replace(MOE, name="head", layers=1, intermediate=6144, experts=0, experts_per_token=0, reads=3 * MOE.hidden)
    alone, drafting = (of_job(config, layout(8, expert=8), MOE, H100, drafts).rows for drafts in ((), (head,)))
    states, pool = drafting["hidden states"]["rollout"], drafting["keys and values"]["rollout"]
    tensor = config.parallel.engine_tensor
    assert states + pool + head.weights_bytes / tensor == pytest.approx(alone["keys and values"]["rollout"])
    keys = (MOE.kv_bytes_per_token + head.kv_bytes_per_token) / tensor
    assert states / pool == pytest.approx(2 * 3 * MOE.hidden / keys), "states are whole on each rank"


@pytest.mark.parametrize(
    ("kind", "rows"), [("warm-up", {"draft model"}), ("warm-up-head", {"draft model", "hidden states"})]
)
def test_what_the_warm_up_will_make_is_counted(kind: str, rows: set[str]) -> None:
    words = ["--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "model"]
    found = memory_of(load(["quickstart_plain", *words, "--rollout.speculation.draft-model", kind]), 2, H100).rows
    assert {"draft model", "hidden states"} & set(found) == rows


def test_an_mtp_layer_is_counted_where_it_learns_and_where_it_drafts(tmp_path: Path) -> None:
    """That of the published MiMo-7B: one of its layers, and what joins embedding and hidden states."""
    sizes = {"num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    sizes |= {"intermediate_size": 11008, "vocab_size": 151680, "num_nextn_predict_layers": 1}
    about = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    usual = [
        "qwen3_8b",
        "--distillation.refresh",
        "0",
        "--rollout.speculation.draft-model",
        "--rollout.speculation.drafters",
    ]

    def found(layers: int, drafter: str) -> tuple[Memory, Memory]:
        (tmp_path / "config.json").write_text(json.dumps(sizes | about | {"num_nextn_predict_layers": layers}))
        config = load([*usual, drafter, "--model.path", str(tmp_path)])
        return memory_of(config, 8, H100), host_memory_of(config, 8, 8)

    (without, host_without), (learns, host), (drafts, _) = found(0, "suffix"), found(1, "suffix"), found(1, "mtp")
    own = 2 * 4096 * 32 * 128 + 2 * 4096 * 8 * 128 + 3 * 4096 * 11008 + 2 * 4096 * 4096
    tensor = load(["qwen3_8b"]).parallel.tensor

    def more(name: str, phase: Phase = "train") -> float:
        return learns.rows[name][phase] - without.rows[name].get(phase, 0.0)

    assert more("policy, trainer") == pytest.approx(2 * own / tensor)
    assert more("gradients") == pytest.approx(4 * own / tensor)
    assert more("optimizer") == pytest.approx(12 * own / 8)
    read = host.rows["checkpoint"]["train"] - host_without.rows["checkpoint"]["train"]
    assert read == pytest.approx(12 * own * 8 / tensor), "by each of eight ranks"
    assert learns.rows["logits"]["train"] == 2 * without.rows["logits"]["train"], "both are there at once"
    assert learns.rows["activations"]["train"] >= without.rows["activations"]["train"]
    assert learns.of("rollout") == pytest.approx(without.of("rollout") + more("policy, trainer", "rollout"))

    engine = load(["qwen3_8b"]).parallel.engine_tensor
    rows, states = drafts.rows, 2 * 4096
    assert rows["MTP layer"]["rollout"] == pytest.approx(2 * own / engine)
    pool = rows["keys and values"]["rollout"] + rows["hidden states"]["rollout"]
    assert pool + rows["MTP layer"]["rollout"] == pytest.approx(learns.rows["keys and values"]["rollout"])
    keys = 37 * 2 * 8 * 128 * 2 / engine
    assert rows["hidden states"]["rollout"] == pytest.approx(pool * states / (keys + states))


def lending(*words: str) -> Config:
    """Two engines of two GPUs, or as `words` say, on whose first ones drafters sleep."""
    drafting = ["--rollout.speculation.mode", "decoupled", "--rollout.speculation.drafters", "suffix"]
    size = ["--parallel.engines", "2", "--rollout.engine.max-total-tokens", "100000"]
    return load(["qwen3_8b", *drafting, *size, "--distillation.refresh", "0", *words])


def test_a_drafter_on_an_engines_gpu_is_counted_beside_all_of_the_engine() -> None:
    """Weights and a pool as long as the engine's, with 32 places for each request of both; 512 rows with logits and
    lists of keys, which stay. The engine's pool is as long as it is set to be, and not all that is left. Asleep
    weights are on the host."""
    draft, policy = SHAPES["Qwen3-0.6B"], SHAPES["Qwen3-8B"]
    config = lending()
    requests, context = config.rollout.engine.max_running_requests, longest_text(config, 40_960)
    memory, on_host = memory_of(config, 8, H100, 8), host_memory_of(config, 8, 8)
    assert config.parallel.engine_tensor == 2
    assert memory.rows["keys and values"]["rollout"] == 100_000 * policy.kv_bytes_per_token / 2
    kept = 512 * (4 * draft.vocab + 8 * context + 4 * 64 * 16 * 128)
    assert 2 * requests <= 512
    assert 16_000 < context <= 16_384
    pool = (100_000 + 2 * requests * 32) * draft.kv_bytes_per_token
    awake = draft.weights_bytes + pool + kept + 512 * 2 * draft.vocab
    assert memory.rows[LENT] == {"rollout": awake, "train": kept, "sync": kept}
    assert on_host.rows[LENT] == dict.fromkeys(PHASES, 2 * draft.weights_bytes)
    four = lending("--parallel.engines", "4")
    assert host_memory_of(four, 8, 4).rows[LENT] == on_host.rows[LENT], "two on each of two hosts"
    assert host_memory_of(four, 8, 8).rows[LENT] == dict.fromkeys(PHASES, 4 * draft.weights_bytes)


def test_a_pool_has_no_more_than_is_there() -> None:
    long = "--rollout.engine.max-total-tokens", "100000000"
    config = lending(*long)
    memory, whole = memory_of(config, 8, H100, 8), memory_of(load(["qwen3_8b"]), 8, H100).rows
    static, kept = config.rollout.engine.memory_fraction * H100, memory.rows[LENT]["train"]
    graphs = 512 * 2 * SHAPES["Qwen3-0.6B"].vocab
    assert memory.rows[LENT]["rollout"] == pytest.approx(static + kept + graphs)
    of_engine = sum(memory.rows[name]["rollout"] for name in ("policy, engine", "keys and values"))
    assert of_engine == pytest.approx(static)
    drafting = load(["qwen3_8b", *long])
    assert memory_of(drafting, 8, H100).rows["keys and values"] == whole["keys and values"]
    short = load(["qwen3_8b", "--rollout.engine.max-total-tokens", "100000"])
    of_both = SHAPES["Qwen3-8B"].kv_bytes_per_token + SHAPES["Qwen3-0.6B"].kv_bytes_per_token
    assert memory_of(short, 8, H100).rows["keys and values"]["rollout"] == pytest.approx(100_000 * of_both / 2)


def test_where_lent_drafters_do_not_fit_a_run_is_refused() -> None:
    memory_of(lending(), 8, H100, 8).check()
    with pytest.raises(
        ConfigError, match=r"^parallel: got .\d+ GB per device in phase rollout \(lent drafter 50, .*max-total-"
    ):
        memory_of(lending("--rollout.engine.max-total-tokens", "400000"), 8, H100, 8).check()


@pytest.mark.parametrize(
    ("words", "host_devices"),
    [
        ((), 2),
        (("--rollout.engine.max-total-tokens", "None"), 8),
        (("--rollout.speculation.mode", "off"), 8),
        (("--parallel.drafters", "1"), 8),
    ],
    ids=["one engine per host", "no size, which is refused", "nobody drafts", "devices of their own"],
)
def test_a_drafter_that_sleeps_nowhere_is_not_counted(words: tuple[str, ...], host_devices: int) -> None:
    config = lending(*words)
    assert LENT not in memory_of(config, 8, H100, host_devices).rows
    assert LENT not in host_memory_of(config, 8, host_devices).rows
