"""Agents with the openai client on a real engine: neither drafts nor a death of it change what they are told."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from specactor.config import EngineConfig, SpeculationConfig
from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer
from specactor.rollout.conversations import Conversations
from specactor.rollout.pool import EnginePool
from specactor.rollout.sglang.engine_client import EngineSpec
from specactor.types import Problem, RolloutRequest, SamplingParams, Trajectory
from tests.rollout import agents
from tests.rollout.sglang.asking import all_of
from tests.rollout.sglang.test_conversations import WRONG
from tests.rollout.sglang.test_verify_worker import HERE, OFF, configure, report, speculation

KINDS = ("Talks", "Talks", "Samples", "Edits", "AtOnce", "Seeds", "UsesTools", "Talks")
PROBLEMS = [
    Problem(
        index=i,
        prompt=f"{i}=",
        prompt_ids=(1,),
        answer="0",
        verifier=f"tests.rollout.agents:{kind}",
        metadata={"turns": 1 + i % 3},
    )
    for i, kind in enumerate(KINDS)
]
REQUESTS = [
    RolloutRequest(
        request_id=f"c{i}",
        prompt_ids=(1,),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=90, stop_token_ids=tuple(range(3, 96, 9))),
        seed=100 + 13 * i,
        group_id=i,
    )
    for i in range(len(KINDS))
]


@pytest.fixture(scope="module")
def folder(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with a tokenizer, which engines need for texts that end a response."""
    copy = tmp_path_factory.mktemp("with-tokenizer") / "model"
    shutil.copytree(model_dir, copy)
    make_char_tokenizer(copy)
    return copy


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    found = load_tokenizer(folder)
    found.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}<eos>{% endfor %}a"
    return found


@pytest.fixture(scope="module")
def pool(make_spec: Callable[..., EngineSpec], folder: Path) -> Iterator[EnginePool]:
    config = EngineConfig(max_running_requests=32, max_total_tokens=6144, max_restarts=4)
    drafting = replace(OFF, mode="coupled", drafters=(f"{HERE}:Constant",))
    with EnginePool([make_spec(43, model_dir=str(folder), config=config, speculation=drafting)]) as pool:
        pool.wait_ready()
        yield pool


class Killing(Conversations):
    """Kills the engine's scheduler when some turns have been answered, once."""

    victim = 0
    answers_left = 6

    def hear(self, response: Trajectory, parse: Any) -> None:
        Killing.answers_left -= 1
        if Killing.answers_left == 0:
            os.kill(Killing.victim, signal.SIGKILL)
        super().hear(response, parse)


def rollout(
    pool: EnginePool,
    tokenizer: PreTrainedTokenizerBase,
    config: SpeculationConfig | None,
    kind: type[Conversations] = Conversations,
) -> list[object]:
    """What is learned from, and what agents were told, in the order of the sessions. None: with what the engine has."""
    if config is not None:
        pool.flush()
        configure(pool.engines[0], config)
    agents.Talks.seen.clear()
    with kind(REQUESTS, PROBLEMS, tokenizer, timeout_s=60, max_prompt_tokens=60) as conversations:
        finished = all_of(pool, REQUESTS, conversations)
    assert not [t.failure for t in finished if t.failure]
    sequences = [sorted(_facts(s) for s in (t, *t.branches)) for t in finished]
    return [*sequences, *(said for i, of in sorted(agents.Talks.seen.items()) for said in of if KINDS[i] == "Talks")]


def _facts(t: Trajectory) -> tuple[object, ...]:
    return (t.prompt_ids, t.token_ids, t.loss_mask, t.seed)


@pytest.fixture(scope="module")
def plain(pool: EnginePool, tokenizer: PreTrainedTokenizerBase) -> list[object]:
    return rollout(pool, tokenizer, OFF)


def test_drafts_change_no_token_of_any_session(
    pool: EnginePool, plain: list[object], tokenizer: PreTrainedTokenizerBase
) -> None:
    rollout(pool, tokenizer, speculation("OfShortPrompts", 6))
    report(pool.engines[0])
    assert rollout(pool, tokenizer, None) == plain
    counts = report(pool.engines[0])
    assert 0 < counts.accepted <= counts.drafted
    assert counts.failures == 0


def test_wrong_noise_is_caught(pool: EnginePool, plain: list[object], tokenizer: PreTrainedTokenizerBase) -> None:
    for name in ("right", "noise_off_by_one"):
        config = replace(OFF, mode="coupled", drafters=(f"{WRONG}:{name}",), window=6)
        found = rollout(pool, tokenizer, config)
    assert found != plain
    configure(pool.engines[0], replace(config, drafters=(f"{WRONG}:right",)))


def test_calls_of_tools_are_found_by_sglangs_parser(pool: EnginePool) -> None:
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 2}}\n</tool_call>'
    text, calls = pool.engines[0].parse_tools(f"Let me see. {call}\n{call}", agents.TOOLS)
    assert text == "Let me see."
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("multiply", {"a": 2})] * 2
    assert pool.engines[0].parse_tools("no call", agents.TOOLS) == ("no call", [])
    for no_call in ("5", '"x"', "null", "[[1]]", '{"name": ["a"]}', "[" * 10**5):  # which end no engine
        text = f"So: <tool_call>\n{no_call}\n</tool_call>"
        assert pool.engines[0].parse_tools(text, agents.TOOLS) == (text, [])
    half = call.replace("2", '"\\ud800"')  # of a character
    assert json.loads(pool.engines[0].parse_tools(half, agents.TOOLS)[1][0][1]) == {"a": "\ud800"}


def test_an_engine_that_is_killed_in_a_session_loses_nothing(
    pool: EnginePool, plain: list[object], tokenizer: PreTrainedTokenizerBase
) -> None:
    """The last test: its engine's successor speculates as the spec says."""
    assert pool.engines[0].ready is not None
    Killing.victim = pool.engines[0].ready.scheduler_pids[0]
    before = pool.engines[0]
    assert rollout(pool, tokenizer, None, Killing) == plain
    assert pool.engines[0] is not before
