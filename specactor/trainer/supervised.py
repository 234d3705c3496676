"""Supervised learning on worked responses: cross entropy of response tokens at temperature 1.

The loss of a batch is divided by its number of sequences times a *constant* number of tokens. A mean over tokens would
reward short responses: of two ways to answer, the one with fewer tokens would get the larger gradient per token.
"""

from __future__ import annotations

from torch import Tensor

from specactor.trainer.microbatch import MicroBatch
from specactor.trainer.objective import response_logprobs


def constant_weight(num_sequences: int, tokens_per_sequence: int) -> float:
    """Weight of every response token of a batch of `num_sequences`."""
    return 1 / (num_sequences * tokens_per_sequence)


def cross_entropy(batch: MicroBatch, logits_1TV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, named sums) of a micro-batch: -sum of weight * log-probability."""
    logprobs_R, _ = response_logprobs(batch, logits_1TV, 1.0)
    loss = -(logprobs_R * batch.weights_R).sum()
    return loss, {"loss": loss.detach()}
