"""Published figures of devices, and what share of them programs attain. PURE: numbers with their sources.

Where a vendor gives a figure with sparsity, half of it stands here. Nothing here was measured by this project;
`specactor profile` measures.

Invariant: every number has its source beside it, or says that it is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specactor.errors import PlanError

HOPPER = "https://glennklockwood.com/garden/processors/h100"
ML_ENGINEERING = "https://github.com/stas00/ml-engineering/blob/master/compute/accelerator/README.md"


@dataclass(frozen=True, kw_only=True)
class Device:
    """Peaks, as published."""

    name: str
    flops: float  # bfloat16, dense, per second
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to the other devices of its node, one direction
    node_devices: int = 8
    """Of one NVLink domain: HGX and DGX boards, https://chippub.substack.com/p/disassembling-nvidias-16t-network"""


@dataclass(frozen=True, kw_only=True)
class Attained:
    """Programs attain these shares of the peaks on all devices; measured on H100 if nothing else is said."""

    matmul: float = 0.80
    """794.5 of 989 TFLOP/s (H100; B200: 1745 of 2250, .78), the best shape, ML_ENGINEERING. Ill-shaped matrices get
    less."""
    weights: float = 0.84
    """2.8 of 3.35 TB/s, coalesced reads of matrices, https://mikamirai.com/blog/gpu-memory-bandwidth/"""
    attention: float = 0.57  # 1.9 of 3.35 TB/s, keys and values in attention, the same page
    link: float = 0.77
    """Bus bandwidth of a large all-reduce over NVLink's, https://waynehacking8.github.io/blog/nccl-nvlink-bandwidth/"""
    all_reduce_s: float = 5e-6
    """Of a small one among 2, 4 and 8 devices: 3.9, 3.7, 5.7 us for 4 KB, https://github.com/sgl-project/sglang/pull/2904"""
    kernel_s: float = 1.2e-6
    """The least time of a kernel in a row of kernels: 1.1 to 1.3 us for adding two small tensors,
    https://github.com/pytorch/pytorch/issues/161104"""
    kernels_per_layer: int = 12  # counted: norms, projections, rotation, attention in two passes, activation; assumed
    launch_s: float = 8e-6  # of a captured graph, processor time, https://cuda.juliagpu.org/dev/usage/graphs/
    memory: float = 0.90  # share for weights and KV; assumed, about SGLang's mem_fraction_static


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(  # SXM5
            name="H100",
            flops=989.4e12,  # HOPPER
            memory_bytes=80e9,  # HOPPER
            memory_bytes_per_s=3.35e12,  # HOPPER
            link_bytes_per_s=450e9,  # HOPPER: 900 GB/s, both directions
        ),
        Device(  # SXM
            name="H200",
            flops=989.4e12,  # the same chip as H100: HOPPER
            memory_bytes=141e9,  # ML_ENGINEERING; https://www.nvidia.com/en-us/data-center/h200/
            memory_bytes_per_s=4.8e12,  # the same two
            link_bytes_per_s=450e9,  # the same two: 900 GB/s, both directions
        ),
        Device(  # SXM5
            name="H20",
            flops=148e12,  # https://willitrunai.com/es/gpus/h20-96gb; https://zangshuxian.com/new/674733024499207168
            memory_bytes=96e9,  # the first of them
            memory_bytes_per_s=4.0e12,  # both of them
            link_bytes_per_s=450e9,  # the first: 900 GB/s, both directions
        ),
        Device(  # HGX, 1000 W
            name="B200",
            flops=2250e12,  # https://glennklockwood.com/garden/processors/B200
            memory_bytes=180e9,  # 192 GB of chips; 179 to 180 usable:
            # https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview
            memory_bytes_per_s=8.0e12,  # both of them
            link_bytes_per_s=900e9,  # both of them: 1.8 TB/s, both directions
        ),
    )
}


def device(name: str) -> Device:
    """Return the device of a name. Raises PlanError for an unknown one."""
    found = {known.lower(): one for known, one in DEVICES.items()}.get(name.lower())
    if found is None:
        raise PlanError(
            f"device: got {name!r}, expected one of {', '.join(DEVICES)}. For others measure a table with specactor "
            "profile and give it with --cost-table."
        )
    return found
