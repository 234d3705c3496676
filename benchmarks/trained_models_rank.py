"""A trainer rank of a warm-up, under torchrun: python -m benchmarks.trained_models_rank TASK. Prints RESULT FOLDER.

The steps are those by which a run makes the model that reinforcement learning starts from, so the two share the cache.
"""

from __future__ import annotations

import os
import sys

from benchmarks.trained_models import task_recipe
from specactor.data.dataset import build_dataset
from specactor.data.tokenizer import load_tokenizer
from specactor.parallel.collective import Collective, destroy_groups, init_groups
from specactor.parallel.layout import check, longest_prompt
from specactor.progress import Progress
from specactor.run import model_shape
from specactor.trainer.warmup import initial_model, warmed_up_model


def main() -> None:
    config = task_recipe(sys.argv[1])
    shape = model_shape(config)
    layout = check(config, int(os.environ["WORLD_SIZE"]), shape)
    init_groups(layout, config.parallel, seed=config.seed, local_rank=int(os.environ["LOCAL_RANK"]))
    collective = Collective()
    start = initial_model(config, collective)
    tokenizer = load_tokenizer(start)
    room = longest_prompt(config, shape.max_position)
    held_out = build_dataset(config.data.eval_source(config.eval.problems), tokenizer, max_prompt_tokens=room)
    problems = build_dataset(config.data.train_source, tokenizer, max_prompt_tokens=room).without(held_out)
    progress = Progress(1, enabled=False, quiet=True)
    folder = warmed_up_model(config, layout, start, problems, tokenizer, collective, progress)
    if collective.rank == 0:
        print(f"RESULT {folder}", flush=True)
    destroy_groups()


if __name__ == "__main__":
    main()
