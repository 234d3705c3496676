"""An EAGLE-3 head in plain PyTorch, trained over several drafted tokens (training-time test, Li et al., arXiv
2503.01840). Pair i is token i + 1 with the target's hidden states at token i, later the head's own; it predicts token i
+ 2.

Shapes: B texts, T tokens, P = T - 1 pairs, F hidden states of all layers, N heads, D head size, V vocabulary, W the
head's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specactor.config import EAGLE3_HEAD
from specactor.config.rules import rules_of
from specactor.cpu import torchvision_ops
from specactor.errors import ConfigError
from specactor.trainer.drafter.buffer import read_rollouts

EMBEDDING = "embed_tokens.weight"
_LAYER = {"layers.0.": "midlayer.", "model.": ""}
"""Other writers' names, and the published ones."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Start:
    """An EAGLE-3 head: one layer that reads hidden states of the target."""

    draft_vocab: int = 0
    """Tokens that it can draft, the most frequent ones of `rollouts`; 0: all."""
    rollouts: tuple[Path, ...] = ()
    """Files of JSON lines with prompt_ids and token_ids, or folders of such."""
    seed: int = 0

    def __post_init__(self) -> None:
        rules_of(self, "start")(
            "draft_vocab",
            self.draft_vocab == 0 or (self.draft_vocab > 0 and bool(self.rollouts)),
            "0, or > 0 with rollouts",
            "Give responses whose most frequent tokens it is to draft.",
        )


def the_transformers() -> Any:
    if torch.version.cuda is None:  # torchvision fails beside a CPU build of torch
        torchvision_ops.install()
    import transformers

    return transformers


def is_head(folder: Path) -> bool:
    try:
        return EAGLE3_HEAD in (json.loads((folder / "config.json").read_bytes()).get("architectures") or ())
    except (OSError, ValueError):
        return False


def layers_read(num_layers: int) -> list[int]:
    """Return the layers that a head reads, as config.json counts them: -1 is the embedding."""
    usual = [1, num_layers // 2 - 1, num_layers - 4]
    # of a target with few layers the last ones that SGLang hands out
    return usual if usual == sorted({*usual}) else list(range(max(-1, num_layers - 4), num_layers - 1))


def features_of(target: Any, tokens_BT: Tensor, layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Run a causal model of transformers; return (features [B, T, F], logits [B, T, V])."""
    output = target(input_ids=tokens_BT, use_cache=False, output_hidden_states=True)
    return torch.cat([output.hidden_states[layer + 1] for layer in layers], dim=-1), output.logits


class _Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self._size: int = config.head_dim
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._theta = float(config.rope_parameters["rope_theta"])
        inputs = 2 * config.hidden_size
        self.q_proj = nn.Linear(inputs, self._heads * self._size, bias=False)
        self.k_proj = nn.Linear(inputs, self._kv_heads * self._size, bias=False)
        self.v_proj = nn.Linear(inputs, self._kv_heads * self._size, bias=False)
        self.o_proj = nn.Linear(self._heads * self._size, config.hidden_size, bias=False)

    def forward(self, x_BPI: Tensor, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Append this step's keys and values [B, N, P, D]."""
        p = x_BPI.shape[1]
        k = len(steps)
        query = self._turned(self._split(self.q_proj(x_BPI), self._heads))
        repeats = self._heads // self._kv_heads
        key, value = (self._split(project(x_BPI), self._kv_heads) for project in (self.k_proj, self.v_proj))
        steps.append((self._turned(key).repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)))
        place = torch.arange(p, device=x_BPI.device)
        hidden = place[None, :] > (place - k)[:, None]
        scores = [(query @ steps[0][0].transpose(-1, -2)).masked_fill(hidden, -torch.inf)]
        # of step m, each pair sees one key: the one from which k - m tokens were drafted
        moved = [tuple(functional.pad(t, (0, 0, k - m, 0))[:, :, :p] for t in steps[m]) for m in range(1, k + 1)]
        scores += [(query * key).sum(-1, keepdim=True) for key, _ in moved]
        weights = (torch.cat(scores, -1) * self._size**-0.5).softmax(-1)
        answer = weights[..., :p] @ steps[0][1]
        for m, (_, value) in enumerate(moved):
            answer = answer + weights[..., p + m, None] * value
        return self.o_proj(answer.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self._size).transpose(1, 2)

    def _turned(self, x_BNPD: Tensor) -> Tensor:
        half = torch.arange(0, self._size, 2, device=x_BNPD.device, dtype=torch.float32)
        place = torch.arange(x_BNPD.shape[2], device=x_BNPD.device, dtype=torch.float32)
        angles = (place[:, None] * self._theta ** (-half / self._size)).repeat(1, 2)
        first, second = x_BNPD.chunk(2, -1)
        return x_BNPD * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = _Attention(config), the_transformers().models.llama.modeling_llama.LlamaMLP(config)
        self.input_layernorm, self.hidden_norm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)
        hidden = hidden + self.self_attn(both, steps)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Head(nn.Module):
    """An EAGLE-3 head, whose parameters have the published names."""

    def __init__(self, config: Any, embedding: Tensor, *, owns_embedding: bool = False) -> None:
        """Take a LlamaConfig with EAGLE-3's fields, and the embedding [V, H]."""
        super().__init__()
        self.config = config
        self.layers: list[int] = config.eagle_config["eagle_aux_hidden_state_layer_ids"]
        self.fc = nn.Linear(len(self.layers) * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("token_ids", torch.arange(config.draft_vocab_size), persistent=False)
        """[W] int64: the target's ids of the tokens that it can draft."""
        self.token_ids: Tensor
        self.owns_embedding = owns_embedding
        self.layers_learned = self.layers if owns_embedding else [-1, *self.layers]
        """What it learns from in a run: also the embedding that it shares, which learns, too."""
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.embedding: Tensor

    def forward(
        self, tokens_BT: Tensor, features_BTF: Tensor, embedded_BTH: Tensor | None = None, *, steps: int
    ) -> Iterator[Tensor]:
        """Yield each step's logits [B, T, W] of the next token; the first k + 1 positions of step k have no meaning."""
        if embedded_BTH is None:
            embedded_BTH = functional.embedding(tokens_BT, self.embedding)
        embedded = embedded_BTH[:, 1:]
        hidden = self.fc(features_BTF[:, :-1])
        keys: list[tuple[Tensor, Tensor]] = []
        for _ in range(steps):
            hidden = self.midlayer(embedded, hidden, keys)
            yield functional.pad(self.lm_head(self.norm(hidden)), (0, 0, 1, 0))
            hidden = functional.pad(hidden, (0, 0, 1, 0))[:, :-1]

    def save_pretrained(self, folder: str, state_dict: Mapping[str, Tensor] | None = None) -> None:
        from safetensors.torch import save_file

        weights = dict(state_dict or self.state_dict())
        vocab, ids = len(self.embedding), self.token_ids.cpu()
        if len(ids) < vocab:
            weights["d2t"] = ids - torch.arange(len(ids))
            weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
        if self.owns_embedding:
            weights[EMBEDDING] = self.embedding
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights.items()}, f"{folder}/model.safetensors")
        self.config.save_pretrained(folder)


def read_head(folder: Path, target: Any, embedding: Tensor) -> Head:
    """Return the head in a folder, for a target with this transformers' config, whose `embedding` [V, H] it may share.
    Raises ConfigError for an unfit one."""
    from safetensors.torch import load_file

    fields = json.loads((folder / "config.json").read_bytes())
    fields.setdefault("draft_vocab_size", fields["vocab_size"])
    fields.setdefault("target_hidden_size", fields["hidden_size"])
    usual = layers_read(target.num_hidden_layers)
    fields.setdefault("eagle_config", {"eagle_aux_hidden_state_layer_ids": usual})
    config = the_transformers().LlamaConfig(**fields)
    _refuse_others(config)
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            for theirs, ours in _LAYER.items():
                name = name.replace(theirs, ours)
            weights[name] = tensor.float() if tensor.is_floating_point() else tensor
    d2t = weights.pop("d2t", None)
    weights.pop("t2d", None)
    own = weights.pop(EMBEDDING, None)
    if (config.target_hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ConfigError.at(
            "draft",
            f"a head of a target with {config.target_hidden_size} hidden sizes and {config.vocab_size} tokens",
            f"one of {target.hidden_size} and {target.vocab_size}",
            "Make one with specactor drafter init.",
        )
    head = Head(config, embedding if own is None else own, owns_embedding=own is not None)
    try:
        head.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).replace("\n\t", " ")
        raise ConfigError.at("draft", str(folder), "an EAGLE-3 head of one layer without biases", reason) from error
    if d2t is not None:
        head.token_ids += d2t
    return head.eval()


def _refuse_others(config: Any) -> None:
    rope, eagle = config.rope_parameters.get("rope_type", "default"), config.eagle_config or {}
    for other, got, expected in (
        (rope != "default", f"a head with rope_type {rope}", "rope_type default"),
        (getattr(config, "norm_output", False), "a head with norm_output", "one that goes on without its norm"),
        (config.hidden_act != "silu", f"a head with hidden_act {config.hidden_act}", "hidden_act silu"),
        (
            not eagle.get("eagle_aux_hidden_state_layer_ids"),
            "a head with an eagle_config without eagle_aux_hidden_state_layer_ids",
            "the layers that it reads, by number",
        ),
        (
            eagle.get("use_aux_hidden_state") is False,
            "a head with use_aux_hidden_state false",
            "one of several layers",
        ),
    ):
        if other:
            raise ConfigError.at("draft", got, expected, "An engine may serve it; here, give another head.")


def make_head(target: Any, start: Eagle3Start) -> Head:
    """Return a new head, which passes the last layer that it reads on to the target's last norm and output
    projection."""
    source = target.config
    if source.num_hidden_layers < 2:
        raise ConfigError.at("target", "1 layer", "2 layers or more", "A head reads several. Use start:target-start.")
    ids = _frequent(start, source.vocab_size)
    same = ["vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"]
    same += ["max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id"]
    config = the_transformers().LlamaConfig(
        **{name: getattr(source, name, None) for name in same},
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": source.rope_parameters["rope_theta"]},
        tie_word_embeddings=False,
        architectures=[EAGLE3_HEAD],
        dtype="float32",
        draft_vocab_size=len(ids),
        target_hidden_size=source.hidden_size,
        eagle_config={
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": layers_read(source.num_hidden_layers),
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start.seed)
        head = Head(config, target.get_input_embeddings().weight)
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(std=0.02)
            head.fc.weight.zero_()[:, -config.hidden_size :].fill_diagonal_(1.0)
            head.token_ids.copy_(ids)
            head.lm_head.weight.copy_(target.get_output_embeddings().weight[ids])
            head.norm.weight.copy_(target.model.norm.weight)
    return head.eval()


def _frequent(start: Eagle3Start, vocab: int) -> Tensor:
    if start.draft_vocab >= vocab or not start.draft_vocab:
        return torch.arange(vocab)
    counts = Counter(dict.fromkeys(range(vocab), 0))
    for line in read_rollouts(start.rollouts):
        counts.update(line.token_ids)
    chosen = sorted(counts, key=lambda token: (-counts[token], token))[: start.draft_vocab]
    return torch.tensor(sorted(chosen))
