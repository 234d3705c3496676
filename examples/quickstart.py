"""Tiny mixture of experts on counting bits: learns within minutes on two CPU cores.

    torchrun --nproc-per-node 2 launch/train_moe.py quickstart

The warm-up leaves a model that knows how to show its work and often guesses instead; reinforcement learning teaches it
to work. docs/results/quickstart.md has the curves. The warm-up also makes an EAGLE-3 head, which drafts in every step
and stays as it is. With a model as small as this it is as fast as plain decoding (docs/results/quickstart_speed.md): it
is here to be seen. Without: the recipe quickstart_plain.
"""

from dataclasses import replace

from specactor.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    EngineConfig,
    EvalConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    SpeculationConfig,
    TrainConfig,
    WarmupConfig,
)


def recipe() -> Config:
    base = plain()
    head = SpeculationConfig(mode="coupled", drafters=("model",), draft_model=("warm-up-head",), window=4)
    return replace(base, rollout=replace(base.rollout, speculation=head))


def plain() -> Config:
    return Config(
        name="quickstart",
        model=ModelConfig(path="tiny", dtype="float32"),
        data=DataConfig(
            train="count_bits", params={"min_n": 1, "max_n": 9999, "size": 20_000}, prompt_template="{number}="
        ),
        parallel=ParallelConfig(expert=2),
        warmup=WarmupConfig(solver="examples.quickstart_tasks:solve", steps=(550, 200), learning_rates=(3e-3, 1e-3)),
        rollout=RolloutConfig(
            prompts_per_step=16,
            group_size=8,
            max_new_tokens=64,
            engine=EngineConfig(max_running_requests=128, max_total_tokens=16_384),
        ),
        algorithm=AlgorithmConfig(advantage="grpo", loss="ppo_clip", aggregation="token_mean"),
        # At a constant rate two of three runs fell back in their last steps: docs/results/quickstart.md.
        train=TrainConfig(steps=40, learning_rate=3e-4, schedule="linear", tokens_per_microbatch=4096),
        eval=EvalConfig(problems=256),
    )
