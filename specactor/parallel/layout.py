"""Which rank holds what. PURE: integers in, integers out.

Invariants: every rank has one coordinate; the dimensions' product is the world size; Megatron-core's refusals come here
first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specactor.config import EAGLE3_HEAD, Config, ParallelConfig, RolloutConfig, TinyModelConfig
from specactor.config.rules import require, rules_of
from specactor.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int  # 0 for a dense model
    vocab_size: int
    max_position: int
    mlp_width: int = 0  # of a dense model; 0: experts, which SGLang may also place whole
    is_head: bool = False  # an EAGLE-3 head, and no model by itself
    has_mtp: bool = False  # an MTP layer behind the last one

    @classmethod
    def of_tiny(cls, tiny: TinyModelConfig, vocab_size: int) -> ModelShape:
        return cls(
            num_layers=tiny.num_layers,
            num_heads=tiny.num_heads,
            num_kv_heads=tiny.num_kv_heads,
            num_experts=tiny.num_experts,
            vocab_size=vocab_size,
            max_position=tiny.max_position,
        )

    @classmethod
    def read(cls, model_dir: Path, setting: str = "model.path") -> ModelShape:
        """Read a folder. Raises ConfigError, of `setting`, where it is no Hugging Face model."""
        file = model_dir / "config.json"
        if not file.is_file():
            raise ConfigError.at(
                setting,
                str(model_dir),
                "a folder with config.json, tiny, or tiny:LAYERS",
                "Give the folder of a model in Hugging Face format with --model.path; nothing is downloaded.",
            )
        try:
            raw = json.loads(file.read_text())
            _refuse_mtp(raw, file, setting)
            return cls._of(raw)
        except (json.JSONDecodeError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise ConfigError.at(
                setting, str(file), "the config.json of a language model", f"It has {problem}."
            ) from None

    @classmethod
    def _of(cls, raw: dict[str, Any]) -> ModelShape:
        return cls(
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads", raw["num_attention_heads"]),
            num_experts=experts_in(raw),
            vocab_size=raw["vocab_size"],
            max_position=raw["max_position_embeddings"],
            mlp_width=0 if experts_in(raw) else raw.get("intermediate_size", 0),
            is_head=EAGLE3_HEAD in (raw.get("architectures") or ()),
            has_mtp=has_mtp(raw),
        )

    def refused_by(self, ranks: int) -> str:
        """Return what a number of SGLang's tensor-parallel ranks has to be and `ranks` is not; "" for nothing."""
        few, many = sorted((self.num_kv_heads, ranks))
        rules = {
            f"a divisor of {self.num_heads} heads": self.num_heads % ranks,
            # with more ranks than these each has a copy
            f"a divisor or a multiple of {self.num_kv_heads} key-value heads": many % few,
            f"a divisor of an MLP's width of {self.mlp_width}": self.mlp_width % ranks,
        }
        return next((rule for rule, left in rules.items() if left), "")


def experts_in(raw: Mapping[str, Any]) -> int:
    """Return how many experts a config.json has, by whichever name its family knows them; 0 for a dense model."""
    return next((raw[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if raw.get(name)), 0)


_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers", "num_mtp_layers")


def has_mtp(raw: Mapping[str, Any]) -> bool:
    """Return whether it has an MTP layer that learns and drafts here."""
    return bool(raw.get("architectures") == ["MiMoForCausalLM"] and raw.get("num_nextn_predict_layers") == 1)


def _refuse_mtp(raw: dict[str, Any], file: Path, setting: str) -> None:
    """Raise ConfigError for MTP layers that would neither learn nor draft."""
    if has_mtp(raw):
        return
    names = [name for name in raw.get("architectures") or () if name.endswith(("MTP", "NextN"))]
    names += [f"{name} {raw[name]}" for name in _MTP_LAYERS if raw.get(name)]
    if names:
        raise ConfigError.at(
            setting,
            f"multi-token prediction (MTP) layers, {names[0]} in {file}",
            "a model without, or MiMo's with one",
            "Remove them from a copy's config.json: the policy is the same. For drafts make an EAGLE-3 head: specactor "
            "drafter init ... start:eagle3-start.",
        )


@dataclass(frozen=True, kw_only=True)
class Layout:
    world: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int

    @property
    def data(self) -> int:
        """Return how many copies see different sequences."""
        return self.world // (self.tensor * self.pipeline * self.context)


def short_ends(layers: int, chunks: int) -> int | None:
    """Return how many ends of a pipeline have one layer less than its other chunks: 0, 1 (the last, which has the
    output layer) or 2 (the first, too, which has the embedding). None where layers do not spread that evenly."""
    short = -layers % chunks
    return short if short <= 2 and layers >= chunks else None  # no chunk is empty


def stage_layers(layers: int, stages: int) -> list[int]:
    """Return how many layers each pipeline stage has, those of its virtual stages together."""
    short, most = short_ends(layers, stages) or 0, -(-layers // stages)
    return [most - (i == 0 and short > 1) - (i == stages - 1 and short > 0) for i in range(stages)]


def smallest_world(p: ParallelConfig) -> int:
    """Return the fewest ranks that hold the model and the engines."""
    once = math.lcm(p.tensor * p.pipeline * p.context, p.expert * p.expert_tensor * p.pipeline)
    return once * max(1, math.ceil(p.engines * p.engine_tensor / once))


def check(config: Config, world: int, shape: ModelShape) -> Layout:
    """Return the layout. Raises ConfigError for one that cannot run."""
    p = config.parallel
    _check_world(p, world)
    _check_experts(config, shape)
    _check_sizes(config, shape)
    rule = rules_of(config)
    rule(
        "parallel.engines",
        p.engines * p.engine_tensor <= world,
        f"engines x engine_tensor <= {world} ranks",
        "Engines run on the trainer's own devices: lower --parallel.engines, or start more ranks.",
    )
    layout = Layout(
        world=world,
        tensor=p.tensor,
        pipeline=p.pipeline,
        context=p.context,
        expert=p.expert,
        expert_tensor=p.expert_tensor,
    )
    per_update = config.rollout.prompts_per_step * config.rollout.group_size // config.train.updates_per_step
    rule(
        "rollout.prompts_per_step",
        per_update >= layout.data,
        f"at least {layout.data} sequences per update, one per data-parallel rank",
        "Ask for more prompts, or use fewer data-parallel ranks.",
    )
    return layout


def _check_world(p: ParallelConfig, world: int) -> None:
    for names, size, remedy in (
        (
            "tensor x pipeline x context",
            p.tensor * p.pipeline * p.context,
            "Start more ranks, or lower one of --parallel.tensor, --parallel.pipeline, --parallel.context.",
        ),
        (
            "expert x expert_tensor x pipeline",
            p.expert * p.expert_tensor * p.pipeline,
            "Start more ranks, or lower --parallel.expert.",
        ),
    ):
        require(world % size == 0, "torchrun --nproc-per-node", world, f"a multiple of {names} = {size}", remedy)


def _check_experts(config: Config, shape: ModelShape) -> None:
    p, rule = config.parallel, rules_of(config)
    rule("parallel.expert", p.expert == 1 or shape.num_experts > 0, "1 for a dense model", "Use --parallel.expert 1.")
    rule(
        "train.routing_replay",
        config.train.routing_replay == "off" or shape.num_experts > 0,
        "off for a dense model",
        "It has no experts to choose from: leave it out.",
    )
    divides = shape.num_experts % p.expert == 0
    rule("parallel.expert", divides, f"a divisor of the model's {shape.num_experts} experts", "Choose a divisor.")
    rule(
        "parallel.expert_tensor",
        shape.num_experts == 0 or p.expert > 1 or p.expert_tensor == p.tensor,
        f"parallel.tensor = {p.tensor} when parallel.expert = 1",
        f"Use --parallel.expert-tensor {p.tensor}, or --parallel.expert > 1.",
    )
    rule(
        "parallel.expert_tensor",
        p.expert_tensor == 1 or p.tensor > 1,  # mbridge merges no shards of experts where it knows of no others
        "1 when parallel.tensor = 1",
        "Use --parallel.expert-tensor 1 with a larger --parallel.expert, or --parallel.tensor > 1.",
    )


def _check_sizes(config: Config, shape: ModelShape) -> None:
    p, rule = config.parallel, rules_of(config)
    rule(
        "parallel.tensor",
        shape.num_heads % p.tensor == 0 and shape.num_kv_heads % p.tensor == 0,
        f"a divisor of {shape.num_heads} heads and {shape.num_kv_heads} key-value heads",
        "Choose a smaller tensor parallelism.",
    )
    rule(
        "parallel.tensor",
        shape.vocab_size % p.tensor == 0,
        f"a divisor of the vocabulary of {shape.vocab_size}",
        "Choose a divisor.",
    )
    layers, virtual = shape.num_layers, p.virtual_pipeline or 1
    fit = [n for n in range(min(virtual, 2), layers + 1) if short_ends(layers, n * virtual) is not None]
    rule(
        "parallel.pipeline",
        p.pipeline in fit,
        f"one of {fit}: stages (times virtual_pipeline) divide the model's {layers} layers, or 1 or 2 more, and none "
        "is empty",
        "Choose one" + (", or another --parallel.virtual-pipeline." if virtual > 1 else "."),
    )
    for name in ("pipeline", "context") if shape.has_mtp else ():
        rule(
            f"parallel.{name}",
            getattr(p, name) == 1,
            "1 for a policy with an MTP layer",
            "Use tensor parallelism, or remove num_nextn_predict_layers from a copy's config.json.",
        )
    rule(
        "parallel.engine_tensor",
        not shape.refused_by(p.engine_tensor),
        shape.refused_by(p.engine_tensor),
        "Choose one.",
    )
    rule(
        "rollout.max_new_tokens",
        config.rollout.max_new_tokens < shape.max_position,
        f"< the model's context length {shape.max_position}",
        "Shorten the responses.",
    )


ENGINE_RESERVED_TOKENS = 2  # SGLang keeps this many tokens of a sequence's room for itself
ENGINE_RESERVED_OF_INPUT = 7
"""Of its input, which is a prompt and the beginning of a response, it keeps so many
(``sglang/srt/managers/tp_worker.py``, ``max_req_input_len``, which an input must stay below)."""


def reserved_tokens(rollout: RolloutConfig) -> int:
    """Return the tokens of a sequence's room that SGLang keeps. With `partial` a stopped request must fit as input,
    with one more to emit."""
    return ENGINE_RESERVED_OF_INPUT - 1 if rollout.partial else ENGINE_RESERVED_TOKENS


def pool_room(tokens: int, page: int) -> int:
    """Return what a request may have of a pool of so many tokens. SGLang sets aside whole pages for the input, and one
    more; where they are not there it would cut the response in silence."""
    return tokens - 2 * (page - 1)


def longest_prompt(config: Config, max_position: int) -> int:
    """Return the tokens that fit beside a response. Raises ConfigError for none."""
    limit, room = _smallest_room(config, max_position)
    rules_of(config)(
        "rollout.max_new_tokens",
        config.rollout.max_new_tokens < room,
        f"< {room}, so that a prompt fits beside it ({limit})",
        "Shorten the responses, or raise that limit.",
    )
    return room - config.rollout.max_new_tokens


def prompt_limit(config: Config, max_position: int) -> str:
    """Return what leaves a prompt no more tokens than `longest_prompt`, and the way out."""
    limit, _ = _smallest_room(config, max_position)
    raised = "" if limit.startswith("the model") else ", or raise that limit"
    return f"({limit} less rollout.max_new_tokens). Shorten it, or lower rollout.max_new_tokens{raised}"


def _smallest_room(config: Config, max_position: int) -> tuple[str, int]:
    """Return what a prompt and its response must fit, and how many tokens that is."""
    p, reserved = config.parallel, reserved_tokens(config.rollout)
    padding = 2 * p.context * p.tensor if p.context > 1 else p.tensor
    rooms = {
        f"the model's context length {max_position}": max_position - reserved,
        "train.tokens_per_microbatch x parallel.context": config.train.tokens_per_microbatch * p.context - padding,
    }
    if (pool := config.rollout.engine.max_total_tokens) is not None:
        page = config.rollout.engine.page_size
        rooms["rollout.engine.max_total_tokens"] = pool_room(pool // page * page, page) - reserved
    return min(rooms.items(), key=lambda item: item[1])


def longest_text(config: Config, max_position: int) -> int:
    return longest_prompt(config, max_position) + config.rollout.max_new_tokens + reserved_tokens(config.rollout)


def engine_owner(engine: int, *, engine_tensor: int) -> int:
    """Return the rank that starts, drives and stops an engine: the first on its devices."""
    return engine * engine_tensor


def own_device(local_rank: int, visible: int) -> int:
    """Return a rank's GPU among `visible` ones: its own, or the only one. Raises ConfigError for more ranks
    than GPUs."""
    if visible > 1 and local_rank >= visible:
        raise ConfigError.at(
            "torchrun --nproc-per-node",
            f"a rank {local_rank}",
            f"at most {visible} ranks, one per GPU that they see",
            "Start fewer ranks per host, or set CUDA_VISIBLE_DEVICES.",
        )
    return 0 if visible == 1 else local_rank


def engine_devices(
    engine: int, machines: Sequence[str], devices: Sequence[int | str], *, engine_tensor: int
) -> tuple[int | str, ...]:
    """Return an engine's devices; `machines` and `devices` are each rank's host, and GPU's UUID or core. Raises
    ConfigError for an engine over several hosts, and two ranks on one GPU."""
    first = engine_owner(engine, engine_tensor=engine_tensor)
    ranks = range(first, first + engine_tensor)
    if len({machines[rank] for rank in ranks}) > 1:
        raise ConfigError.at(
            "parallel.engine_tensor",
            engine_tensor,
            f"a divisor of the ranks of a host: engine {engine} would share the devices of ranks {first} to "
            f"{ranks[-1]}, which are on several hosts",
            "Choose one that divides torchrun --nproc-per-node.",
        )
    own = tuple(devices[rank] for rank in ranks)
    for rank in ranks:
        others = [other for other, device in enumerate(devices) if other != rank and device == devices[rank]]
        if isinstance(devices[rank], str) and others:
            raise ConfigError.at(
                "torchrun --nproc-per-node",
                f"ranks {sorted([rank, *others])} on GPU {devices[rank]}",
                "one GPU per rank",
                "Start fewer ranks, or give each another GPU in CUDA_VISIBLE_DEVICES.",
            )
    return own


def place_engine(
    engine: int, views: Sequence[Hashable], local_ranks: Sequence[int], *, engine_tensor: int, pooled: bool
) -> tuple[int, int]:
    """Return (rank that starts the engine, its number of the first device). `views` are ranks' hosts with the devices
    that they see, `local_ranks` their numbers at their launchers; if `pooled`, a view's first rank starts its engines.
    """
    rank = engine_owner(engine, engine_tensor=engine_tensor)
    return (views.index(views[rank]) if pooled else rank), local_ranks[rank]
