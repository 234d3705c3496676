"""The policy's MTP layer learns in the policy's updates, after each forward pass.

Invariants: the policy's weights, gradient norm and loss are bit for bit those without; the layer's gradients are no
part of the norm, and are clipped as the policy's are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from mbridge.core.util import unwrap_model
from torch import Tensor

from specactor.trainer.objective import response_logprobs

if TYPE_CHECKING:
    from specactor.trainer.microbatch import MicroBatch
    from specactor.trainer.model import Policy

_GIVEN = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
"""Inputs that the layer shares with the policy's layers."""


def set_apart(policy: Policy) -> None:
    """Take MTP layers out of Megatron's forward pass, before the optimizer is made."""
    # There its gradients would flow into the policy, and no logits come out.
    policy.config.mtp_num_layers = None
    for module in map(unwrap_model, policy.chunks):
        if hasattr(module, "mtp"):
            module.mtp_process = False
            for parameter in module.mtp.parameters():
                parameter.shared = True  # Megatron counts it in the norm elsewhere: nowhere


class MtpTraining:
    """Trains the layer at the rollouts' temperature."""

    def __init__(self, module: Any, *, temperature: float) -> None:
        self._module, self._temperature = module, temperature
        [self._layer] = module.mtp.layers
        self._hidden_T1H: Tensor | None = None
        """Of the policy's last forward pass; under sequence parallelism this rank's part."""
        self._given: dict[str, Any] = {}
        module.decoder.register_forward_hook(self._keep, with_kwargs=True)

    @classmethod
    def of(cls, policy: Policy, *, temperature: float) -> MtpTraining | None:
        """Return the training of the policy's MTP layer; None where there is none."""
        found = [module for module in map(unwrap_model, policy.chunks) if hasattr(module, "mtp")]
        return cls(found[0], temperature=temperature) if found else None

    def _keep(self, _: Any, __: Any, given: dict[str, Any], hidden_T1H: Tensor) -> None:
        if torch.is_grad_enabled():
            self._hidden_T1H = hidden_T1H.detach()
            self._given = {name: given[name] for name in _GIVEN}

    def loss(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss, its sums), after the policy's forward pass. The layer learns, at a token and the hidden states
        before it, the token after."""
        hidden_T1H, self._hidden_T1H = self._hidden_T1H, None
        assert hidden_T1H is not None
        module = self._module
        # A sequence's last token has none after it. What it is given does not matter: nobody reads what comes of it.
        with torch.no_grad():
            embedded = module.embedding(input_ids=batch.tokens_1T.roll(-1, dims=1), position_ids=batch.positions_1T)
        # As in Megatron, from a token and the hidden states at the one before follows the token after.
        hidden_T1H = self._layer._proj_and_transformer_layer(hidden_T1H, embedded, **self._given)
        output = module.output_layer
        weight = module.shared_embedding_or_output_weight() if output.weight is None else output.weight
        logits_T1V, _ = output(hidden_T1H, weight=weight.detach())
        known_R = batch.positions_1T[0, batch.rows_R] > 0  # a prompt of one token has none before it
        rows = replace(batch, rows_R=(batch.rows_R - 1).clamp(min=0))
        logprobs_R, _ = response_logprobs(rows, logits_T1V.transpose(0, 1), self._temperature)
        logprobs_R = logprobs_R * known_R
        loss = float(module.config.mtp_loss_scaling_factor) * -(batch.weights_R * logprobs_R).sum()
        return loss, {"mtp_loss": -logprobs_R.detach().sum(), "mtp_tokens": known_R.sum()}
