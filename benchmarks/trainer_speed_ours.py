"""A rank of the policy trainer in the trainer benchmark, started by torchrun.

python -m benchmarks.trainer_speed_ours MODEL_DIR FOLDER PARALLEL_AS_JSON
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks import trainer_speed_case as case
from benchmarks.recipes import benchmark_config
from specactor.config import AlgorithmConfig, CorrectionConfig, ParallelConfig, TrainConfig
from specactor.parallel.collective import destroy_groups, init_groups
from specactor.parallel.layout import ModelShape, check
from specactor.trainer.policy import PolicyTrainer

TOKENS_PER_MICROBATCH = [2048, 4096, 8192]


def main() -> None:
    import torch
    import torch.distributed as dist

    model_dir, folder, parallel = Path(sys.argv[1]), Path(sys.argv[2]), ParallelConfig(**json.loads(sys.argv[3]))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config = replace(
        benchmark_config(str(model_dir), parallel=parallel),
        algorithm=AlgorithmConfig(
            clip_low=case.CLIP, clip_high=case.CLIP, correction=CorrectionConfig(bounds=(0.0, case.TIS_CAP))
        ),
        train=TrainConfig(adam_betas=case.ADAM_BETAS, grad_clip=case.GRAD_CLIP),
    )
    layout = check(config, int(os.environ["WORLD_SIZE"]), ModelShape.read(model_dir))
    init_groups(layout, parallel, seed=0, local_rank=int(os.environ["LOCAL_RANK"]))
    trainer = PolicyTrainer(config, layout, model_dir)
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    batch = case.sequences(vocab_size)

    def step(tokens_per_microbatch: int) -> float:
        trainer.config = replace(config, train=replace(config.train, tokens_per_microbatch=tokens_per_microbatch))
        return trainer.train_step(batch, learning_rate=case.LEARNING_RATE).loss

    case.serve(folder, rank=dist.get_rank(), settings=TOKENS_PER_MICROBATCH, step=step, barrier=dist.barrier)
    destroy_groups()


if __name__ == "__main__":
    main()
