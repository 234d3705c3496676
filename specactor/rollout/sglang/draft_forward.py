"""Forward passes of a draft model on SGLang's model runner. All contact of drafting with that runner is in this file.

A pass computes rows, each the next token of some request, and writes their keys and values at the slots that the
target's page table names. It goes to the layers directly: what SGLang's runner does besides (graphs, padding, copies
to fixed buffers, balance of experts) serves batches of the scheduler, and takes longer than a small model.

Shape legend: R rows, B rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


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


class DraftForward:
    """Of one engine rank. With several ranks all must call it, with equal arguments."""

    def __init__(self, runner: Any) -> None:
        from sglang.srt.model_executor import forward_batch_info

        self._runner = runner
        self._info = forward_batch_info
        self.vocab_size = int(runner.model_config.vocab_size)
        self.device = torch.device(runner.device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around any number of passes."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with forward_context(ForwardContext(attn_backend=self._runner.attn_backend)):
            yield

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

    def fill(self, tokens_R: Tensor, table_R: Tensor, positions_R: Tensor) -> None:
        """The same for rows of which no logits are wanted."""
        self._hidden(tokens_R, table_R, positions_R)

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
