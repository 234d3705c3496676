"""Script: compiles the kernels of engines on GPUs for a Hopper, without one. Prints JSON: bytes of machine code."""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specactor.rollout.sglang import kernels

HOPPER = GPUTarget("cuda", 90, 32)
PARTS = {"best_scores": "*fp64", "best_tokens": "*i64", "tops": "*fp32", "totals": "*fp32"}
POOL = {"q": "*bf16", "keys": "*bf16", "values": "*bf16", "kv_indptr": "*i32", "kv_indices": "*i64", "sizes": "*i32"}
STRIDES = dict.fromkeys(("q_row", "key_slot", "key_head", "value_slot", "value_head", "heads", "max_parts"), "i32")


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, int], warps: int) -> Any:
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    return triton.compile(source, target=HOPPER, options={"num_warps": warps})


def main() -> None:
    rows = {"logits": "*fp32", "temperatures": "*fp32", "seeds": "*i64", "positions": "*i64", "greedy": "*i1"}
    sizes = dict.fromkeys(("stride", "vocab", "num_chunks"), "i32")
    drawn = {"token": "*i64", "row_top": "*fp32", "row_log_total": "*fp32", "num_chunks": "i32"}
    head = {"D": 128, "BLOCK_D": 128, "SPLIT": kernels.SPLIT}
    tile = {"GROUP": 4, "PLACES": kernels.TILE, "M": 32, **head, "BLOCK": kernels.BLOCK}
    parts = {"parts": "*fp32", "log_totals": "*fp32"}
    out = {"out": "*bf16", "kv_indptr": "*i32", "value_scale": "fp32", "heads": "i32", "max_parts": "i32"}
    chunk = compiled(kernels._draw_chunk, rows | PARTS | sizes, {"CHUNK": kernels.CHUNK}, 8)
    attend = compiled(kernels._attend_part, POOL | parts | {"scale": "fp32"} | STRIDES, tile, 4)
    sizes_of = {"readers": "*i64", "sizes": "*i32", "num_rows": "i32"}
    added = dict.fromkeys(("x", "residual", "weight", "out", "total"), "*bf16") | {"eps": "fp32"}
    made = [
        *(chunk, compiled(kernels._combine_chunks, PARTS | drawn, {"CHUNKS": 128}, 1)),
        *(attend, compiled(kernels._combine_parts, parts | out, head, 1)),
        compiled(kernels._size_tiles, sizes_of, {"TILE": kernels.TILE, "BLOCK_R": 4096}, 8),
        compiled(kernels._add_and_normalize, added, {"D": 2048, "BLOCK_D": 2048, "ROUNDS": False}, 8),
    ]
    found = {
        "bytes": [len(kernel.asm["cubin"]) for kernel in made],
        # 2^32 - 1, by which a hash is divided, is no number of float32
        "exact": "0d41EFFFFFFFE00000" in chunk.asm["ptx"] and "div.rn.f32" in chunk.asm["ptx"],
        "tensor cores": "mma.sync" in attend.asm["ptx"],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
