"""Script: compiles kernels that SGLang makes on a Hopper for Qwen3's shapes in bfloat16, by its own loader and nvcc,
without a GPU. Prints JSON: of each library, which is loaded, its bytes, whether it has code for a device, and which."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.lib import hopper
from tests.rollout.sglang.cuda_branch import make_driver


def main(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_driver(Path(folder))
        os.environ["SGLANG_JIT_CACHE_DIR"] = folder
        told = subprocess.run(["nvcc", "--dryrun", "-c", "none.cu"], capture_output=True, text=True, check=False).stderr
        (os.environ["CUDA_HOME"],) = re.findall(r"^#\$ TOP=(.*)", told, re.MULTILINE)
        hopper.install()
        from sglang.kernels.ops.activation.activation import activation_module
        from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
        from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module
        from sglang.kernels.ops.layernorm.norm import _jit_qknorm_module, _jit_rmsnorm_module
        from sglang.kernels.ops.moe.moe_topk_softmax import _jit_moe_topk_softmax_module

        bf16 = torch.bfloat16
        kernels = {
            "activation": lambda: activation_module(bf16),
            "rope": lambda: _jit_fused_rope_module(True, 128, bf16, bf16),
            "kvcache": lambda: _jit_kvcache_module(1024, 1024, 0),
            "qknorm": lambda: _jit_qknorm_module(128, bf16),
            "rmsnorm": lambda: _jit_rmsnorm_module(2048, bf16),
            "topk_softmax": lambda: _jit_moe_topk_softmax_module(torch.float32),
        }
        found = {}
        for name in names:
            before = set(Path(folder).rglob("*.so"))
            kernels[name]()  # which also loads it
            (made,) = set(Path(folder).rglob("*.so")) - before
            code = made.read_bytes()
            found[name] = [len(code), b".nv_fatbin" in code, made.relative_to(folder).parts[0]]
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
