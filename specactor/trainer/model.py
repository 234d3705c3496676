"""The policy as a Megatron-core GPTModel, from and to Hugging Face format. Contact with mbridge is here and in
`shards`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specactor.config import TrainConfig
from specactor.config.rules import require
from specactor.cpu import megatron as cpu_platform
from specactor.cpu.sglang import OF_TRAINER
from specactor.data.tokenizer import register_mimo
from specactor.errors import ConfigError
from specactor.parallel.layout import experts_in, short_ends
from specactor.trainer import fusions

cpu_platform.install()


def _import_bridges() -> None:
    """Import mbridge without families with images, which take three seconds."""
    spec = importlib.util.find_spec("mbridge")
    assert spec is not None
    assert spec.origin is not None
    if "mbridge" not in sys.modules:
        models = types.ModuleType("mbridge.models")
        models.__path__ = [str(Path(spec.origin).parent / "models")]
        sys.modules["mbridge.models"] = models  # so that its own __init__, which imports all, does not run
    for family in FAMILIES:
        found = vars(importlib.import_module(f"mbridge.models.{family}"))
        bridges = {name: value for name, value in found.items() if name.endswith("Bridge")}
        vars(sys.modules["mbridge.models"]).update(bridges)  # some families import others from there


FAMILIES = ("qwen2", "qwen2moe", "qwen3", "qwen3moe", "llama", "mixtral", "mimo", "glm4moe")
_import_bridges()
register_mimo()

import mbridge  # noqa: E402
from mbridge.core.bridge import register_model  # noqa: E402
from mbridge.core.llm_bridge import LLMBridge  # noqa: E402
from mbridge.core.util import unwrap_model  # noqa: E402
from mbridge.models.mimo import MimoBridge  # noqa: E402
from mbridge.utils.post_creation_callbacks import make_value_model  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from specactor.trainer import mtp  # noqa: E402

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}
"""Read by cuBLAS, TransformerEngine and NCCL when they are first used."""
_CORRECTED = {"qwen2_moe": {"moe_shared_expert_gate": True}, "mixtral": {"moe_router_pre_softmax": False}}
"""What mbridge gets wrong, by model type: it builds no gate, and scales the chosen experts by less than 1 in sum."""
_ALL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "quantization_config": (None,),  # its weights would be read without their scales
    # Logits in float32 would not be the trainer's, and on GPUs depend on how many rows are computed together.
    **dict.fromkeys(("enable_lm_head_fp32", "enable_lm_head_output_fp32"), (False,)),
}
_MIXTURES = _ALL | {"tie_word_embeddings": (False,)}  # with tied ones, SGLang has an output layer that is not loaded
_QWEN_MIXTURES = _MIXTURES | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
BUILT = {
    "llama": _ALL | {"attention_bias": (False,), "mlp_bias": (False,)},
    "mimo": _ALL,
    "qwen2": _ALL,
    "qwen3": _ALL | {"attention_bias": (False,)},
    "mixtral": _MIXTURES,
    "qwen2_moe": _QWEN_MIXTURES | {"qkv_bias": (True,)},
    "qwen3_moe": _QWEN_MIXTURES | {"attention_bias": (False,)},
    "glm4_moe": _MIXTURES
    | {"attention_bias": (True,), "norm_topk_prob": (True,), "n_group": (1,), "n_shared_experts": (1,)},
}
"""By model type, fields that mbridge does not read, with the values of the model that it builds: the first of them is
meant where a config.json has no such field."""
_RENORMALIZED = ("qwen2_moe", "qwen3_moe")
"""Model types whose ``norm_topk_prob`` says whether the chosen experts' weights add up to 1, which mbridge ignores."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def has_transformer_engine() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


@dataclass(frozen=True)
class Policy:
    """This rank's chunks, one per virtual pipeline stage."""

    chunks: list[Any]
    bridge: Any
    config: Any
    """Megatron's TransformerConfig."""
    source_dir: Path
    local_spec: bool
    scalar: bool = False
    """One output per token: a critic's value."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every (Hugging Face name, whole tensor) on every rank. Collective. A tensor may share the model's
        memory: use it before the next, read-only."""
        seen = set()
        with torch.no_grad():
            for name, tensor in self.bridge.export_weights(self.for_bridge()):
                if name not in seen:  # a tied output layer comes again from the last pipeline stage
                    seen.add(name)
                    yield name, tensor

    def layers(self) -> Iterator[Any]:
        return (layer for chunk in self.chunks for layer in unwrap_model(chunk).decoder.layers)

    def modules_of(self, layer: int) -> Iterator[Any]:
        """Return what computes a layer on this rank; -1 is the embedding."""
        if layer >= 0:
            return (module for module in self.layers() if module.layer_number - 1 == layer)
        return (chunk.embedding for chunk in map(unwrap_model, self.chunks) if chunk.pre_process)

    def for_bridge(self) -> list[Any]:
        """Return the chunks under the names that mbridge knows."""
        if not (self.local_spec or self.scalar):
            return [unwrap_model(chunk) for chunk in self.chunks]
        return [_shown_to_bridge(chunk, local_spec=self.local_spec, has_head=not self.scalar) for chunk in self.chunks]


def build(model_dir: Path, *, dtype: str, train: TrainConfig, scalar: bool = False) -> Policy:
    """Return a Hugging Face folder's model with its weights, spread by Megatron's parallel state. Collective. `scalar`:
    one output per token, 0 at first. Raises ConfigError for an unsupported model."""
    settle_arithmetic(dtype, deterministic=train.deterministic)
    local_spec = not has_transformer_engine()
    bridge = _make_bridge(model_dir, dtype, local_spec, train, scalar=scalar)
    if scalar:
        bridge.hf_config.tie_word_embeddings = False
    with contextlib.redirect_stdout(io.StringIO()):  # it prints parameter counts
        chunks = bridge.get_model(
            bf16=dtype == "bfloat16",
            use_cpu_initialization=local_spec,
            post_model_creation_callbacks=[make_value_model] if scalar else [],
        )
    policy = Policy(chunks, bridge, bridge.config, model_dir, local_spec, scalar)
    mtp.set_apart(policy)
    with torch.no_grad():
        bridge.load_weights(policy.for_bridge(), str(model_dir), memory_efficient=True)
        for chunk in map(unwrap_model, chunks) if scalar else ():
            if chunk.post_process:
                chunk.output_layer.weight.zero_()  # random values would teach the policy noise
    return policy


def settle_arithmetic(dtype: str, *, deterministic: bool) -> None:
    """Choose how this process, without its engines, multiplies and sums (in float32 without TF32), before the first
    kernel. What the user has set stays."""
    if dtype == "float32":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        # With TF32, which TransformerEngine asks for in spite of these, engine and trainer could not agree to 1e-4.
        _set_variable("NVIDIA_TF32_OVERRIDE", "0")
    torch.use_deterministic_algorithms(deterministic)
    if deterministic:
        for name, value in DETERMINISTIC.items():
            _set_variable(name, value)


def _set_variable(name: str, value: str) -> None:
    if name not in os.environ:
        os.environ[name] = value
        OF_TRAINER.add(name)


def read_hf_config(model_dir: Path) -> Any:
    """Return the folder's configuration, with ``rope_theta`` where mbridge reads it. Raises ConfigError for a model
    that mbridge cannot represent, or would build as another."""
    config = AutoConfig.from_pretrained(model_dir)
    _refuse_others(config, model_dir)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        raise ConfigError.at(
            "model.path",
            rope["rope_type"],
            "the default rotary embedding",
            "Scaled rotary embeddings are not supported: train with the model's original context length.",
        )
    if "rope_theta" in rope:  # where transformers 5 keeps it; mbridge would build another model without an error
        config.rope_theta = rope["rope_theta"]
    if getattr(config, "head_dim", 0) is None:  # mbridge expects none, or a number
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def _refuse_others(config: Any, model_dir: Path) -> None:
    """Raise ConfigError for a model of another type than `BUILT`, or that differs from what would be built."""
    kind = config.model_type
    if kind not in BUILT:
        raise ConfigError.at("model.path", kind, f"one of {sorted(BUILT)}", "Choose a model of a supported type.")
    for name, values in BUILT[kind].items():
        _require(config, name, getattr(config, name, values[0]) in values, values[0], model_dir)
    window = getattr(config, "sliding_window", None) or math.inf
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    _require(config, "sliding_window", not slides or window >= config.max_position_embeddings, None, model_dir)


def _require(config: Any, name: str, ok: bool, built: object, model_dir: Path) -> None:
    require(
        ok,
        "model.path",
        f"{name} {getattr(config, name, None)} in {model_dir / 'config.json'}",
        f"{name} {built}, which models of type {config.model_type} are built with",
        "Another model would be trained in silence: choose one that has it.",
    )


def _make_bridge(model_dir: Path, dtype: str, local_spec: bool, train: TrainConfig, *, scalar: bool) -> Any:
    hf_config = read_hf_config(model_dir)
    bridge = mbridge.AutoBridge.from_config(hf_config, dtype=DTYPES[dtype])
    head = "model.embed_tokens.weight" if hf_config.tie_word_embeddings else "lm_head.weight"
    bridge._DIRECT_MAPPING = bridge._DIRECT_MAPPING | {"output_layer.weight": head}  # mbridge knows tied Qwens alone
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    short = short_ends(hf_config.num_hidden_layers, stages * virtual) or 0
    settings: dict[str, Any] = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "calculate_per_token_loss": True,  # gradients are summed, not averaged: weights are global
        "variable_seq_lengths": stages > 1,  # micro-batches differ in length
        "account_for_loss_in_pipeline_split": short > 0,
        "account_for_embedding_in_pipeline_split": short > 1,
        "deterministic_mode": train.deterministic,
    }
    if experts_in(hf_config.to_dict()):
        settings["moe_router_dtype"] = "fp32"
    settings |= _CORRECTED.get(hf_config.model_type, {})
    if hf_config.model_type in _RENORMALIZED:
        settings["moe_router_pre_softmax"] = not hf_config.norm_topk_prob
    if train.recompute == "full":
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif train.recompute == "selective":
        settings |= {"recompute_granularity": "selective"}
    present, gpu = fusions.present(), torch.cuda.is_available()
    settings |= fusions.fields(present, gpu=gpu, dtype=dtype, deterministic=train.deterministic)
    if local_spec:
        settings |= {"use_cpu_initialization": True, "moe_grouped_gemm": False, "moe_shared_expert_overlap": False}
    if scalar:
        settings["mtp_num_layers"] = None
    bridge.set_extra_args(**settings)
    if local_spec:
        bridge.has_vp_stage = True
        bridge._get_transformer_layer_spec = lambda vp_stage=None: get_gpt_decoder_block_spec(
            bridge.config, use_transformer_engine=False, vp_stage=vp_stage
        )
    return bridge


@register_model("mimo")
class _MimoBridge(MimoBridge):  # type: ignore[misc]
    """mbridge's, with an MTP layer that computes what the published one does."""

    def _get_gptmodel_args(self) -> dict[str, Any]:
        arguments: dict[str, Any] = LLMBridge._get_gptmodel_args(self)  # MiMo's takes a config for a layer's spec
        if self.config.mtp_num_layers:
            spec, fused = self._get_transformer_layer_spec(), has_transformer_engine()
            arguments["mtp_block_spec"] = get_gpt_mtp_block_spec(self.config, spec, use_transformer_engine=fused)
        return arguments

    def _weight_to_hf_format(self, name: str, weight: Tensor) -> tuple[list[str], list[Tensor]]:
        return super()._weight_to_hf_format(name, _halves_turned(name, weight))  # type: ignore[no-any-return]

    def _weight_to_mcore_format(self, name: str, hf_weights: list[Tensor]) -> Tensor:
        return _halves_turned(name, super()._weight_to_mcore_format(name, hf_weights))


def _halves_turned(name: str, weight: Tensor) -> Tensor:
    # An MTP layer reads the embedding before the hidden states in Megatron, and behind them in MiMo.
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1) if name.endswith(".eh_proj.weight") else weight


def _shown_to_bridge(chunk: Any, *, local_spec: bool, has_head: bool) -> types.SimpleNamespace:
    """Show a chunk, without critic's head, under TransformerEngine's names, which mbridge knows."""
    module = unwrap_model(chunk)
    experts = {index for index, layer in enumerate(module.decoder.layers) if hasattr(layer.mlp, "router")}

    def shown(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        kept = [(name, tensor) for name, tensor in named if has_head or not name.startswith("output_layer.")]
        return [(_fused_name(name, experts), tensor) for name, tensor in kept] if local_spec else kept

    state, parameters = dict(shown(module.state_dict().items())), shown(module.named_parameters())
    return types.SimpleNamespace(decoder=module.decoder, state_dict=lambda: state, named_parameters=lambda: parameters)


def _fused_name(name: str, expert_layers: set[int]) -> str:
    """Return TransformerEngine's name: norms are fused into what follows."""
    match = re.match(r"(decoder\.layers\.(\d+)|mtp\.layers\.\d+\.transformer_layer)\.(.*)", name)
    if match is None:
        return name
    layer, rest = int(match[2] or -1), match[3]
    rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    if layer not in expert_layers:
        rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    rest = re.sub(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"mlp.experts.\2.weight\1", rest)
    return f"{match[1]}.{rest}"
