"""What SGLang's own NGRAM and STANDALONE ask of the CPU, so that they can be measured where their kernels do not exist.

The published `sgl_kernel` holds CUDA code, and its CPU build needs AVX512 or AMX. Here is the same arithmetic on whole
batches, in PyTorch and numpy, with one attention call per layer: a verify gathers the keys of a request once for all
its draft tokens. Also, SGLang's verify takes the likeliest token on a CPU, whatever the temperature; it gets the
rejection sampling back that it has on a GPU. `install` is for a process that hosts such an engine, before its start.

Invariant: what is computed is what the kernels of the same names compute; emitted tokens follow the target's law.

Shape legend: B requests, N rows of a request in a verify, V vocabulary, L keys (padded), H query heads, G key-value
heads, D head size, S slots of the KV pool.
"""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from specactor.cpu import sglang_ops

_slots_of: tuple[Tensor, int, int, tuple[Tensor, Tensor]] | None = None
"""The last lengths, their version, rows per request, and the `key_slots` made from them: all layers share these."""

_emitted, _verifies = 0, 0


def accepted() -> tuple[int, int]:
    """(emitted tokens, verifies of a request) since the last call."""
    global _emitted, _verifies
    counts = (_emitted, _verifies)
    _emitted, _verifies = 0, 0
    return counts


def install() -> None:
    """Call it before SGLang is imported."""
    import sgl_kernel  # the stand-in of specactor.cpu

    for function in (
        assign_extend_cache_locs_cpu,
        assign_draft_cache_locs_contiguous_cpu,
        fill_bonus_tokens_cpu,
        fill_accept_out_cache_loc_cpu,
        build_tree_kernel_efficient_cpu,
        build_draft_decode_metadata_cpu,
        copy_all_layer_kv_cache_cpu,
    ):
        setattr(sgl_kernel, function.__name__, function)
    trees: Any = types.ModuleType("sgl_kernel.speculative")
    trees.reconstruct_indices_from_tree_mask = reconstruct_indices_from_tree_mask
    sgl_kernel.speculative = trees
    sys.modules["sgl_kernel.speculative"] = trees
    operators: Any = torch.ops.sgl_kernel
    operators.decode_attention_cpu = decode_attention_cpu
    operators.extend_attention_cpu = extend_attention_cpu


def connect() -> None:
    """Tell SGLang to use them. Call it after the plugins of SGLang were loaded."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    ATTENTION_BACKENDS["torch_native"] = ATTENTION_BACKENDS["intel_amx"]
    create = DraftBackendFactory._create_backend

    def created(self: Any, name: str, backends: dict[str, Any], *args: Any, **named: Any) -> Any:
        return create(self, name, backends | {"torch_native": backends["intel_amx"]}, *args, **named)

    DraftBackendFactory._create_backend = created
    eagle_utils._verify_uses_greedy = lambda *, is_all_greedy, **_: is_all_greedy
    eagle_utils.tree_speculative_sampling_target_only = sample_tree


# --------------------------------------------------------------------------------------------------- KV bookkeeping


def assign_extend_cache_locs_cpu(
    rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _: int
) -> None:
    """slots = columns [start, end) of every request's row, one request after the other."""
    counts = (ends - starts).long()
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    column = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner] + starts.long()[owner]
    slots[: len(owner)] = table[rows.long()[owner], column].to(slots.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    rows: Tensor, table: Tensor, lengths: Tensor, slots: Tensor, _: int, topk: int, columns: int
) -> None:
    """slots = the `topk * columns` columns from each request's length on."""
    column = lengths.long()[:, None] + torch.arange(topk * columns)
    slots[: column.numel()] = table[rows.long()[:, None], column].reshape(-1).to(slots.dtype)


def fill_bonus_tokens_cpu(tokens: Tensor, lengths: Tensor, bonus: Tensor, stride: int) -> None:
    """bonus = the last of every request's emitted tokens."""
    last = torch.arange(len(lengths)) * stride + lengths.long() - 1
    bonus[: len(lengths)] = tokens.reshape(-1)[last].to(bonus.dtype)


def fill_accept_out_cache_loc_cpu(accepted: Tensor, slots: Tensor, kept: Tensor) -> None:
    """kept = slots of accepted rows (those that are not -1), without gaps."""
    flat = accepted.reshape(-1)
    rows = flat[flat >= 0].long()
    kept[: len(rows)] = slots[rows].to(kept.dtype)


def copy_all_layer_kv_cache_cpu(addresses: Tensor, strides: Tensor, targets: Tensor, sources: Tensor) -> None:
    """In every layer's buffer, copy the slots `sources` to `targets`."""
    into, out = targets.numpy().astype(np.int64), sources.numpy().astype(np.int64)
    moved = into != out
    into, out = into[moved], out[moved]
    if not len(into):
        return
    slots = int(max(into.max(), out.max())) + 1
    for address, stride in zip(addresses.tolist(), strides.tolist(), strict=True):
        raw = (ctypes.c_uint8 * (slots * stride)).from_address(address)
        buffer = np.frombuffer(raw, dtype=np.uint8).reshape(slots, stride)
        buffer[into] = buffer[out]


def build_draft_decode_metadata_cpu(
    table: Tensor, rows: Tensor, lengths: Tensor, topk: int, steps: int, _: int
) -> Tensor:
    """The page table with a row per candidate of a draft: the request's tokens, then the candidate's own."""
    own = table[rows.long()].repeat_interleave(topk, dim=0)
    if topk > 1:
        base = lengths.long().repeat_interleave(topk)[:, None] + torch.arange(steps)
        lane = torch.arange(topk).repeat(len(rows))[:, None] * steps
        own.scatter_(1, base, own.gather(1, base + lane))
    return own


# ------------------------------------------------------------------------------------------------------------ trees


def reconstruct_indices_from_tree_mask(
    mask: Tensor,
    lengths: Tensor,
    positions: Tensor,
    index: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    requests: int,
    nodes: int,
) -> None:
    """From "column is an ancestor of row": positions of nodes, and links to first children and next siblings."""
    ancestors = mask.reshape(-1)[: requests * nodes * nodes].view(requests, nodes, nodes).bool().tril(-1)
    order = torch.arange(nodes)
    parent = torch.where(ancestors, order, -1).amax(dim=2)
    child = torch.where(ancestors, order[:, None], nodes).amin(dim=1)
    brothers = (parent[:, :, None] == parent[:, None, :]) & (order[:, None] > order)
    sibling = torch.where(brothers, order[:, None], nodes).amin(dim=1)
    positions.view(-1).copy_((ancestors.sum(2) + lengths[:, None]).view(-1))
    index.copy_(torch.arange(requests * nodes).view(requests, nodes))
    first_child.copy_(torch.where(child < nodes, child, -1))
    next_sibling.copy_(torch.where((parent >= 0) & (sibling < nodes), sibling, -1))


def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    selected: Tensor,
    lengths: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    first_child: Tensor,
    next_sibling: Tensor,
    topk: int,
    depth: int,
    nodes: int,
    mode: int,
) -> None:
    """The tree of a draft with one candidate per step, which is a chain."""
    if topk != 1 or int(mode) != 1:
        raise NotImplementedError("drafts of several candidates per step: not measured here")
    requests = len(lengths)
    order = torch.arange(nodes)
    mask.view(requests, nodes, nodes).copy_((order <= order[:, None]).expand(requests, nodes, nodes))
    positions.view(requests, nodes).copy_(lengths[:, None] + order)
    index.copy_(torch.arange(requests * nodes).view(requests, nodes))
    first_child.copy_(torch.where(order + 1 < nodes, order + 1, -1).expand(requests, nodes))
    next_sibling.fill_(-1)


def sample_tree(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Walk down the tree: a child is taken with the target's probability of it, given that those before were not.

    Args: target_probs [B, N, V]; the results are written to the first three arguments.
    """
    global _emitted, _verifies
    probs = target_probs.numpy()
    tokens, rows = candidates.tolist(), retrive_index.tolist()
    children, siblings = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    coins, last_coins = uniform_samples.tolist(), uniform_samples_for_final_sampling.view(-1).tolist()
    for b in range(len(tokens)):
        node, taken, coin = 0, [0], coins[b][0]
        while True:
            child, mass, refused = children[b][node], 0.0, []
            while child != -1:
                p = float(probs[b, node, tokens[b][child]])
                mass += p
                if len(taken) < accept_index.shape[1] and (coin <= mass / threshold_acc or p >= threshold_single):
                    break
                refused.append(tokens[b][child])
                child = siblings[b][child]
            if child == -1:
                break
            node, coin = child, coins[b][child]
            taken.append(child)
        left = probs[b, node].astype(np.float64)
        if len(taken) < accept_index.shape[1]:
            left[refused] = 0.0
        total = left.cumsum()
        own = int(np.searchsorted(total, last_coins[b] * total[-1], side="right"))
        emitted = [*(tokens[b][child] for child in taken[1:]), min(own, len(left) - 1)]
        places = [rows[b][child] for child in taken]
        predicts[places] = torch.tensor(emitted, dtype=predicts.dtype)
        accept_index[b, : len(places)] = torch.tensor(places, dtype=accept_index.dtype)
        accept_token_num[b] = len(places) - 1
        _emitted += len(places)
    _verifies += len(tokens)


# -------------------------------------------------------------------------------------------------------- attention


def decode_attention_cpu(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scale: float,
    value_scale: float,
    output: Tensor,
    new_keys: Tensor | None,
    new_values: Tensor | None,
    slots: Tensor,
    _: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    scale: float,
    *rest: Any,
) -> None:
    """One new token per request."""
    if new_keys is not None and new_values is not None:
        keys[slots] = new_keys.view(-1, *keys.shape[1:])
        values[slots] = new_values.view(-1, *values.shape[1:])
    where, bias = _slots(table, rows, lengths, 1)
    part = sglang_ops.SharedKeys(where, [(slice(0, len(rows)), bias)])
    sglang_ops.decode_attention(query, keys, values, [part], scale, output)


def extend_attention_cpu(
    query: Tensor,
    _k: Tensor,
    _v: Tensor,
    output: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scale: float,
    value_scale: float,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    extended: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    logit_cap: float,
    cross: bool,
    window: int,
    encoder_lengths: Any,
    sinks: Any,
    tree: Tensor | None = None,
    causal: bool = True,
) -> None:
    """Several new tokens per request; their keys are in the pool already."""
    counts = extended.tolist()
    if len(set(counts)) == 1:
        _extend_evenly(query, output, keys, values, table, rows, lengths, counts[0], scale, tree)
        return
    first = 0
    for row, length, count in zip(rows.tolist(), lengths.tolist(), counts, strict=True):
        slots = table[row, :length].long()
        mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        attended = functional.scaled_dot_product_attention(
            query[first : first + count].transpose(0, 1)[None],
            keys[slots].transpose(0, 1)[None],
            values[slots].transpose(0, 1)[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        output[first : first + count] = attended[0].transpose(0, 1)
        first += count


def _extend_evenly(
    query: Tensor,
    output: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    count: int,
    scale: float,
    tree: Tensor | None,
) -> None:
    """As many new tokens in each request, in one call of the kernel."""
    requests, heads, kv_heads = len(rows), query.shape[1], keys.shape[1]
    where, bias = _slots(table, rows, lengths, count, tree)
    k_BGLD = keys.index_select(0, where).view(requests, -1, kv_heads, keys.shape[2]).transpose(1, 2)
    v_BGLD = values.index_select(0, where).view(requests, -1, kv_heads, values.shape[2]).transpose(1, 2)
    q_BHND = query.view(requests, count, heads, -1).transpose(1, 2)
    out_BHND = functional.scaled_dot_product_attention(
        q_BHND, k_BGLD, v_BGLD, attn_mask=bias, scale=scale, enable_gqa=True
    )
    output.copy_(out_BHND.transpose(1, 2).reshape(requests * count, heads, -1))


def _slots(
    table: Tensor, rows: Tensor, lengths: Tensor, count: int, tree: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Slots [B * L] of keys, and the bias [B, 1, count, L] of the last `count` tokens; once for all layers."""
    global _slots_of
    if _slots_of is not None:
        known, version, num, made = _slots_of
        if known is lengths and version == lengths._version and num == count:
            return made
    where, bias = sglang_ops.key_slots(table, rows, lengths, int(lengths.max()), queries=1)
    if count > 1:
        bias = bias.expand(-1, -1, count, -1).clone()
        first = (lengths - count)[:, None, None]
        key = torch.arange(bias.shape[3])
        row = torch.arange(count)[:, None]
        hidden = key > first + row
        if tree is not None:
            seen = tree.reshape(-1)[: len(rows) * count * count].view(len(rows), count, count).bool()
            node = (key - first).clamp(0, count - 1).expand(-1, count, -1)
            hidden = (key >= first) & ~seen.gather(2, node)
        bias.masked_fill_(hidden[:, None], float("-inf"))
    made = (where, bias)
    _slots_of = (lengths, lengths._version, count, made)
    return made
