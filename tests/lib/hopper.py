"""A Hopper GPU as far as SGLang looks when it resolves its arguments: no tensor ever reaches it.

Call `install` before sglang is imported, in a process of its own.
"""

from __future__ import annotations

import os

import torch

from tests.lib import gpu_packages

MEMORY_MIB = 81559


class Properties:
    """What torch tells of an H100."""

    name = "NVIDIA H100 80GB HBM3"
    major, minor = 9, 0
    total_memory = 80 * 2**30
    multi_processor_count = 132
    warp_size = 32
    L2_cache_size = 50 * 2**20
    regs_per_multiprocessor = 65536
    shared_memory_per_block_optin = 232448
    gcnArchName = ""  # noqa: N815  (torch's name)


def install(count: int = 8) -> None:
    """Make torch say that there are GPUs, and SGLang find its kernels."""
    from specactor.cpu import torchvision_ops

    os.environ["HF_HUB_OFFLINE"] = "1"
    torchvision_ops.install()
    import torchvision  # noqa: F401

    torch.version.cuda = "13.0"
    for name, value in {
        "is_available": True,
        "is_initialized": False,
        "_is_compiled": True,
        "device_count": count,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_properties": Properties,
        "get_device_name": Properties.name,
        "mem_get_info": (79 * 2**30, 80 * 2**30),
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
    }.items():
        setattr(torch.cuda, name, lambda *args, value=value, **kwargs: value)
    gpu_packages.stand_in("sglang-kernel")
    import sglang.srt.arg_groups.memory_hook as hook
    import sglang.srt.utils.common as common

    for place in (common, hook):
        place.get_device_memory_capacity = lambda device=None: MEMORY_MIB  # asks nvidia-smi
