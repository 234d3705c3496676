"""The arithmetic of decoding on a CPU against plain references, and its promise of the same bits in any company."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn import functional

from specactor.cpu import sglang_ops as ops
from tests.rollout.conftest import start_script

HEADS, KV_HEADS, HEAD_DIM, SLOTS = 4, 2, 16, 4000


def murmur3_x86_32(blocks: list[int]) -> int:
    """MurmurHash3 in Python's integers, from its published description; seed 0."""
    mask, h = 0xFFFFFFFF, 0
    for k in blocks:
        k = k * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) & mask
        h ^= k * 0x1B873593 & mask
        h = (h << 13 | h >> 19) & mask
        h = (h * 5 + 0xE6546B64) & mask
    h ^= 4 * len(blocks)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ h >> shift) * factor & mask
    return h


def test_the_reference_hash_is_murmur3() -> None:
    assert murmur3_x86_32([]) == 0
    assert murmur3_x86_32([0x87654321]) == 0xF55B516B  # published test vectors of MurmurHash3_x86_32
    assert murmur3_x86_32([0]) == 0x2362F9DE


def test_hash_equals_the_reference() -> None:
    seeds, positions = [0, 1, 2**31 - 1, 2**33 + 5], [0, 7, 4096, 131_071]
    got = ops.murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.arange(50))
    assert got.dtype == torch.uint32
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        want = [murmur3_x86_32([seed & 0xFFFFFFFF, seed >> 32, position, column]) for column in range(50)]
        assert got[row].tolist() == want


def test_samples_equal_a_gumbel_argmax_in_python() -> None:
    torch.manual_seed(0)
    logprobs = torch.log_softmax(3 * torch.randn(20, 40), dim=-1)
    seeds, positions = torch.arange(20) * 1_000_003, torch.arange(20) * 3
    got = ops.sample_with_noise(logprobs, seeds, positions).view(-1)
    for row in range(20):
        hashes = [murmur3_x86_32([int(seeds[row]), 0, int(positions[row]), v]) for v in range(40)]
        u = np.clip(np.log(np.array(hashes) / (2**32 - 1)), None, -(2.0**-32))
        assert int(got[row]) == int(np.argmax(logprobs[row].double().numpy() - np.log(-u)))


def test_samples_are_those_of_sglang_s_own_function() -> None:
    torch.manual_seed(3)
    rows, vocabulary = 400, 60
    logprobs = torch.log_softmax(torch.randn(rows, vocabulary) * torch.linspace(0.1, 6, rows)[:, None], dim=-1)
    seeds, positions = torch.randint(2**40, (rows,)), torch.randint(10_000, (rows,))
    with start_script("../cpu/sglang_sample.py") as process:
        question = json.dumps([logprobs.tolist(), seeds.tolist(), positions.tolist()])
        told, _ = process.communicate(question + "\n", timeout=240)
    [line] = [line for line in told.splitlines() if line.startswith("TOKENS ")]
    wanted = json.loads(line.removeprefix("TOKENS "))
    assert ops.sample_with_noise(logprobs, seeds, positions).view(-1).tolist() == wanted
    assert ops.sample_with_noise(logprobs, seeds, positions + 1).view(-1).tolist() != wanted


def test_samples_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.025])
    n = 40_000
    draws = ops.sample_with_noise(probs.log().expand(n, 5), torch.arange(n), torch.full((n,), 11)).view(-1)
    counts = torch.bincount(draws, minlength=5)
    assert torch.all((counts - n * probs).abs() < 5 * (n * probs * (1 - probs)).sqrt())


def test_excluded_tokens_are_never_drawn() -> None:
    probs = torch.tensor([0.0, 1.0, 0.0]).expand(5000, 3)
    draws = ops.sample_with_noise(probs.log(), torch.arange(5000), torch.zeros(5000, dtype=torch.long))
    assert torch.all(draws == 1)


class Pool:
    """A KV pool with requests scattered over it; slot 0 holds rubbish, as padding may read it."""

    def __init__(self, lengths: list[int], *, heads: int = HEADS) -> None:
        torch.manual_seed(1)
        width = max(lengths) + 3
        slots = max(SLOTS, len(lengths) * width + 1)
        self.k, self.v = torch.randn(2, slots, KV_HEADS, HEAD_DIM)
        self.k[0], self.v[0] = 1e4, 1e4
        self.lengths = torch.tensor(lengths)
        self.q = torch.randn(len(lengths), heads, HEAD_DIM)
        self.req_to_token = (torch.randperm(slots - 1)[: len(lengths) * width] + 1).view(len(lengths), width).int()

    def attend(self, rows: torch.Tensor, longest: int | None = None) -> torch.Tensor:
        """Each row with its own keys, gathered beside those of a request that has `longest`."""
        lengths = self.lengths[rows]
        queries = self.q.shape[1] // KV_HEADS
        slots, bias = ops.key_slots(self.req_to_token, rows, lengths, longest or int(lengths.max()), queries=queries)
        return ops.decode_attention(self.q[rows], self.k, self.v, [ops.SharedKeys(slots, [(slice(None), bias)])], 0.3)

    def attend_sharing(self, q: torch.Tensor, readers: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        parts = ops.shared_keys(self.req_to_token, readers, seen, queries=self.q.shape[1] // KV_HEADS)
        return ops.decode_attention(q, self.k, self.v, parts, 0.3)


def test_decode_attention_equals_softmax_of_scores() -> None:
    pool = Pool([1, 5, 16, 17, 40, 64])
    got = pool.attend(torch.arange(6))
    for b, n in enumerate(pool.lengths.tolist()):
        slots = pool.req_to_token[b, :n].long()
        for head in range(HEADS):
            k, v = pool.k[slots, head // 2], pool.v[slots, head // 2]
            want = torch.softmax(0.3 * k @ pool.q[b, head], dim=0) @ v
            torch.testing.assert_close(got[b, head], want, atol=1e-5, rtol=1e-5)


def test_attention_gives_the_same_bits_in_any_company() -> None:
    pool = Pool([1, 5, 16, 17, 40, 64, 90, 3])
    together = pool.attend(torch.arange(8))
    for b, n in enumerate(pool.lengths.tolist()):
        assert torch.equal(pool.attend(torch.tensor([b]))[0], together[b])
        assert torch.equal(pool.attend(torch.tensor([b]), longest=n + 100)[0], together[b])
    readers = torch.arange(8).repeat(25)  # in several pieces, the last one smaller
    assert len(readers) * 90 > 4 * ops.KEYS_AT_ONCE
    many = pool.attend_sharing(pool.q[readers], readers, pool.lengths[readers])
    assert torch.equal(many, together.repeat(25, 1, 1))
    wrong = pool.attend_sharing(pool.q, torch.arange(8), pool.lengths + 1)
    assert not torch.equal(wrong, together), "one key too many must show"


@pytest.mark.parametrize("queries", [1, 2, 4, 8, 16])
def test_a_row_has_the_same_bits_beside_any_rows_of_its_request(queries: int) -> None:
    """As many as there are requests, of 1 to 9 rows, some of which read through another page-table row."""
    lengths = [12, 30, 63, 64, 100, 127, 129, 190, 257, 511, 513, 700, 1030] * 6
    pool = Pool(lengths, heads=queries * KV_HEADS)
    torch.manual_seed(5)
    sizes = torch.randint(1, 10, (len(lengths),))
    readers = torch.arange(len(lengths)).repeat_interleave(sizes)
    seen = pool.lengths[readers] - torch.randint(0, 9, readers.shape)  # not in order: trees have branches
    other = torch.rand(readers.shape) < 0.1
    readers[other] = torch.randint(0, len(lengths), (int(other.sum()),))
    seen = torch.minimum(seen, pool.lengths[readers])
    q = torch.randn(len(readers), *pool.q.shape[1:])
    together = pool.attend_sharing(q, readers, seen)
    for row in range(len(readers)):
        alone = pool.attend_sharing(q[row : row + 1], readers[row : row + 1], seen[row : row + 1])[0]
        assert torch.equal(alone, together[row]), row
    first = seen.clone()
    first[0] += 1
    changed = (pool.attend_sharing(q, readers, first) != together).flatten(1).any(1)
    assert changed.nonzero().view(-1).tolist() == [0], "a key too many changes its own row alone"


@pytest.mark.parametrize("queries", [1, 2, 4, 8, 16])
def test_attention_over_long_contexts_gives_the_same_bits_in_any_company(queries: int) -> None:
    lengths = [3, 100, 127, 128, 129, 190, 200, 250, 256, 257, 300, 511, 513, 700, 1030, 2047]
    pool = Pool(lengths, heads=queries * KV_HEADS)
    together = pool.attend(torch.arange(len(lengths)))
    for b, n in enumerate(lengths):
        for longest in (n, n + 4, n + 20, 4 * n):
            alone = pool.attend(torch.tensor([b]), longest=longest)[0]
            assert torch.equal(alone, together[b]), f"{n} keys, padded for {longest}"


@pytest.mark.parametrize(("out", "width"), [(48, 64), (96, 64), (4, 64), (128, 128)])
def test_linear_gives_the_same_bits_in_any_company(out: int, width: int) -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(out, width), torch.randn(70, width)
    want = functional.linear(x, weight)
    for rows in range(1, 70):
        assert torch.equal(ops.linear(x[:rows], weight), want[:rows]), rows
        assert torch.equal(ops.linear(x[70 - rows :], weight), want[70 - rows :]), rows
    torch.testing.assert_close(want.double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-4)


def reference_experts(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor):  # type: ignore[no-untyped-def]
    out = torch.zeros_like(x)
    for t in range(len(x)):
        for k, e in enumerate(ids[t].tolist()):
            if e >= 0:
                gate, up = (w13[e] @ x[t]).chunk(2)
                out[t] += weights[t, k] * (w2[e] @ (functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 33])
@pytest.mark.parametrize("missing", [False, True])
def test_experts_equal_a_loop_over_tokens(num_tokens: int, missing: bool) -> None:
    torch.manual_seed(num_tokens)
    w13, w2 = torch.randn(6, 2 * 24, 32), torch.randn(6, 32, 24)
    x, weights = torch.randn(num_tokens, 32), torch.rand(num_tokens, 2)
    ids = torch.stack([torch.randperm(6)[:2] for _ in range(num_tokens)])
    if missing:
        ids[torch.rand(ids.shape) < 0.4] = -1
    got = ops.experts(x, weights, ids, w13, w2)
    torch.testing.assert_close(got, reference_experts(x, weights, ids, w13, w2), atol=1e-4, rtol=1e-4)


def test_experts_give_the_same_bits_in_any_company() -> None:
    torch.manual_seed(3)
    w13, w2 = torch.randn(8, 2 * 32, 64), torch.randn(8, 64, 32)
    x, weights = torch.randn(50, 64), torch.rand(50, 2)
    ids = torch.stack([torch.randperm(8)[:2] for _ in range(50)])
    together = ops.experts(x, weights, ids, w13, w2)
    for rows in ([0], [49], [3, 4], list(range(20, 40)), [7, 1, 30]):
        assert torch.equal(ops.experts(x[rows], weights[rows], ids[rows], w13, w2), together[rows])
