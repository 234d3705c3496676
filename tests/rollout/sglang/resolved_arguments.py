"""Script: what SGLang makes of our arguments on a machine with Hopper GPUs, by mode, and with Blackwell's, what its
graphs would do with the rows of a verification, and which memory it releases and resumes when it is asked by ours.
Prints JSON."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

from specactor.config import EngineConfig
from specactor.rollout.sglang.engine_protocol import EngineSpec
from tests.lib import hopper


def main(model_dir: str) -> None:
    os.environ["SGLANG_PLUGINS"] = "specactor"
    hopper.install()
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from specactor.config import SpeculationConfig
    from specactor.rollout.sglang.backend import server_args

    load_plugins()
    found = {}
    for mode in ("off", "coupled", "auto", "SGLang's default", "coupled, tiles"):
        spec = EngineSpec(
            index=0,
            model_dir=model_dir,
            dtype="bfloat16",
            devices=("GPU-0",),
            context_length=128,
            log_file="log",
            speculation=SpeculationConfig(mode=mode if mode in ("off", "auto") else "coupled"),
        )
        arguments = server_args(spec, gpu=True, memory_release=True)
        if mode.startswith("SGLang"):  # what it does where nothing is said
            del arguments["cuda_graph_backend_prefill"]
        attention = "tiles" if mode.endswith("tiles") else "triton"
        resolved = ServerArgs(**arguments | {"attention_backend": attention})
        resolved.resolve_once()
        resolved.check_server_args()
        view = resolved_view(resolved)
        graphs = view.cuda_graph_config
        found[mode] = {
            "decode": str(graphs.decode.backend),
            "prefill": str(graphs.prefill.backend),
            "most rows": max(graphs.decode.bs),
            "rows": view.speculative_num_draft_tokens,
            "attention": [view.attention_backend, view.disable_radix_cache],
        }
    kernels = kernels_of(replace(spec, speculation=SpeculationConfig()))
    print(
        json.dumps({"arguments": found, "kernels": kernels, "graphs": graphs_of(width=9), "memory": memory_by_call()})
    )


def kernels_of(spec: EngineSpec) -> dict[str, object]:
    """The kernels of experts and attention, and the largest graph of decoding, on Hopper and Blackwell: of an engine
    that runs 300 requests, SGLang's own choice, and of arguments of the user's."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.server_args import ServerArgs

    from specactor.rollout.sglang.backend import server_args

    def resolved(spec: EngineSpec, *left_out: str) -> list[object]:
        arguments = server_args(spec, gpu=True, memory_release=True)
        of_sglang = ServerArgs(**{name: value for name, value in arguments.items() if name not in left_out})
        of_sglang.resolve_once()
        view = resolved_view(of_sglang)
        return [view.moe_runner_backend, view.attention_backend, max(view.cuda_graph_config.decode.bs)]

    many = replace(spec, config=EngineConfig(max_running_requests=300))
    asked = replace(many, config=replace(many.config, extra_args={"attention_backend": "fa4"}))
    own = ("moe_runner_backend", "attention_backend", "cuda_graph_bs_decode")
    found: dict[str, object] = {"Hopper": resolved(many), "Hopper, SGLang's": resolved(many, *own)}
    facts = {"is_blackwell": True, "is_sm100": True, "is_sm100_or_sm110": True, "device_sm": 100}
    hopper_s = dict.fromkeys(("is_sm90", "is_hopper_with_cuda_12_3"), False)
    with override_platform(**facts, **hopper_s, device_capability=(10, 0)):
        found |= {"Blackwell": resolved(many), "Blackwell, SGLang's": resolved(many, *own)}
        found["Blackwell, asked"] = resolved(asked)
    return found


def graphs_of(*, width: int) -> dict[str, object]:
    """Whether SGLang's own runner would replay a graph captured for `width` tokens per request for decode rows of one
    token, and what its copy into the graph's input then does."""
    import torch
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    class Runner(DecodeCudaGraphRunner):  # type: ignore[misc]
        def __init__(self) -> None:  # captures nothing: there is no device
            vars(self).update(
                ragged_verify_mode=False,
                captured_req_width=width,
                require_mlp_tp_gather=False,
                enable_pdmux=False,
                disable_padding=False,
                max_bs=256,
                require_mlp_sync=False,
                is_encoder_decoder=False,
                enable_two_batch_overlap=False,
                model_runner=SimpleNamespace(spec_algorithm=SimpleNamespace(is_ngram=lambda: False)),
            )

        def _resolve_lora_variant(self, batch: object) -> None:
            return None

        def _make_graph_key(self, *args: object, **kwargs: object) -> int:
            return 0

    from specactor.rollout.sglang import gpu

    kind = gpu._subclass(Runner)
    ours = kind.__new__(kind)
    Runner.__init__(ours)
    found: dict[str, object] = {}
    for rows in (1, 3):
        tokens = torch.arange(5, 5 + rows)
        batch = SimpleNamespace(replace_embeds=None, spec_info=None, batch_size=rows, input_ids=tokens)
        target = torch.zeros(rows * width, dtype=torch.int64)
        try:
            torch._foreach_copy_([target], [tokens])
            copied = target.tolist()
        except RuntimeError:
            copied = "RuntimeError"
        found[str(rows)] = {
            "replayed": bool(Runner().can_run_graph(batch)),
            "ours": bool(ours.can_run_graph(batch)),
            "copied": copied,
        }
    return found


def memory_by_call() -> list[list[str]]:
    """What is released after each call of our backend, by SGLang's own manager, which raises for what it cannot do."""
    import torch
    import torch.distributed as dist
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    from specactor.rollout.sglang.backend import Backend

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.cuda.synchronize = lambda: None
    released: set[str] = set()

    class Manager(SchedulerWeightUpdaterManager):  # type: ignore[misc]
        """Asks no engine for its group and its settings."""

        def __post_init__(self) -> None:
            self.tp_cpu_group = dist.group.WORLD

        def _assert_weight_cache_inactive(self, _: str) -> None:
            return None

    def pause(tag: str) -> None:
        assert tag not in released, f"{tag}: the memory saver ends a process that pauses what is paused"
        released.add(tag)

    manager = Manager(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=torch.nn.Linear(2, 2, device="cpu"))),
        draft_worker=None,
        memory_saver_adapter=SimpleNamespace(pause=pause, resume=released.remove),
        flush_cache=lambda: True,
        is_fully_idle=lambda **_: True,
    )

    async def release(request: object, _: None) -> None:
        manager.release_memory_occupation(request)

    async def resume(request: object, _: None) -> None:
        manager.resume_memory_occupation(request)

    backend = Backend.__new__(Backend)
    backend.memory_release, backend._released = True, set()
    backend._engine = SimpleNamespace(
        tokenizer_manager=SimpleNamespace(release_memory_occupation=release, resume_memory_occupation=resume)
    )
    after = []
    for call in (
        *(backend.resume_memory, backend.release_memory, backend.release_memory),
        *(lambda: backend.resume_memory(("weights",)), lambda: backend.resume_memory(("weights",))),
        *(backend.release_memory, lambda: backend.resume_memory(("weights",)), backend.resume_memory),
        backend.resume_memory,
    ):
        asyncio.run(call())
        after.append(sorted(released))
    return after


if __name__ == "__main__":
    main(sys.argv[1])
