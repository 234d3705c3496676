"""The arguments that engines are started with. No engine is started."""

from __future__ import annotations

import runpy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specactor.config import EngineConfig, SpeculationConfig
from specactor.cpu import sglang as cpu
from specactor.errors import EngineError
from specactor.rollout.sglang import backend
from specactor.rollout.sglang.backend import server_args
from specactor.rollout.sglang.engine_client import Engine
from specactor.rollout.sglang.engine_protocol import EngineSpec
from specactor.rollout.sglang.gpu import graph_sizes
from tests.lib.scripts import found_by

COUPLED = SpeculationConfig(mode="coupled", drafters=("model",), draft_model="d")
BACKUP = "enable_draft_weights_cpu_backup"


def spec(speculation: SpeculationConfig) -> EngineSpec:
    return EngineSpec(
        index=0,
        model_dir="m",
        dtype="float32",
        devices=(0,),
        context_length=64,
        log_file="l",
        speculation=speculation,
    )


@pytest.mark.parametrize("gpu", [True, False])
def test_a_draft_model_in_the_engine_outlives_a_release_of_memory(gpu: bool) -> None:
    """Pushes bring it new versions only; a weight sync brings back the policy alone."""
    arguments = server_args(spec(COUPLED), gpu=gpu, memory_release=gpu)
    assert arguments["speculative_draft_model_path"] == "d"
    assert arguments[BACKUP] is True


def test_an_engine_without_a_drafter_for_it_has_no_draft_model() -> None:
    arguments = server_args(spec(replace(COUPLED, drafters=("suffix",))), gpu=True, memory_release=True)
    assert arguments["speculative_algorithm"] == "SPECACTOR"
    assert not {"speculative_draft_model_path", BACKUP} & {*arguments}


def test_the_policy_has_no_backup() -> None:
    for speculation in (SpeculationConfig(), COUPLED):
        arguments = server_args(spec(speculation), gpu=True, memory_release=True)
        assert "enable_weights_cpu_backup" not in arguments
        assert (BACKUP in arguments) == ("speculative_draft_model_path" in arguments)


@pytest.mark.parametrize("gpu", [True, False])
def test_sglang_has_every_argument(gpu: bool) -> None:
    package = find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    order = Path(package.origin).parent / "srt/arg_groups/field_order.py"  # which imports nothing
    known = runpy.run_path(str(order))["POSITIONAL_FIELD_ORDER"]
    assert set(server_args(spec(COUPLED), gpu=gpu, memory_release=gpu)) <= set(known)


def test_an_engine_that_awaits_weights_reads_those_of_its_draft_model_alone() -> None:
    waits = server_args(replace(spec(COUPLED), awaits_weights=True), gpu=True, memory_release=True)
    assert (waits["load_format"], waits["speculative_draft_load_format"]) == ("dummy", "auto")
    assert "load_format" not in server_args(spec(COUPLED), gpu=True, memory_release=True)


def test_the_kv_pool_of_a_replacement_does_not_depend_on_what_is_free() -> None:
    given = replace(spec(COUPLED), config=EngineConfig(memory_fraction=0.5), kv_tokens=4096)
    arguments = server_args(given, gpu=True, memory_release=True)
    assert arguments["max_total_tokens"] == 4096
    assert arguments["mem_fraction_static"] > 0.95, "SGLang takes the smaller of both"
    assert server_args(spec(COUPLED), gpu=True, memory_release=True)["mem_fraction_static"] == 0.5


@pytest.fixture(scope="module")
def on_hopper(model_dir: str) -> dict[str, Any]:
    return found_by("tests.rollout.sglang.resolved_arguments", model_dir)


def test_engines_have_graphs_of_decoding_and_none_of_prefills(on_hopper: dict[str, Any]) -> None:
    """By SGLang's own resolution of arguments for device cuda, with our plugin."""
    resolved = on_hopper["arguments"]
    for mode in ("off", "coupled", "auto"):
        assert (resolved[mode]["decode"], resolved[mode]["prefill"]) == ("full", "disabled")
    default = resolved["SGLang's default"]
    assert (default["decode"], default["prefill"], default["rows"]) == ("full", "breakable", 9)


def test_sglang_takes_attention_in_tiles_for_a_deterministic_engine_on_gpus(on_hopper: dict[str, Any]) -> None:
    tiles, triton = (on_hopper["arguments"][mode] for mode in ("coupled, tiles", "coupled"))
    assert tiles == triton | {"attention": ["tiles", triton["attention"][1]]}


def test_graphs_reach_to_all_rows_of_a_verification(on_hopper: dict[str, Any]) -> None:
    """Left alone, SGLang has none for more rows than requests may run, of which a round has nine times as many."""
    arguments, requests = on_hopper["arguments"], EngineConfig().max_running_requests
    assert arguments["off"]["most rows"] == requests
    for mode in ("coupled", "auto", "coupled, tiles"):
        assert arguments[mode]["most rows"] == arguments[mode]["rows"] * requests == 9 * requests


def test_kernels_that_choose_by_the_number_of_rows_are_left_on_no_gpu(on_hopper: dict[str, Any]) -> None:
    """By SGLang's own resolution, of a mixture of experts. Left alone it takes others on Blackwell, and has no graphs
    for more than 256 requests."""
    kernels = on_hopper["kernels"]
    assert kernels["Hopper"] == ["triton", "triton", graph_sizes(300)[-1]]
    assert kernels["Blackwell"] == ["triton", "triton", graph_sizes(300)[-1]]
    assert kernels["Blackwell, asked"][:2] == ["triton", "fa4"]
    assert kernels["Hopper, SGLang's"] == ["auto", "fa3", 256]
    assert kernels["Blackwell, SGLang's"] == ["flashinfer_trtllm", "flashinfer", 256]


@pytest.mark.parametrize("most", [1, 2, 3, 9, 255, 256, 257, 264, 640, 2304])
def test_a_round_computes_few_rows_beyond_its_own(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted({*sizes})
    assert most <= sizes[-1] < most + 8
    for rows in range(1, most + 1):
        taken = next(size for size in sizes if size >= rows)
        assert taken - rows <= max(7, rows // 8 + 8)


def test_a_graph_of_wider_requests_would_take_a_row_without_an_error(on_hopper: dict[str, Any]) -> None:
    """In SGLang's own graphs of speculation one row is broadcast over the tokens of its request, and more than one is
    an error. So `gpu` never runs in them."""
    one, three = on_hopper["graphs"]["1"], on_hopper["graphs"]["3"]
    assert one == {"replayed": True, "ours": False, "copied": [5] * 9}
    assert three == {"replayed": True, "ours": False, "copied": "RuntimeError"}


def test_memory_is_released_and_resumed_once(on_hopper: dict[str, Any]) -> None:
    """In stages too: the weights come back first, and go again alone where the rest has not come back."""
    all_kinds, rest = ["cuda_graph", "kv_cache", "weights"], ["cuda_graph", "kv_cache"]
    assert on_hopper["memory"] == [[], all_kinds, all_kinds, rest, rest, all_kinds, rest, [], []]


class _Number:
    """A token, or a log-probability, that counts how often it is converted."""

    conversions = 0

    def __float__(self) -> float:
        _Number.conversions += 1
        return 0.0

    def __int__(self) -> int:
        return int(float(self))


def test_a_report_converts_what_is_new() -> None:
    """The engine's one event loop makes all reports: it must not go through all of a response for each."""
    answers = [
        {"output_ids": [_Number()] * length, "meta_info": {"output_token_logprobs": [(_Number(), 0, None)] * length}}
        for length in (1, 3, 4)
    ]
    found = [backend.new_tokens(out, since) for out, since in zip(answers, (0, 1, 3), strict=True)]
    assert found == [([0] * new, [0.0] * new) for new in (1, 2, 1)]
    assert _Number.conversions == 2 * 4
    answers[0]["meta_info"] = {}
    with pytest.raises(EngineError, match="0 log-probabilities for 1 tokens"):
        backend.new_tokens(answers[0], 0)


def test_an_engine_is_idle_before_its_memory_goes() -> None:
    """SGLang's scheduler asserts it, and dies."""
    done: list[str] = []
    engine: Any = SimpleNamespace(flush=lambda: done.append("flush"), _do=lambda command: done.append(command.verb))
    Engine.release_memory(engine)
    assert done == ["flush", "release_memory"]


def test_an_engines_environment_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A UUID is the same device to everyone; a number is one of those that this process was given."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:64")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert cpu.gpu_environment(("GPU-b", "GPU-a")) == {
        "CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a",
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
    }
    assert cpu.gpu_environment((1,))["CUDA_VISIBLE_DEVICES"] == "5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert cpu.gpu_environment((1,))["CUDA_VISIBLE_DEVICES"] == "1"
