"""SGLang's engine as its own process uses it.

Invariants:
- noise depends on (seed, position) alone;
- a batch is one message to the scheduler, so it is always admitted alike;
- log-probabilities are log_softmax(logits / temperature) of the emitted token, before top-p and top-k.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from specactor.errors import EngineError
from specactor.parallel.layout import pool_room
from specactor.rollout import process_guard
from specactor.rollout.resume import num_begun
from specactor.rollout.sglang import rank_calls, responses
from specactor.rollout.sglang.engine_protocol import EngineSpec
from specactor.rollout.sglang.gpu import graph_sizes
from specactor.types import FinishReason, RolloutRequest

_MEMORY = ("weights", "kv_cache", "cuda_graph")  # SGLang's names of the memory that can be released


def server_args(spec: EngineSpec, *, gpu: bool, memory_release: bool) -> dict[str, Any]:
    """Return arguments of `sglang.Engine`; `extra_args`, which has none that a setting sets, has the last word."""
    config = spec.config
    arguments: dict[str, Any] = {
        "model_path": spec.model_dir,
        "dtype": spec.dtype,
        "tp_size": spec.tensor_parallel,
        "context_length": spec.context_length,
        "max_running_requests": config.max_running_requests,
        "max_total_tokens": config.max_total_tokens,
        "mem_fraction_static": config.memory_fraction,
        "random_seed": spec.random_seed,
        "skip_tokenizer_init": True,
        "enable_deterministic_inference": True,
        "sampling_backend": "pytorch",
        "sleep_on_idle": True,
        "incremental_streaming_output": False,
        "log_level": "warning",
        "enable_memory_saver": memory_release,
        **config.attention_on(gpu=gpu),
    }
    reserve = 0
    if spec.speculation.mode != "off":
        rows = spec.speculation.max_window + 1
        reserve = 2 * rows * config.max_running_requests  # SGLang sets aside two rounds per request
        arguments |= {"speculative_algorithm": "SPECACTOR", "speculative_num_draft_tokens": rows}
        if folders := [*spec.speculation.in_engines.values(), *[spec.model_dir] * spec.speculation.uses_mtp]:
            arguments["speculative_draft_model_path"] = folders[0]  # `verify_worker` loads them all
            arguments["enable_draft_weights_cpu_backup"] = True  # no weight sync brings them back after a release
    if spec.awaits_weights:
        arguments |= {"load_format": "dummy", "speculative_draft_load_format": "auto"}
    if gpu:
        arguments |= {
            "cuda_graph_backend_prefill": "disabled",  # those cannot be released for training
            "cuda_graph_bs_decode": graph_sizes(reserve // 2 or config.max_running_requests),
            "moe_runner_backend": "triton",  # the others of Blackwell choose by rows, and permute weights
        }
        if spec.kv_tokens:
            # SGLang would divide what is free, of which the trainer's parameters, on the devices when an engine is
            # replaced, have taken a part: the pool would be smaller, or there would be none. Nearly all of it is more
            # than weights and a pool of a known size take.
            arguments |= {"max_total_tokens": spec.kv_tokens, "mem_fraction_static": 0.99}
    else:
        arguments |= {
            "device": "cpu",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,  # there is no device to overlap with
            "disable_custom_all_reduce": True,
            # SGLang sizes the pool of a CPU by the machine's memory, which it shares with the trainer.
            "max_total_tokens": config.max_total_tokens or config.max_running_requests * spec.context_length + reserve,
        }
    return arguments | dict(config.extra_args)


class Backend:
    """A running SGLang engine; its coroutines run on `loop`."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start the engine. Call it in the main thread."""
        self.gpu = torch.cuda.is_available()
        self.memory_release = self.gpu and find_spec("torch_memory_saver") is not None
        self._spec = spec
        self._released: set[str] = set()  # kinds of memory that the device has back
        self._engine = _engine_class(fork=not self.gpu)(
            **server_args(spec, gpu=self.gpu, memory_release=self.memory_release)
        )
        info = self._engine._scheduler_init_result.scheduler_infos[0]
        self.kv_tokens: int = info["max_total_num_tokens"]
        page = self._engine.server_args.resolved_dict()["page_size"] or 1
        self.max_sequence_tokens = min(spec.context_length, pool_room(self.kv_tokens, page)) - spec.reserved_tokens
        self.scheduler_pids: list[int] = list(self._engine.get_all_child_pids())
        self.loop = self._engine.loop
        self._num_calls = 0
        self._num_batches = 0
        self._rids: dict[str, str] = {}  # SGLang's names of the requests that run

    async def generate(
        self, requests: Sequence[RolloutRequest], report_tokens: int = 0
    ) -> AsyncIterator[tuple[int, tuple[list[int], list[float]], dict[str, Any] | None]]:
        """Yield (index, (tokens, log-probabilities), None) after every `report_tokens` tokens, of new ones, and (index,
        those of all, response) at the end, without what was `begun`. Raises EngineError for requests that SGLang or
        this engine refuses."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        self._num_batches += 1
        manager = self._engine.tokenizer_manager
        if manager.tokenizer is None and any(request.sampling.stop for request in requests):
            manager.tokenizer = responses.Text(manager.server_args.tokenizer_path or self._spec.model_dir)
        inputs = [[*r.prompt_ids, *(r.begun.token_ids if r.begun else ())] for r in requests]
        start = min(map(len, inputs)) - 1 if all(request.begun for request in requests) else 0
        rids = [f"{self._num_batches}.{i}." for i in range(len(requests))]  # SGLang aborts by prefix
        self._rids |= {request.request_id: rid for request, rid in zip(requests, rids, strict=True)}
        batch = GenerateReqInput(
            input_ids=inputs,
            # News of every 64 tokens show that there is progress.
            sampling_params=[_sampling(request, report_tokens or 64) for request in requests],
            rid=rids,
            return_logprob=True,
            logprob_start_len=-1,
            return_routed_experts=self._spec.config.routed_experts,
            routed_experts_start_len=start,
            stream=True,
        )
        reported = [0] * len(requests)
        try:
            async for out in manager.generate_request(batch, None):
                index = int(out["meta_info"]["id"].split(".")[1])
                reason = out["meta_info"]["finish_reason"]
                state = new_tokens(out, 0 if reason else reported[index]) if reason or report_tokens else ([], [])
                if reason is None:
                    reported[index] += len(state[0])
                    yield index, state, None
                else:
                    self._forget(requests[index], rids[index])
                    goes_on = bool(requests[index].begun)
                    yield index, state, _response(out, state, reason, start=start, goes_on=goes_on)
        except ValueError as error:
            raise EngineError(f"SGLang refused the batch: {error}") from error
        finally:
            for request, rid in zip(requests, rids, strict=True):
                self._forget(request, rid)

    def _forget(self, request: RolloutRequest, rid: str) -> None:
        if self._rids.get(request.request_id) == rid:
            del self._rids[request.request_id]

    async def abort(self, request_ids: Sequence[str]) -> None:
        manager = self._engine.tokenizer_manager
        for request_id in request_ids:
            rid = self._rids.get(request_id, "")
            for _ in range(200):  # SGLang passes over an abort of what it does not know yet
                if rid in manager.rid_to_state or self._rids.get(request_id) != rid:
                    break
                await asyncio.sleep(0.005)
            if rid:
                manager.abort_request(rid)

    def abort_all(self) -> None:
        """End every request with reason ``abort``."""
        self._engine.tokenizer_manager.abort_request(abort_all=True)

    async def release_memory(self) -> None:
        """Give all memory back to the device, where the platform can."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        tags = [tag for tag in _MEMORY if tag not in self._released]
        if self.memory_release and tags:  # SGLang takes none for all, and its scheduler dies of a second release
            request = ReleaseMemoryOccupationReqInput(tags=tags)
            await self._engine.tokenizer_manager.release_memory_occupation(request, None)
            self._released = set(_MEMORY)

    async def resume_memory(self, tags: Sequence[str] = _MEMORY) -> None:
        """Take released memory again. Weights are undefined until the next sync."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        wanted = [tag for tag in tags if tag in self._released]
        if wanted:  # SGLang's scheduler dies of the resumption of what it has
            request = ResumeMemoryOccupationReqInput(tags=wanted)
            await self._engine.tokenizer_manager.resume_memory_occupation(request, None)
            self._released -= set(wanted)

    def rank_call(self, name: str, payload: bytes, timeout_s: float) -> list[bytes]:
        """Run a registered function in every rank. It blocks: one call at a time, in a thread.

        Raises EngineError when a rank fails, and TimeoutError when one does not come back.
        """
        from sglang.srt.managers.io_struct import RpcReqInput, sock_recv, sock_send

        self._num_calls += 1
        folder = Path(os.environ["TMPDIR"]) / f"call-{self._num_calls}"
        folder.mkdir()
        try:
            (folder / rank_calls.PAYLOAD_FILE).write_bytes(payload)
            channel = self._engine.send_to_rpc
            parameters = {"name": name, "folder": str(folder)}
            sock_send(channel, RpcReqInput(method=rank_calls.METHOD, parameters=parameters))
            if not channel.poll(int(timeout_s * 1000)):
                raise TimeoutError(f"rank call {name!r} did not come back within {timeout_s:g} s")
            result = sock_recv(channel)
            if not result.success:
                raise EngineError(f"rank call {name!r}: {result.message}")
            return rank_calls.read_replies(folder, self._spec.tensor_parallel)
        finally:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()

    def shutdown(self) -> None:
        self._engine.shutdown()


def _engine_class(*, fork: bool) -> Any:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.load_snapshot import shm_path_for

    class TokenEngine(Engine):  # type: ignore[misc]
        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
            return [], []  # there is no text to make

        @classmethod
        def _launch_scheduler_processes(cls, server_args: Any, port_args: Any, *args: Any, **kwargs: Any) -> Any:
            shared = Path(os.environ["TMPDIR"]) / process_guard.SHARED_FILES
            with open(shared, "a") as file:  # schedulers are killed before they can unlink it
                file.write(shm_path_for(port_args.instance_id) + "\n")
            # Without CUDA a forked scheduler is safe here (one thread, no sockets yet) and spares it the imports.
            if fork:
                multiprocessing.set_start_method("fork", force=True)
            return super()._launch_scheduler_processes(server_args, port_args, *args, **kwargs)

    return TokenEngine


def _sampling(request: RolloutRequest, stream_interval: int) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens - num_begun(request),
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias} or None,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "ignore_eos": sampling.ignore_eos,
        "sampling_seed": request.seed,
        "stream_interval": stream_interval,
        "custom_params": responses.custom_params(request),
    }


def new_tokens(out: dict[str, Any], start: int) -> tuple[list[int], list[float]]:
    """Return tokens and log-probabilities from `start` on. SGLang's answers have all, and may come with each token."""
    tokens = [int(token) for token in out["output_ids"][start:]]
    logprobs = [float(entry[0]) for entry in (out["meta_info"].get("output_token_logprobs") or [])[start:]]
    if len(tokens) != len(logprobs):
        raise EngineError(f"SGLang returned {len(logprobs)} log-probabilities for {len(tokens)} tokens")
    return tokens, logprobs


def _response(
    out: dict[str, Any], state: tuple[list[int], list[float]], reason: dict[str, Any], *, start: int, goes_on: bool
) -> dict[str, Any]:
    kinds: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
    tokens, logprobs = state
    return {
        "token_ids": tokens,
        "logprobs": logprobs,
        "finish_reason": kinds[reason["type"]],
        "routed_experts": responses.experts_of(out["meta_info"], num_tokens=len(tokens), start=start, goes_on=goes_on),
    }
