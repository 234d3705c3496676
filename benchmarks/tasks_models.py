"""A little model for each task of `tasks_answers` and one for all of them, draft models cut from them, and what drafts
of every method would have brought to their responses.

Targets learn worked answers and draft models the target's law, both by the package's drafter trainer. Responses are
sampled by transformers; then they are replayed in rounds, as an engine verifies: `suffix` itself drafts, and where the
draft model is right is computed with noise that is drawn given the response.

Shape legend: N response tokens, V vocabulary, T tokens of one response.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks import tasks_answers
from benchmarks.acceptance_laws import Hits
from benchmarks.distillation import learn, sampled
from benchmarks.tasks_answers import TASKS, worked
from benchmarks.trained_models import DraftShape, cached
from specactor.config import TinyModelConfig
from specactor.data.tiny_model import make_tiny_model
from specactor.data.tokenizer import load_tokenizer
from specactor.rollout.sglang.draft_runner import DRAFT_TEMPERATURE
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.suffix import SuffixDrafter
from specactor.trainer.drafter import acceptance, init, losses
from specactor.trainer.drafter.buffer import TrainingExample

MIX = "mix"
SHAPE = init.RandomStart(hidden_size=64, num_layers=2, intermediate_size=192)
LEARNS = DraftShape(steps=250, batch_size=32, learning_rate=4e-3)  # the target, from worked answers
OF_ALL = replace(LEARNS, steps=350)  # the target of all tasks
DRAFTS = DraftShape(steps=80, batch_size=32, learning_rate=3e-3, sequences=768)
WORKED, OF_MIX = 2500, 500  # problems per task to learn from
PROMPTS, PROMPTS_OF_MIX = 32, 12  # held out, per task
GROUP_SIZE, VISITS = 8, 2
RUNNING, WINDOW = 64, 4
MAX_NEW_TOKENS = 100
HELD_OUT_SEED = 10**7
METHODS = ("suffix", "model", "both")


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out response, without its first token, which a prefill gives."""

    task: str
    prompt: int  # those with equal numbers are siblings
    prompt_tokens: int
    visit: int
    tokens: int
    entropy: float  # of the policy, nats per token
    rounds: dict[str, int]  # by method; plain decoding has as many as tokens
    drafted: dict[str, int]  # draft tokens that were verified


def names_of(task: str) -> list[str]:
    return list(TASKS) if task == MIX else [task]


def base() -> Path:
    """Return a model that gives the others their tokenizer and vocabulary."""
    tiny = TinyModelConfig(num_layers=1, hidden_size=64, num_experts=2, expert_size=32)
    return cached("tasks-base", (asdict(tiny),), lambda folder: make_tiny_model(tiny, 0, folder))


def target_of(task: str) -> Path:
    """Return the model that learned worked answers to the task's problems."""

    def make(folder: Path) -> None:
        init.make_draft_model(base(), folder, SHAPE)
        model = init.read_model(folder)
        learn(model, examples(task), _learns(task))
        init.write_model(model, folder, tokenizer=base())

    return cached(f"tasks-target-{task}", _parts(task), make)


def draft_of(task: str) -> Path:
    """Return the draft model: the target's first layer, which learned the target's law on worked answers."""

    def make(folder: Path) -> None:
        init.make_draft_model(target_of(task), folder, init.TargetStart(num_layers=1))
        target, draft = init.read_model(target_of(task)), init.read_model(folder)
        known = examples(task)
        taught = [known[i] for i in np.random.default_rng(0).permutation(len(known))[: DRAFTS.sequences].tolist()]
        learn(draft, acceptance.with_top_k(target, taught, top_k=int(target.config.vocab_size)), DRAFTS)
        init.write_model(draft, folder, tokenizer=base())

    return cached(f"tasks-draft-{task}", (_parts(task), asdict(DRAFTS)), make)


def responses_of(task: str) -> list[Response]:
    """Return what every method would have brought to held-out responses, prompt by prompt, of both visits."""

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "responses.json").write_bytes(msgspec.json.encode(_measured(task)))

    counted = [inspect.getsource(of) for of in (_measured, right, replay, held_out)]
    folder = cached(f"tasks-responses-{task}", (_parts(task), asdict(DRAFTS), counted), make)
    return msgspec.json.decode((folder / "responses.json").read_bytes(), type=list[Response])


def _learns(task: str) -> DraftShape:
    return OF_ALL if task == MIX else LEARNS


def _parts(task: str) -> tuple[object, ...]:
    sizes = (WORKED, OF_MIX, PROMPTS, PROMPTS_OF_MIX)
    return (names_of(task), asdict(SHAPE), asdict(_learns(task)), sizes, inspect.getsource(tasks_answers))


def examples(task: str) -> list[TrainingExample]:
    """Return prompts with worked answers, in tokens."""
    tokenizer = load_tokenizer(base())
    end = tokenizer.eos_token_id
    found = []
    for name in names_of(task):
        known = _problems(name, size=OF_MIX if task == MIX else WORKED, seed=0)
        for prompt, answer in known.items():
            first, rest = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer))
            ids = np.array([*first, *rest, end], np.int32)
            found.append(TrainingExample(token_ids=ids, prompt_len=len(first), version=0))
    return found


def _problems(name: str, *, size: int, seed: int) -> dict[str, str]:
    with redirect_stdout(StringIO()):  # the task of programs prints a dot for each
        return worked(name, size=size, seed=seed)


def held_out(task: str) -> dict[tuple[int, ...], str]:
    """Return prompts that no model learns from, with the names of their tasks."""
    tokenizer = load_tokenizer(base())
    found: dict[tuple[int, ...], str] = {}
    for name in names_of(task):
        number = PROMPTS_OF_MIX if task == MIX else PROMPTS
        known = _problems(name, size=WORKED, seed=0)
        fresh = [p for p in _problems(name, size=3 * number, seed=HELD_OUT_SEED) if p not in known]
        found |= {tuple(tokenizer.encode(p, add_special_tokens=False)): name for p in fresh[:number]}
    return found


def _measured(task: str) -> list[Response]:
    target, draft = init.read_model(target_of(task)), init.read_model(draft_of(task))
    task_of = held_out(task)
    order = [prompt for prompt in task_of for _ in range(GROUP_SIZE * VISITS)]
    by_prompt = defaultdict(list)
    for example in sampled(target, order, MAX_NEW_TOKENS, 1):
        by_prompt[tuple(example.token_ids[: example.prompt_len].tolist())].append(example)
    visits = [
        [x for prompt in task_of for x in by_prompt[prompt][v * GROUP_SIZE : (v + 1) * GROUP_SIZE]]
        for v in range(VISITS)
    ]
    prompts = list(task_of)
    drafters = {method: SuffixDrafter() if method != "model" else None for method in METHODS}
    found: list[Response] = []
    for visit, responses in enumerate(visits):
        hits, entropies = right(target, draft, responses)
        replays = {method: replay(method, drafters[method], responses, hits, visit) for method in METHODS}
        for i, response in enumerate(responses):
            prompt = prompts[i // GROUP_SIZE]
            found.append(
                Response(
                    task=task_of[prompt],
                    prompt=i // GROUP_SIZE,
                    prompt_tokens=len(prompt),
                    visit=visit,
                    tokens=response.response_len - 1,
                    entropy=entropies[i],
                    rounds={method: rounds[i] for method, (rounds, _) in replays.items()},
                    drafted={method: drafted[i] for method, (_, drafted) in replays.items()},
                )
            )
    return [one for one in found if one.tokens]


@torch.no_grad()
def right(target: Any, draft: Any, responses: Sequence[TrainingExample]) -> tuple[list[Hits], list[float]]:
    """Return per response where the draft model's token is the response's [T], and the policy's mean entropy."""
    chance = torch.Generator().manual_seed(2)
    hits: list[Hits] = [np.zeros(0, np.bool_)] * len(responses)
    entropies = [0.0] * len(responses)
    for members in losses.plan_micro_batches([len(x.token_ids) for x in responses], 1, 4096)[0]:
        batch = losses.build([responses[i] for i in members], torch.device("cpu"))
        logp_NV, logq_NV = (
            losses.draft_logprobs(
                model(input_ids=batch.tokens_BT, use_cache=False).logits.flatten(0, 1)[batch.row_N],
                batch.temperatures_N,
            ).double()
            for model in (target, draft)
        )
        noise_NV = acceptance.noise_given(logp_NV, batch.targets_N, chance)
        right_N = (logq_NV / DRAFT_TEMPERATURE + noise_NV).argmax(1) == batch.targets_N
        entropy_N = torch.special.entr(logp_NV.exp()).sum(1)
        sizes = [responses[i].response_len for i in members]
        for i, own, surprise in zip(members, torch.split(right_N, sizes), torch.split(entropy_N, sizes), strict=True):
            hits[i], entropies[i] = own.numpy(), float(surprise.mean())
    return hits, entropies


def replay(
    method: str, drafter: SuffixDrafter | None, responses: Sequence[TrainingExample], hits: Sequence[Hits], visit: int
) -> tuple[list[int], list[int]]:
    """Return rounds and verified draft tokens of every response, of which RUNNING decode together.

    A round of `both` verifies two drafts as a tree, and keeps the longer right part."""
    num_rounds, num_drafted = [0] * len(responses), [0] * len(responses)
    waiting = list(range(len(responses)))[::-1]
    running: dict[int, DraftSequence] = {}
    texts = [x.token_ids[x.prompt_len :].tolist() for x in responses]
    while waiting or running:
        while waiting and len(running) < RUNNING:
            i = waiting.pop()
            prompt = tuple(responses[i].token_ids[: responses[i].prompt_len].tolist())
            running[i] = DraftSequence(request_id=f"{visit}.{i}", prompt_ids=prompt)
            if drafter is not None:
                drafter.open(running[i])
            _emit(drafter, running[i], texts[i][:1])
        for i in [i for i, sequence in running.items() if len(sequence.output_ids) == len(texts[i])]:
            if drafter is not None:
                drafter.close(running[i])
            del running[i]
        windows = [WINDOW] * len(running)
        drafts = drafter.propose(list(running.values()), windows) if drafter is not None else [[] for _ in running]
        for (i, sequence), draft in zip(running.items(), drafts, strict=True):
            at = len(sequence.output_ids)
            rest = texts[i][at:]
            of_text = _leading([a == b for a, b in zip(draft, rest, strict=False)])
            of_model = _leading(hits[i][at : at + WINDOW].tolist()) if method != "suffix" else 0
            num_rounds[i] += 1
            num_drafted[i] += len(draft) + (WINDOW - min(of_text, of_model) if method != "suffix" else 0)
            _emit(drafter, sequence, rest[: max(of_text, of_model) + 1])
    return num_rounds, num_drafted


def _emit(drafter: SuffixDrafter | None, sequence: DraftSequence, tokens: list[int]) -> None:
    sequence.output_ids.extend(tokens)
    if drafter is not None:
        drafter.commit(sequence, tokens)


def _leading(right: list[bool]) -> int:
    return right.index(False) if False in right else len(right)
