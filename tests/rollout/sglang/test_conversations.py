"""Conversations on a real engine: speculation, deaths and what was cached change no token of any turn."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from specactor.config import EngineConfig, SpeculationConfig
from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer
from specactor.rollout.conversations import Conversations
from specactor.rollout.pool import EnginePool
from specactor.rollout.sglang.engine_client import EngineSpec
from specactor.types import Problem, RolloutRequest, SamplingParams, Trajectory
from tests.rollout.conftest import VOCAB
from tests.rollout.sglang.asking import all_of
from tests.rollout.sglang.drafters import OfShortPrompts
from tests.rollout.sglang.test_verify_worker import HERE, OFF, configure, report, speculation

WRONG = "tests.rollout.sglang.wrong_versions"
PROBLEMS = [
    Problem(
        index=i,
        prompt=f"{i // 4}=",
        prompt_ids=(1,),
        answer="0",
        verifier="tests.rollout.environments:Talks",
        metadata={"turns": 1 + i % 4},
    )
    for i in range(24)
]
REQUESTS = [
    RolloutRequest(
        request_id=f"c{i}",
        prompt_ids=(1,),
        sampling=SamplingParams(
            temperature=(1.0, 0.7)[i % 2], max_new_tokens=90, stop_token_ids=tuple(range(3, VOCAB, 9))
        ),
        seed=100 + 13 * i,
        group_id=i // 4,
    )
    for i in range(24)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("characters")
    make_char_tokenizer(Path(folder))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def pool(make_spec: Callable[..., EngineSpec]) -> Iterator[EnginePool]:
    """One engine, whose speculation each test configures."""
    config = EngineConfig(max_running_requests=32, max_total_tokens=6144, max_restarts=4)
    spec = make_spec(41, config=config, speculation=replace(OFF, mode="coupled", drafters=(f"{HERE}:Constant",)))
    with EnginePool([spec]) as pool:
        pool.wait_ready()
        yield pool


class Killing(Conversations):
    """Kills the engine's scheduler when some turns have been answered, once."""

    victim = 0
    answers_left = 30

    def take(self, answer: object) -> RolloutRequest | Trajectory | None:
        Killing.answers_left -= 1
        if Killing.answers_left == 0:
            os.kill(Killing.victim, signal.SIGKILL)
        return super().take(answer)  # type: ignore[arg-type]


def rollout(
    pool: EnginePool,
    tokenizer: PreTrainedTokenizerBase,
    config: SpeculationConfig | None,
    kind: type[Conversations] = Conversations,
) -> list[Trajectory]:
    """All conversations, in their order; None: with what the engine has."""
    if config is not None:
        pool.flush()
        configure(pool.engines[0], config)
    with kind(REQUESTS, PROBLEMS, tokenizer, timeout_s=60, max_prompt_tokens=20) as conversations:
        return all_of(pool, REQUESTS, conversations)


def facts(found: list[Trajectory]) -> list[tuple[object, ...]]:
    return [(t.token_ids, t.loss_mask, t.reward, t.finish_reason, t.logprobs) for t in found]


def texts(found: list[Trajectory]) -> list[tuple[object, ...]]:
    return [fact[:4] for fact in facts(found)]


@pytest.fixture(scope="module")
def plain(pool: EnginePool, tokenizer: PreTrainedTokenizerBase) -> list[Trajectory]:
    found = rollout(pool, tokenizer, OFF)
    assert {t.num_turns for t in found} == {1, 2, 3, 4}
    assert not any(t.failure for t in found)
    return found


def test_drafts_change_no_token_of_any_turn(
    pool: EnginePool, plain: list[Trajectory], tokenizer: PreTrainedTokenizerBase
) -> None:
    """The drafter drafts for conversations that it knows by their first prompts, also in later turns."""
    drafting = speculation("OfShortPrompts", 6)
    assert all(len(t.prompt_ids) <= OfShortPrompts.longest for t in plain)
    rollout(pool, tokenizer, drafting)  # it learns what will come
    report(pool.engines[0])
    assert facts(rollout(pool, tokenizer, None)) == facts(plain)
    counts = report(pool.engines[0])
    first_turns = sum((*t.loss_mask, False).index(False) for t in plain)
    assert first_turns < counts.accepted < counts.drafted
    assert counts.failures == 0


def test_wrong_noise_is_caught(pool: EnginePool, plain: list[Trajectory], tokenizer: PreTrainedTokenizerBase) -> None:
    for name in ("right", "noise_off_by_one"):
        config = replace(OFF, mode="coupled", drafters=(f"{WRONG}:{name}",), window=6)
        found = rollout(pool, tokenizer, config)
    assert texts(found) != texts(plain)
    configure(pool.engines[0], replace(config, drafters=(f"{WRONG}:right",)))


def test_every_turn_is_what_its_engine_says_to_the_whole_conversation(
    pool: EnginePool, plain: list[Trajectory], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Asked in one request, without conversations and with empty caches."""
    configure(pool.engines[0], OFF)
    for request, t in list(zip(REQUESTS, plain, strict=True))[:8]:
        ends = [i for i, sampled in enumerate(t.loss_mask or (True,)) if sampled and i and not t.loss_mask[i - 1]]
        for start in (0, *ends):
            turn = replace(
                request,
                prompt_ids=t.prompt_ids + t.token_ids[:start],
                sampling=replace(request.sampling, max_new_tokens=90 - start),
            )
            pool.flush()
            [alone] = pool.engines[0].generate([turn])
            assert t.token_ids[start : start + len(alone.token_ids)] == alone.token_ids
            after = start + len(alone.token_ids)
            assert after == len(t.token_ids) or not t.loss_mask[after]


def test_an_engine_that_is_killed_in_mid_conversation_changes_no_token(
    pool: EnginePool, plain: list[Trajectory], tokenizer: PreTrainedTokenizerBase
) -> None:
    """The last test: its engine's successor speculates as the spec says."""
    assert pool.engines[0].ready is not None
    Killing.victim = pool.engines[0].ready.scheduler_pids[0]
    before = pool.engines[0]
    assert texts(rollout(pool, tokenizer, None, Killing)) == texts(plain)
    assert pool.engines[0] is not before
