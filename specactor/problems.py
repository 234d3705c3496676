"""A run's problems: what it learns from, and what is held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from specactor import hooks
from specactor.config import Config
from specactor.data.dataset import Alone, Dataset, build_datasets
from specactor.data.environment import environment_of
from specactor.errors import ConfigError
from specactor.parallel.collective import Collective
from specactor.trainer.warmup import find_solver
from specactor.types import Problem


def problems_of(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    prompt_limit: str,
    note: Callable[[str], object],
    collective: Collective | Alone,
) -> tuple[Dataset, dict[str, Dataset]]:
    """Return what is learned from, and disjoint held-out sets; `note` is told what is done in silence else.
    Collective."""
    data, count = config.data, config.eval.problems
    learned, held_out = [data.train_source, *data.mixed_sources], data.eval_sources(count) if count else {}
    sources = [*learned, *held_out.values()]
    sets = build_datasets(
        sources, tokenizer, max_prompt_tokens=max_prompt_tokens, prompt_limit=prompt_limit, collective=collective
    )

    def chosen() -> tuple[Dataset, dict[str, Dataset]]:
        if config.warmup.solver:
            find_solver(config.warmup.solver)  # a wrong path is found before anything is started
        hooks.check(config)
        _check_environments(config, sets[: len(learned)])
        evaluated = {name: (held_out[name].path, of) for name, of in zip(held_out, sets[len(learned) :], strict=True)}
        return _parted(sets[: len(learned)], evaluated, count, tokenizer, note)

    return collective.together("data", chosen)


def _check_environments(config: Config, sets: Sequence[Dataset]) -> None:
    talks = next((problem.verifier for part in sets for problem in part if environment_of(problem.verifier)), "")
    if talks and config.rollout.partial:
        raise ConfigError.at(
            *("rollout.partial", True, f"another value with environments ({talks})"),
            "What an environment holds is in no checkpoint.",
        )


def _parted(
    sets: list[Dataset],
    evaluated: Mapping[str, tuple[str, Dataset]],
    count: int,
    tokenizer: PreTrainedTokenizerBase,
    note: Callable[[str], object],
) -> tuple[Dataset, dict[str, Dataset]]:
    held_out: dict[str, Dataset] = {}
    for name, (path, whole) in evaluated.items():
        held_out[name] = Dataset(whole[:count])
        if len(whole) > count:
            note(f"{path}: of {len(whole)} held-out problems the first {count} are evaluated (eval.problems).")
        # Also of those that are not evaluated none is learned from.
        before, sets = sum(map(len, sets)), [part.without(whole) for part in sets]
        if left_out := before - sum(map(len, sets)):
            note(f"{left_out} of {before} problems to learn from are among those of {name}, and are left out.")
    if tokenizer.chat_template and any(_is_plain(part[0], tokenizer) for part in sets):
        note("Prompts are taken as they are, without the model's chat template. Rows with messages go through it.")
    return Dataset.of(sets) if len(sets) > 1 else sets[0], held_out


def _is_plain(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a prompt is a text that no chat template has made. The first token may be special in any text."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    made = "messages" in problem.metadata or bool(special & {*problem.prompt_ids[1:]})
    return not (made or environment_of(problem.verifier))
