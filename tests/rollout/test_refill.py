"""Dynamic sampling while a rollout goes on: the same groups are kept, whatever is fast, slow, dead or elsewhere."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers import PreTrainedTokenizerBase

from specactor.data.dataset import Dataset
from specactor.data.stream import PromptStream
from specactor.data.tokenizer import load_tokenizer, make_char_tokenizer
from specactor.errors import DataError
from specactor.metrics import METRICS
from specactor.progress import Progress
from specactor.recipes import load
from specactor.rollout.collector import RolloutCollector
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.driver import Driver
from specactor.rollout.grading import Grading
from specactor.rollout.pool import EnginePool
from specactor.rollout.refill import Refill
from specactor.rollout.requests import assign
from specactor.rollout.sglang.engine_client import Engine
from specactor.types import Problem, RolloutRequest, SamplingParams, ScoredGroup, Trajectory
from tests.rollout.driver_cases import FakeEngine, expected

WANT, SIZE = 6, 2


def requests_of(number: int) -> list[RolloutRequest]:
    return [
        RolloutRequest(
            request_id=f"0.{number}.{sample}",
            prompt_ids=(1,),
            sampling=SamplingParams(temperature=1.0, max_new_tokens=1 + random.Random(number).randrange(40)),
            seed=100 * number + sample,
            group_id=number,
        )
        for sample in range(SIZE)
    ]


def teaches(number: int) -> bool:
    return random.Random(1000 + number).random() < 0.4


KEPT = [number for number in range(100) if teaches(number)][:WANT]
"""The rule, by itself."""


@dataclass
class Rank:
    """One rank, which starts its engines again when one has died."""

    refill: Refill
    engines: list[FakeEngine]
    found: dict[str, Trajectory] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)

    def run(self, barrier: threading.Barrier) -> None:
        pending: list[RolloutRequest] = []
        self.refill.begin = lambda new: self.asked.update(r.group_id for r in new)
        while True:
            driver = Driver(cast("list[Engine]", self.engines), notify=lambda t: None, refill=self.refill)
            driver.run(assign(pending, len(self.engines)))
            assert not self.found.keys() & driver.done.keys()
            self.found |= driver.done
            ended = driver.done | driver.stopped
            pending = [r for r in (*pending, *driver.added) if r.request_id not in ended]
            if not all(engine.alive for engine in self.engines):
                self.refill.leave()
            barrier.wait()
            self.refill.read()
            is_over = self.refill.kept is not None
            barrier.wait()
            if is_over:
                return
            self.engines = [engine if engine.alive else FakeEngine() for engine in self.engines]
            self.refill.attempt += 1


class Slow(FakeEngine):
    """Takes a while for everything."""

    def generate(self, requests: Sequence[RolloutRequest], **options: Any) -> None:
        time.sleep(0.02)
        super().generate(requests, **options)


def rollout(
    engines: list[list[FakeEngine]], *, ahead: int = WANT, most: int = 80, kind: type[Refill] = Refill
) -> list[Rank]:
    """One list of engines per rank."""
    store = HashStore()

    def judge(number: int, responses: Sequence[Trajectory]) -> tuple[bool, float]:
        assert {t.request_id for t in responses} == {r.request_id for r in requests_of(number)}
        return teaches(number), number / 100

    ranks = [
        Rank(
            kind(
                want=WANT,
                ahead=ahead,
                most=most,
                size=SIZE,
                requests_of=requests_of,
                problem_of=lambda request: cast("Problem", None),
                teaches=judge,
                store=store,
                prefix="groups",
                is_own=lambda number, i=i: number % len(engines) == i,  # type: ignore[misc]
            ),
            own,
        )
        for i, own in enumerate(engines)
    ]
    barrier = threading.Barrier(len(ranks), timeout=60)
    threads = [threading.Thread(target=rank.run, args=(barrier,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in ranks:
        rank.refill.forget()
    assert store.num_keys() == 0
    return ranks


SETTINGS = {
    "one engine": lambda: [[FakeEngine()]],
    "two engines": lambda: [[FakeEngine(), FakeEngine()]],
    "one of them slow": lambda: [[Slow(), FakeEngine()]],
    "one of them dies": lambda: [[FakeEngine(dies_after=20), FakeEngine()]],
    "two ranks": lambda: [[FakeEngine()], [FakeEngine()]],
    "two ranks, one slow": lambda: [[FakeEngine()], [Slow()]],
    "two ranks, a death": lambda: [[FakeEngine(dies_after=15)], [FakeEngine(), FakeEngine()]],
    "three ranks": lambda: [[FakeEngine()], [Slow()], [FakeEngine(dies_after=30)]],
}


@pytest.mark.parametrize("ahead", [WANT, 2 * WANT])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_same_groups_are_kept(setting: str, ahead: int) -> None:
    ranks = rollout(SETTINGS[setting](), ahead=ahead)
    found = {name: t for rank in ranks for name, t in rank.found.items()}
    for rank in ranks:
        assert rank.refill.kept == KEPT
        assert {n: rank.refill.rates[n] for n in KEPT} == {n: n / 100 for n in KEPT}
    for request in (r for number in KEPT for r in requests_of(number)):
        assert found[request.request_id].token_ids == expected(request)
    asked = set().union(*(rank.asked for rank in ranks))
    assert asked >= set(range(KEPT[-1] + 1))
    if ahead == WANT:
        assert asked == set(range(KEPT[-1] + 1)), "nothing is drawn that is not needed"


def test_too_few_are_kept_where_too_many_would_have_to_be_drawn() -> None:
    [rank] = rollout([[FakeEngine()]], most=8)
    assert rank.refill.kept == [number for number in range(8) if teaches(number)]
    assert len(rank.refill.kept) < WANT


class InOrderOfEnds(Refill):
    """Keeps those that were complete first."""

    @property
    def kept(self) -> list[int] | None:
        found = [number for number, kept in self.known.items() if kept]
        return found[:WANT] if len(found) >= WANT else None


def test_a_wrong_rule_is_caught() -> None:
    found = [rollout(SETTINGS["one of them slow"](), ahead=2 * WANT, kind=InOrderOfEnds)[0].refill.kept]
    assert found != [KEPT]


@pytest.fixture(scope="module")
def grading() -> Iterator[Grading]:
    with Grading(timeout_s=60) as found:
        yield found


@dataclass
class Ready(Slow):
    """What a pool needs of an engine besides."""

    index: int = 0
    ready: bool = True
    delay_s: float = 0.0

    def generate(self, requests: Sequence[RolloutRequest], **options: Any) -> None:
        time.sleep(self.delay_s)
        FakeEngine.generate(self, requests, **options)


def collector(
    engines: list[FakeEngine], tokenizer: PreTrainedTokenizerBase, grading: Grading, **settings: str
) -> RolloutCollector:
    """Of one rank, on scripted engines."""
    words = [word for key, value in settings.items() for word in (f"--{key.replace('__', '.')}", value)]
    config = load(["dapo", "--rollout.prompts-per-step", "6", "--rollout.group-size", "2", *words])
    verifier = "tests.rollout.verifiers:even"
    problems = [
        Problem(index=i, prompt="", prompt_ids=(1 + i,), answer="", verifier=verifier, metadata={}) for i in range(40)
    ]
    pool = EnginePool([])
    pool.engines = cast("list[Engine]", engines)
    alone: Any = SimpleNamespace(
        rank=0, world=1, store=HashStore(), together=lambda _, work: work(), gather=lambda x, _: [x], any=bool
    )

    def replace_lost() -> None:
        pool.engines = cast("list[Engine]", [Ready() for _ in pool.engines])

    return RolloutCollector(
        config,
        pool=pool,
        drafters=DrafterPool([]),
        grading=grading,
        collective=alone,
        tokenizer=tokenizer,
        train_data=Dataset(problems),
        eval_data={},
        progress=Progress(3),
        host="",
        max_prompt_tokens=50,
        replace_lost=replace_lost,
    )


class Failing(Ready):
    """The environments of the first group fail, which is replaced then."""

    def generate(self, requests: Sequence[RolloutRequest], **options: Any) -> None:
        def finished(t: Trajectory) -> None:
            options["on_finished"](replace(t, failure="mine: step: it is down") if t.group_id == 0 else t)

        super().generate(requests, **options | {"on_finished": finished})


def test_conversations_that_failed_in_a_replaced_group_are_counted(tmp_path: Path, grading: Grading) -> None:
    make_char_tokenizer(tmp_path)
    own = collector([Failing()], load_tokenizer(tmp_path), grading)
    groups = own.collect(0)
    size = own.config.rollout.group_size
    assert [len(g.trajectories) for g in groups] == [size] * 6
    assert (own.num_failed, own._first_failure) == (size, "mine: step: it is down")
    own.collect(1)
    assert own.num_failed == size


def test_a_group_that_failed_says_nothing_of_its_problem(tmp_path: Path, grading: Grading) -> None:
    """Neither to the mean of what was drawn nor to a curriculum, which knows the problem's rate, or that it has none.
    Wrong: .5."""
    make_char_tokenizer(tmp_path)
    seen: dict[str, Trajectory] = {}

    class Sees(Failing):
        def generate(self, requests: Sequence[RolloutRequest], **options: Any) -> None:
            finished = options["on_finished"]

            def heard(t: Trajectory) -> None:
                seen[t.request_id] = t
                finished(t)

            super().generate(requests, **options | {"on_finished": heard})

    own = collector([Sees()], load_tokenizer(tmp_path), grading, data__order="curriculum")
    own.collect(0)
    scores = [float(own.grading.scored(t).reward or 0.0) for t in seen.values() if not t.failure]
    assert len(scores) == len(seen) - 2
    assert own.drawn["reward/drawn_mean"] == pytest.approx(sum(scores) / len(scores))
    rates = cast("Any", own.prompts.state())["rates"]
    assert len(rates) == own.drawn["reward/drawn_groups"] - 1


def test_a_step_in_which_all_failed_is_an_error_that_says_so(tmp_path: Path, grading: Grading) -> None:
    make_char_tokenizer(tmp_path)

    class Fails(Ready):
        def generate(self, requests: Sequence[RolloutRequest], **options: Any) -> None:
            finished = options["on_finished"]
            down = {"on_finished": lambda t: finished(replace(t, failure="mine: step: it is down"))}
            super().generate(requests, **options | down)

    own = collector([Fails()], load_tokenizer(tmp_path), grading)
    with pytest.raises(DataError, match="48 responses of a step failed, and no group is left to learn from; the first"):
        own.collect(0)


def test_a_resume_says_that_its_problems_are_others(
    tmp_path: Path, grading: Grading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of the same seed come in the same order, whatever they ask."""
    make_char_tokenizer(tmp_path)
    own = collector([], load_tokenizer(tmp_path), grading)
    notes: list[str] = []
    monkeypatch.setattr(own.progress, "note", notes.append)
    state = own.state()
    own.restore(state)
    assert notes == []
    own.train_data = Dataset(replace(problem, answer="1") for problem in own.train_data)
    own.restore(state)
    assert notes == ["The problems to learn from are as many as at the checkpoint, but others: data changed."]


def test_a_step_counts_all_that_it_drew(tmp_path: Path, grading: Grading) -> None:
    make_char_tokenizer(tmp_path)
    seen: list[Trajectory] = []

    class Sees(Ready):
        def generate(self, requests: Sequence[RolloutRequest], **options: Any) -> None:
            finished = options["on_finished"]
            super().generate(requests, **options | {"on_finished": lambda t: (seen.append(t), finished(t))})

    own = collector([Sees()], load_tokenizer(tmp_path), grading)
    kept = [t for group in own.collect(0) for t in group.trajectories]
    assert own.drawn["rollout/responses"] == len(seen) == 2 * own.drawn["reward/drawn_groups"] > len(kept)
    assert own.drawn["rollout/tokens"] == sum(len(t.token_ids) for t in seen) > sum(len(t.token_ids) for t in kept)
    scores = [float(own.grading.scored(t).reward or 0.0) for t in seen]
    assert own.drawn["reward/drawn_mean"] == pytest.approx(sum(scores) / len(scores))
    assert set(own.drawn) <= set(METRICS)


def test_what_shaping_takes_off_makes_no_group_worth_learning_from(tmp_path: Path, grading: Grading) -> None:
    """Every response here has another reward, as it has another length. Wrong: rewards that are compared."""
    make_char_tokenizer(tmp_path)
    buffer = load(["dapo"]).rollout.max_new_tokens - 1
    own = collector([Ready()], load_tokenizer(tmp_path), grading, algorithm__overlong_buffer=str(buffer))
    groups = own.collect(0)
    assert [sum(g.scores) for g in groups] == [1.0] * 6
    assert any(set(g.rewards) != {0.0, 1.0} for g in groups)


def keeps_some(group: ScoredGroup) -> bool:
    """Five of the forty problems."""
    return group.problem.index % 8 == 3


def keeps_none(group: ScoredGroup) -> bool:
    return False


@pytest.mark.parametrize("oversample", ["1", "2"])
def test_where_few_groups_are_kept_no_others_are_learned_from(
    oversample: str, tmp_path: Path, grading: Grading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: a step that is filled up with groups that the filter refused."""
    make_char_tokenizer(tmp_path)
    options = {"algorithm__dynamic_sampling": "tests.rollout.test_refill:keeps_some", "rollout__oversample": oversample}
    own = collector([Ready()], load_tokenizer(tmp_path), grading, **options)
    drawn = [visit.problem for visit in PromptStream(40, own.config.seed, shuffle=True).take(24)]
    notes: list[str] = []
    monkeypatch.setattr(own.progress, "note", notes.append)
    groups = own.collect(0)
    kept = [index for index in drawn if index % 8 == 3]
    assert [group.problem.index for group in groups] == kept
    assert own.drawn["reward/drawn_groups"] == 24
    assert notes == [
        f"algorithm.dynamic_sampling: of 24 groups, which a step draws at most, {len(kept)} teach something. It learns "
        "from these alone."
    ]


def test_a_filter_that_keeps_nothing_is_an_error(tmp_path: Path, grading: Grading) -> None:
    make_char_tokenizer(tmp_path)
    name = "tests.rollout.test_refill:keeps_none"
    own = collector([Ready()], load_tokenizer(tmp_path), grading, algorithm__dynamic_sampling=name)
    with pytest.raises(DataError) as caught:
        own.collect(0)
    assert str(caught.value) == (
        f"algorithm.dynamic_sampling: {name} kept none of the 24 groups that a step draws at most, expected at least "
        "one. Let it keep more, learn from other problems, or raise rollout.prompts_per_step."
    )


def test_a_step_in_which_all_scores_are_equal_goes_on_and_says_so(
    tmp_path: Path, grading: Grading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a run's first steps, where nothing is right yet."""
    make_char_tokenizer(tmp_path)
    own = collector([Ready()], load_tokenizer(tmp_path), grading)
    own.train_data = Dataset(replace(p, verifier="exact", answer="never") for p in own.train_data)
    notes: list[str] = []
    monkeypatch.setattr(own.progress, "note", notes.append)
    groups = own.collect(0)
    assert [group.scores for group in groups] == [(0.0, 0.0)] * 6
    assert notes == [
        "algorithm.dynamic_sampling: of 24 groups, which a step draws at most, 0 teach something. It goes on with "
        "groups whose scores are equal."
    ]


@pytest.mark.parametrize("oversample", ["1", "2"])
def test_steps_have_the_same_groups_and_go_on_in_the_same_place(
    oversample: str, grading: Grading, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Also after a resume, and with a curriculum, which hears of all groups up to the last that is kept."""
    folder = tmp_path_factory.mktemp("characters")
    make_char_tokenizer(folder)
    tokenizer, options = load_tokenizer(folder), {"rollout__oversample": oversample, "data__order": "curriculum"}
    settings: list[list[FakeEngine]] = [
        [Ready()],
        [Ready(delay_s=0.05), Ready(index=1)],
        [Ready(dies_after=20), Ready(index=1)],
    ]
    found = []
    for engines in settings:
        own = collector(engines, tokenizer, grading, **options)
        first = own.collect(0)
        again = collector([Ready()], tokenizer, grading, **options)
        again.restore(own.state())
        second = own.collect(1)
        assert again.collect(1) == second
        found.append((first, second, own.state()))
    assert found[0] == found[1] == found[2]
    first, second, state = found[0]
    for groups in (first, second):
        assert len(groups) == 6
        assert all(0 < sum(group.scores) < 2 for group in groups)
        assert [t.reward for g in groups for t in g.trajectories] == [x for g in groups for x in g.scores]
    rates = cast("Any", state)["prompts"]["rates"]
    assert len(rates) >= len({g.problem.index for g in (*first, *second)})
    assert {rate for _, rate in rates} == {0.0, 0.5, 1.0}
