"""Sampling options do what they say, for a request alone as among others; with speculation: `test_interruptions`."""

from __future__ import annotations

import pytest

from specactor.errors import EngineError
from specactor.rollout.sglang.engine_client import Engine
from tests.rollout.conftest import request
from tests.rollout.sglang.asking import differs
from tests.rollout.sglang.sampling_cases import OPTIONS


@pytest.mark.parametrize("options", OPTIONS[1:7], ids=lambda options: "+".join(options))
def test_an_option_matters_and_needs_no_company(engine: Engine, options: dict[str, object]) -> None:
    alone = [request(i, new=20, **options) for i in range(6)]  # type: ignore[arg-type]
    mixed = engine.generate([*alone, *(request(i, new=20, top_k=5) for i in range(6, 9)), request(9, top_p=0.2)])
    assert not differs([engine.generate([one])[0] for one in alone], mixed[:6])
    assert differs(mixed[:6], engine.generate([request(i, new=20) for i in range(6)]))


def test_stop_strings_without_a_tokenizer_are_refused_by_name(engine: Engine) -> None:
    with pytest.raises(EngineError, match=r"rollout\.stop: needs a tokenizer .* has no file tokenizer"):
        engine.generate([request(0, stop=("a",))])
    assert len(engine.generate([request(0)])[0].token_ids) == 24
