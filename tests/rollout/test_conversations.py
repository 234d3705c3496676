"""Two hundred conversations on scripted engines: none is lost or doubled, whatever environments and engines do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
from transformers import PreTrainedTokenizerBase

from specactor.data.environment import environment_of
from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer
from specactor.errors import DataError
from specactor.rollout.conversations import Conversations
from specactor.rollout.driver import Driver
from specactor.rollout.requests import assign
from specactor.rollout.sglang.engine_client import Engine
from specactor.types import Problem, RolloutRequest, SamplingParams, Trajectory
from tests.rollout import environments
from tests.rollout.driver_cases import FakeEngine, enough, token

HERE = "tests.rollout.environments"
MAX_NEW = 60
GIVEN_UP = ("Hangs", "Blocks", "BlocksAtTheStart")
BROKEN = ("Raises", "Exits")
EXPECTED = "expected a text, or messages with a role and a content each, or a finite number as reward"
ROOM = "expected 1 to 50"
LIMIT = "(the model's context length 110 less rollout.max_new_tokens). Shorten it, or lower rollout.max_new_tokens"
HALF = "surrogates not allowed. Leave such halves of characters out."


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("characters")
    make_char_tokenizer(folder)
    return load_tokenizer(folder)


@pytest.fixture(autouse=True)
def _held() -> Iterator[None]:
    environments.released.clear()
    environments.Blocks.answered.clear()
    yield
    environments.released.set()


def stops_at(token: int) -> bool:
    return token % 8 == 7


def problem(index: int, kind: str = "Talks") -> Problem:
    return Problem(
        index=index,
        prompt=f"{index}=",
        prompt_ids=(1,),
        answer="0",
        verifier=f"{HERE}:{kind}",
        metadata={"turns": 1 + index % 5},
    )


def request(index: int) -> RolloutRequest:
    return RolloutRequest(
        request_id=f"c{index}",
        prompt_ids=(1,),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=MAX_NEW),
        seed=7 + index,
        group_id=index // 4,
    )


def expected(
    problem: Problem, request: RolloutRequest, tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[int, ...], tuple[bool, ...], float]:
    """Tokens, which of them were sampled, and the reward: token by token, without any of the code that is tested."""
    text, mask, turns = list(tokenizer.encode(problem.prompt)), [], 0
    start = len(text)
    while True:
        response: list[int] = []
        while len(text) - start < MAX_NEW and not (response and stops_at(response[-1])):
            response.append(token(request.seed, len(text)))
            text.append(response[-1])
            mask.append(True)
        turns += 1
        if turns == environments.problem_turns(problem):
            return tuple(text[start:]), tuple(mask), float(turns)
        said = tokenizer.encode(environments.said(tokenizer.decode(response, skip_special_tokens=True)))
        if len(text) - start + len(said) >= MAX_NEW:
            return tuple(text[start:]), tuple(mask), 0.0
        text += said
        mask += [False] * len(said)


def rollout(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    *,
    engines: Sequence[FakeEngine] | None = None,
    timeout_s: float = 60.0,
    notify: Callable[[Trajectory], None] = lambda trajectory: None,
    kind: type[Conversations] = Conversations,
    **options: Any,
) -> list[Trajectory]:
    """All conversations; engines that die are replaced."""
    seen: list[Trajectory] = []

    def see(trajectory: Trajectory) -> None:
        seen.append(trajectory)
        notify(trajectory)

    pending = requests = [request(p.index) for p in problems]
    engines = engines or [FakeEngine(stops_at=stops_at), FakeEngine(stops_at=stops_at)]
    room: dict[str, Any] = {"max_prompt_tokens": 50, "prompt_limit": LIMIT}
    with kind(requests, problems, tokenizer, timeout_s=timeout_s, **room) as conversations:
        for _ in range(3):
            driver = Driver(cast("list[Engine]", engines), notify=see, conversations=conversations, **options)
            driver.run(assign(pending, len(engines)))
            pending = [r for r in pending if r.request_id not in driver.done | driver.stopped]
            if not pending:
                break
            engines = [FakeEngine(stops_at=stops_at)]
    assert pending == []
    return seen


def by_index(found: Sequence[Trajectory]) -> dict[int, Trajectory]:
    each = {int(t.request_id[1:]): t for t in found}
    assert len(each) == len(found), "none is doubled"
    return each


def differing(problems: Sequence[Problem], found: Sequence[Trajectory], tokenizer: PreTrainedTokenizerBase) -> int:
    """How many conversations are not as expected."""
    each, wrong = by_index(found), 0
    for p in problems:
        tokens, mask, reward = expected(p, request(p.index), tokenizer)
        t = each[p.index]
        wrong += (t.token_ids, t.loss_mask or (True,) * len(tokens), t.reward) != (tokens, mask, reward)
        assert len(t.logprobs) == len(t.token_ids)
        if tokens == t.token_ids:
            assert [span.end for span in t.spans][-1] == len(tokens)
            assert all((logprob == 0.0) != sampled for logprob, sampled in zip(t.logprobs, mask, strict=True))
    return wrong


def no_thread_is_left() -> bool:
    for thread in [t for t in threading.enumerate() if t.name == "environment"]:
        thread.join(60)
    return not any(t.name == "environment" for t in threading.enumerate())


def test_conversations_are_token_by_token_what_they_should_be(tokenizer: PreTrainedTokenizerBase) -> None:
    problems = [problem(i) for i in range(200)]
    found = rollout(problems, tokenizer)
    assert differing(problems, found, tokenizer) == 0
    assert {t.num_turns for t in found} >= {1, 2, 3, 4}
    assert any(t.finish_reason == "length" for t in found)
    assert no_thread_is_left()


class OtherNoise(Conversations):
    """The noise begins anew in every turn."""

    def turn_of(self, turn: RolloutRequest) -> RolloutRequest:
        return replace(turn, seed=turn.seed + turn.num_earlier)

    def take(self, answer: Any) -> Any:
        found = super().take(answer)
        return self.turn_of(found) if isinstance(found, RolloutRequest) else found


class AllLearned(Conversations):
    """What the environment said is learned from."""

    def take(self, answer: Any) -> Any:
        found = super().take(answer)
        return replace(found, loss_mask=()) if isinstance(found, Trajectory) else found


class Retokenized(Conversations):
    """A turn sees the text of the conversation, not its tokens: what was special is gone."""

    def take(self, answer: Any) -> Any:
        found = super().take(answer)
        if isinstance(found, RolloutRequest):
            text = self._tokenizer.decode(list(found.prompt_ids), skip_special_tokens=True)
            return replace(found, prompt_ids=tuple(self._tokenizer.encode(text)))
        return found


@pytest.mark.parametrize("wrong", [OtherNoise, AllLearned, Retokenized])
def test_wrong_versions_are_caught(wrong: type[Conversations], tokenizer: PreTrainedTokenizerBase) -> None:
    problems = [problem(i) for i in range(60)]
    assert differing(problems, rollout(problems, tokenizer, kind=wrong), tokenizer) > 0


@pytest.mark.parametrize("dies_after", [1, 40, 300])
def test_engines_that_die_change_nothing(dies_after: int, tokenizer: PreTrainedTokenizerBase) -> None:
    problems = [problem(i) for i in range(200)]
    engines = [FakeEngine(stops_at=stops_at, dies_after=dies_after), FakeEngine(stops_at=stops_at)]
    assert differing(problems, rollout(problems, tokenizer, engines=engines), tokenizer) == 0
    both = [FakeEngine(stops_at=stops_at, dies_after=dies_after) for _ in range(2)]
    assert differing(problems, rollout(problems, tokenizer, engines=both), tokenizer) == 0


def test_a_slow_environment_holds_up_nobody_else(tokenizer: PreTrainedTokenizerBase) -> None:
    """Twenty of them hold their threads until all the others are over."""
    problems = [problem(i, "Slow" if i % 10 == 0 else "Talks") for i in range(200)]
    over: list[str] = []

    def notify(trajectory: Trajectory) -> None:
        over.append(trajectory.request_id)
        if len(over) == 180:
            environments.released.set()

    assert differing(problems, rollout(problems, tokenizer, notify=notify), tokenizer) == 0
    assert no_thread_is_left()


def test_whatever_environments_do_no_conversation_is_lost(tokenizer: PreTrainedTokenizerBase) -> None:
    kinds = ("Talks", "Talks", *GIVEN_UP, *BROKEN, "Floods", "LeavesTasks", "Lasts")
    problems = [problem(i, kinds[i // 5 % 10]) for i in range(200)]
    engines = [FakeEngine(stops_at=stops_at, dies_after=200), FakeEngine(stops_at=stops_at)]
    given_up: list[Trajectory] = []

    def notify(t: Trajectory) -> None:
        given_up.extend([t] if "Blocks" in t.failure else [])
        if len(given_up) == 40:  # all that hold their threads: they answer now, while others go on
            environments.released.set()

    each = by_index(rollout(problems, tokenizer, engines=engines, timeout_s=10.0, notify=notify))
    assert environments.Blocks.answered, "in the rollout"
    assert set(each) == set(range(200))
    for p in problems:
        kind, t = p.verifier.partition(":")[2], each[p.index]
        if kind in GIVEN_UP:
            method = "start" if kind == "BlocksAtTheStart" else "step"
            assert t.failure == f"{p.verifier}: {method}: no answer in time"
        elif kind in BROKEN:
            why = "ValueError('a bug of the environment')" if kind == "Raises" else "RuntimeError('SystemExit(3)')"
            assert t.failure == f"{p.verifier}: step: {why}"
        elif kind == "Floods":
            assert (t.failure, t.reward, t.finish_reason, t.num_turns) == ("", 0.0, "length", 1)
        else:
            assert differing([p], [t], tokenizer) == 0
    assert 5 in environments.Talks.closed
    assert no_thread_is_left()
    assert len(environments.Blocks.answered) == 20


def test_what_environments_leave_running_ends_with_them(tokenizer: PreTrainedTokenizerBase) -> None:
    problems = [problem(i, "LeavesGenerators" if i % 2 else "LeavesTasks") for i in range(20)]
    assert differing(problems, rollout(problems, tokenizer), tokenizer) == 0
    assert no_thread_is_left()
    assert environments.LeavesTasks.left, "some"
    assert all(task.cancelled() for task in environments.LeavesTasks.left)
    assert set(environments.LeavesTasks.ended) == set(range(1, 20, 2))


def test_enough_groups_end_conversations_that_wait_for_their_environments(tokenizer: PreTrainedTokenizerBase) -> None:
    problems = [problem(i, "Slow" if i < 8 else "Talks") for i in range(40)]
    requests = [request(p.index) for p in problems]
    engine = FakeEngine(stops_at=stops_at)
    with Conversations(requests, problems, tokenizer, timeout_s=60, max_prompt_tokens=50) as conversations:
        seen: list[Trajectory] = []
        driver = Driver(
            cast("list[Engine]", [engine]), notify=seen.append, conversations=conversations, is_enough=enough(6)
        )
        driver.run([requests])
        environments.released.set()
    assert {t.request_id for t in seen} == set(driver.done)
    assert set(driver.done) | set(driver.stopped) == {r.request_id for r in requests}
    assert not set(driver.done) & set(driver.stopped)
    assert {f"c{i}" for i in range(8)} <= set(driver.stopped)
    assert differing([problems[i] for i in sorted(by_index(seen))], seen, tokenizer) == 0
    assert no_thread_is_left()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Nan", f"step: it returned nan of type float, {EXPECTED}"),
        ("Nothing", f"step: it returned None of type NoneType, {EXPECTED}"),
        ("Silent", "step: it said '', which has no tokens. Say what the policy is to go on from"),
        ("Mute", f"start: it said 0 tokens, {ROOM}"),
        ("Long", f"start: it said 51 tokens, {ROOM} {LIMIT}"),
        ("TellsHalf", f"step: text: 'utf-8' codec can't encode character '\\ud800' in position 1: {HALF}"),
        ("StartsWithHalf", f"start: text: 'utf-8' codec can't encode character '\\ud800' in position 0: {HALF}"),
        ("LimitsATool", "step: TimeoutError()"),
        ("RaisesWhenMade", "start: ValueError('half of it: \\ud800')"),
        ("RaisesWhatRaises", "step: told after all: \\ud800"),
    ],
)
def test_a_wrong_answer_ends_its_conversation_in_one_line(
    kind: str, message: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The others go on."""
    problems = [problem(0), problem(1, kind), problem(2)]
    each = by_index(rollout(problems, tokenizer))
    assert (each[1].failure, each[1].reward) == (f"{HERE}:{kind}: {message}", 0.0)
    assert differing([problems[i] for i in (0, 2)], [each[0], each[2]], tokenizer) == 0


def test_rewards_are_read_as_verifiers_scores_are(tokenizer: PreTrainedTokenizerBase) -> None:
    problems = [problem(i, "RewardsInTorch") for i in range(5)]
    assert differing(problems, rollout(problems, tokenizer), tokenizer) == 0


def test_an_environment_is_made_in_a_thread_of_its_own(tokenizer: PreTrainedTokenizerBase) -> None:
    """One that takes too long is given up."""
    problems = [problem(i, "BlocksWhenMade" if i == 0 else "Talks") for i in range(5)]
    each = by_index(rollout(problems, tokenizer, timeout_s=2.0))
    assert each[0].failure == f"{HERE}:BlocksWhenMade: start: no answer in time"
    assert differing(problems[1:], [each[i] for i in range(1, 5)], tokenizer) == 0
    environments.released.set()
    assert no_thread_is_left()


def test_where_no_further_thread_can_be_started_one_conversation_fails(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may allow a thousand, and all conversations of a step begin at once."""
    start, begun = threading.Thread.start, list[str]()

    def limited(thread: threading.Thread) -> None:
        begun.append(thread.name)
        if begun.count("environment") == 3 and thread.name == "environment":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    problems = [problem(i) for i in range(20)]
    found = rollout(problems, tokenizer)
    failed = [t for t in found if t.failure]
    assert [t.failure.partition(": ")[2] for t in failed] == ['start: RuntimeError("can\'t start new thread")']
    others = {t.request_id for t in found if not t.failure}
    kept = [p for p in problems if request(p.index).request_id in others]
    assert differing(kept, [t for t in found if not t.failure], tokenizer) == 0
    assert no_thread_is_left()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("RaisesAtTheEnd", ["OSError('its container is still there')"]),
        ("ExitsAtTheEnd", ["RuntimeError('SystemExit(3)')"]),
        ("RaisesWhatRaisesAtTheEnd", ["UntoldError"]),
        ("HangsAtTheEnd", ["no answer in time"]),
        ("BlocksAtTheEnd", ["no answer in time"]),
        ("EndsWithoutAsync", []),
    ],
)
def test_an_environment_that_is_not_released_is_told(
    kind: str, why: list[str], tokenizer: PreTrainedTokenizerBase
) -> None:
    """It costs nothing else: the conversation is whole, and so are others."""
    told: list[str] = []
    environments.Talks.closed.clear()
    problems = [problem(0), problem(1, kind), problem(2)]
    kept = cast("Any", partial(Conversations, unreleased=told.append))
    assert differing(problems, rollout(problems, tokenizer, timeout_s=3.0, kind=kept), tokenizer) == 0
    assert told == [f"{HERE}:{kind}: close: {one}" for one in why]
    assert {*environments.Talks.closed} == ({0, 2} if why else {0, 1, 2})
    environments.released.set()
    assert no_thread_is_left()
    assert len(told) == len(why), "once"


def test_where_no_thread_can_be_started_to_release_an_environment_that_is_told(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, told = threading.Thread.start, list[str]()

    def limited(thread: threading.Thread) -> None:
        if "_close" in repr(vars(thread).get("_target")):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    kept = cast("Any", partial(Conversations, unreleased=told.append))
    assert differing([problem(0)], rollout([problem(0)], tokenizer, kind=kept), tokenizer) == 0
    assert told == [f'{HERE}:Talks: close: RuntimeError("can\'t start new thread")']


@pytest.mark.parametrize(
    ("kind", "message"),
    [("NotAsync", "async def start(self, problem)"), ("WithoutArgument", "async def step(self, response)")],
)
def test_a_class_that_is_no_environment_is_refused(kind: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        environment_of(f"{HERE}:{kind}")
    assert f"got '{HERE}:{kind}', a class without `{message}`" in str(caught.value)


def test_a_function_is_no_environment() -> None:
    assert environment_of("exact") is None
    assert environment_of(f"{HERE}:said") is None
