"""Memory of a job's fullest device and host in bytes, by phase of a step.

Invariants: no phase leaves out what another that holds the same tensors counts; more devices never make a row larger.
Source: Megatron-core's distributed optimizer.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from specactor.config import Config, DraftTrainingConfig, EngineConfig
from specactor.config.rollout import DRAFT_ROWS, SPLIT
from specactor.config.speculation import MADE_BY_WARM_UP, WARM_UP_HEAD
from specactor.config.train import HEAD_STEPS, PART_LOGITS
from specactor.errors import ConfigError
from specactor.parallel.layout import Layout, ModelShape, check, longest_text, stage_layers
from specactor.planning.model_shapes import SHAPES, TransformerShape
from specactor.rollout.sglang.draft_slots import BLOCK_TOKENS
from specactor.weights_sync.buckets import ELEMENT_BYTES as BYTES

Phase = Literal["rollout", "train", "sync"]
PHASES: tuple[Phase, ...] = ("rollout", "train", "sync")
GRADIENT_BYTES = BYTES["float32"]  # (`trainer.optimizer.wrap`)
ADAM_BYTES = {"float32": 8, "bfloat16": 4, "host": 8}  # both moments, by train.optimizer_state
MAIN_WEIGHT_BYTES = BYTES["float32"]  # beside parameters that are not float32 themselves
DRAFT_BYTES = BYTES["float32"] + ADAM_BYTES["float32"]  # of a draft model's weight that learns, and its moments
MICRO_BATCH = "draft micro-batch"  # what it takes beyond the policy's
LENT = "lent drafter"
ESTIMATED = ("activations", "logits", MICRO_BATCH, "overhead")  # no line of code allocates them as they stand here


@dataclass(frozen=True, kw_only=True)
class Memory:
    rows: Mapping[str, Mapping[Phase, float]]  # what -> how much in each phase in which it is there
    device_bytes: float

    def of(self, phase: Phase, *, without: Collection[str] = ()) -> float:
        return sum(row.get(phase, 0.0) for name, row in self.rows.items() if name not in without)

    @property
    def fits(self) -> bool:
        return max(map(self.of, PHASES)) <= self.device_bytes

    def check(self) -> None:
        """Raise ConfigError where a phase needs too much even without estimates."""
        needed = {phase: self.of(phase, without=ESTIMATED) for phase in PHASES}
        fullest = max(PHASES, key=needed.__getitem__)
        if needed[fullest] > self.device_bytes:
            parts = sorted(((row.get(fullest, 0.0), name) for name, row in self.rows.items()), reverse=True)
            most = ", ".join(f"{name} {taken / 1e9:.0f}" for taken, name in parts[:3])
            size = "max-total-tokens" if LENT in self.rows else "memory-fraction"
            raise ConfigError.at(
                "parallel",
                f"{needed[fullest] / 1e9:.0f} GB per device in phase {fullest} ({most})",
                f"<= {self.device_bytes / 1e9:.0f} GB",
                "Use more devices, a larger --parallel.tensor, --parallel.pipeline or --parallel.expert, or a smaller "
                f"--rollout.engine.{size}. All of it: specactor plan RECIPE",
            )


def _of_rounds(
    config: Config, shape: TransformerShape, drafts: Sequence[TransformerShape]
) -> dict[str, dict[Phase, float]]:
    """Return what an engine rank keeps for CUDA graphs of the policy and of draft models: the places of keys, with
    Triton's attention what each part of those gives, gathered logits, and logits in float32 once for each vocabulary;
    and what graphs hold themselves."""
    engine, speculates = config.rollout.engine, config.rollout.speculation.mode != "off"
    width, tensor = BYTES[config.model.dtype], config.parallel.engine_tensor
    requests, context = engine.max_running_requests, longest_text(config, sys.maxsize)
    rows = requests * (config.rollout.speculation.max_window + 1 if speculates else 1)
    of_drafts = min(rows, max(requests, DRAFT_ROWS))
    kept = 4.0 * rows * sum({model.vocab for model in (shape, *drafts)})
    in_graphs = 0.0
    for model, most in ((shape, rows), *((draft, of_drafts) for draft in drafts)):
        kept += most * _of_keys(engine, context, model, tensor) + (width * rows * model.vocab if tensor > 1 else 0)
        in_graphs += most * width * model.vocab / tensor
    return {
        "rows of rounds": dict.fromkeys(PHASES, kept),
        "logits in graphs": dict.fromkeys(("rollout", "sync"), in_graphs),
    }


def _of_keys(engine: EngineConfig, context: int, model: TransformerShape, tensor: int = 1) -> float:
    """Return the bytes that attention keeps for a row: places of keys, and what parts of them give."""
    if engine.attention_on(gpu=True)["attention_backend"] not in ("triton", "tiles"):
        return 4.0 * context
    parts = -(-context // SPLIT) * model.heads / tensor
    return 8.0 * context + 4.0 * parts * model.head_dim


def of_job(
    config: Config,
    layout: Layout,
    shape: TransformerShape,
    device_bytes: float,
    drafts: Sequence[TransformerShape] = (),
    learns: TransformerShape | None = None,
) -> Memory:
    """Return the memory of a device with a trainer and an engine rank; `drafts` are in every engine, beside an MTP
    layer, and `learns` on every rank."""
    width = BYTES[config.model.dtype]
    held = max(map(sum, parameters(shape, layout)))
    optimizer = optimizer_bytes(config, shape, layout) if config.train.optimizer_state != "host" else 0.0
    tokens = config.train.tokens_per_microbatch  # of each rank: with context parallelism a sequence has more
    engine = config.rollout.engine
    static = engine.memory_fraction * device_bytes
    weights = width * shape.params / config.parallel.engine_tensor
    buckets = 2.0 * config.weights_sync.bucket_bytes
    rows: dict[str, dict[Phase, float]] = {
        "policy, trainer": dict.fromkeys(PHASES, width * held),
        "gradients": {"train": GRADIENT_BYTES * held},
        # In float32 it stays (`trainer.optimizer.offload`).
        "optimizer": dict.fromkeys(("train",) if width < 4 else PHASES, optimizer),
        "activations": {"train": activations(config, layout, shape, tokens)},
        # 10 bytes of each: in bfloat16, twice, in float32 for the loss, and its gradient
        "logits": {"train": 10 * (1 + shape.mtp_layers) * tokens * shape.vocab / layout.tensor},
        "policy, engine": {"rollout": weights, "sync": weights},
        "keys and values": dict.fromkeys(("rollout", "sync"), _pool(config, static - weights, [shape])),
        **_of_rounds(config, shape, drafts),
        "buckets": {"sync": buckets},
        # of CUDA contexts of a rank and an engine rank, NCCL's buffers and fragmentation: assumed
        "overhead": dict.fromkeys(PHASES, 3e9),
    }
    if config.algorithm.advantage == "gae":
        # Its weights leave the device, too. Too much is counted: all of an output layer, and an MTP layer.
        rows["critic"] = dict(rows["optimizer"]) | {"train": (width + GRADIENT_BYTES) * held + optimizer}
    if learns is not None:
        rows["draft model, trainer"] = _of_draft_training(config, layout, learns)
        # The policy's comes before it, and has given back what it took.
        more = _draft_microbatch(config, learns) - rows["activations"]["train"] - rows["logits"]["train"]
        rows[MICRO_BATCH] = {"train": max(0.0, more)}
    rows |= _of_drafting(config, shape, drafts, static - weights)
    return Memory(rows=rows, device_bytes=device_bytes)


def _pool(config: Config, left: float, models: Sequence[TransformerShape], states: float = 0.0) -> float:
    """Return what an engine rank's pool takes of what is left for it: all, or what so many tokens take."""
    tokens = config.rollout.engine.max_total_tokens
    return max(0.0, left if tokens is None else min(left, tokens * (_keys(config, models) + states)))


def _keys(config: Config, models: Sequence[TransformerShape]) -> float:
    """Return the bytes of a token's keys and values on an engine rank."""
    tensor, width = config.parallel.engine_tensor, BYTES[config.model.dtype]
    # Ranks beyond the key-value heads have copies of them.
    return sum(replace(of, param_bytes=width).kv_bytes_per_token / min(tensor, of.kv_heads) for of in models)


def _of_drafting(
    config: Config, shape: TransformerShape, drafts: Sequence[TransformerShape], pool: float
) -> dict[str, dict[Phase, float]]:
    """Return what an engine's draft models take of what was left for the policy's pool."""
    mtp = shape.mtp_layers if config.rollout.speculation.uses_mtp else 0
    if not drafts and not mtp:
        return {}
    width = BYTES[config.model.dtype]
    # Their keys and values are in the same pool (`draft_runner`); weights are there before the pool is made.
    in_all = sum(draft.weights_bytes for draft in drafts) + (width * shape.mtp_params if mtp else 0)
    drafter = in_all / config.parallel.engine_tensor
    # So are the hidden states that a head, or an MTP layer, reads: whole on each rank.
    states = width * (sum(draft.reads for draft in drafts) + mtp * shape.hidden)
    models = [replace(shape, layers=shape.layers + mtp), *drafts]
    pool = _pool(config, pool - drafter, models, states)
    of_states = pool * states / (_keys(config, models) + states)
    taken = {"draft model" if drafts else "MTP layer": drafter, "keys and values": pool - of_states}
    if states:
        taken["hidden states"] = of_states
    return {name: dict.fromkeys(("rollout", "sync"), number) for name, number in taken.items()}


def _of_lending(config: Config, policy: TransformerShape, device_bytes: float, engines: int) -> dict[Phase, float]:
    """Return what a drafter process takes of an engine's first GPU, of so many on its host: awake beside all that the
    engine has, which keeps its pool; asleep what SGLang does not release."""
    engine, draft = config.rollout.engine, _lent(config, policy)
    requests = engines * engine.max_running_requests
    # As `DraftBackend` asks for, whole on one device.
    tokens = (engine.max_total_tokens or 0) + requests * BLOCK_TOKENS
    left = engine.memory_fraction * device_bytes - draft.weights_bytes
    pool = max(0.0, min(left, tokens * draft.kv_bytes_per_token))
    rows = max(requests, DRAFT_ROWS)
    kept = rows * (4.0 * draft.vocab + _of_keys(EngineConfig(), longest_text(config, sys.maxsize), draft))
    in_graphs = rows * draft.param_bytes * draft.vocab
    return {"rollout": draft.weights_bytes + pool + kept + in_graphs, "train": kept, "sync": kept}


def _lent(config: Config, policy: TransformerShape) -> TransformerShape:
    """Return the one draft model of processes that have no devices."""
    [name] = config.rollout.speculation.in_processes.values()
    return replace(_draft(policy, name), param_bytes=BYTES[config.model.dtype])


def _lenders(config: Config, devices: int) -> int:
    """Return the most engines of a host with so many GPUs that have a drafter asleep on theirs."""
    engines = min(config.parallel.engines, devices // config.parallel.engine_tensor)
    # One alone has nobody to draft for; without a size no drafter starts on GPUs (`drafter_start.make_specs`).
    lends = config.lends_devices and engines >= 2 and config.rollout.engine.max_total_tokens is not None
    return engines if lends else 0


def _of_draft_training(config: Config, layout: Layout, draft: TransformerShape) -> dict[Phase, float]:
    """Return what is there beside its micro-batches."""
    gradients = 2 * GRADIENT_BYTES if layout.world > 1 else GRADIENT_BYTES  # DDP has its own beside them
    if config.distillation.zero_stage:  # DeepSpeed's memory is not handed over; at most:
        state = 0 if config.distillation.offload else DRAFT_BYTES / layout.world
        return dict.fromkeys(PHASES, (BYTES["float32"] + GRADIENT_BYTES + state) * draft.params)
    return {"train": (DRAFT_BYTES + gradients) * draft.params}


def _draft_microbatch(config: Config, draft: TransformerShape) -> float:
    """Return the bytes of a micro-batch in float32, whole on every rank, of which nothing is computed again but the
    loss: what PyTorch keeps of every layer for its gradients, and logits. A head is computed once per step."""
    tokens = DraftTrainingConfig.of(config.distillation).tokens_per_microbatch
    norms, mlp = 6 * draft.hidden, 4 * draft.intermediate
    attention = draft.head_dim * (6 * draft.heads + 2 * draft.kv_heads)
    layers = BYTES["float32"] * tokens * draft.layers * (norms + attention + mlp)
    if draft.reads:  # its attention keeps each pair of tokens, and a copy of that
        layers += 2 * BYTES["float32"] * draft.heads * tokens**2
    logits = BYTES["float32"] * tokens * draft.vocab  # whose place their gradients take
    of_loss = min(24 * PART_LOGITS, 6 * logits)  # which computes with so many at once
    return (HEAD_STEPS if draft.reads else 1) * (layers + logits) + of_loss


def host_memory_of(config: Config, ranks: int, devices: int) -> Memory:
    """Return the memory of a host with so many `devices`, without what processes themselves take. Raises as
    `memory_of`."""
    layout, shape = _layout(config, ranks)
    width, held, hosted = BYTES[config.model.dtype], max(map(sum, parameters(shape, layout))), min(devices, ranks)
    learning = 1 + (config.algorithm.advantage == "gae")
    saved = shape.params + shape.mtp_params
    optimizer = learning * hosted * optimizer_bytes(config, shape, layout)
    gradients = GRADIENT_BYTES / (ADAM_BYTES["host"] + MAIN_WEIGHT_BYTES) * optimizer  # copies, for Adam to read
    on_host = config.train.optimizer_state == "host"
    lenders = _lenders(config, hosted)
    asleep = dict.fromkeys(PHASES, lenders * float(_lent(config, shape).weights_bytes)) if lenders else {}
    rows: dict[str, dict[Phase, float]] = {
        # In bfloat16 it is in locked memory, which is kept, while engines have the devices.
        "optimizer": dict.fromkeys(PHASES, optimizer) if width < 4 else {},
        "gradients": dict.fromkeys(PHASES, gradients) if on_host else {},
        "reference": dict.fromkeys(PHASES, width * held * hosted) if config.algorithm.kl_coef else {},
        "draft model, trainer": _on_hosts(config, shape, hosted),
        LENT: asleep,
        "buckets": dict.fromkeys(PHASES, 2.0 * config.weights_sync.bucket_bytes * hosted),
        # What its ranks hand over and, as mirrors, what other hosts do; in a first push what is kept of that. Where
        # there is no room for it, weights go through the buckets alone.
        "policy, for engines": dict.fromkeys(PHASES, width * shape.params),
        # Gathered by ranks that hold a whole model between them, which are of one host where it has as many devices.
        # Every rank reads the state of all its parameters.
        "checkpoint": {"train": learning * (ADAM_BYTES["float32"] + MAIN_WEIGHT_BYTES) * max(saved, hosted * held)},
    }
    return Memory(rows={name: row for name, row in rows.items() if row}, device_bytes=math.inf)


def _on_hosts(config: Config, policy: TransformerShape, hosted: int) -> dict[Phase, float]:
    """Return the locked host memory, by phase, that holds every rank's draft model."""
    learns = _learns(config, policy)
    if learns is None or (config.distillation.zero_stage and not config.distillation.offload):
        return {}
    divided = DRAFT_BYTES * learns.params
    return dict.fromkeys(PHASES, divided if config.distillation.zero_stage else divided * hosted)


def checkpoint_bytes(config: Config) -> float:
    """Return what a checkpoint takes on disk, without a draft model: weights, main weights and moments, of the critic,
    too. Raises as `named_shape`."""
    shape, learning = _own_shape(config), 1 + (config.algorithm.advantage == "gae")
    each = BYTES[config.model.dtype] + MAIN_WEIGHT_BYTES + ADAM_BYTES["float32"]
    return float(learning * each * (shape.params + shape.mtp_params))


def optimizer_bytes(config: Config, shape: TransformerShape, layout: Layout) -> float:
    """Return the bytes of Adam's moments and main weights of the fullest rank, wherever they are."""
    expert_copies = layout.world // (layout.expert * layout.expert_tensor * layout.pipeline)
    each = ADAM_BYTES[config.train.optimizer_state] + (MAIN_WEIGHT_BYTES if config.model.dtype != "float32" else 0)
    copies = layout.data * layout.context
    return each * max(dense / copies + experts / expert_copies for dense, experts in parameters(shape, layout))


def parameters(shape: TransformerShape, layout: Layout) -> list[tuple[float, float]]:
    """Return the parameters of a rank of each stage, (dense, experts')."""
    router, last = shape.hidden * shape.experts, layout.pipeline - 1
    layer = (shape.attention_params + shape.mlp_params - router) / layout.tensor + router
    layer_experts = shape.experts * shape.expert_params / (layout.expert * layout.expert_tensor)
    found = []
    for stage, layers in enumerate(stage_layers(shape.layers, layout.pipeline)):
        ends = (stage == 0) + (stage == last and not (last == 0 and shape.tied))
        dense = layers * layer + (ends * shape.head_params + shape.mtp_params) / layout.tensor
        found.append((dense, layers * layer_experts))
    return found


def activations(config: Config, layout: Layout, shape: TransformerShape, tokens: float) -> float:
    """Return a rank's bytes: what layers keep, and all of the computed one."""
    # A pipeline's first stage begins as many micro-batches as there are stages before one of them comes back.
    layers = layout.pipeline * max(stage_layers(shape.layers, layout.pipeline))
    whole = 34 * tokens * shape.hidden / layout.tensor  # with fused attention: arXiv 2205.05198, table 2
    experts = BYTES["bfloat16"] * tokens * shape.experts_per_token * (2 * shape.hidden + 3 * shape.expert_intermediate)
    one = whole + experts / layout.tensor
    # Sequence parallelism divides what lies between layers among the tensor-parallel ranks.
    between = BYTES[config.model.dtype] * tokens * shape.hidden / layout.tensor
    # An MTP layer's pass is not recomputed: it ends before that of any other layer is.
    all_of_it = (layers + shape.mtp_layers) * one
    return {"none": all_of_it, "selective": all_of_it, "full": layers * between + one}[config.train.recompute]


def memory_of(config: Config, ranks: int, device_bytes: float, host_devices: int = sys.maxsize) -> Memory:
    """Return the memory of a recipe's devices, one per rank, on hosts with so many. Raises ConfigError for an
    impossible layout, PlanError for an unknown shape."""
    layout, shape = _layout(config, ranks)
    drafts = [_draft(shape, name) for name in config.rollout.speculation.in_engines.values()]
    memory = of_job(config, layout, shape, device_bytes, drafts, _learns(config, shape))
    if not (engines := _lenders(config, min(ranks, host_devices))):
        return memory
    return replace(memory, rows={**memory.rows, LENT: _of_lending(config, shape, device_bytes, engines)})


def _learns(config: Config, policy: TransformerShape) -> TransformerShape | None:
    name = config.rollout.speculation.first_draft_model
    return _draft(policy, name) if name and config.drafter_learns else None


def _draft(policy: TransformerShape, name: str) -> TransformerShape:
    return _made(policy, name) if name in MADE_BY_WARM_UP else named_shape(name, "rollout.speculation.draft_model")


def _layout(config: Config, ranks: int) -> tuple[Layout, TransformerShape]:
    shape = _own_shape(config)
    sizes = ModelShape(
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        num_experts=shape.experts,
        vocab_size=shape.vocab,
        max_position=sys.maxsize,
    )
    return check(config, ranks, sizes), shape


def _made(policy: TransformerShape, name: str) -> TransformerShape:
    return replace(
        policy,
        name=name,
        layers=1,
        intermediate=policy.intermediate or policy.experts_per_token * policy.expert_intermediate,
        experts=0,
        experts_per_token=0,
        reads=min(3, policy.layers) * policy.hidden if name == WARM_UP_HEAD else 0,
    )


def _own_shape(config: Config) -> TransformerShape:
    tiny = config.model.tiny
    if tiny is None:
        return named_shape(config.model.path, "model.path")
    from specactor.data.tokenizer import VOCAB_SIZE

    return TransformerShape(
        name="tiny",
        layers=tiny.num_layers,
        hidden=tiny.hidden_size,
        heads=tiny.num_heads,
        kv_heads=tiny.num_kv_heads,
        head_dim=tiny.head_dim,
        intermediate=0,
        vocab=VOCAB_SIZE,
        experts=tiny.num_experts,
        experts_per_token=tiny.experts_per_token,
        expert_intermediate=tiny.expert_size,
    )


def named_shape(name: str, setting: str = "model") -> TransformerShape:
    """Return a built-in shape, or a folder's. Raises ConfigError for other names."""
    if name in SHAPES:
        return SHAPES[name]
    file = Path(name) / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError):
        if file.parent.name in SHAPES and not file.exists():
            return SHAPES[file.parent.name]  # a folder of that name, which is elsewhere
        raise ConfigError.at(
            setting, name, f"a folder with config.json or one of {', '.join(SHAPES)}", "Check the name or the path."
        ) from None
    return TransformerShape.of_config(config, Path(name).name)
