"""How much of a draft model would be accepted, computed offline on responses of the target.

Shapes: N response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specactor.trainer.drafter import head_training, losses
from specactor.trainer.drafter.buffer import TopK, TrainingExample
from specactor.trainer.drafter.head import Head
from specactor.trainer.drafter.recorder import STATES
from specactor.trainer.logprobs import vocab_parallel_top_k


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Shares are of response tokens."""

    tokens: int
    accept_length: float  # emitted / verifies with drafts that share the target's noise
    shared: float  # share of positions where the draft with shared noise is the target's token
    overlap: float  # 1 - TV: the most that any drafter that follows this distribution reaches
    entropy: float  # of the target, nats per token


@torch.no_grad()
def measure(
    target: Any, draft: Any, examples: Sequence[TrainingExample], *, window: int, seed: int, tokens_per_pass: int = 4096
) -> Acceptance:
    """Return how much of `draft`, a causal model of transformers or an EAGLE-3 head, the target would accept."""
    chance = torch.Generator().manual_seed(seed)
    shared: list[NDArray[np.bool_]] = []
    overlap = entropy = 0.0
    for members, batch in _passes(examples, tokens_per_pass):
        if isinstance(draft, Head):
            logp_NV, *by_depth = head_training.logprobs(target, draft, batch, steps=window)
        else:
            logp_NV, *by_depth = (_logprobs(model, batch) for model in (target, draft))
        logp_NV, depths = logp_NV.double(), [logq_NV.double() for logq_NV in by_depth]
        overlap += float(torch.minimum(logp_NV.exp(), depths[0].exp()).sum())
        entropy += float(torch.special.entr(logp_NV.exp()).sum())
        # A file does not tell the noise, so it is drawn; for responses of an older policy this is an estimate.
        noise_NV = noise_given(logp_NV, batch.targets_N, chance)
        agrees = [(logq_NV + noise_NV).argmax(1) == batch.targets_N for logq_NV in depths]
        sizes = [example.response_len for example in members]
        shared += [part.numpy() for part in torch.split(torch.stack(agrees, dim=1), sizes)]
    count = sum(map(len, shared))
    return Acceptance(
        tokens=count,
        accept_length=accept_length(shared, window),
        shared=sum(float(agrees[:, 0].sum()) for agrees in shared) / count,
        overlap=overlap / count,
        entropy=entropy / count,
    )


def noise_given(logp_NV: Tensor, tokens_N: Tensor, chance: torch.Generator) -> Tensor:
    """Draw Gumbel noise [N, V], float64, given that argmax(log p + noise) is the token (Maddison et al., arXiv
    1411.0030)."""
    scores_NV = logp_NV - torch.empty_like(logp_NV).exponential_(generator=chance).log()
    largest_N1 = -torch.empty_like(logp_NV[:, :1]).exponential_(generator=chance).log()
    below_NV = -torch.logaddexp(-scores_NV, -largest_N1)  # a Gumbel number cut off at the largest
    below_NV.scatter_(1, tokens_N[:, None], largest_N1)
    return below_NV - logp_NV


def accept_length(agrees: Sequence[NDArray[np.bool_]], window: int) -> float:
    """Return emitted / verifies, where a verify accepts at most `window` tokens and adds one. `agrees`: per response
    [tokens, depths], whether the token is accepted, by those drafted before it in the verify."""
    emitted = verifies = 0
    for response in agrees:
        at, (length, depths) = 0, response.shape
        while at < length:
            accepted = 0
            while accepted < window and at + accepted < length and response[at + accepted, min(accepted, depths - 1)]:
                accepted += 1
            at += accepted + 1
            verifies += 1
        emitted += length
    return emitted / verifies if verifies else 1.0


@torch.no_grad()
def with_top_k(
    target: Any,
    examples: Sequence[TrainingExample],
    *,
    top_k: int,
    layers: Sequence[int] = (),
    tokens_per_pass: int = 4096,
    go_on: Callable[[], bool] = lambda: True,
) -> list[TrainingExample]:
    """Return the examples, longest first, with the target's top-k and hidden states after these layers, until `go_on`
    is false."""
    made = []
    for members, batch in _passes(examples, tokens_per_pass):
        if not go_on():
            break
        output = target(input_ids=batch.tokens_BT, use_cache=False, output_hidden_states=bool(layers))
        logits_NV = output.logits.flatten(0, 1)[batch.row_N]
        scaled_NV = logits_NV / batch.temperatures_N[:, None]
        most = min(top_k, scaled_NV.shape[1])
        ids_NK, logp_NK = vocab_parallel_top_k(scaled_NV, most, temperature=1.0, group=None)
        sizes = [example.response_len for example in members]
        rows = zip(members, torch.split(ids_NK, sizes), torch.split(logp_NK, sizes), strict=True)
        for row, (example, ids, logp) in enumerate(rows):
            known = TopK(tokens=ids.numpy().astype(np.int32), logprobs=logp.numpy().astype(np.float16))
            own = [output.hidden_states[layer + 1][row, : len(example.token_ids)] for layer in layers]
            states = torch.cat(own, dim=-1).to(STATES) if own else None
            made.append(replace(example, top_k=known, states=states))
    return made


def _passes(examples: Sequence[TrainingExample], tokens: int) -> Iterator[tuple[list[TrainingExample], losses.Batch]]:
    for indices in losses.plan_micro_batches([len(example.token_ids) for example in examples], 1, tokens)[0]:
        members = [examples[i] for i in indices]
        yield members, losses.build(members, torch.device("cpu"))


def _logprobs(model: Any, batch: losses.Batch) -> Tensor:
    logits = model(input_ids=batch.tokens_BT, use_cache=False).logits
    return losses.draft_logprobs(logits.flatten(0, 1)[batch.row_N], batch.temperatures_N)
