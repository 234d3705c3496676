"""What engines promise, and where."""

from __future__ import annotations

import pytest

from specactor.config import EngineConfig
from specactor.config.rollout import SAME_BITS, SAME_LAW, guarantee


@pytest.mark.parametrize(
    ("arguments", "gpu", "dtype", "arithmetic", "promise"),
    [
        ({}, False, "float32", "rows", SAME_BITS),
        ({"attention_backend": "tiles"}, False, "float32", "tiles", SAME_BITS),
        ({"attention_backend": "intel_amx"}, False, "float32", "intel_amx's own kernel", SAME_LAW),
        ({}, False, "bfloat16", "rows", SAME_LAW),
        ({}, True, "bfloat16", "SGLang's own kernel", SAME_LAW),
        ({"attention_backend": "torch_native"}, True, "float32", "torch_native's own kernel", SAME_LAW),
        ({"attention_backend": "tiles"}, True, "float32", "tiles", SAME_LAW),
        (
            {"attention_backend": "tiles", "decode_attention_backend": "fa3"},
            True,
            "bfloat16",
            "fa3's own kernel",
            SAME_LAW,
        ),
    ],
)
def test_same_bits_are_promised_where_tests_have_shown_them(
    arguments: dict[str, str], gpu: bool, dtype: str, arithmetic: str, promise: str
) -> None:
    assert guarantee(EngineConfig(extra_args={**arguments}), gpu=gpu, dtype=dtype) == (arithmetic, promise)
