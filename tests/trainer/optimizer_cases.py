"""Where Adam keeps its state: a bfloat16 model under each setting, beside an Adam in float64, in `layout_script`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from specactor.config import Config
from specactor.errors import SpecActorError
from specactor.parallel.collective import init_groups
from specactor.parallel.layout import Layout
from specactor.trainer import checkpoint, optimizer
from specactor.trainer.policy import PolicyTrainer
from specactor.weights_sync.digest import digest
from tests.trainer import policy_cases as cases

RATE, DECAY, STEPS = 1e-2, 0.1, 3
NAMES = ("param", "exp_avg", "exp_avg_sq")


def config_of(entry: dict[str, Any]) -> Config:
    config = cases.config(entry["model"], {}, {"weight_decay": DECAY})
    config = replace(config, model=replace(config.model, dtype="bfloat16"))
    return replace(config, train=replace(config.train, optimizer_state=entry["state"]))


def kept(trainer: PolicyTrainer) -> Iterator[tuple[Any, torch.Tensor, dict[str, torch.Tensor]]]:
    """(group, what holds the gradient, main weights and moments) of every parameter that this rank updates."""
    optimizer.fill_state(trainer.optimizer)
    for part in optimizer.parts(trainer.optimizer):
        for model_param, (group, order) in part.model_param_group_index_map.items():
            shard = part.optimizer.param_groups[group]["params"][order]
            tensors = part._get_main_param_and_optimizer_states(model_param)
            yield part.optimizer.param_groups[group], shard, {name: tensors[name] for name in NAMES}


def gradient(shard: torch.Tensor) -> torch.Tensor:
    decoupled = getattr(shard, "decoupled_grad", None)
    found = shard.grad if decoupled is None else decoupled
    assert found is not None
    return found.double()


def expected(before: list[Any], gradients: list[torch.Tensor], count: int, rounded: Callable[[Any], Any]) -> list[Any]:
    """AdamW in float64, whose moments are `rounded` after each step."""
    found = []
    for (decay, weight, first, second), grad in zip(before, gradients, strict=True):
        first, second = 0.9 * first + 0.1 * grad, 0.95 * second + 0.05 * grad * grad
        update = first / (1 - 0.9**count) / ((second / (1 - 0.95**count)).sqrt() + cases.ADAM_EPS)
        found.append((decay, weight * (1 - RATE * decay) - RATE * update, rounded(first), rounded(second)))
    return found


def differences(trainer: PolicyTrainer, state: str) -> dict[str, float]:
    """Largest difference of a main weight from the Adam in float64, with the right rounding and with the wrong one."""
    places: dict[str, Callable[[Any], Any]] = {
        "float32": lambda x: x,
        "bfloat16": lambda x: x.float().bfloat16().double(),
    }
    trains = [[(DECAY * g["wd_mult"], *(t[name].double() for name in NAMES)) for g, _, t in kept(trainer)]] * 2
    gradients: list[torch.Tensor] = []
    step = type(trainer.optimizer).step_with_ready_grads

    def seen(self: Any) -> Any:
        gradients[:] = [gradient(shard) for _, shard, _ in kept(trainer)]
        return step(self)

    with mock.patch.object(type(trainer.optimizer), "step_with_ready_grads", seen):
        for count in range(1, STEPS + 1):
            trainer.train_step(cases.sequences(count), learning_rate=RATE)
            trains = [
                expected(one, gradients, count, rounded) for one, rounded in zip(trains, places.values(), strict=True)
            ]
    assert any(bool(g.any()) for g in gradients)
    found = [t["param"].double() for _, _, t in kept(trainer)]
    return {
        name: max(float((one[1] - other).abs().max()) for one, other in zip(theirs, found, strict=True))
        for name, theirs in zip(places, trains, strict=True)
    }


def bits(trainer: PolicyTrainer) -> list[int]:
    own = [digest(tensor.contiguous()) for _, _, tensors in kept(trainer) for tensor in tensors.values()]
    return own + [digest(parameter) for parameter in trainer._parameters()]


def going_on(trainer: PolicyTrainer) -> list[Any]:
    return [[trainer.train_step(cases.sequences(9 + i), learning_rate=RATE).numbers(), bits(trainer)] for i in range(2)]


def check(entry: dict[str, Any]) -> dict[str, Any]:
    state = entry["state"]
    config = config_of(entry)
    layout = Layout(world=int(entry["world"]), tensor=1, pipeline=1, context=1, expert=1, expert_tensor=1)
    init_groups(layout, config.parallel, seed=0, local_rank=0)
    trainer = PolicyTrainer(config, layout, Path(entry["model"]))
    types = sorted({f"{t.dtype} {t.device.type}" for _, _, tensors in kept(trainer) for t in tensors.values()})
    result: dict[str, Any] = {
        "classes": sorted({type(part.optimizer).__name__ for part in optimizer.parts(trainer.optimizer)}),
        "types": types,
        "away": differences(trainer, state),
    }
    saved = checkpoint.write(trainer, Path(entry["root"]), 1, {})()
    before = bits(trainer)
    undisturbed = going_on(trainer)
    trainer.config = config_of(entry | {"state": "host" if state == "float32" else "float32"})
    try:
        checkpoint.load(trainer, saved)
    except SpecActorError as error:
        result["refused"] = f"{type(error).__name__}: {error}"
    trainer.config = config
    fresh = PolicyTrainer(config, layout, Path(entry["model"]))
    checkpoint.load(fresh, saved)
    same = {"loaded": bits(fresh) == before, "resumed": going_on(fresh) == undisturbed}
    mistakes = {
        "bfloat16": mock.patch.object(optimizer.RoundedAdamW, "load_state_dict", torch.optim.AdamW.load_state_dict),
        "host": mock.patch.object(HybridDeviceOptimizer, "_update_fp32_params_by_new_state"),
    }
    if state in mistakes:
        with mistakes[state]:
            checkpoint.load(fresh, saved)
        same["wrong"] = going_on(fresh) == undisturbed
    weights = [t["param"].clone() for _, _, t in kept(trainer)]
    trainer.reset_optimizer()
    same["reset"] = all(
        torch.equal(t["param"], weight) and not t["exp_avg"].any() and not t["exp_avg_sq"].any()
        for (_, _, t), weight in zip(kept(trainer), weights, strict=True)
    )
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [same, result["away"]])
    result |= {name: [ranks[0][name] for ranks in every] for name in same}
    result["away"] = {name: max(ranks[1][name] for ranks in every) for name in result["away"]}
    return result


def check_overlap(entry: dict[str, Any]) -> dict[str, Any]:
    """Steps of several micro-batches with gradients that are summed at the end, in many buckets meanwhile, and so that
    those of the first micro-batch are sent before others are there. Nothing is clipped: the norm is a sum in another
    order."""
    parallel = entry.get("parallel", {})
    config = cases.config(entry["model"], parallel, {"grad_clip": 1e9, "tokens_per_microbatch": 64})
    sizes = {"expert": 1, "pipeline": 1, "tensor": 1, "context": 1} | {
        k: v for k, v in parallel.items() if k != "virtual_pipeline"
    }
    layout = Layout(world=int(entry["world"]), expert_tensor=1, **sizes)
    init_groups(layout, config.parallel, seed=0, local_rank=0)
    found: dict[str, Any] = {}
    for name, overlap, bucket in (
        ("at the end", False, None),
        ("in buckets", True, 5000),
        ("wrong", True, 5000),
    ):
        with mock.patch.multiple(optimizer, OVERLAP=overlap, BUCKET_SIZE=bucket):
            trainer = PolicyTrainer(config, layout, Path(entry["model"]))
        if name == "wrong":
            trainer.policy.config.no_sync_func = None
        try:
            stats = [trainer.train_step(cases.sequences(i), learning_rate=RATE) for i in range(3)]
        except (AssertionError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        found[name] = [digest(parameter) for parameter in trainer._parameters()]
        found[f"buckets, {name}"] = sum(len(buffer.buckets) for chunk in trainer.chunks for buffer in chunk.buffers)
        found[f"micro-batches, {name}"] = stats[-1].num_microbatches
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return {"ranks": every}
