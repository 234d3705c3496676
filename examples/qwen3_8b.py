"""Qwen3-8B, a dense model, on 8 H100 (one node), DAPO on mathematics. Not run by the project's tests.

    torchrun --nproc-per-node 8 launch/train_moe.py qwen3_8b --model.path /models/Qwen3-8B \
        --data.train math_train.jsonl --data.eval math_eval.jsonl
"""

from specactor.config import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    TrackingConfig,
    TrainConfig,
    WeightsSyncConfig,
)


def recipe() -> Config:
    return Config(
        name="qwen3_8b",
        model=ModelConfig(path="models/Qwen3-8B", dtype="bfloat16"),
        data=DataConfig(train="data/math_train.jsonl", eval="data/math_eval.jsonl"),
        parallel=ParallelConfig(tensor=2, expert_tensor=2, engines=4, engine_tensor=2, timeout_s=1800),
        rollout=RolloutConfig(
            prompts_per_step=64,
            group_size=16,
            max_new_tokens=8192,
            engine=EngineConfig(max_running_requests=256, memory_fraction=0.8),
        ),
        algorithm=AlgorithmConfig(
            clip_low=0.2, clip_high=0.28, dynamic_sampling=True, overlong_buffer=1024, aggregation="token_mean"
        ),
        train=TrainConfig(
            steps=500,
            learning_rate=1e-6,
            warmup_steps=10,
            updates_per_step=4,
            weight_decay=0.01,
            tokens_per_microbatch=16_384,
            recompute="selective",
            max_logprob_gap=float(
                "inf"
            ),  # bfloat16 rounds differently in the two engines; importance weights are capped
        ),
        weights_sync=WeightsSyncConfig(bucket_bytes=2**29),
        checkpoint=CheckpointConfig(every=20),
        eval=EvalConfig(problems=500, every=20),
        tracking=TrackingConfig(wandb="online"),
    )
