"""Forward passes of a draft model on SGLang's model runner. All contact of drafting with that runner is in this file.

A pass computes rows, each the next token of some request, and writes their keys and values at the slots that a page
table names: the target's, or in a process without a target (`load_alone`) one of its own. It goes to the layers
directly: what SGLang's runner does besides (graphs, padding, copies to fixed buffers, balance of experts) serves
batches of the scheduler, and takes longer than a small model.

Shape legend: R rows, B rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specactor.rollout.sglang.draft_slots import BLOCK_TOKENS, slot_range

MAX_ROWS = 512
"""Rows of one pass over tokens that were not seen yet."""


def load(server_args: Any, *, gpu_id: int, nccl_port: int, target_worker: Any) -> Any:
    """SGLang's worker with the draft model, on this rank; it has no memory pool yet. Takes a dense model."""
    from sglang.srt.managers.tp_worker import TpModelWorker

    return TpModelWorker(
        server_args=server_args,
        gpu_id=gpu_id,
        nccl_port=nccl_port,
        is_draft_worker=True,
        context_length=target_worker.model_runner.model_config.context_len,
    )


def load_alone(
    model_dir: str,
    *,
    dtype: str,
    max_tokens: int | None,
    max_requests: int,
    context_length: int,
    memory_fraction: float = 0.5,
    random_seed: int = 0,
) -> Any:
    """SGLang's runner of a dense model, with a page table and a KV pool of its own. Once per process, before CUDA or
    sockets are used. The process's TMPDIR must be its own.

    Args: slots of the KV pool, or None, and SGLang decides; rows of the page table; longest text in tokens; share of a
    GPU's memory for weights and KV pool.
    """
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = (Path(os.environ["TMPDIR"]) / "rendezvous").as_uri()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_device, get_schedule, publish
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(
        **_alone(
            model_path=model_dir,
            dtype=dtype,
            context_length=context_length,
            max_running_requests=max_requests,
            max_total_tokens=max_tokens,
            mem_fraction_static=memory_fraction,
            random_seed=random_seed,
        )
    )
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    initialize_moe_config()
    model_config = ModelConfig.from_server_args(server_args)
    bootstrap.init_parallel_runtime(server_args=server_args, device=get_device().device, dist_port=0)
    bootstrap.init_layer_runtime(model_config=model_config)
    runner = ModelRunner(
        model_config=model_config,
        mem_fraction_static=get_schedule().mem_fraction_static,
        gpu_id=0,
        nccl_port=0,
        server_args=server_args,
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    return runner


def _alone(**arguments: Any) -> dict[str, Any]:
    """Arguments of SGLang's server for `load_alone`."""
    arguments |= {
        "skip_tokenizer_init": True,
        "enable_deterministic_inference": True,
        "sampling_backend": "pytorch",
        "page_size": 1,
        "disable_cuda_graph": True,
        "log_level": "warning",
    }
    if not torch.cuda.is_available():
        arguments |= {"device": "cpu", "attention_backend": "torch_native", "disable_overlap_schedule": True}
    return arguments


class DraftForward:
    """Of one engine rank. With several ranks all must call it, with equal arguments."""

    def __init__(self, runner: Any) -> None:
        from sglang.srt.model_executor import forward_batch_info

        self._runner = runner
        self._info = forward_batch_info
        self.vocab_size = int(runner.model_config.vocab_size)
        self.device = torch.device(runner.device)

    @property
    def context_length(self) -> int:
        """Longest text in tokens."""
        return int(self._runner.model_config.context_len)

    @property
    def num_slots(self) -> int:
        """Of the KV pool; they count from 1."""
        return int(self._runner.max_total_num_tokens)

    @property
    def num_rows(self) -> int:
        """Of the page table; they count from 1."""
        return int(self._runner.req_to_token_pool.size)

    def leave_device(self) -> None:
        """Weights go to the host's memory, and the KV pool goes. On a GPU the page table and CUDA's own memory stay: a
        process gives those back with its end alone."""
        self._runner.model.to("cpu")
        self._runner.token_to_kv_pool._clear_buffers()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def take_device(self) -> None:
        """After `leave_device`; no key of before is there."""
        self._runner.model.to(self.device)
        self._runner.token_to_kv_pool._create_buffers()

    def place(self, row: int, index: int, block: int) -> None:
        """Positions from index * BLOCK_TOKENS on lie in this block. Args: row of the page table."""
        table = self._runner.req_to_token_pool.req_to_token
        first, stop = index * BLOCK_TOKENS, min((index + 1) * BLOCK_TOKENS, table.shape[1])
        slot = slot_range(block).start
        table[row, first:stop] = torch.arange(slot, slot + stop - first, dtype=table.dtype, device=table.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around any number of passes."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with forward_context(ForwardContext(attn_backend=self._runner.attn_backend)):
            yield

    def after(self, texts: Sequence[Sequence[int]], table_B: Tensor, starts: Sequence[int]) -> Tensor:
        """[B, V], of the next token after each text, in passes of at most `MAX_ROWS` rows.

        Args: tokens that were not seen yet, at least one of each request; rows of the page table; position of the
        first of these tokens.
        """
        if sum(map(len, texts)) == len(texts) <= MAX_ROWS:
            tokens_B = torch.tensor([text[0] for text in texts], dtype=torch.int64, device=self.device)
            return self.logits(tokens_B, table_B, torch.tensor(starts, dtype=torch.int64))
        rows = [
            (token, lane, start + j)
            for lane, (text, start) in enumerate(zip(texts, starts, strict=True))
            for j, token in enumerate(text)
        ]
        last = [row - 1 for row in accumulate(map(len, texts))]
        pieces = []
        for first in range(0, len(rows), MAX_ROWS):
            tokens_R, lanes_R, positions_R = torch.tensor(rows[first : first + MAX_ROWS], dtype=torch.int64).unbind(1)
            wanted = torch.tensor([row - first for row in last if first <= row < first + MAX_ROWS], device=self.device)
            tokens_R, table_R = tokens_R.to(self.device), table_B[lanes_R.to(self.device)]
            if len(wanted):
                pieces.append(self.logits(tokens_R, table_R, positions_R, wanted))
            else:
                self._hidden(tokens_R, table_R, positions_R)
        return torch.cat(pieces)

    def logits(self, tokens_R: Tensor, table_R: Tensor, positions_R: Tensor, wanted_B: Tensor | None = None) -> Tensor:
        """[B, V], of the rows `wanted_B`, or of all. Args: tokens, rows of the page table, positions (on the CPU).

        A row reads the keys of its request up to its own position, be they from this pass or from an earlier one.
        """
        batch, hidden = self._hidden(tokens_R, table_R, positions_R)
        if wanted_B is not None:
            hidden = hidden[wanted_B]
        model = self._runner.model
        output = model.logits_processor(tokens_R, hidden, model.lm_head, batch)
        logits: Tensor = output.next_token_logits
        return logits

    def _hidden(self, tokens_R: Tensor, table_R: Tensor, positions_R: Tensor) -> tuple[Any, Tensor]:
        runner = self._runner
        lengths_R = positions_R + 1
        positions_R = positions_R.to(self.device)
        batch = self._info.ForwardBatch(
            forward_mode=self._info.ForwardMode.DECODE,
            batch_size=len(tokens_R),
            input_ids=tokens_R.clamp(max=self.vocab_size - 1),  # the target may have ids beyond, for padding
            req_pool_indices=table_R,
            seq_lens=lengths_R.to(self.device),
            seq_lens_cpu=lengths_R,
            seq_lens_sum=int(lengths_R.sum()),
            out_cache_loc=runner.req_to_token_pool.req_to_token[table_R, positions_R].to(torch.int64),
            positions=positions_R,
            capture_hidden_mode=self._info.CaptureHiddenMode.NULL,
            spec_algorithm=runner.spec_algorithm,
        )
        translator = runner.kv_index_translator
        translator.own_plan(batch).bind(batch, translator)
        runner.attn_backend.init_forward_metadata(batch)
        hidden: Tensor = runner.model.model(batch.input_ids, positions_R, batch)
        return batch, hidden


def common(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next(
        (j for j, (a, b) in enumerate(zip(draft, tokens, strict=False)) if a != b), min(len(draft), len(tokens))
    )
