"""Configurations of the benchmarks."""

from __future__ import annotations

from specactor.config import (
    Config,
    DataConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    TinyModelConfig,
    WeightsSyncConfig,
)

HUNDRED_MILLION = TinyModelConfig(
    num_layers=8,
    hidden_size=512,
    num_experts=16,
    expert_size=480,
)
"""A Qwen3-MoE of 100 M parameters."""


def benchmark_config(model_dir: str, *, parallel: ParallelConfig, bucket_bytes: int = 64 * 2**20) -> Config:
    """A run of a model on disk, in float32."""
    return Config(
        name="benchmark",
        model=ModelConfig(path=model_dir, dtype="float32"),
        data=DataConfig(train="count_bits", params={"size": 100}),
        parallel=parallel,
        rollout=RolloutConfig(engine=EngineConfig(max_total_tokens=4096, max_running_requests=16)),
        weights_sync=WeightsSyncConfig(bucket_bytes=bucket_bytes),
    )


def sync_config(
    model_dir: str, *, world: int, expert: int, tensor: int, engine_tensor: int, bucket_bytes: int, repetitions: int
) -> Config:
    """Of the weight sync benchmark."""
    parallel = ParallelConfig(
        expert=expert, tensor=tensor, expert_tensor=1 if expert > 1 else tensor, engine_tensor=engine_tensor
    )
    return benchmark_config(model_dir, parallel=parallel, bucket_bytes=bucket_bytes)
