"""A draft model on SGLang's model runner.

Invariants: the first `cached` tokens of a text have keys and values of just these tokens; what lies behind is
overwritten before it is read, so a rollback is a shorter length; a draft depends on its text's tokens, seed and
temperature alone, but for the rounding of prefills.

Shape legend: R rows, B texts, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specactor.config import EAGLE3_HEAD, EngineConfig
from specactor.config.rollout import DRAFT_ROWS
from specactor.rollout.sglang import sampling
from specactor.rollout.sglang.draft_slots import BLOCK_TOKENS, slot_range
from specactor.rollout.sglang.gpu import graph_sizes, on_device, rows_as_requests
from specactor.rollout.speculation.verification import common

DRAFT_TEMPERATURE = 2 / 3
"""Factor of a request's temperature in its drafts. Measured at temperature 1 (docs/results/acceptance.md): 0.4 to 1.6 %
more tokens accepted than with 1, 2.7 % more with a draft model whose policy was trained on, 1.5 % fewer where the
policy became less certain than its draft model."""


def is_greedy(sampling: Any) -> bool:
    """Return whether a request's noise is of no use to drafters: none, or of ranks among sorted tokens."""
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    return bool(sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k < TOP_K_ALL)


_loaded: list[Any] = []  # SGLang's configurations of this rank's draft models


def load(folder: str, server_args: Any, *, gpu_id: int, nccl_port: int, target_worker: Any) -> Any:
    """Return SGLang's worker with a dense draft model, without a memory pool yet."""
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.runtime_context import get_spec

    with get_spec().override(speculative_draft_model_path=folder):
        worker = TpModelWorker(
            server_args=server_args,
            gpu_id=gpu_id,
            nccl_port=nccl_port,
            is_draft_worker=True,
            context_length=target_worker.model_runner.model_config.context_len,
        )
    _loaded.append(worker.model_runner.model_config)
    return worker


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    cell_size = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size"
    HookRegistry.register(cell_size, _with_the_draft_model, HookType.AROUND)


def _with_the_draft_model(original: Callable[..., int], configurator: Any, kvc: Any, num_layers: int) -> int:
    own = original(configurator, kvc, num_layers)
    if kvc.is_draft_worker:
        return own
    from sglang.srt.runtime_context import get_parallel

    # Bytes of a token: SGLang counts draft models for its own algorithms alone, and the target's pool would take all.
    for draft in _loaded:
        layers = draft.num_nextn_predict_layers if is_mtp(draft) else draft.num_hidden_layers
        heads = draft.get_num_kv_heads(get_parallel().attn_tp_size)
        per_layer = heads * (draft.head_dim + draft.v_head_dim) * kvc.kv_cache_dtype.itemsize
        own += int(layers * per_layer + num_features(draft) * draft.dtype.itemsize)
    return own


def is_mtp(model_config: Any) -> bool:
    return "MiMoMTP" in (model_config.hf_config.architectures or ())


def num_features(model_config: Any) -> int:
    """Return how many hidden-state numbers per token a head reads; 0: no head."""
    config = model_config.hf_config
    if is_mtp(model_config):
        return int(config.hidden_size)
    if EAGLE3_HEAD not in (config.architectures or ()):
        return 0
    layers = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0)
    return len(layers) * int(getattr(config, "target_hidden_size", config.hidden_size))


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
    """Return SGLang's runner of a dense model, with its own page table and KV pool.

    Call it once per process, before CUDA or sockets are used, with a TMPDIR of its own.

    Args:
        max_tokens: slots of the pool; None lets SGLang decide.
        memory_fraction: of a GPU.
    """
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = (Path(os.environ["TMPDIR"]) / "rendezvous").as_uri()
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    arguments: dict[str, Any] = {
        "model_path": model_dir,
        "dtype": dtype,
        "context_length": context_length,
        "max_running_requests": max_requests,
        "max_total_tokens": max_tokens,
        "mem_fraction_static": memory_fraction,
        "random_seed": random_seed,
        "skip_tokenizer_init": True,
        "enable_deterministic_inference": True,
        "sampling_backend": "pytorch",
        "page_size": 1,
        "cuda_graph_backend_prefill": "disabled",
        "log_level": "warning",
        **EngineConfig().attention_on(gpu=torch.cuda.is_available()),
    }
    if torch.cuda.is_available():
        arguments["cuda_graph_bs_decode"] = graph_sizes(max(DRAFT_ROWS, max_requests))
    else:
        arguments |= {"device": "cpu", "disable_cuda_graph": True, "disable_overlap_schedule": True}
    return _runner_of(ServerArgs(**arguments))


def _runner_of(server_args: Any) -> Any:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.runtime_context import SpawnRanks, get_device, get_schedule, publish

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
    with rows_as_requests(runner):
        runner.init_attention_backends()
        if get_device().device == "cuda":
            runner.init_cuda_graphs()
    return runner


@dataclass(slots=True)
class SequenceCache:
    """What the draft model has seen of a text."""

    cached: int = 0  # leading tokens whose keys and values count
    fed: list[int] = field(default_factory=list)
    """Draft tokens that it saw after those; they count as far as the text goes on with the same."""

    def grow(self, length: int, tokens: Sequence[int]) -> None:
        """Append `tokens` to the text, which had `length`."""
        if self.cached == length:
            self.cached += common(self.fed, tokens)
        self.fed = []

    def cut(self, length: int) -> None:
        """Tokens from position `length` on are others now."""
        self.cached, self.fed = min(self.cached, length), []


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftText:
    """A text that wants draft tokens."""

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    seed: int
    temperature: float  # 0: the likeliest token is drafted
    window: int  # draft tokens, at least one. The page table has slots for all but the last
    row: int  # of the page table
    cache: SequenceCache

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_unseen(self) -> int:
        """Return the number of tokens that are shown for a draft; the last one always is."""
        return self.length - min(self.cache.cached, self.length - 1)

    def since(self, start: int) -> list[int]:
        prompt = len(self.prompt_ids)
        if start >= prompt:
            return list(self.output_ids[start - prompt :])
        return [*self.prompt_ids[start:], *self.output_ids]


class Positions(NamedTuple):
    """Positions of tokens in their texts, on the host and on the device."""

    host: Tensor
    there: Tensor

    def plus(self, number: int, first: int | None = None) -> Positions:
        """Return the first ones, or all, that many further."""
        return Positions(self.host[:first] + number, self.there[:first] + number)


class DraftBatch:
    """Texts as tensors, those of larger windows first."""

    def __init__(self, texts: Sequence[DraftText], device: torch.device, draft_temperature: float) -> None:
        self.texts = texts
        last = torch.tensor([text.length - 1 for text in texts], dtype=torch.int64)
        self.base = Positions(last, on_device(last, device))  # of the last tokens
        self.table = on_device([text.row for text in texts], device, torch.int64)  # [B] rows of the page table
        self.seeds = on_device([text.seed for text in texts], device, torch.int64)  # [B]
        temperatures = [[(text.temperature or 1.0) * draft_temperature] for text in texts]
        self.temperatures = on_device(temperatures, device, torch.float32)  # [B, 1]
        self.greedy = on_device([text.temperature == 0 for text in texts], device)  # [B]

    def count(self, depth: int) -> int:
        return sum(text.window > depth for text in self.texts)  # the first ones


class DraftRunner:
    """Drafts for texts. All ranks must call it, with equal arguments."""

    draft_temperature = DRAFT_TEMPERATURE
    first_token = 0  # the first that it is shown
    keeps_drafts = True  # what it saw of its drafts counts as far as the text goes on with the same
    few_tokens = 16  # unseen ones of a text that have a row each, which reads all keys; of more, most are prefilled
    prefill_tokens = 4096  # of a pass; 0: there is none

    def __init__(self, runner: Any) -> None:
        from sglang.srt.model_executor import forward_batch_info

        self._runner = runner
        self.runners_up: list[int] | None = None
        """Of the last call, per text its second choice for the first token, if it was set to a list before."""
        self._info = forward_batch_info
        self._vocab_size = int(runner.model_config.vocab_size)
        self._device = torch.device(runner.device)

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._runner.model
        return model

    @property
    def context_length(self) -> int:
        """Return the longest text in tokens."""
        return int(self._runner.model_config.context_len)

    @property
    def num_slots(self) -> int:
        """Return the number of slots of the KV pool, which count from 1."""
        return int(self._runner.max_total_num_tokens)  # counted from 1, as rows are

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the page table, which count from 1."""
        return int(self._runner.req_to_token_pool.size)

    def leave_device(self) -> None:
        """Move the weights to the host and free the KV pool."""
        self.model.to("cpu")
        self._runner.decode_cuda_graph_runner = None  # it would read where the weights were
        self._runner.token_to_kv_pool._clear_buffers()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def take_device(self) -> None:
        """Undo `leave_device`; all keys are lost."""
        self.model.to(self._device)
        self._runner.token_to_kv_pool._create_buffers()
        if self._device.type == "cuda":
            with rows_as_requests(self._runner):
                self._runner.init_decode_cuda_graph()

    def place(self, row: int, first: int, block: int) -> None:
        """Let positions of this page-table row, from `first` on, lie in this block."""
        table = self._runner.req_to_token_pool.req_to_token
        slot, stop = slot_range(block).start, min(first + BLOCK_TOKENS, table.shape[1])
        table[row, first:stop] = torch.arange(slot, slot + stop - first, dtype=table.dtype, device=table.device)

    def share(self, row: int, own: int, *, length: int, block: int) -> None:
        """Let row `own` read `length` tokens of `row`; further ones lie in this block."""
        table = self._runner.req_to_token_pool.req_to_token
        table[own, :length] = table[row, :length]
        self.place(own, length, block)

    def is_behind(self, text: DraftText) -> bool:
        """Return whether tokens of the text are to be prefilled."""
        return self.prefill_tokens > 0 and text.num_unseen > self.few_tokens

    @torch.no_grad()
    def prefill(self, texts: Sequence[DraftText]) -> None:
        """Show unseen tokens of the texts, in order, but never the last of one: as many as one pass takes."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        parts: list[tuple[DraftText, int, int]] = []
        left = self.prefill_tokens
        for text in texts:
            start = text.cache.cached
            stop = min(text.length - 1, start + left)
            if start < stop:
                parts.append((text, start, stop))
                left -= stop - start
        with forward_context(ForwardContext(attn_backend=self._runner.attn_backend)):
            self._hidden(self._prefill_batch(parts))
        for text, _, stop in parts:
            text.cache.cached = stop

    def _prefill_batch(self, parts: Sequence[tuple[DraftText, int, int]]) -> Any:
        tokens_R = torch.tensor([token for text, start, stop in parts for token in text.since(start)[: stop - start]])
        positions_R = torch.cat([torch.arange(start, stop) for _, start, stop in parts])
        starts, stops = [start for _, start, _ in parts], [stop for *_, stop in parts]
        counts = [stop - start for start, stop in zip(starts, stops, strict=True)]
        table = torch.tensor([text.row for text, *_ in parts])
        table_R = table.repeat_interleave(torch.tensor(counts))
        positions = Positions(positions_R, on_device(positions_R, self._device))
        batch = self._batch(on_device(tokens_R, self._device), on_device(table_R, self._device), positions)
        batch.forward_mode = self._info.ForwardMode.EXTEND
        batch.batch_size = len(parts)
        batch.req_pool_indices = on_device(table, self._device)
        batch.seq_lens_cpu = torch.tensor(stops)
        batch.seq_lens, batch.seq_lens_sum = on_device(batch.seq_lens_cpu, self._device), sum(stops)
        batch.extend_num_tokens = len(tokens_R)
        batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu = starts, counts
        batch.extend_prefix_lens = on_device(starts, self._device, torch.int32)
        batch.extend_seq_lens = on_device(counts, self._device, torch.int32)
        batch.extend_start_loc = on_device([0, *accumulate(counts[:-1])], self._device, torch.int32)
        return batch

    @torch.no_grad()
    def draft(self, texts: Sequence[DraftText]) -> list[list[int]]:
        """Return drafts: a pass over each text's unseen tokens, which should be few, then one per further token."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        if not texts:
            return []
        order = sorted(range(len(texts)), key=lambda i: -texts[i].window)
        batch = DraftBatch([texts[i] for i in order], self._device, self.draft_temperature)
        with forward_context(ForwardContext(attn_backend=self._runner.attn_backend)):
            logits_BV = self._catch_up(batch)
            columns = [self._sample(logits_BV, batch, 0)]
            if self.runners_up is not None:
                others_BV = logits_BV.scatter(1, columns[0].long()[:, None], float("-inf"))
                runner_up_B = self._sample(others_BV, batch, 0)
            for depth in range(1, batch.texts[0].window):
                count = batch.count(depth)
                logits_BV = self._logits(columns[-1][:count], batch.table[:count], batch.base.plus(depth, count))
                columns.append(self._sample(logits_BV, batch, depth))
        if self.runners_up is not None:
            columns.append(runner_up_B)
        tokens = torch.cat(columns).tolist()  # one wait for the device
        starts = [0, *accumulate(map(len, columns))]
        drafts: list[list[int]] = [[] for _ in texts]
        for b, i in enumerate(order):
            drafts[i] = [tokens[start + b] for start in starts[: texts[i].window]]
            texts[i].cache.fed = drafts[i][:-1] if self.keeps_drafts else []
        if self.runners_up is not None:
            runners_up = dict(zip(order, tokens[starts[-2] :], strict=True))
            self.runners_up = [runners_up[i] for i in range(len(texts))]
        return drafts

    def _sample(self, logits_BV: Tensor, batch: DraftBatch, depth: int) -> Tensor:
        """Return argmax_v log q(v) + G(seed, position, v), int64 [B], G being the target's noise at the last of `depth`
        draft tokens."""
        from sglang.srt.layers import sampler

        count = len(logits_BV)
        greedy = [text.temperature == 0 for text in batch.texts[:count]]
        if all(greedy):
            return logits_BV.argmax(dim=1)
        positions_B = batch.base.plus(depth, count).there
        if sampling.serves(logits_BV):
            from specactor.rollout.sglang import kernels

            of_texts = batch.temperatures[:count], batch.seeds[:count], positions_B, batch.greedy[:count]
            return kernels.draw(logits_BV, *of_texts).tokens
        logq_BV = (logits_BV.float() / batch.temperatures[:count]).log_softmax(dim=1)
        sampled_B: Tensor = sampler.multinomial_with_seed(logq_BV, batch.seeds[:count], positions_B).view(-1)
        return sampled_B.where(~batch.greedy[:count], logits_BV.argmax(dim=1)) if any(greedy) else sampled_B

    def _catch_up(self, batch: DraftBatch) -> Tensor:
        """Return logits [B, V] after each text."""
        rows, last = self._unseen(batch)
        pieces = []
        for first in range(0, len(rows), DRAFT_ROWS):
            wanted = on_device(
                [row - first for row in last if first <= row < first + DRAFT_ROWS], self._device, torch.int64
            )
            columns = self._columns(rows[first : first + DRAFT_ROWS], batch)
            if len(wanted):
                pieces.append(self._logits(*columns, wanted))
            else:
                self._hidden(self._batch(*columns))
        for text in batch.texts:
            text.cache.cached = text.length
        return torch.cat(pieces)

    def _unseen(self, batch: DraftBatch) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Return the unseen tokens, each with its text's and its own position, and which of them end texts."""
        starts = [max(self.first_token, min(text.cache.cached, text.length - 1)) for text in batch.texts]
        unseen = [text.since(start) for text, start in zip(batch.texts, starts, strict=True)]
        rows = [
            (token, b, start + j)
            for b, (tokens, start) in enumerate(zip(unseen, starts, strict=True))
            for j, token in enumerate(tokens)
        ]
        return rows, [row - 1 for row in accumulate(map(len, unseen))]

    def _columns(self, rows: Sequence[tuple[int, int, int]], batch: DraftBatch) -> tuple[Tensor, Tensor, Positions]:
        """Return tokens, rows of the page table, and positions."""
        columns = torch.tensor(rows, dtype=torch.int64).T.contiguous()
        tokens_R, texts_R, there_R = on_device(columns, self._device).unbind(0)  # in one copy
        return tokens_R, batch.table[texts_R], Positions(columns[2], there_R)

    def _logits(
        self, tokens_R: Tensor, table_R: Tensor, positions: Positions, wanted_B: Tensor | None = None
    ) -> Tensor:
        """Return logits [B, V] of the rows `wanted_B`, or of all. A row reads keys up to its own position, also those
        of this pass."""
        batch = self._batch(tokens_R, table_R, positions)
        # Other passes go to the layers directly: SGLang's runner serves the scheduler besides, which takes longer than
        # a small model.
        if (replayed := self._replayed(batch)) is not None:
            return replayed if wanted_B is None else replayed[wanted_B]
        hidden = self._hidden(batch)
        if wanted_B is not None:
            hidden = hidden[wanted_B]
        model: Any = self._runner.model
        output = model.logits_processor(tokens_R, hidden, model.lm_head, batch)
        logits: Tensor = output.next_token_logits
        return logits

    @property
    def _graphs(self) -> Any:
        return getattr(self._runner, "decode_cuda_graph_runner", None)

    def _replayed(self, batch: Any) -> Tensor | None:
        """Return the logits of all rows, which the next graph overwrites; None where no graph serves."""
        if self._graphs is None or not self._graphs.can_run_graph(batch):
            return None
        logits: Tensor = self._graphs.execute(batch).next_token_logits
        return logits

    def _batch(self, tokens_R: Tensor, table_R: Tensor, positions: Positions) -> Any:
        runner = self._runner
        lengths = positions.plus(1)
        return self._info.ForwardBatch(
            forward_mode=self._info.ForwardMode.DECODE,
            batch_size=len(tokens_R),
            input_ids=tokens_R.clamp(max=self._vocab_size - 1),  # the target may have ids beyond, for padding
            req_pool_indices=table_R,
            seq_lens=lengths.there,
            seq_lens_cpu=lengths.host,
            seq_lens_sum=int(lengths.host.sum()),
            out_cache_loc=runner.req_to_token_pool.req_to_token[table_R, positions.there].to(torch.int64),
            positions=positions.there,
            capture_hidden_mode=self._info.CaptureHiddenMode.NULL,
            spec_algorithm=runner.spec_algorithm,
        )

    def _hidden(self, batch: Any) -> Tensor:
        self._bind(batch)
        self._runner.attn_backend.init_forward_metadata(batch)
        hidden: Tensor = self._forward(batch)
        return hidden

    def _bind(self, batch: Any) -> None:
        translator = self._runner.kv_index_translator
        translator.own_plan(batch).bind(batch, translator)

    def _forward(self, batch: Any) -> Any:
        return self._runner.model.model(batch.input_ids, batch.positions, batch)
