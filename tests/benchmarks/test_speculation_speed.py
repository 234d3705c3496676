"""The parts of the speculation benchmark that need no engine: stand-in kernels, the grown model, the table."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import speculation_speed as speed
from benchmarks import speculation_speed_kernels as kernels
from benchmarks.speculation_speed_models import Shape, grow, grow_head
from benchmarks.speculation_speed_profile import COLUMNS, page, profile_row
from benchmarks.speculation_speed_server import Profile
from benchmarks.speculation_speed_table import Cell, aims, result, table, verdict
from specactor.config import TinyModelConfig
from specactor.cpu import sglang as cpu
from specactor.data.tiny_model import make_tiny_model
from specactor.trainer.drafter import init
from specactor.trainer.drafter.head import Eagle3Start, features_of
from specactor.types import RolloutRequest, SamplingParams

PARENTS = ([-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4])
"""Of the nodes of two trees; the second is a chain."""
NODES = 6


def masks() -> Tensor:
    """[2, NODES, NODES]: column is an ancestor of row, or the row itself."""
    mask = torch.zeros(2, NODES, NODES, dtype=torch.bool)
    for tree, parents in enumerate(PARENTS):
        for node in range(NODES):
            ancestor = node
            while ancestor != -1:
                mask[tree, node, ancestor] = True
                ancestor = parents[ancestor]
    return mask


def links() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(positions, index, first child, next sibling) of the trees, after 10 and 20 tokens."""
    made = [torch.zeros(2, NODES, dtype=torch.int64) for _ in range(4)]
    kernels.reconstruct_indices_from_tree_mask(masks().view(-1), torch.tensor([10, 20]), *made, 2, NODES)
    return made[0], made[1], made[2], made[3]


def test_links_of_trees() -> None:
    positions, index, first_child, next_sibling = links()
    assert positions.tolist() == [[10, 11, 11, 12, 12, 12], [20, 21, 22, 23, 24, 25]]
    assert index.view(-1).tolist() == list(range(2 * NODES))
    assert first_child.tolist() == [[1, 3, 5, -1, -1, -1], [1, 2, 3, 4, 5, -1]]
    assert next_sibling.tolist() == [[-1, 2, -1, 4, -1, -1], [-1] * NODES]


def sampled(trials: int, *, forget_refused: bool = False) -> Tensor:
    """How often each token was emitted first, when three drafts were offered of a law of four tokens."""
    law = torch.tensor([0.4, 0.3, 0.2, 0.1])
    generator = torch.Generator().manual_seed(3)
    _, _, first_child, next_sibling = links()
    counts = torch.zeros(4)
    candidates = torch.tensor([[3, 0, 1, 2, 3, 0], [3, 1, 0, 2, 3, 0]])
    if forget_refused:
        next_sibling = torch.full_like(next_sibling, -1)
        candidates[:, 1] = 0
    for _ in range(trials):
        predicts = torch.zeros(2 * NODES, dtype=torch.int32)
        accepted = torch.full((2, NODES), -1, dtype=torch.int32)
        coins = torch.rand(2, NODES, generator=generator)
        kernels.sample_tree(
            predicts=predicts,
            accept_index=accepted,
            accept_token_num=torch.zeros(2, dtype=torch.int32),
            candidates=candidates,
            retrive_index=torch.arange(2 * NODES).view(2, NODES),
            retrive_next_token=first_child,
            retrive_next_sibling=next_sibling,
            uniform_samples=coins if not forget_refused else coins * 0,
            uniform_samples_for_final_sampling=torch.rand(2, generator=generator),
            target_probs=law.expand(2, NODES, 4).contiguous(),
            draft_probs=torch.zeros(2, NODES, 4),
        )
        for tree in range(2):
            counts[predicts[tree * NODES].item()] += 1
    return counts


def chi_square(counts: Tensor) -> float:
    """Against the law of `sampled`, three degrees of freedom."""
    expected = counts.sum() * torch.tensor([0.4, 0.3, 0.2, 0.1])
    return float(((counts - expected) ** 2 / expected).sum())


def test_rejection_sampling_keeps_the_law() -> None:
    assert chi_square(sampled(2000)) < 21  # p > 1e-4
    assert chi_square(sampled(300, forget_refused=True)) > 100  # coins that are always accepted


def attended_row(query: Tensor, keys: Tensor, values: Tensor, slots: list[int]) -> Tensor:
    """[H, D] of one query over the keys at these slots."""
    k, v = keys[slots].transpose(0, 1)[None], values[slots].transpose(0, 1)[None]
    out = functional.scaled_dot_product_attention(query[None, :, None], k, v, enable_gqa=True, scale=0.3)
    return out[0, :, 0]


@pytest.mark.parametrize("with_tree", [True, False])
def test_a_verify_attends_to_the_prefix_and_its_own_path(with_tree: bool) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(80, 2, 8), torch.randn(80, 2, 8)
    table = torch.randperm(80)[:64].view(2, 32)
    query, output = torch.randn(2 * NODES, 4, 8), torch.zeros(2 * NODES, 4, 8)
    lengths, new = torch.tensor([10, 20]) + NODES, torch.tensor([NODES, NODES])
    tree = masks().view(-1) if with_tree else None
    rest = (NODES, 0.3, 0.0, False, 0, None, None, tree)
    kernels.extend_attention_cpu(
        query, query, query, output, keys, values, 1.0, 1.0, table, torch.arange(2), lengths, new, new, *rest
    )
    for request, prefix in enumerate((10, 20)):
        for node in range(NODES):
            path = [j for j in range(NODES) if (masks()[request, node, j] if with_tree else j <= node)]
            slots = table[request, [*range(prefix), *(prefix + j for j in path)]].tolist()
            row = request * NODES + node
            torch.testing.assert_close(output[row], attended_row(query[row], keys, values, slots))


def test_ragged_prompts_attend_causally() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(80, 2, 8), torch.randn(80, 2, 8)
    table = torch.randperm(80)[:64].view(2, 32)
    query, output = torch.randn(8, 4, 8), torch.zeros(8, 4, 8)
    lengths, new = torch.tensor([5, 7]), torch.tensor([5, 3])
    kernels.extend_attention_cpu(
        query, query, query, output, keys, values, 1.0, 1.0, table, torch.arange(2), lengths, new, new, 5, 0.3, 0.0,
        False, 0, None, None,
    )  # fmt: skip
    ends = [(0, end) for end in range(1, 6)] + [(1, end) for end in range(5, 8)]
    for row, (request, end) in enumerate(ends):
        slots = table[request, :end].tolist()
        torch.testing.assert_close(output[row], attended_row(query[row], keys, values, slots))


def test_slots_are_read_and_moved() -> None:
    table = torch.arange(40).view(2, 20)
    slots = torch.zeros(5, dtype=torch.int64)
    kernels.assign_extend_cache_locs_cpu(
        torch.tensor([1, 0]), table, torch.tensor([3, 1]), torch.tensor([5, 4]), slots, 0
    )
    assert slots.tolist() == [23, 24, 1, 2, 3]
    buffer = torch.arange(24, dtype=torch.float32).view(6, 4)
    before = buffer.clone()
    sources, targets = torch.tensor([5, 1, 2]), torch.tensor([1, 2, 2])[:3]
    targets[2] = 0
    kernels.copy_all_layer_kv_cache_cpu(torch.tensor([buffer.data_ptr()]), torch.tensor([16]), targets, sources)
    assert torch.equal(buffer[[1, 2, 0]], before[[5, 1, 2]])


LOGITS = """
import sys, torch
from transformers import AutoModelForCausalLM
ids = torch.arange(4, 24)[None]
a, b = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32)(ids).logits for p in sys.argv[1:])
print("RESULT", (a - b).abs().max().item(), a.std().item())
"""


@pytest.mark.deep
def test_a_grown_model_has_the_same_law(tmp_path: Path) -> None:
    make_tiny_model(TinyModelConfig(num_layers=2, hidden_size=64), 0, tmp_path / "a")
    grow(
        tmp_path / "a",
        tmp_path / "b",
        Shape(num_layers=3, hidden_size=256, num_heads=4, num_kv_heads=2, expert_size=160),
    )
    done = subprocess.run(
        [sys.executable, "-c", LOGITS, str(tmp_path / "a"), str(tmp_path / "b")],
        env=os.environ | cpu.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "RESULT" in done.stdout, done.stderr[-2000:]
    difference, spread = map(float, done.stdout.partition("RESULT ")[2].split())
    assert difference < 1e-3 * spread


@pytest.mark.deep
def test_a_grown_head_drafts_the_same(tmp_path: Path) -> None:
    make_tiny_model(TinyModelConfig(num_layers=4, hidden_size=64), 0, tmp_path / "small")
    shape = Shape(num_layers=6, hidden_size=256, num_heads=4, num_kv_heads=2, expert_size=320)
    grow(tmp_path / "small", tmp_path / "large", shape)
    init.make_draft_model(tmp_path / "small", tmp_path / "head", Eagle3Start(seed=3))
    grow_head(tmp_path / "head", tmp_path / "large head", shape)
    tokens_BT = torch.arange(4, 24)[None]
    answers = []
    for target_dir, head_dir in (("small", "head"), ("large", "large head")):
        target = init.read_model(tmp_path / target_dir)
        drafter = init.read_draft(tmp_path / head_dir, target)
        features, _ = features_of(target, tokens_BT, drafter.layers)
        answers.append(torch.stack([logits[:, 4:] for logits in drafter(tokens_BT, features, steps=3)]))
    assert (answers[0] - answers[1]).abs().max() < 1e-3 * answers[0].std()


def test_a_shape_that_changes_the_function_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}')
    with pytest.raises(ValueError, match="hidden_size"):
        grow(tmp_path, tmp_path / "b", Shape(hidden_size=320))


def cell(name: str, batch: int, ratio: float, phase: str = "warm", *, unsure: float = 0.0) -> Cell:
    """Of six repetitions, one of which is `unsure` faster."""
    ratios = (*[ratio] * 5, ratio + unsure)
    return Cell(model="A", phase=phase, batch=batch, name=name, tokens_per_s=100.0, ratios=ratios, accept_length=2.5)


def test_missed_aims_are_named() -> None:
    fast = [cell("auto", 1, 4.4), cell("auto", 64, 0.99), cell("SGLang NGRAM", 1, 4.2)]
    assert [(len(aim.missed), aim.open) for aim in aims(fast)] == [(0, 0)] * 3
    slow = [cell("auto", 1, 1.9), cell("auto", 64, 0.97), cell("SGLang NGRAM", 64, 0.98)]
    assert [(len(aim.missed), aim.open) for aim in aims(slow)] == [(1, 0)] * 3
    assert "missed in 1 of 2: A, batch 64, warm: 0.97. Open in 0." in str(aims(slow)[0])
    assert not aims([cell("plain", 1, 1.0), cell("SGLang NGRAM", 1, 1.2)]), "what was not measured is not met"


def test_an_aim_is_open_where_the_interval_holds_the_bound() -> None:
    unsure = [cell("auto", 1, 4.4), cell("auto", 64, 0.5, unsure=0.5), cell("SGLang NGRAM", 64, 0.98)]
    floor, mean, builtins = aims(unsure)
    assert (floor.missed, floor.open) == ((), 1)
    assert str(floor).endswith("open in 1 of 2.")
    assert (mean.missed, mean.open) == ((), 1)
    assert (builtins.missed, builtins.open) == ((), 1)
    assert verdict(unsure).count("in 0") == 3
    few = replace(cell("auto", 64, 0.97), ratios=(0.97,) * 5)
    assert [(aim.missed, aim.open) for aim in aims([few])] == [((), 1)] * 2, "five repetitions have no such interval"


def test_the_table_has_a_row_per_place_and_says_what_is_missing() -> None:
    columns, rows = table(
        [cell("plain", 1, 1.0), cell("auto", 1, 2.0), cell("plain", 2, 1.0), cell("plain", 1, 1, "cold")]
    )
    assert columns == ("model", "step", "batch", "plain", "auto")
    assert [row[:3] for row in rows] == [["A", "cold", "1"], ["A", "warm", "1"], ["A", "warm", "2"]]
    assert rows[1][3:] == ["100 tok/s", "2.00 (2.00-2.00); 2.5"]
    assert rows[2][4] == "-"
    assert np.all([len(row) == len(columns) for row in rows])


def test_work_is_cut_into_calls_and_given_the_lengths_of_plain_decoding() -> None:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=64)
    requests = [
        RolloutRequest(request_id=str(i), prompt_ids=(5, 6), sampling=sampling, seed=i, group_id=0) for i in range(8)
    ]
    work = speed.Work(batch=4, repetition=0, phases={"cold": requests})
    fixed = speed.fixed_lengths(work, {str(i): tuple(range(i + 1)) for i in range(8)})
    calls = list(fixed.calls("cold"))
    assert [len(call) for call in calls] == [4, 4]
    assert [r.sampling.max_new_tokens for call in calls for r in call] == list(range(1, 9))
    assert all(r.sampling.ignore_eos for call in calls for r in call)


def test_a_profile_separates_drafting_from_deciding_and_sglang_from_both() -> None:
    parts = {"worker": 0.6, "target": 0.4, "decide and draft": 0.15, "draft": 0.05, "run_batch": 0.7, "commits": 0.02}
    cells = profile_row("B", "auto", 4, Profile(batches=100, total_s=1.0, parts_s=parts))
    assert cells[:4] == ["B, batch 4: auto", "1.00", "100", "10.00"]
    of = dict(zip(COLUMNS, cells[4:], strict=True))
    assert of == {
        **dict.fromkeys(("rows", "emit", "learn"), "0.00"),
        "around": "4.00",
        "target": "4.00",
        "tell": "0.20",
        "draft": "0.50",
        "decide": "1.00",
    }
    assert len(page([cells], 0.0).columns) == len(cells)


def test_the_page_names_repetitions_and_verdicts() -> None:
    page = result([cell("plain", 1, 1.0), cell("auto", 1, 2.5)], 0.3, "the clock")
    assert "A 6" in page.intro
    assert "met." in page.notes
    assert "missed" not in page.notes
