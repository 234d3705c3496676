"""A trainer rank of a warm-up, under torchrun: python -m benchmarks.trained_models_rank TASK. Prints RESULT FOLDER.

The steps are those by which a run makes the model that reinforcement learning starts from, so the two share the cache.
"""

from __future__ import annotations

import os
import sys

from specactor.cpu import megatron

megatron.install()  # before megatron.core is imported, as in launch/train_moe.py

from benchmarks.trained_models import task_recipe  # noqa: E402
from specactor.data.dataset import build_dataset  # noqa: E402
from specactor.data.tokenizer import load_tokenizer  # noqa: E402
from specactor.parallel.collective import Collective, destroy_groups, init_groups  # noqa: E402
from specactor.parallel.layout import check, longest_prompt  # noqa: E402
from specactor.progress import Progress  # noqa: E402
from specactor.run import model_shape  # noqa: E402
from specactor.trainer.warmup import initial_model, warmed_up_model  # noqa: E402


def main() -> None:
    config = task_recipe(sys.argv[1])
    shape = model_shape(config)
    layout = check(config, int(os.environ["WORLD_SIZE"]), shape)
    init_groups(layout, config.parallel, seed=config.seed, local_rank=int(os.environ["LOCAL_RANK"]))
    collective = Collective()
    start = initial_model(config, collective)
    tokenizer = load_tokenizer(start)
    room = longest_prompt(config, shape.max_position)
    held_out = build_dataset(config.data.eval_sources(config.eval.problems)["eval"], tokenizer, max_prompt_tokens=room)
    problems = build_dataset(config.data.train_source, tokenizer, max_prompt_tokens=room).without(held_out)
    progress = Progress(1, quiet=True)
    folder = warmed_up_model(config, layout, start, problems, tokenizer, collective, progress)
    if collective.rank == 0:
        print(f"RESULT {folder}", flush=True)
    destroy_groups()


if __name__ == "__main__":
    main()
