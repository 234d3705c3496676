"""Script for Triton's interpreter: the attention backend of engines on GPUs, with SGLang's own as its base, decodes
rows of plain rounds and of a verification, directly and as code that a graph would replay. Prints JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch

from specactor.cpu import torchvision_ops

torchvision_ops.install()
import sglang.srt.layers.attention.triton_backend as sglang_backend  # noqa: E402
from sglang.srt.model_executor import forward_batch_info  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

from specactor.errors import EngineError  # noqa: E402
from specactor.rollout.sglang.draft_runner import DraftRunner, DraftText, SequenceCache  # noqa: E402
from specactor.rollout.sglang.gpu import backend_class  # noqa: E402

HEADS, KV_HEADS, DIM, CONTEXT, REQUESTS = 4, 2, 16, 512, 4
LENGTHS = [300, 40, 70]


class Pools:
    """Of requests and of their keys; asked as SGLang asks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.size, self.start_layer = 40, 0
        slots = REQUESTS * CONTEXT
        self.req_to_token = torch.randperm(slots).view(REQUESTS, CONTEXT).int()
        self.k, self.v = torch.randn(2, slots, KV_HEADS, DIM)

    def get_key_buffer(self, _: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, _: int) -> torch.Tensor:
        return self.v

    def set_kv_buffer(self, _: Any, slots: Any, k: torch.Tensor, v: torch.Tensor, *__: Any, **___: Any) -> None:
        slots = slots.loc
        self.k[slots], self.v[slots] = k, v

    def pack_read_stream(
        self, _: Any, *, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, indptr: torch.Tensor, out: torch.Tensor
    ) -> None:
        for i, (reader, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
            out[int(indptr[i]) : int(indptr[i]) + length] = self.req_to_token[reader, :length]


def backend(pools: Pools, **other: Any) -> Any:
    model = SimpleNamespace(
        attention_arch=None,
        context_len=CONTEXT,
        head_dim=DIM,
        v_head_dim=DIM,
        swa_v_head_dim=DIM,
        is_encoder_decoder=False,
        hf_config=SimpleNamespace(architectures=[]),
        hf_text_config=SimpleNamespace(),
        get_max_num_attention_heads=lambda: HEADS,
        get_num_kv_heads=lambda *_: KV_HEADS,
    )
    runner = SimpleNamespace(
        req_to_token_pool=pools,
        token_to_kv_pool=pools,
        token_to_kv_pool_allocator=None,
        kv_index_translator=pools,
        sliding_window_size=None,
        page_size=1,
        device="cpu",
        gpu_id=0,
        is_draft_worker=False,
        model_config=model,
        spec_algorithm=None,
        kv_cache_dtype=torch.float32,
        dtype=torch.float32,
        decode_num_tokens_per_req=lambda: 1,
    )
    vars(runner).update(other)
    kernel = SimpleNamespace(enable_lean_attention=None, triton_attention_num_kv_splits=8)
    kernel.triton_attention_split_tile_size = None
    patched = {
        "get_exec": SimpleNamespace(
            kernel=kernel,
            dllm=SimpleNamespace(dllm_algorithm=None),
            deterministic=SimpleNamespace(enable_deterministic_inference=True),
        ),
        "get_spec": SimpleNamespace(speculative_num_draft_tokens=9, speculative_num_steps=8, speculative_eagle_topk=1),
        "get_parallel": SimpleNamespace(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0),
        "get_schedule": SimpleNamespace(chunked_prefill_size=8192),
        "get_device_core_count": 132,
        "mambaish_config": None,
        "cuda_graph_fully_disabled": True,
    }
    for name, value in patched.items():
        setattr(sglang_backend, name, lambda *_, value=value: value)
    return backend_class()(runner)


def batch(readers: list[int], lengths: list[int]) -> Any:
    return SimpleNamespace(
        batch_size=len(readers),
        req_pool_indices=torch.tensor(readers),
        seq_lens=torch.tensor(lengths),
        seq_lens_sum=sum(lengths),
        forward_mode=ForwardMode.DECODE,
        spec_info=None,
        encoder_lens=None,
        kv_loc_plan=None,
        out_cache_loc=torch.zeros(len(readers), dtype=torch.int64),
    )


LAYER = SimpleNamespace(
    tp_q_head_num=HEADS,
    tp_k_head_num=KV_HEADS,
    qk_head_dim=DIM,
    v_head_dim=DIM,
    layer_id=0,
    scaling=0.25,
    logit_cap=0.0,
    logit_capping_method="tanh",
    sliding_window_size=-1,
    k_scale=None,
    v_scale=None,
    xai_temperature_len=-1,
    is_cross_attention=False,
    attn_type=None,
)


def decode(attention: Any, q: torch.Tensor, rows: Any) -> torch.Tensor:
    attention.init_forward_metadata(rows)
    found: torch.Tensor = attention.forward_decode(q, None, None, LAYER, rows, save_kv_cache=False)
    return found


def replayed(attention: Any, q: torch.Tensor, rows: Any) -> torch.Tensor:
    """As a graph of eight rows that was captured for others, filled up with a row that nobody reads."""
    pad = 8 - len(q)
    static = batch([0] * 8, [1] * 8)
    attention.init_cuda_graph_state(8, 8)
    attention.init_forward_metadata_out_graph(static, in_capture=True)
    inputs = torch.cat([q, torch.zeros(pad, q.shape[1])])

    def graph() -> torch.Tensor:
        found: torch.Tensor = attention.forward_decode(inputs, None, None, LAYER, static, save_kv_cache=False)
        return found

    graph()
    static.req_pool_indices.copy_(torch.cat([rows.req_pool_indices, torch.zeros(pad, dtype=torch.int64)]))
    static.seq_lens.copy_(torch.cat([rows.seq_lens, torch.ones(pad, dtype=torch.int64)]))
    attention.init_forward_metadata_out_graph(static)
    return graph()[: len(q)]


def refused(pools: Pools, **other: Any) -> str:
    try:
        backend(pools, **other)
    except EngineError as error:
        return str(error)
    return ""


def prefilled(attention: Any, pools: Pools) -> float:
    """A draft model's prefill of two texts, one after a beginning that it has seen: the largest error of a last row."""
    runner = DraftRunner.__new__(DraftRunner)
    runner._info, runner._device, runner._vocab_size = forward_batch_info, torch.device("cpu"), 100
    runner._runner = SimpleNamespace(req_to_token_pool=pools, spec_algorithm=None)
    texts = [
        DraftText(
            prompt_ids=[1] * 60, output_ids=[2] * 9, seed=0, temperature=1.0, window=1, row=row, cache=SequenceCache()
        )
        for row in (2, 1)
    ]
    rows = runner._prefill_batch([(texts[0], 20, 68), (texts[1], 0, 37)])
    q, k, v = torch.randn(85, HEADS * DIM), torch.randn(85, KV_HEADS, DIM), torch.randn(85, KV_HEADS, DIM)
    attention.init_forward_metadata(rows)
    found = attention.forward_extend(q, k, v, LAYER, rows)
    return max(
        float((found[row] - exact(pools, q[row], table, length)).abs().max())
        for row, table, length in ((47, 2, 68), (20, 2, 41), (84, 1, 37), (48, 1, 1))
    )


def exact(pools: Pools, q: torch.Tensor, table: int, length: int) -> torch.Tensor:
    slots = pools.req_to_token[table, :length].long()
    k, v = (x[slots].double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (pools.k, pools.v))
    scores = torch.einsum("hd,nhd->hn", q.view(HEADS, DIM).double(), k) * LAYER.scaling
    return torch.einsum("hn,nhd->hd", scores.softmax(1), v).flatten()


def main() -> None:
    pools = Pools()
    attention = backend(pools)
    plain = torch.randn(3, HEADS * DIM)
    alone = decode(attention, plain, batch([0, 1, 2], LENGTHS))
    # A chain of four rows of the first request, one of the second, a branch of the first through a row of its own.
    pools.req_to_token[3] = pools.req_to_token[0]
    readers, lengths = [0, 0, 0, 0, 1, 3, 2], [298, 299, 300, 301, 40, 300, 70]
    q = torch.randn(7, HEADS * DIM)
    q[[2, 4, 5, 6]] = plain[[0, 1, 0, 2]]
    rows = batch(readers, lengths)
    verified = decode(attention, q, rows)
    found = {
        "error": float((alone[0] - exact(pools, plain[0], 0, 300)).abs().max()),
        "same": torch.equal(verified[[2, 4, 5, 6]], alone[[0, 1, 0, 2]]),
        "others differ": not torch.equal(verified[1], alone[0]),
        "graph": torch.equal(replayed(attention, q, rows), verified),
        "sizes": attention._sizes[:8].tolist(),
        "prefill": prefilled(attention, pools),
        "refused": [
            refused(pools, page_size=64),
            refused(pools, sliding_window_size=128),
            refused(pools, kv_cache_dtype=torch.float8_e5m2),
        ],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
