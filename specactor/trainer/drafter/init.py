"""The draft model at its start, in Hugging Face format.

Invariants: equal arguments give equal bytes; the process's random state is neither read nor moved; a folder appears
whole or not at all, and replaces only a model.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from specactor.config.rules import rules_of
from specactor.errors import ConfigError, DataError
from specactor.trainer.drafter.head import Eagle3Start, is_head, make_head, read_head, the_transformers

_MODEL = "model.layers."
_MLP = ("gate_proj", "up_proj", "down_proj")
_FUSED = "specactor_fused"  # of the attention of draft models on GPUs


@dataclass(frozen=True, kw_only=True)
class TargetStart:
    """A draft model cut out of the target."""

    num_layers: int = 1

    def __post_init__(self) -> None:
        rules_of(self, "start")("num_layers", self.num_layers > 0, "> 0", "See --help for its meaning.")


@dataclass(frozen=True, kw_only=True)
class RandomStart:
    """A random draft model with the target's vocabulary."""

    hidden_size: int = 128
    num_layers: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        rule = rules_of(self, "start")
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            rule(name, getattr(self, name) > 0, "> 0", "See --help for its meaning.")
        rule(
            "num_heads",
            self.num_heads % self.num_kv_heads == 0,
            f"a multiple of num_kv_heads, {self.num_kv_heads}",
            "Heads share keys and values in groups of one size.",
        )
        rule("head_dim", self.head_dim % 2 == 0, "an even number", "Rotary embeddings turn pairs.")


Start = TargetStart | RandomStart | Eagle3Start


def make_draft_model(target: Path, folder: Path, start: Start) -> int:
    """Write the draft model, with the target's tokenizer; return its number of parameters. Raises ConfigError when
    `folder` is not empty, or the target cannot be cut so."""
    if folder.exists() and not _is_empty(folder):
        raise ConfigError.at(
            "out", str(folder), "a path that does not exist or an empty folder", "Choose another, or remove it."
        )
    check_out(folder)
    model = new_draft(target, start)
    write_model(model, folder, tokenizer=target)
    return sum(p.numel() for p in model.parameters())


def new_draft(target: Path, start: Start) -> Any:
    match start:
        case TargetStart():
            return _cut(target, start)
        case RandomStart():
            return _random(target, start)
        case Eagle3Start():
            return make_head(read_model(target), start)


def read_model(folder: Path, device: torch.device | str = "cpu") -> Any:
    """Return a causal model in float32; the random state stays. Raises ConfigError for none."""
    auto = the_transformers().AutoModelForCausalLM
    try:
        with torch.random.fork_rng(devices=[]):
            model = auto.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError.at("model", str(folder), "a folder with a model in Hugging Face format", reason) from error
    fill_buffers(model)
    if torch.device(device).type == "cuda" and not getattr(model.config, "sliding_window", None):
        use_fused_attention(model)
    return model.to(device).eval()


def use_fused_attention(model: Any) -> None:
    """Have PyTorch's fused attention on GPUs: in float32 it has none for grouped heads, and would keep all pairs of
    tokens."""
    the_transformers().AttentionInterface.register(_FUSED, _attend)
    model.set_attn_implementation(_FUSED)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Return [B, T, heads, D]; batches are padded on the right, where a causal mask hides it."""
    key, value = (of.repeat_interleave(query.shape[1] // of.shape[1], 1) for of in (key, value))
    attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return attended.transpose(1, 2).contiguous(), None


def read_draft(folder: Path, target: Any) -> Any:
    if not is_head(folder):
        return read_model(folder)
    return read_head(folder, target.config, target.get_input_embeddings().weight)


@torch.no_grad()
def fill_buffers(model: nn.Module) -> None:
    """Compute rotary frequencies, which transformers leaves uninitialised where torch stands in for CUDA."""
    for module in model.modules():
        if isinstance(getattr(module, "inv_freq", None), Tensor):
            fresh = type(module)(module.config)
            for name, buffer in fresh.named_buffers(recurse=False):
                module.get_buffer(name).copy_(buffer)


def read_fitting(folder: Path, policy: Any, device: torch.device | str) -> Any:
    """Return a run's draft model, or a head without the embedding that it shares. Raises ConfigError where it does not
    fit a policy of this transformers' config."""
    if is_head(folder):
        return read_head(folder, policy, torch.empty(policy.vocab_size, 0)).to(device)
    model, vocab_size = read_model(folder, device), policy.vocab_size
    if model.config.vocab_size != vocab_size:
        raise ConfigError.at(
            "rollout.speculation.draft_model",
            f"{model.config.vocab_size} tokens",
            f"the policy's {vocab_size} tokens",
            "Make one with specactor drafter init.",
        )
    return model


def check_out(out: Path, *inputs: Path) -> None:
    """Raise ConfigError where a model cannot be written, or would replace anything else or `inputs`."""
    if out.exists() and not (_is_empty(out) or _is_model(out)):
        raise ConfigError.at(
            "out",
            str(out),
            "a path that does not exist, an empty folder or a model's (config.json and *.safetensors)",
            "Choose another: what is there would be lost.",
        )
    for path in inputs:
        if path.resolve().is_relative_to(out.resolve()):
            raise ConfigError.at(
                "out", str(out), f"a folder without {path}, which is read", "Choose another: it would be replaced."
            )
    above = next(folder for folder in out.resolve().parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise ConfigError.at("out", str(out), f"a path that can be made, which {above} forbids", "Choose another.")


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def write_model(model: Any, folder: Path, *, tokenizer: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write a model whole or not at all, over what was there; `weights` replace its own. Raises ConfigError as
    `check_out`, OSError where the disk fails."""
    assert not dist.is_initialized() or dist.get_rank() == 0, "transformers writes nothing on other ranks, silently"
    check_out(folder)
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    old = unfinished.with_name(f"{unfinished.name}.old")
    try:
        unfinished.chmod(0o755)
        model.save_pretrained(str(unfinished), state_dict=None if weights is None else dict(weights))
        for file in tokenizer.iterdir():
            if file.is_file() and ("token" in file.name or file.name in ("vocab.json", "merges.txt")):
                shutil.copyfile(file, unfinished / file.name)
        if folder.exists():
            os.rename(folder, old)
        os.rename(unfinished, folder)
    except SafetensorError as error:
        raise OSError(f"{folder}: could not be written: {error}") from error
    finally:
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def quiet() -> None:
    the_transformers().utils.logging.disable_progress_bar()


def _dense(source: Any, *, seed: int, **shape: Any) -> Any:
    transformers = the_transformers()
    same = ("vocab_size", "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id")
    theirs = {name: getattr(source, name, None) for name in same}
    config = transformers.Qwen3Config(**theirs | shape, dtype="float32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.Qwen3ForCausalLM(config).float()


def _random(target: Path, start: RandomStart) -> Any:
    source = the_transformers().AutoConfig.from_pretrained(str(target), local_files_only=True)
    return _dense(
        source,
        seed=start.seed,
        hidden_size=start.hidden_size,
        num_hidden_layers=start.num_layers,
        num_attention_heads=start.num_heads,
        num_key_value_heads=start.num_kv_heads,
        head_dim=start.head_dim,
        intermediate_size=start.intermediate_size,
        rope_parameters=source.rope_parameters,
        tie_word_embeddings=False,
    )


def _cut(target: Path, start: TargetStart) -> Any:
    source = read_model(target)
    config = source.config
    if config.model_type not in ("qwen3", "qwen3_moe"):
        raise ConfigError.at(
            "target", config.model_type, "qwen3 or qwen3_moe", "Start at random, or from a checkpoint."
        )
    there = config.num_hidden_layers
    if start.num_layers > there:
        raise ConfigError.at(
            "num_layers", start.num_layers, f"1..{there}, the target's layers", "Start at random for others."
        )
    experts = getattr(config, "num_experts", 0) or 0
    taken = config.num_experts_per_tok if experts else 0  # so a drafted token costs a layer what the target's costs
    draft = _dense(
        config,
        seed=0,  # every weight is the target's
        hidden_size=config.hidden_size,
        num_hidden_layers=start.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=taken * config.moe_intermediate_size if taken else config.intermediate_size,
        rope_parameters=config.rope_parameters,
        tie_word_embeddings=config.tie_word_embeddings,
    )
    _copy(draft, source.state_dict(), taken)
    return draft


def _dense_mlp(weights: Mapping[str, Tensor], layer: int, projection: str, taken: int) -> Tensor:
    """Return the first `taken` experts of a layer side by side in one MLP: exactly the mean of their answers."""
    if f"{_MODEL}{layer}.mlp.{projection}.weight" in weights:  # a dense layer among mixtures
        raise DataError(f"layer {layer} of the target is dense, others are not. Start the draft model at random.")
    experts = list(expert_weights(weights, layer, projection)[:taken])
    return torch.cat(experts, dim=1) / taken if projection == "down_proj" else torch.cat(experts, dim=0)


def expert_weights(weights: Mapping[str, Tensor], layer: int, projection: str) -> Tensor:
    """Return [experts, out, in] of a Qwen3-MoE layer."""
    before = f"{_MODEL}{layer}.mlp.experts."
    fused = f"{before}{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"
    if fused in weights:
        whole = weights[fused]
        if projection == "down_proj":
            return whole
        return whole.chunk(2, dim=1)[_MLP.index(projection)]
    count = sum(name.startswith(before) and name.endswith(f"{projection}.weight") for name in weights)
    return torch.stack([weights[f"{before}{e}.{projection}.weight"] for e in range(count)])


@torch.no_grad()
def _copy(draft: nn.Module, weights: Mapping[str, Tensor], experts: int) -> None:
    for name, parameter in draft.named_parameters():
        projection = name.removesuffix(".weight").rpartition(".")[2]
        if experts and projection in _MLP:
            layer = int(name.removeprefix(_MODEL).partition(".")[0])
            parameter.copy_(_dense_mlp(weights, layer, projection, experts))
        else:
            parameter.copy_(weights[name])
