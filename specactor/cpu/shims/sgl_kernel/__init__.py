"""What plain decoding in SGLang asks of the `sgl_kernel` package on a CPU, in PyTorch.

The published wheels of that package hold CUDA code, and its CPU build needs AVX512 or AMX. This stand-in is seen only
by the processes of an engine without a GPU (`specactor.cpu.sglang.environment`).
`torch.ops.sgl_kernel.convert_weight_packed` is left undefined on purpose: its absence makes SGLang take its
torch-native paths. Kernels that plain decoding never calls can be imported, and name themselves when they are called.
"""

import torch

from specactor.cpu.sglang_ops import murmur_hash32

__version__ = "0.0.0+specactor"

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: this kernel has no stand-in without a GPU")

    return missing
