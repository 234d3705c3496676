"""The environment of processes that run SGLang. Imports neither torch nor SGLang."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

SHIMS = Path(__file__).parent / "shims"
OF_TRAINER: set[str] = set()
"""Variables that a trainer has set in this process for itself. An engine that replaces another would have them, and
those that were started before the trainer was made would not."""
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "GROUP_", "LOCAL_", "ROLE_", "MASTER_", "RANK", "WORLD_SIZE")
_KEY = "SPECACTOR_KEY"  # of ranks (seals.py): verifiers are code of others, and may run what a response says


def environment(cores: Sequence[int | str] = ()) -> dict[str, str]:
    """Return the variables of an engine on `cores`, one per tensor-parallel rank."""
    inherited = os.environ.get("PYTHONPATH")
    variables = {
        "PYTHONPATH": os.pathsep.join([str(SHIMS), *([inherited] if inherited else [])]),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_PLUGINS": "specactor",
        "SGLANG_NCCL_SO_PATH": "/nonexistent",  # a CUDA build of torch brings NCCL, which would then look for a GPU
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHDYNAMO_DISABLE": "1",  # compiling with a C++ compiler takes longer than all it could save here
    }
    if len(cores) > 1:  # SGLang refuses several ranks on one NUMA node without the list
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores))
    return variables


def process_environment(devices: Sequence[int | str]) -> dict[str, str]:
    """Return the whole environment of an engine's process, GPU or not."""
    # What torchrun tells its ranks is left out: an engine is a world of its own.
    others = {name: value for name, value in os.environ.items() if name not in {*OF_TRAINER, _KEY}}
    kept = {name: value for name, value in others.items() if not name.startswith(_TORCHRUN_PREFIXES)}
    if has_gpu():
        return {**kept, **gpu_environment(devices), "SGLANG_PLUGINS": "specactor"}
    return {**kept, **environment(devices)}


def gpu_environment(devices: Sequence[int | str]) -> dict[str, str]:
    """Return the variables of an engine on GPUs, by UUID or this process's numbers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    given = visible.split(",") if visible else []
    names = [device if isinstance(device, str) else given[device] if given else str(device) for device in devices]
    variables = {
        "CUDA_VISIBLE_DEVICES": ",".join(names),
        # CUDA graphs keep activations of their own: without this a release leaves that memory with the engine.
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
        # Where an engine's ranks find a tenth less free on one device than on another SGLang refuses to start. Trainer
        # ranks and drafters on the same devices may hold so much more there.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    }
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        # The memory saver cannot release segments that grow; what else a user has set for the trainer may stay.
        kept = [part for part in os.environ.get(name, "").split(",") if "expandable_segments" not in part]
        if os.environ.get(name) is not None:
            variables[name] = ",".join(kept)
    return variables


def has_gpu() -> bool:
    """Return whether engines have NVIDIA GPUs; a trainer may have replaced `torch.cuda`."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not Path("/dev/nvidiactl").exists():
        return False
    import torch  # which takes seconds, and is not needed where there is no driver

    return torch.version.cuda is not None
