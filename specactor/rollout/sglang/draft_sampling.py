"""How a draft model samples: argmax_v [beta log q(v) + G(seed, position, v)], G the target's own noise.

The position is that of the token before the drafted one, as in the target's sampler. beta is fitted by
`planning.sharpening`; infinity drafts the likeliest token, which is also right for requests without noise.

Shape legend: B requests that want another token, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from specactor.rollout.planning.noise import Floats, Ints
from specactor.rollout.planning.sharpening import TOP


def is_greedy(sampling: Any) -> bool:
    """Whether the noise of a request with these parameters of SGLang is of no use to drafters: there is none, or it
    belongs to ranks among sorted tokens."""
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    return bool(sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k < TOP_K_ALL)


def log_probabilities(logits_BV: Tensor, temperatures_B1: Tensor) -> Tensor:
    """log q, float32 [B, V]."""
    return (logits_BV.float() / temperatures_B1).log_softmax(dim=1)


def likeliest(logq_BV: Tensor) -> tuple[Floats, Ints]:
    """log q [B, K] and ids [B, K] of the likeliest tokens, likeliest first."""
    likely = logq_BV.topk(min(TOP, logq_BV.shape[1]), dim=1)
    return likely.values.cpu().numpy(), likely.indices.cpu().numpy()


def draw(logq_BV: Tensor, *, beta: float, seeds_B: Tensor, positions_B: Tensor, greedy_B: Tensor) -> Tensor:
    """The draft tokens, int64 [B]. Args: positions of the tokens before; requests whose likeliest token is drafted."""
    from sglang.srt.layers import sampler

    likeliest_B = logq_BV.argmax(dim=1)
    if math.isinf(beta):
        return likeliest_B
    shared_B1: Tensor = sampler.multinomial_with_seed(beta * logq_BV, seeds_B, positions_B)
    return shared_B1.view(-1).where(~greedy_B, likeliest_B)
