"""Products whose tiles follow the number of rows: only where a row keeps its bits, and never SGLang's kernel of few
rows. Norms in one kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu import INTERPRETED
from specactor.rollout.sglang import products
from tests.lib.scripts import found_by

OF_EXPERTS = (128, 768, 2048, 8, None, False, None)
"""What SGLang asks with after the number of rows, for Qwen3-30B-A3B in bfloat16."""


@pytest.mark.processes
def test_rows_keep_their_bits_in_other_tiles_and_in_norms_of_one_kernel() -> None:
    found = found_by("tests.rollout.sglang.product_cases", anew=True, **INTERPRETED)
    assert max(found["errors"]) < 1e-3
    assert all(found["alone"]), "a row has its bits in any company"
    assert found["agree"] == [False, True, False], "tiles of several depths, of one, and one dense tile that is deeper"
    norms = found["norms"]
    assert norms["far"] <= 2**-6, "at most two roundings of bfloat16 from SGLang's"
    assert norms["alone"] == [True, False], "a row has its bits in any company; a wrong version has not"
    assert norms["asked"] == [0, 5], "SGLang's own serves whatever is another norm"


@pytest.mark.parametrize("agree", [True, False])
def test_the_number_of_rows_decides(monkeypatch: pytest.MonkeyPatch, agree: bool) -> None:
    monkeypatch.setattr(products, "_may_choose", lambda: agree)
    taken: list[Any] = []
    monkeypatch.setattr(products, "multiply", lambda tile, *_: taken.append(tile))

    def own(*_: Any) -> None:
        taken.append("own")

    for rows in (1, 16, 17, 64, 65, 512, 513):
        products._product(own, torch.zeros(rows, 8, dtype=torch.bfloat16), torch.zeros(8, 8), torch.bfloat16)
    small, middle, large = products.PRODUCTS.values()
    assert taken == ([small] * 2 + [middle] * 2 + [large] * 2 + ["own"] if agree else ["own"] * 7)
    taken.clear()
    products._product(own, torch.zeros(1, 8), torch.zeros(8, 8), torch.float32)
    assert taken == ["own"], "what was looked at is bfloat16"


@pytest.mark.parametrize("agree", [True, False])
def test_the_rows_of_an_expert_decide(monkeypatch: pytest.MonkeyPatch, agree: bool) -> None:
    monkeypatch.setattr(products, "_may_choose", lambda: agree)

    def chosen(rows: int, own: dict[str, int] = products.SGLANGS, dtype: str | None = None) -> dict[str, int]:
        experts, size, depth, per_row, _, *more = OF_EXPERTS
        return products._of_experts(lambda *_: own, rows, experts, size, depth, per_row, dtype, *more)

    few, many = products.FEW, products.MANY
    assert [chosen(rows) for rows in (1, 64, 65)] == ([few, few, many] if agree else [products.SGLANGS] * 3)
    assert chosen(1, dtype="float32") == products.SGLANGS
    assert chosen(1, own={"BLOCK_SIZE_M": 16}) == {"BLOCK_SIZE_M": 16}, "not in SGLang's batch-invariant mode"


def test_no_graph_is_captured_while_it_is_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_current_stream_capturing", lambda: True)
    products.agree.cache_clear()
    assert not products._may_choose()
    assert products.agree.cache_info().currsize == 0
