"""What this machine has.

Packages that crash on import (PyPI's transformer-engine without a GPU) or are another project (PyPI's apex) are tried
in another process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import netrc
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil  # type: ignore[import-untyped]

# Module -> (its distribution, a statement that succeeds where it works).
PROBES = {
    "transformer_engine": ("transformer-engine", "import transformer_engine.pytorch as m; m.Linear, m.LayerNorm"),
    "apex": ("apex", "from apex.optimizers import FusedAdam"),
    "sgl_kernel": ("sglang-kernel", "import sgl_kernel"),
    "deepspeed": ("deepspeed", "import deepspeed; deepspeed.initialize"),
    "torch_memory_saver": ("torch-memory-saver", "import torch_memory_saver"),
}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Package:
    version: str  # empty where it is missing
    works: bool
    problem: str = ""  # last line of the error with which it failed to import


@dataclass(frozen=True, kw_only=True)
class Devices:
    gpus: tuple[Gpu, ...]
    cores: int
    memory_bytes: int  # of the machine, or of its container where that is less
    packages: dict[str, Package]  # by module name, see `PROBES`
    wandb_key: bool  # whether wandb would find credentials


def detect(environ: Mapping[str, str] | None = None) -> Devices:
    """Look at this machine, which takes seconds."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        found = dict(zip(PROBES, pool.map(probe, PROBES), strict=True))
    return Devices(
        gpus=gpus(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(),
        packages=found,
        wandb_key=wandb_key(environ or {}, Path.home()),
    )


def gpus() -> tuple[Gpu, ...]:
    """Return what torch can use; none with its CPU build."""
    if importlib.util.find_spec("torch") is None:
        return ()
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return ()
    all_properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(Gpu(name=each.name, memory_bytes=each.total_memory) for each in all_properties)


def return_unused() -> None:
    """Give other processes the memory that torch and malloc keep."""
    if gpus():
        import torch

        gc.collect()
        torch.cuda.empty_cache()
    trim_heap()


def trim_heap() -> None:
    """Return free pages: glibc keeps those below a page in use, 600 MiB after 1,000 steps of a tiny model."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such call
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def gpu_uuid(number: int) -> str:
    """Return a name that does not depend on CUDA_VISIBLE_DEVICES."""
    import torch

    properties = torch.cuda.get_device_properties(number)
    # CUDA finds a part of a GPU under MIG- alone, and says in its name that it is one: "NVIDIA A100 MIG 1g.5gb"
    return f"{'MIG' if ' MIG ' in properties.name else 'GPU'}-{properties.uuid}"


def numbers() -> tuple[int, ...]:
    """Return the GPUs' numbers; without any, those of this process's cores."""
    return tuple(range(len(gpus()))) or tuple(sorted(os.sched_getaffinity(0)))


def probe(module: str) -> Package:
    distribution, statement = PROBES[module]
    if importlib.util.find_spec(module) is None:
        return Package(version="", works=False)
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return Package(version="", works=False, problem="a module of this name, but not the package")
    try:
        done = subprocess.run(
            [sys.executable, "-c", statement], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        return Package(version=version, works=False, problem=f"its import took more than {error.timeout:g} s")
    if done.returncode == 0:
        return Package(version=version, works=True)
    lines = done.stderr.strip().splitlines()
    return Package(version=version, works=False, problem=lines[-1] if lines else f"died with {done.returncode}")


def wandb_key(environ: Mapping[str, str], home: Path) -> bool:
    if environ.get("WANDB_API_KEY"):
        return True
    for file in (Path(environ.get("NETRC", home / ".netrc")), home / "_netrc"):
        try:
            if netrc.netrc(str(file)).authenticators("api.wandb.ai"):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def free_memory_bytes() -> int:
    """Return what may still be taken of the machine's memory, or of a container's or job's where that is less."""
    free = int(psutil.virtual_memory().available)
    return max(0, min([free, *(left for _, left in _memory_limits())]))


def _memory_bytes() -> int:
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _memory_limits())])


def _memory_limits() -> list[tuple[int, int]]:
    """Return the limits of this process's control groups that have one, each with what may still be taken; bytes."""
    found = []
    for line in OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            root, names, hierarchy = CGROUPS, ("memory.max", "memory.current"), ""
        elif "memory" in controllers.split(","):  # version 1, as with Slurm's cgroup/v1
            root, names, hierarchy = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        else:
            continue
        own = root / path.lstrip("/")
        for group in (own, *own.parents):  # in a container its own group may be the root
            with contextlib.suppress(OSError, ValueError):  # no group, or "max"
                limit, used = (int((group / name).read_text()) for name in names)
                pages = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                caches = sum(int(pages[f"{hierarchy}{kind}_file"]) for kind in ("active", "inactive"))  # they go
                found.append((limit, limit - used + caches))
    return found
