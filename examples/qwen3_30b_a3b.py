"""Qwen3-30B-A3B on 64 H100 (8 nodes of 8), GSPO on mathematics. A production shape; not run by the project's tests.

    sbatch --nodes 8 launch/slurm.sh qwen3_30b_a3b --model.path /models/Qwen3-30B-A3B \
        --rollout.speculation.draft-model /models/Qwen3-0.6B \
        --data.train math_train.jsonl --data.eval math_eval.jsonl --output-dir /shared/runs

Layout: tensor 4 stays inside a node and divides the 4 key-value heads; experts 8 puts 16 of the 128 experts on a
device; data parallelism takes the other factor, 16. Each of the 16 engines spans 4 devices. For longer responses raise
--parallel.context; for less memory --parallel.pipeline 2 (48 layers), with its factor taken from data parallelism.

Drafts come from earlier responses and from Qwen3-0.6B, which has the same tokenizer, whichever is predicted to be
faster; the model is refreshed after every step.
"""

from specactor.config import (
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    DistillationConfig,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    SpeculationConfig,
    TrackingConfig,
    TrainConfig,
    WeightsSyncConfig,
)


def recipe() -> Config:
    return Config(
        name="qwen3_30b_a3b",
        model=ModelConfig(path="models/Qwen3-30B-A3B", dtype="bfloat16"),
        data=DataConfig(train="data/math_train.jsonl", eval=("data/math_eval.jsonl",)),
        parallel=ParallelConfig(tensor=4, expert=8, engines=16, engine_tensor=4),
        rollout=RolloutConfig(
            prompts_per_step=128,
            group_size=16,
            max_new_tokens=8192,
            audit="warn",
            engine=EngineConfig(max_running_requests=256, memory_fraction=0.78),
            speculation=SpeculationConfig(
                mode="auto", drafters=("suffix", "model"), draft_model=("models/Qwen3-0.6B",)
            ),
        ),
        algorithm=AlgorithmConfig(
            loss="gspo",
            aggregation="sequence_mean",
            clip_low=3e-4,
            clip_high=4e-4,
        ),
        train=TrainConfig(
            steps=500,
            learning_rate=1e-6,
            warmup_steps=10,
            updates_per_step=4,
            weight_decay=0.01,
            tokens_per_microbatch=16_384,
            recompute="full",
        ),
        weights_sync=WeightsSyncConfig(bucket_bytes=2**30),
        # a draft model that was pretrained has little to learn: the default rate is for one that was made for the run
        distillation=DistillationConfig(refresh=0.03, learning_rate=1e-5),
        checkpoint=CheckpointConfig(every=20),
        eval=EvalConfig(problems=500, every=20),
        tracking=TrackingConfig(wandb="online"),
    )
