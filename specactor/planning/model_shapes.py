"""Sizes of decoders with grouped-query attention and gated MLPs, dense or with routed experts, but for biases and norms
(under 0.1 %). PURE. A shape is refused rather than misread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specactor.config import EAGLE3_HEAD
from specactor.errors import PlanError
from specactor.parallel.layout import experts_in, has_mtp


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Sizes are per layer where nothing else is said."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of the dense MLP; 0 in a model with experts
    vocab: int
    tied: bool = False  # the output projection is the embedding
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    param_bytes: int = 2
    reads: int = 0  # numbers of the target's hidden states at a token; > 0: an EAGLE-3 head, of one layer
    mtp_layers: int = 0  # 0 or 1, behind the last one; all other figures are without it

    def __post_init__(self) -> None:
        sizes = {"layers": self.layers, "hidden": self.hidden, "heads": self.heads, "kv_heads": self.kv_heads}
        sizes |= {"head_dim": self.head_dim, "vocab": self.vocab, "intermediate": self.intermediate or self.experts}
        wrong = {name: size for name, size in sizes.items() if not isinstance(size, int) or size < 1}
        if wrong or self.experts_per_token > self.experts:
            raise PlanError(
                f"{self.name}: got {wrong or self.experts_per_token}, expected whole numbers >= 1, and no more experts "
                "per token than there are. Check config.json."
            )

    @property
    def attention_params(self) -> int:
        inputs = 2 if self.reads else 1  # a token's embedding beside hidden states
        return self.hidden * self.head_dim * ((1 + inputs) * self.heads + 2 * inputs * self.kv_heads)

    @property
    def mlp_params(self) -> int:
        """Return the parameters of the dense MLP, or of the router."""
        return 3 * self.hidden * self.intermediate + self.hidden * self.experts  # one of the two is 0

    @property
    def expert_params(self) -> int:
        return 3 * self.hidden * self.expert_intermediate

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        layer = self.attention_params + self.mlp_params + self.experts * self.expert_params
        ends = 1 if self.tied or self.reads else 2  # a head's embedding is its target's
        return self.layers * layer + self.head_params * ends + self.reads * self.hidden

    @property
    def mtp_params(self) -> int:
        return self.mtp_layers * (self.attention_params + self.mlp_params + 2 * self.hidden**2)

    @property
    def active_params(self) -> int:
        """Return the parameters that a token is multiplied with, of the embedding a row."""
        layer = self.attention_params + self.mlp_params + self.experts_per_token * self.expert_params
        return self.layers * layer + self.head_params + self.reads * self.hidden

    @property
    def weights_bytes(self) -> int:
        return self.params * self.param_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * self.param_bytes

    def distinct_experts(self, tokens: float) -> float:
        """Return how many experts `tokens` choose, if each chooses evenly: E (1 - (1 - k/E)^T)."""
        if not self.experts:
            return 0.0
        return float(self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens))

    @classmethod
    def of_config(cls, config: Mapping[str, Any], name: str) -> TransformerShape:
        """Read a config.json. Raises PlanError for that of no such decoder."""
        experts = experts_in(config)
        unlike = ("kv_lora_rank", "shared_expert_intermediate_size", "n_shared_experts")
        refused = [key for key in unlike if config.get(key)]
        dense = config.get("mlp_only_layers") or config.get("first_k_dense_replace")
        mixed = experts and (dense or config.get("decoder_sparse_step", 1) != 1)
        sliding = config.get("sliding_window") and config.get("use_sliding_window", True)
        if refused or mixed or sliding:
            found = refused or (["layers with and without experts"] if mixed else ["sliding_window"])
            raise PlanError(
                f"{name}: got {found[0]}, expected plain attention and layers of one kind. Measure a table with "
                "specactor profile and give it with --cost-table."
            )
        try:
            heads, reads = config["num_attention_heads"], 0
            if is_head := EAGLE3_HEAD in (config.get("architectures") or ()):
                layers = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0)
                reads = len(layers) * config.get("target_hidden_size", config["hidden_size"])
            return cls(
                name=name,
                layers=config["num_hidden_layers"],
                hidden=config["hidden_size"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads", heads),
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                intermediate=0 if experts else config["intermediate_size"],
                vocab=(config.get("draft_vocab_size") if is_head else None) or config["vocab_size"],
                reads=reads,
                mtp_layers=int(has_mtp(config)),
                tied=bool(config.get("tie_word_embeddings", False)),
                experts=experts,
                experts_per_token=config["num_experts_per_tok"] if experts else 0,
                expert_intermediate=config.get("moe_intermediate_size", config["intermediate_size"]) if experts else 0,
            )
        except (KeyError, TypeError) as error:
            raise PlanError(
                f"{name}: config.json has no {error}; expected that of a decoder with grouped-query attention. "
                "For other models measure a table with specactor profile and give it with --cost-table."
            ) from None


def _dense(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **more: Any
) -> TransformerShape:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": hidden // heads}
    return TransformerShape(name=name, intermediate=intermediate, vocab=vocab, **(sizes | more))


QWEN3_EXPERTS = {"head_dim": 128, "experts": 128, "experts_per_token": 8}
# By name. Parameters come out as the names say, which a test checks.
SHAPES: Mapping[str, TransformerShape] = {
    shape.name: shape
    for shape in (
        # https://huggingface.co/Qwen/NAME/blob/main/config.json; where that page could not be read, of a copy
        _dense("Qwen2.5-0.5B", 24, 896, 14, 2, 4864, 151936, tied=True),
        _dense("Qwen2.5-1.5B", 28, 1536, 12, 2, 8960, 151936, tied=True),
        _dense("Qwen2.5-7B", 28, 3584, 28, 4, 18944, 152064),
        _dense("Qwen2.5-32B", 64, 5120, 40, 8, 27648, 152064),
        _dense("Qwen3-0.6B", 28, 1024, 16, 8, 3072, 151936, tied=True, head_dim=128),
        _dense("Qwen3-4B", 36, 2560, 32, 8, 9728, 151936, tied=True, head_dim=128),
        _dense("Qwen3-8B", 36, 4096, 32, 8, 12288, 151936, head_dim=128),
        _dense("Qwen3-32B", 64, 5120, 64, 8, 25600, 151936, head_dim=128),
        # the same figures: https://gitcode.com/Ascend/MindSpeed-RL/blob/master/configs/model/qwen3_30b_a3b.yaml and
        # qwen3_235b_a22b.yaml beside it
        _dense("Qwen3-30B-A3B", 48, 2048, 32, 4, 0, 151936, expert_intermediate=768, **QWEN3_EXPERTS),
        _dense("Qwen3-235B-A22B", 94, 4096, 64, 4, 0, 151936, expert_intermediate=1536, **QWEN3_EXPERTS),
    )
}
# Smaller models with the tokenizer of the larger.
DRAFTERS: Mapping[str, tuple[str, ...]] = {
    "Qwen2.5-7B": ("Qwen2.5-0.5B",),
    "Qwen2.5-32B": ("Qwen2.5-0.5B", "Qwen2.5-1.5B"),
    "Qwen3-8B": ("Qwen3-0.6B",),
    "Qwen3-32B": ("Qwen3-0.6B", "Qwen3-4B"),
    "Qwen3-30B-A3B": ("Qwen3-0.6B",),
    "Qwen3-235B-A22B": ("Qwen3-0.6B", "Qwen3-4B"),
}
