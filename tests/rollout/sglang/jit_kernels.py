"""Script: compiles kernels that SGLang makes on a Hopper for Qwen3's shapes in bfloat16, by its own loader and nvcc,
without a GPU. Prints JSON: of each library, which is loaded, its bytes, whether it has code for a device, and which."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

import torch

from tests.lib import hopper
from tests.rollout.sglang.cuda_branch import make_driver


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_driver(Path(folder))
        os.environ["SGLANG_JIT_CACHE_DIR"] = folder
        told = subprocess.run(["nvcc", "--dryrun", "-c", "none.cu"], capture_output=True, text=True, check=False).stderr
        (os.environ["CUDA_HOME"],) = re.findall(r"^#\$ TOP=(.*)", told, re.MULTILINE)
        hopper.install()
        from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module
        from sglang.kernels.ops.layernorm.norm import _jit_qknorm_module

        bf16 = torch.bfloat16
        kernels = {
            "kvcache": lambda: _jit_kvcache_module(1024, 1024, 0),
            "qknorm": lambda: _jit_qknorm_module(128, bf16),
        }
        found = {}
        for name, compile_it in kernels.items():
            before = set(Path(folder).rglob("*.so"))
            compile_it()  # which also loads it
            (made,) = set(Path(folder).rglob("*.so")) - before
            code = made.read_bytes()
            found[name] = [len(code), b".nv_fatbin" in code, made.relative_to(folder).parts[0]]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
