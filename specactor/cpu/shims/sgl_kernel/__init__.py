"""What SGLang's decoding asks of `sgl_kernel` on a CPU, in PyTorch: the package's builds need CUDA, AVX512 or AMX."""

import ctypes

import torch

from specactor.cpu.sglang_ops import murmur_hash32

__version__ = "0.0.0+specactor"

# `convert_weight_packed` stays undefined: its absence makes SGLang take its torch-native paths.

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


def assign_req_to_token_pool_cpu(rows, req_to_token, starts, ends, slots, _):
    """Write `slots`, one request after the other, to columns [start, end) of its row."""
    counts = (ends - starts).long()
    if len(slots) == len(counts) and bool((counts == 1).all()):  # what a plain step asks for
        req_to_token[rows.long(), starts.long()] = slots.to(req_to_token.dtype)
        return
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    column = torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner] + starts.long()[owner]
    req_to_token[rows.long()[owner], column] = slots[: len(owner)].to(req_to_token.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, targets, sources):
    """Copy slots in every layer's buffer; all are read before any is written."""
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(base + slot * stride, stride) for slot in sources.tolist()]
        for slot, data in zip(targets.tolist(), slots, strict=True):
            ctypes.memmove(base + slot * stride, data, stride)


def __getattr__(name):  # kernels that are never called here can be imported, and name themselves when called
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: this kernel has no stand-in without a GPU")

    return missing
