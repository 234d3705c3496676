"""Script for Triton's interpreter: the sampling kernel beside SGLang's sampler as it runs on CPUs. Prints JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from specactor.cpu import sglang_ops, torchvision_ops
from specactor.rollout.sglang import kernels

torchvision_ops.install()
import sglang.srt.layers.sampler as sglang_sampler  # noqa: E402
from sglang.srt.sampling.sampling_params import TOP_K_ALL  # noqa: E402

from specactor.rollout.sglang import sampling  # noqa: E402

SEEDS = torch.tensor([0, 1, 2**31 - 1, 2**33 + 5, 2**40 + 7, 12345678901234, 2**63 - 1])
RULES = {"all": (1.0, TOP_K_ALL), "greedy": (1.0, 1), "top-p": (0.7, TOP_K_ALL), "top-k": (1.0, 5)}


@triton.jit
def _bits_and_noise(seeds: Any, positions: Any, bits: Any, noise: Any, vocab: Any, BLOCK: tl.constexpr) -> None:
    row, tokens = tl.program_id(0), tl.arange(0, BLOCK)
    h = kernels._hash(tl.load(seeds + row), tl.load(positions + row), tokens)
    tl.store(bits + row * vocab + tokens, h.to(tl.int64), mask=tokens < vocab)
    tl.store(noise + row * vocab + tokens, kernels._noise(h), mask=tokens < vocab)


def noise_of(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(bits, noise) [R, V], as the CPU makes them."""
    bits = sglang_ops.murmur_hash32(seeds, positions, torch.arange(vocab))
    log_u = torch.from_numpy(bits.numpy().astype(np.float64) / (2**32 - 1)).log()
    return bits.long(), -(-log_u.clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32))).log()


def bits_and_noise() -> dict[str, Any]:
    positions, vocab = torch.tensor([0, 1, 7, 511, 40_959, 131_071, 5]), 3000
    bits = torch.empty(len(SEEDS), vocab, dtype=torch.int64)
    noise = torch.empty(len(SEEDS), vocab, dtype=torch.float64)
    _bits_and_noise[(len(SEEDS),)](SEEDS, positions, bits, noise, vocab, BLOCK=4096)
    wanted_bits, wanted = noise_of(SEEDS, positions, vocab)
    return {"bits": torch.equal(bits, wanted_bits), "error": float((noise - wanted).abs().max())}


def rows(count: int, vocab: int, seed: int) -> tuple[torch.Tensor, ...]:
    """logits, temperatures, seeds, positions; some tokens are excluded, and in one row whole chunks."""
    torch.manual_seed(seed)
    logits = torch.randn(count, vocab) * torch.linspace(0.1, 8, count)[:, None]
    logits[torch.rand(count, vocab) < 0.05] = -torch.inf
    logits[0, : vocab - 3] = -torch.inf
    temperatures = torch.tensor([0.3, 0.7, 1.0, 1.3]).repeat(count)[:count, None]
    return logits, temperatures, torch.randint(2**62, (count,)), torch.randint(100_000, (count,))


def drawn(count: int, vocab: int, *, later: int = 0, missing: int = 0) -> dict[str, Any]:
    """Rows whose token is another than argmax of the same sum in torch; and the error of log-probabilities. Wrong
    versions: `later` positions of noise, `missing` tokens at the end."""
    logits, temperatures, seeds, positions = rows(count, vocab, vocab)
    greedy = torch.arange(count) % 4 == 3
    found = kernels.draw(logits[:, : vocab - missing], temperatures, seeds, positions + later, greedy)
    scaled = logits / temperatures
    _, noise = noise_of(seeds, positions, vocab)
    wanted = (scaled.double() + noise.masked_fill(greedy[:, None], 0.0)).argmax(1)
    got = kernels.logprobs_of(found.tokens, logits, temperatures, found)
    exact = scaled.double().log_softmax(-1).gather(1, found.tokens[:, None])[:, 0]
    again = [kernels.draw(*(x[i : i + 1] for x in (logits, temperatures, seeds, positions, greedy))) for i in (1, 3)]
    alone = all(torch.equal(x[[1, 3]], torch.cat(y)) for x, y in zip(found, zip(*again, strict=True), strict=True))
    return {"others": int((found.tokens != wanted).sum()), "error": float((got - exact).abs().max()), "alone": alone}


def info_of(rules: list[str], temperatures: torch.Tensor, seeds: torch.Tensor) -> Any:
    top_p, top_k = zip(*(RULES[rule] for rule in rules), strict=True)
    return SimpleNamespace(
        temperatures=temperatures.masked_fill(torch.tensor([rule == "greedy" for rule in rules])[:, None], 1.0),
        top_ps=torch.tensor(top_p),
        top_ks=torch.tensor(top_k, dtype=torch.int32),
        min_ps=torch.zeros(len(rules)),
        sampling_seed=seeds,
        is_all_greedy=all(rule == "greedy" for rule in rules),
        need_top_p_sampling=any(value != 1.0 for value in top_p),
        need_top_k_sampling=any(value != TOP_K_ALL for value in top_k),
        need_min_p_sampling=False,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
        has_custom_logit_processor=False,
        max_top_k=None,
        grammars=None,
    )


class Sampler(sglang_sampler.Sampler):  # type: ignore[misc]
    """SGLang's, without an engine; its parts are hooked as in one."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        vars(self).update(rl_on_policy_target=None, enable_deterministic=True, use_log_softmax_logprob=False)
        vars(self).update(use_ascend_backend=False)
        self.output_logprob_processor = sglang_sampler.OutputLogprobProcessor()
        self.most_probs = 0  # rows whose probabilities there were at once

    def _sample_from_probs(self, probs: torch.Tensor, *args: Any) -> Any:
        self.most_probs = max(self.most_probs, len(probs))
        return sampling.sample_by_kind(sglang_sampler.Sampler._sample_from_probs, self, probs, *args)


def whole_sampler(rules: list[str]) -> dict[str, Any]:
    """SGLang's forward, and ours around it, on the same rows."""
    sglang_sampler.multinomial_with_seed = sglang_ops.sample_with_noise
    sglang_sampler.get_exec = lambda: SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    logits, temperatures, seeds, positions = rows(len(rules), 700, 5)
    found = []
    for serves in (False, True):
        sampling.serves = lambda _, serves=serves: serves
        output = SimpleNamespace(next_token_logits=logits.clone(), next_token_logprobs=None)
        info, nothing = info_of(rules, temperatures, seeds), ([0] * len(rules), [None] * len(rules))
        sampler = Sampler()
        tokens = sampling.sample_in_one_pass(
            sglang_sampler.Sampler.forward, sampler, output, info, True, *nothing, positions, logprob_logits=None
        )
        found.append((tokens.long(), output.next_token_logprobs))
    (tokens, logprobs), (ours, our_logprobs) = found
    same = tokens == ours
    error = float((logprobs - our_logprobs)[same].abs().max())
    return {"others": int((~same).sum()), "error": error, "most_probs": sampler.most_probs}


def main() -> None:
    found = {
        "noise": bits_and_noise(),
        "drawn": {str(vocab): drawn(24, vocab) for vocab in (5, 1000, 2048, 2049, 5000)},
        "large": drawn(5, 151_936),
        "wrong": [drawn(24, 1000, later=1)["others"], drawn(24, 5000, missing=1000)["others"]],
        "mixed": whole_sampler(["all", "greedy", "top-p", "top-k", "all"] * 12),
        "greedy": whole_sampler(["greedy"] * 9),
        "plain": whole_sampler(["all"] * 60),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
