"""Script: the trainer in bfloat16 in one process, which Megatron wraps as it does on a GPU. Prints JSON.

Usage: python -m tests.trainer.bfloat16_script MODEL_DIR FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from specactor.cpu import megatron as cpu_platform

cpu_platform.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from specactor.cpu.sglang import process_environment  # noqa: E402
from specactor.parallel.collective import destroy_groups, init_groups  # noqa: E402
from specactor.parallel.layout import Layout  # noqa: E402
from specactor.trainer import checkpoint, model_files  # noqa: E402
from specactor.trainer.model import DETERMINISTIC, Policy, settle_arithmetic  # noqa: E402
from specactor.trainer.policy import PolicyTrainer  # noqa: E402
from specactor.trainer.shards import RankShards  # noqa: E402
from tests.trainer import policy_cases as cases  # noqa: E402


def bits(pairs: Any) -> dict[str, str]:
    """Name -> dtype and exact contents."""
    return {
        name: f"{tensor.dtype} {hash(tensor.contiguous().view(torch.uint8).numpy().tobytes())}"
        for name, tensor in pairs
    }


def handed_over(policy: Policy) -> dict[str, str]:
    """Everything that the only rank hands over in a weight sync."""
    return bits(pair for one_round in RankShards(policy).rounds(2**16) for pair in one_round)


def fused_names(policy: Policy) -> list[str]:
    """Names under which a policy of TransformerEngine's layers, which none of the local ones has, meets mbridge."""
    return [name for chunk in replace(policy, local_spec=False).for_bridge() for name, _ in chunk.named_parameters()]


def gathers_on_the_host() -> bool:
    """What Megatron is told on a GPU of how it gathers the optimizer for a checkpoint."""
    with mock.patch("torch.cuda.is_available", return_value=True):
        return bool(model_files._metadata()["distrib_optim_fully_reshardable_mem_efficient"])


def arithmetic() -> dict[str, Any]:
    """As `settle_arithmetic` has left it."""
    return {
        "torch": torch.are_deterministic_algorithms_enabled(),
        "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        **{name: os.environ.get(name, "") for name in (*DETERMINISTIC, "NVIDIA_TF32_OVERRIDE")},
        "of engines": sorted({*DETERMINISTIC, "NVIDIA_TF32_OVERRIDE"} & process_environment([0]).keys()),
    }


def main(model_dir: str, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    config = cases.config(model_dir, {})
    model, train = replace(config.model, dtype="bfloat16"), replace(config.train, deterministic=True)
    config = replace(config, model=model, train=train)
    layout = Layout(world=1, tensor=1, pipeline=1, context=1, expert=1, expert_tensor=1)
    init_groups(layout, config.parallel, seed=0, local_rank=0)
    trainer = PolicyTrainer(config, layout, Path(model_dir))
    before = handed_over(trainer.policy)
    learn, types = trainer._objective, set()

    def watched(batch: Any, logits_1TV: torch.Tensor) -> Any:
        types.add(str(logits_1TV.dtype))
        return learn(batch, logits_1TV)

    trainer._objective = watched  # type: ignore[assignment]
    loss = trainer.train_step(cases.sequences(), learning_rate=1e-2).loss
    after, whole = handed_over(trainer.policy), bits(trainer.policy.named_weights())
    saved = folder / "checkpoints"
    checkpoint.write(trainer, saved, 1, {"steps_done": 1})()
    again = trainer.train_step(cases.sequences(1), learning_rate=1e-2).loss
    logits, learned = sorted(types), handed_over(trainer.policy)
    checkpoint.load(trainer, saved / "step-000001")
    restored = handed_over(trainer.policy)
    trainer._wrapper = {}
    repeated = trainer.train_step(cases.sequences(1), learning_rate=1e-2).loss
    result = {
        "wrapper": type(trainer.policy.chunks[0]).__name__,
        "names": fused_names(trainer.policy),
        "dtypes": sorted({text.split()[0] for text in after.values()}),
        "changed": before != after and set(before) == set(after),
        "shards_are_the_model": after == whole,
        "restored": restored == after,
        "logits": logits,
        "copied logits": sorted(types - {*logits}),
        "learned as from copied logits": handed_over(trainer.policy) == learned,
        "in_shared_memory": RankShards(trainer.policy, trainer.shared_parameters).held(0) is not None,
        "losses": [loss, again, repeated],
        "gathers_on_the_host": gathers_on_the_host(),
        "deterministic": arithmetic() | {"megatron": trainer.policy.config.deterministic_mode},
    }
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    settle_arithmetic("bfloat16", deterministic=True)
    result["the user's"] = arithmetic()
    settle_arithmetic("float32", deterministic=False)
    result["float32"] = arithmetic()
    print(json.dumps(result))
    destroy_groups()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
