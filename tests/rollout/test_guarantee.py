"""What engines promise, and where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specactor import doctor, run
from specactor.config import EngineConfig
from specactor.config.rollout import SAME_BITS, SAME_LAW, guarantee
from specactor.errors import ConfigError
from specactor.planning import profile_command
from specactor.recipes import load


@pytest.mark.parametrize(
    ("arguments", "gpu", "dtype", "arithmetic", "promise"),
    [
        ({}, False, "float32", "rows", SAME_BITS),
        ({"attention_backend": "intel_amx"}, False, "float32", "intel_amx's own kernel", SAME_LAW),
        ({}, False, "bfloat16", "rows", SAME_LAW),
        ({}, True, "bfloat16", "triton's own kernel", SAME_LAW),
        ({"attention_backend": "torch_native"}, True, "float32", "torch_native's own kernel", SAME_LAW),
        ({"attention_backend": "tiles"}, True, "float32", "tiles", SAME_LAW),
        ({"attention_backend": "fa3"}, True, "bfloat16", "fa3's own kernel", SAME_LAW),
    ],
)
def test_same_bits_are_promised_where_tests_have_shown_them(
    arguments: dict[str, str], gpu: bool, dtype: str, arithmetic: str, promise: str
) -> None:
    assert guarantee(EngineConfig(extra_args={**arguments}), gpu=gpu, dtype=dtype) == (arithmetic, promise)


REFUSED = (
    "rollout.engine.extra_args: got 'attention_backend=tiles', expected a GPU for tiles. "
    "Leave it out: without a GPU torch_native, the default, reads keys once, too."
)


def test_tiles_without_a_gpu_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By runs, profiles and the doctor. Another backend is not, nor tiles beside a GPU."""
    for module in (run, profile_command):
        monkeypatch.setattr(module, "gpus", lambda: ())
    config = load(["quickstart", "--rollout.speculation.mode", "off", "--rollout.speculation.drafters", "suffix"])
    found: list[str] = []
    for backend in ("torch_native", "tiles"):
        engine = replace(config.rollout.engine, extra_args={"attention_backend": backend})
        asked = replace(config, rollout=replace(config.rollout, engine=engine))
        for check in (lambda it: run._checked(it, 2), profile_command._check):
            try:
                check(asked)
            except ConfigError as error:
                found.append(str(error))
        told = doctor.tokens(asked, gpu=False)
        assert told.fatal == (backend == "tiles")
        if told.fatal:
            found.append(f"{told.found}. {told.remedy}")
        assert not doctor.tokens(asked, gpu=True).fatal
    assert found == [REFUSED] * 3
