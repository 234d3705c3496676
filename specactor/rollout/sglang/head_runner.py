"""An EAGLE-3 head, or an MTP layer, on SGLang's model runner. It reads tokens with the target's hidden states at the
token before, while drafting with its own.

Invariants: those of `draft_runner`; a key of its own states is never read in a later round.

Shape legend: R rows, B texts, V vocabulary, S slots, F numbers of all layers read.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specactor.config import EAGLE3_HEAD
from specactor.config.rollout import DRAFT_ROWS
from specactor.cpu import sglang_ops
from specactor.errors import EngineError
from specactor.rollout.sglang.draft_runner import DraftBatch, DraftRunner, Positions, is_mtp, num_features

_KV_CACHE = "kv_cache"  # SGLang's name of the memory that is given back with the KV pool
MTP_WEIGHTS = "model.mtp_layers."  # how the names of an MTP layer's weights begin in Hugging Face format


class TargetStates:
    """Hidden states of the target by slot, of the layers that a head reads."""

    def __init__(self, target: Any, head: Any, *, num_slots: int) -> None:
        """Have `target` write them. Call it before CUDA graphs are captured."""
        wanted = num_features(head.model_config)
        if not is_mtp(head.model_config):
            _capture(target.model, head.model_config.hf_config)
        with head.token_to_kv_pool.memory_saver_adapter.region(_KV_CACHE):
            self._states_SF = torch.zeros(num_slots, wanted, dtype=head.dtype, device=head.device)
        self._table = target.req_to_token_pool.req_to_token
        rows = max(DRAFT_ROWS, head.req_to_token_pool.size)
        self.own_RH = torch.zeros(rows, head.model_config.hidden_size, dtype=head.dtype, device=head.device)
        """Where a graph of the head reads its rows' hidden states, and leaves the head's own."""
        target.model.model.register_forward_hook(self._write, with_kwargs=True)

    def _write(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        hidden, layers = output if isinstance(output, tuple) else (output, [output])
        self._states_SF[batch.out_cache_loc] = torch.cat(list(layers), dim=-1).to(self._states_SF.dtype)
        return hidden

    def of(self, table_R: Tensor, positions_R: Tensor) -> Tensor:
        """Return [R, F] at these positions of page-table rows."""
        return self._states_SF[self._table[table_R, positions_R]]


def _capture(model: Any, config: Any) -> None:
    if not hasattr(model, "set_eagle3_layers_to_capture"):
        raise EngineError(
            f"rollout.speculation.draft_model: got an EAGLE-3 head, which SGLang's {type(model).__name__} gives no "
            "hidden states. Use a draft model: specactor drafter init."
        )
    layers = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids") or None
    model.set_eagle3_layers_to_capture(layers)
    model.capture_aux_hidden_states = False  # the hook takes them away again


def refuse_unfit(folder: Path, *, hierarchical_cache: bool) -> None:
    """Raise EngineError for a head that SGLang would serve wrongly, before a draft model is loaded."""
    config = json.loads((folder / "config.json").read_bytes())
    architectures = config.get("architectures") or ()
    if hierarchical_cache and "MiMoForCausalLM" in architectures:
        raise EngineError(
            "rollout.speculation.drafters: got mtp and enable_hierarchical_cache, expected the prefix cache on the "
            "device alone, with which hidden states stay. Leave it out of rollout.engine.extra_args."
        )
    if EAGLE3_HEAD not in architectures:
        return
    eagle, names = config.get("eagle_config") or {}, _tensors(folder)
    no_output = config.get("draft_vocab_size") is None and "lm_head.weight" not in names
    for unfit, got, expected, remedy in (
        (not names, "no *.safetensors", "its weights in such files", "Convert them."),
        (
            eagle.get("use_aux_hidden_state", config.get("use_aux_hidden_state")) is False,
            "use_aux_hidden_state false",
            "one that reads several layers",
            "Give such a head.",
        ),
        (config.get("tie_word_embeddings"), "tied embeddings", "an lm_head of its own", "Give such a head."),
        (no_output, "neither draft_vocab_size nor lm_head", "an lm_head of its own", "Give such a head."),
        (
            hierarchical_cache,
            "enable_hierarchical_cache beside it",
            "the prefix cache on the device alone, with which hidden states stay",
            "Leave it out of rollout.engine.extra_args.",
        ),
    ):
        if unfit:
            raise EngineError(
                f"rollout.speculation.draft_model: got an EAGLE-3 head ({folder}) and {got}, expected {expected}. "
                f"{remedy}"
            )


def prepare(target: Any, head: Any) -> TargetStates:
    """Give the head what it shares with the target; return the target's states. Call it between SGLang's making of
    pools and of attention backends."""
    if (page := head.token_to_kv_pool.page_size) != 1:
        raise EngineError(
            f"rollout.speculation: got an EAGLE-3 head or MTP layer and pages of {page} tokens, expected 1: its keys "
            "lie a slot beside the target's. Leave page_size out of rollout.engine.extra_args."
        )
    # What it shares is no module of the head: pushes must not find it among its parameters.
    if is_mtp(head.model_config):
        del head.model.model.embed_tokens, head.model.lm_head
        vars(head.model.model)["embed_tokens"] = target.model.model.embed_tokens
        vars(head.model)["lm_head"] = target.model.lm_head
    elif not any(name.endswith("embed_tokens.weight") for name in _tensors(Path(head.model_config.model_path))):
        own, given = head.model_config.hidden_size, target.model_config.hidden_size
        if own != given:
            raise EngineError(
                f"rollout.speculation.draft_model: got an EAGLE-3 head of {own} hidden sizes without an embedding, "
                f"expected one of the target's {given}, whose embedding it can share. Give a head with an embedding."
            )
        del head.model.model.embed_tokens
        vars(head.model.model)["embed_tokens"] = target.model.model.embed_tokens
    if head.device == "cpu":  # few rows take other kernels, and a draft must not feel the others of its round
        joining = head.model.model.input_proj if is_mtp(head.model_config) else head.model.model.fc
        joining.forward = lambda x: sglang_ops.linear(x, joining.weight, joining.bias)
    # The first token has no pair, and a pair's key lies at its token's slot: texts may share the slot before.
    head.req_to_token_pool = copy.copy(target.req_to_token_pool)
    head.req_to_token_pool.req_to_token = target.req_to_token_pool.req_to_token[:, 1:]
    head.init_kv_index_translator()
    states = TargetStates(target, head, num_slots=head.token_to_kv_pool.size + page)
    layers = _mtp_pass if is_mtp(head.model_config) else _head_pass
    head.model.forward = functools.partial(_captured, head.model, layers, states.own_RH)
    return states


def _captured(
    model: Any,
    layers: Callable[..., tuple[Tensor, Tensor]],
    own_RH: Tensor,
    tokens_R: Tensor,
    positions_R: Tensor,
    batch: Any,
) -> Any:
    """Return SGLang's output of a head, as a CUDA graph computes it. Args: layers: `_head_pass` or `_mtp_pass`."""
    states_RH = own_RH[: len(tokens_R)]
    batch.spec_info = SimpleNamespace(hidden_states=states_RH)
    hidden, passed_RH = layers(model, tokens_R, positions_R, batch)
    batch.spec_info = None
    states_RH.copy_(passed_RH)
    return model.logits_processor(tokens_R, hidden, model.lm_head, batch)


def _head_pass(model: Any, tokens_R: Tensor, positions_R: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Return what logits are made of, and what the next pair reads, [R, H] each."""
    hidden, [own] = model.model(tokens_R, positions_R, batch)
    return hidden, own


def _mtp_pass(model: Any, tokens_R: Tensor, positions_R: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the same of an MTP layer."""
    # SGLang's layer hides the token at position 0. Megatron, which trains it, does not; and rotary embedding tells
    # distances alone.
    hidden = model.model(tokens_R, positions_R + 1, batch)
    return hidden, hidden


def _tensors(folder: Path) -> set[str]:
    from safetensors import safe_open

    names = set[str]()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names.update(tensors.keys())
    return names


class _KeysWritten(Exception):  # noqa: N818 (nothing went wrong)
    """Ends a pass at its attention."""


class HeadRunner(DraftRunner):
    """Drafts with an EAGLE-3 head: the first token from the target's hidden states, further ones from the head's."""

    first_token = 1
    keeps_drafts = False
    prefill_tokens = 0
    few_rows = DRAFT_ROWS
    """Unseen tokens of a batch that one pass reads; of more, those before a text's last leave keys and values alone.
    Catching up in a response takes an eighth of the time then after 128 prompts of 400 tokens, three quarters after
    prompts of 20 (2026-11-27, one core)."""
    _pass = staticmethod(_head_pass)

    def __init__(self, runner: Any, states: TargetStates) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention

        super().__init__(runner)
        self._states = states
        self._own_BH: Tensor | None = None
        """Hidden states of the head at the last token of each text; None: it reads the target's."""
        self._passed_RH: Tensor  # those of the last pass
        layers = runner.model.model
        self._normalizes = any(getattr(layers, name, None) is not None for name in ("input_norm", "fc_norm"))
        """Whether it does more to the target's states than join them, which graphs leave out."""
        attentions = [module for module in layers.modules() if isinstance(module, RadixAttention)]
        self._attention: Any = attentions[0] if len(attentions) == 1 else None
        """None: further layers read more than keys of the first."""
        ids = getattr(runner.model, "hot_token_id", None)
        self._token_ids = None if ids is None else ids.to(self._device)  # of a reduced vocabulary

    def _catch_up(self, batch: DraftBatch) -> Tensor:
        self._own_BH, self._caught_up = None, list[Tensor]()
        if self._attention is not None:
            self._write_keys(batch)
        logits_BV = super()._catch_up(batch)
        self._own_BH = torch.cat(self._caught_up)
        return logits_BV

    def _logits(
        self, tokens_R: Tensor, table_R: Tensor, positions: Positions, wanted_B: Tensor | None = None
    ) -> Tensor:
        logits_BV = super()._logits(tokens_R, table_R, positions, wanted_B)
        if wanted_B is not None:
            self._caught_up.append(self._passed_RH[wanted_B])
        else:
            self._own_BH = self._passed_RH
        if self._token_ids is None:
            return logits_BV
        whole_BV = logits_BV.new_full((len(logits_BV), self._vocab_size), -torch.inf)
        whole_BV[:, self._token_ids] = logits_BV
        return whole_BV

    def _batch(self, tokens_R: Tensor, table_R: Tensor, positions: Positions) -> Any:
        return super()._batch(tokens_R, table_R, positions.plus(-1))  # pairs count from 0

    @torch.no_grad()
    def _write_keys(self, batch: DraftBatch) -> None:
        """Show texts up to their last tokens. Of those before the last, later rows read keys and values alone."""
        rows, last = self._unseen(batch)
        if len(rows) <= self.few_rows:
            return
        ends = set(last)
        before = [row for r, row in enumerate(rows) if r not in ends]
        self._attention.forward = self._leave_keys
        try:
            for first in range(0, len(before), DRAFT_ROWS):
                part = self._batch(*self._columns(before[first : first + DRAFT_ROWS], batch))
                self._bind(part)
                with suppress(_KeysWritten):
                    self._forward(part)
        finally:
            del self._attention.forward
        for text in batch.texts:
            text.cache.cached = text.length - 1

    def _leave_keys(self, _: Tensor, keys: Tensor, values: Tensor, batch: Any, **__: Any) -> Tensor:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        layer = self._attention
        shape = len(keys), layer.tp_k_head_num, -1
        self._runner.token_to_kv_pool.set_kv_buffer(
            layer, KVWriteLoc.for_batch(batch), keys.view(shape), values.view(shape), layer.k_scale, layer.v_scale
        )
        raise _KeysWritten

    def _replayed(self, batch: Any) -> Tensor | None:
        if self._graphs is None:
            return None
        states_RF, own_RH = self._read(batch), self._states.own_RH[: batch.batch_size]
        if states_RF.shape[1] != own_RH.shape[1]:
            if self._normalizes:
                return None
            states_RF = self._runner.model.model.fc(states_RF)
        own_RH.copy_(states_RF)
        self._passed_RH = own_RH
        return super()._replayed(batch)

    def _forward(self, batch: Any) -> Tensor:
        # Attention would take it for a tree before this.
        batch.spec_info = SimpleNamespace(hidden_states=self._read(batch))
        hidden, self._passed_RH = self._pass(self._runner.model, batch.input_ids, batch.positions, batch)
        batch.spec_info = None
        return hidden

    def _read(self, batch: Any) -> Tensor:
        """Return the hidden states that go with the rows' tokens."""
        if self._own_BH is None:
            return self._states.of(batch.req_pool_indices, batch.positions)
        return self._own_BH[: batch.batch_size]


class MtpRunner(HeadRunner):
    """Drafts with the target's MTP layer, again and again."""

    _pass = staticmethod(_mtp_pass)


class PolicyWithMtp(torch.nn.Module):
    """The target and its MTP layer as one module."""

    def __init__(self, target: torch.nn.Module, mtp: torch.nn.Module) -> None:
        super().__init__()
        self.target, self.mtp = target, mtp

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        yield from self.target.named_parameters()
        yield from self.mtp.named_parameters("mtp")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        def of_target() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:  # each is loaded before the next is taken
                if name.startswith(MTP_WEIGHTS):
                    self.mtp.load_weights([(name, tensor)])  # type: ignore[operator]
                else:
                    yield name, tensor

        self.target.load_weights(of_target())  # type: ignore[operator]
