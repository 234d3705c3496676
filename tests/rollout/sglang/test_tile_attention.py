"""Attention in tiles as engines on GPUs have it: kernel and backend in Triton's interpreter, and compilation."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import INTERPRETED
from tests.lib.scripts import found_by

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "groups", [("2",), pytest.param(("1", "2", "3", "4", "5", "6", "7", "8"), marks=pytest.mark.deep)], ids=str
)
def test_a_row_has_the_same_bits_wherever_it_stands_in_its_tile(groups: tuple[str, ...]) -> None:
    """Whatever the others hold, however many keys follow; and the values are softmax attention's. Parts of another size
    and tiles of several requests, which are wrong versions, are seen."""
    found = found_by("tests.rollout.sglang.tile_kernel_cases", *groups, anew=True, **INTERPRETED)
    for name, (differing, rows, error) in found["cases"].items():
        assert differing == 0, name
        assert rows >= 12
        assert error < (1e-5 if "float32" in name else 2e-3), name
    assert found["other parts"][0] > 2
    assert found["mixed tiles"][0] > 2
    assert found["sizes"] == [8, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 0, 1]


def test_the_backend_decodes_verifications_with_the_bits_of_plain_rounds() -> None:
    """SGLang's Triton backend below it, with a chain, a branch and other requests in one batch, also as a graph. What a
    draft model makes for a prefill is what that backend asks for."""
    found = found_by("tests.rollout.sglang.tile_backend_cases", anew=True, **INTERPRETED)
    assert max(found["error"], found["prefill"]) < 1e-6
    assert found["same"]
    assert found["others differ"]
    assert found["graph"]
    assert found["sizes"] == [4, 0, 0, 0, 1, 1, 1, 1]
    assert "pages of several tokens" in found["refused"][0]
    assert "a sliding window" in found["refused"][1]
    assert "keys in torch.float8_e5m2" in found["refused"][2]


def test_kernels_compile_for_a_hopper(tmp_path: Path) -> None:
    """By Triton's compiler and assembler, which need no device."""
    found = found_by("tests.rollout.sglang.compiled_kernels", TRITON_CACHE_DIR=str(tmp_path))
    assert min(found["bytes"]) > 1000
    assert found["exact"]
    assert found["tensor cores"]
