"""Qwen3-8B, a dense model, on 8 H100 (one node), DAPO on mathematics. Not run by the project's tests.

    torchrun --nproc-per-node 8 launch/train_moe.py qwen3_8b --model.path /models/Qwen3-8B \
        --rollout.speculation.draft-model /models/Qwen3-0.6B \
        --data.train math_train.jsonl --data.eval math_eval.jsonl

What is not said here is as in qwen3_30b_a3b.
"""

from dataclasses import replace

from examples import qwen3_30b_a3b
from specactor.config import AlgorithmConfig, Config, WeightsSyncConfig


def recipe() -> Config:
    base = qwen3_30b_a3b.recipe()
    return replace(
        base,
        name="qwen3_8b",
        model=replace(base.model, path="models/Qwen3-8B"),
        parallel=replace(base.parallel, tensor=2, expert=1, expert_tensor=2, engines=4, engine_tensor=2),
        rollout=replace(base.rollout, prompts_per_step=64),
        algorithm=AlgorithmConfig(
            aggregation="token_mean",
            clip_low=0.2,
            clip_high=0.28,
            dynamic_sampling="unequal",
            overlong_buffer=1024,
        ),
        weights_sync=WeightsSyncConfig(bucket_bytes=2**29),
    )
