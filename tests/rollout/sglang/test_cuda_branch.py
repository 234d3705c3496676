"""SGLang's branch for CUDA, imported without a GPU: what we patch, subclass and read is there under its name."""

from __future__ import annotations

import shutil

import pytest

from tests.lib.scripts import found_by


@pytest.mark.deep
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, for a driver that Triton can load")
def test_every_name_that_we_use_is_in_sglangs_branch_for_cuda() -> None:
    """With the names that its kernel package has, and no others. A renamed import, target of a hook, overridden method,
    field and kernel are seen."""
    found = found_by("tests.rollout.sglang.cuda_branch", anew=True)
    assert found["cuda"]
    assert "arch=90" in found["triton"]
    assert found["files"] > 500
    assert found["memory saver"] == ["torch", "preload"], "by Megatron, which SGLang imports, and by us"
    assert found["hooks"] == [16, 16], "registered, applied: SGLang only logs one that it does not find"
    assert found["names"] > 100
    assert found["missing"] == []
    assert found["after renaming"] == [
        "TritonAttnBackend.init_forward_metadata_out_graph",
        "kv_index_translator",
        "sglang.srt.layers.sampler.Sampler._sample_from_probs",
        "sglang.srt.managers.io_struct.RpcReqInput",
        "cannot import name 'silu_and_mul' from 'sgl_kernel'",
    ]


@pytest.mark.deep
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc: nvidia-cuda-nvcc, -crt, -nvvm and -cccl 13.0")
def test_kernels_that_sglang_makes_itself_compile_for_a_hopper() -> None:
    """By its own loader, as for Qwen3 in bfloat16, and the libraries can be loaded."""
    found = found_by("tests.rollout.sglang.jit_kernels", anew=True)
    assert set(found) == {"kvcache", "qknorm"}
    for size, has_code, target in found.values():
        assert size > 10_000
        assert has_code
        assert target == "sm90a"
