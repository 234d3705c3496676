"""A draft model in a process of its own gives the token that transformers' logits and the noise give, whatever was
rolled back or forgotten before, and whoever else is in the batch."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from specactor.cpu import sglang as cpu
from specactor.rollout.decoupled.drafter_side import Lane, MirroredRequests
from specactor.rollout.decoupled.protocol import Beat, Header, Open, encode
from specactor.rollout.sglang.draft_runner import DRAFT_TEMPERATURE
from specactor.rollout.sglang.draft_slots import BLOCK_TOKENS
from tests.rollout.sglang.test_model_drafter import make_dense

VOCAB = 96
CONTEXT = 100
BLOCKS = 12
ROWS = 8
NEAR_TIE = 1e-4
REPOSITORY = Path(__file__).resolve().parents[3]


class Child:
    """The process of draft_backend_script.py."""

    def __init__(self, folder: str, temporary: Path) -> None:
        script = [sys.executable, "-m", "tests.rollout.sglang.draft_backend_script"]
        with open(temporary / "log", "w") as log:
            self._process = subprocess.Popen(
                [*script, folder, str(BLOCKS * BLOCK_TOKENS), str(ROWS), str(CONTEXT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=REPOSITORY,
                env={**os.environ, **cpu.environment(), "TMPDIR": str(temporary)},
            )

    def __call__(self, *operation: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(operation) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise AssertionError("the process died")

    def extend(self, lanes: list[Lane]) -> list[list[int]]:
        answers = self.read_up(lanes)
        assert len(answers) == len(lanes), "all are"
        return list(answers.values())

    def read_up(self, lanes: list[Lane]) -> dict[int, list[int]]:
        """Return the answers of a call, by index, to those whose texts are not still being read."""
        answers: list[list[int] | None] = self("extend", [asdict(lane) for lane in lanes])
        return {i: answer for i, answer in enumerate(answers) if answer is not None}

    def wrong(self, lanes: list[Lane], answers: list[list[int]], asked: str = "reference") -> int:
        """How many of the answers' first tokens differ from the reference's, near ties aside."""
        right = self(asked, [asdict(lane) for lane in lanes]) if lanes else []
        return sum(a[0] != token and gap > NEAR_TIE for a, (token, gap) in zip(answers, right, strict=True))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    child = Child(make_dense(tmp_path_factory.mktemp("dense")), tmp_path_factory.mktemp("child"))
    yield child
    child.close()


@dataclass
class Text:
    """A request as a mirror of the drafter keeps it."""

    key: str
    prompt_ids: tuple[int, ...]
    seed: int
    temperature: float
    tokens: list[int] = field(default_factory=list)
    agreed: int = 0

    def lane(self) -> Lane:
        """For a call; what comes after it counts as unchanged until it is."""
        lane = Lane(
            key=self.key,
            prompt_ids=self.prompt_ids,
            tokens=self.tokens[:],
            seed=self.seed,
            temperature=self.temperature,
            agreed=self.agreed,
        )
        self.agreed = len(self.tokens)
        return lane

    def replace(self, start: int, tokens: list[int]) -> None:
        """The target emitted these from `start` on."""
        self.tokens[start:] = tokens
        self.agreed = min(self.agreed, start)


def text(rng: random.Random, key: int, temperature: float | None = None) -> Text:
    prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40)))
    heat = rng.choice([0.0, 0.7, 1.0, 1.0]) if temperature is None else temperature
    return Text(f"k{key}", prompt, seed=rng.randrange(2**40), temperature=heat)


def life(child: Child, *, texts: int, steps: int, seed: int, most: int = ROWS) -> tuple[int, int]:
    """Texts that grow, roll back and end in all ways, in batches of up to `most`; (answers, wrong ones). Who finds no
    room in the pool has no answer."""
    rng = random.Random(seed)
    running = [text(rng, i) for i in range(texts)]
    answered = mistakes = 0
    for _ in range(steps):
        batch = rng.sample(running, rng.randrange(1, min(most, texts) + 1))
        lanes = [t.lane() for t in batch]
        answers = child.read_up(lanes)
        given = {i: answer for i, answer in answers.items() if answer}
        answered += len(given)
        mistakes += child.wrong([lanes[i] for i in given], list(given.values()))
        for b, t in enumerate(batch):
            event = rng.random()
            if event < 0.7:
                t.tokens += answers.get(b, [])
            elif event < 0.9:
                t.replace(rng.randrange(len(t.tokens) + 1), [rng.randrange(3, VOCAB) for _ in range(rng.randrange(3))])
            if event > 0.96 or len(t.prompt_ids) + len(t.tokens) > CONTEXT - 8:
                i = running.index(t)
                running[i] = text(rng, i)  # under the same key
                if rng.random() < 0.7:
                    child("forget", t.key)
                    running[i].prompt_ids = rng.choice([t.prompt_ids, running[i].prompt_ids])
    for t in running:
        child("forget", t.key)
    return answered, mistakes


def begin(child: Child, name: str = "Shared") -> None:
    child("new", name)


@pytest.mark.parametrize("name", ["Shared", "ReadsSlowly"])
@pytest.mark.parametrize("texts", [3, 14], ids=["all fit", "some have no room"])
def test_tokens_are_those_of_transformers_and_the_noise(child: Child, texts: int, name: str) -> None:
    begin(child, name)
    answered, mistakes = life(child, texts=texts, steps=40, seed=texts)
    assert answered > 80
    assert mistakes == 0
    cached, blocks, rows = child("state")
    assert (cached, blocks, rows) == (0, BLOCKS, ROWS), "all was forgotten, so nothing is held"


def test_long_texts_are_read_over_several_calls_while_others_draft(child: Child) -> None:
    """With the drafts that they have where a call reads all."""
    rng = random.Random(15)
    lengths = [60, 50, 40, 2, 2, 2]
    texts = [
        Text(f"k{i}", tuple(rng.randrange(3, VOCAB) for _ in range(length)), seed=i, temperature=1.0)
        for i, length in enumerate(lengths)
    ]
    begin(child)
    at_once = child.extend([replace(t.lane(), agreed=0) for t in texts])
    begin(child, "ReadsSlowly")
    for t in texts:
        t.agreed = 0
    first: dict[str, list[int]] = {}
    calls: dict[str, int] = {}
    for call in range(15):
        lanes = [t.lane() for t in texts]
        answers = child.read_up(lanes)
        assert child.wrong([lanes[i] for i in answers], list(answers.values())) == 0
        assert list(answers)[-3:] == [3, 4, 5]
        for i, answer in answers.items():
            assert len(answer) == 1
            first.setdefault(texts[i].key, answer)
            calls.setdefault(texts[i].key, call)
            texts[i].tokens += answer
    assert [first[t.key] for t in texts] == at_once
    assert [calls[t.key] for t in texts] == [9, 5, 2, 0, 0, 0], "the shortest first, 16 tokens per call"
    for t in texts:
        child("forget", t.key)


def test_drafts_are_sampled_at_the_draft_temperature(child: Child) -> None:
    rng = random.Random(4)
    begin(child, "DraftBackend")
    texts = [text(rng, i) for i in range(6)]
    wrong = wrong_at_1 = 0
    for _ in range(8):
        lanes = [t.lane() for t in texts]
        answers = child.extend(lanes)
        cooled = [replace(lane, temperature=lane.temperature * DRAFT_TEMPERATURE) for lane in lanes]
        wrong += child.wrong(cooled, answers)
        wrong_at_1 += child.wrong(lanes, answers)
        for t, answer in zip(texts, answers, strict=True):
            t.tokens += answer
    assert wrong == 0
    assert wrong_at_1 > 0


@pytest.mark.parametrize(
    ("mistake", "texts"),
    [
        ("TakesTheNextNoise", 4),
        ("KeepsWhatWasRolledBack", 4),
        ("SkipsTheFirstToken", 4),
        ("SeesTheLastTokenAlone", 4),
        ("RemembersTheForgotten", 14),
        ("IsGreedy", 4),
        ("ReadsTooFar", 4),
    ],
)
def test_mistakes_are_noticed(child: Child, mistake: str, texts: int) -> None:
    begin(child, mistake)
    steps = 40 if texts < ROWS else 300  # another text seldom gets the room of one that was forgotten
    _, mistakes = life(child, texts=texts, steps=steps, seed=texts)
    assert mistakes > 3


def test_without_room_nothing_is_drafted_until_another_is_forgotten(child: Child) -> None:
    rng = random.Random(6)
    texts = [text(rng, i) for i in range(ROWS + 1)]
    begin(child)
    lanes = [t.lane() for t in texts]
    answers = child.extend(lanes)
    there = [lane for lane, answer in zip(lanes, answers, strict=True) if answer]
    assert 1 < len(there) <= ROWS
    assert child.wrong(there, list(filter(None, answers))) == 0
    for lane in there:
        child("forget", lane.key)
    late = [lane for lane in lanes if lane not in there]
    assert child.wrong(late, child.extend(late)) == 0


def test_texts_end_with_the_context(child: Child) -> None:
    rng = random.Random(7)
    long, full, over, short = (text(rng, i) for i in range(4))
    for t, length in ((long, CONTEXT - 1), (full, CONTEXT), (over, CONTEXT + 1)):
        t.tokens = [rng.randrange(3, VOCAB) for _ in range(length - len(t.prompt_ids))]
    begin(child)
    lanes = [t.lane() for t in (long, full, over, short)]
    answers = child.extend(lanes)
    assert answers[2] == []
    kept = [0, 1, 3]
    assert child.wrong([lanes[i] for i in kept], [answers[i] for i in kept]) == 0
    assert child.extend([short.lane()])[0][0] == answers[3][0]


def test_an_empty_prompt_does_not_reach_it(child: Child) -> None:
    """There is no token to go on from, so it would end the process."""
    begin(child)
    mirrors = MirroredRequests(1, max_tokens=4000)
    for number, prompt in ((1, []), (2, [5])):
        beat = Beat(engine="e", requests=[(1, 0, 0)])
        opening = Open(request=number, prompt_ids=prompt, output_ids=[], seed=77, temperature=1.0, window=2)
        mirrors.receive(5, encode(Header(sender=5, receiver=1, number=number), [beat, opening]), 0.0)
    assert mirrors.drops.counts == {"malformed": 1}
    lanes = [replace(lane, key=str(lane.key)) for lane in mirrors.wanted(8)]
    assert child.wrong(lanes, child.extend(lanes)) == 0
    assert len(lanes) == 1
    child("forget", lanes[0].key)


@pytest.mark.parametrize("name", ["Shared", "KeepsKeysOfOldWeights"])
def test_new_weights_draft_as_their_model_does(
    child: Child, tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    """In the middle of texts, whose keys were of the old weights; damaged weights change nothing."""
    folders = [make_dense(tmp_path_factory.mktemp("weights"), f"seed={seed}") for seed in (21, 11)]
    rng = random.Random(10)
    texts = [text(rng, i) for i in range(5)]
    begin(child, name)
    mistakes = 0
    for folder, damaged in ((folders[0], False), (folders[0], True), (folders[1], False)):  # ends as it began
        for _ in range(2):
            for t, answer in zip(texts, child.extend([t.lane() for t in texts]), strict=True):
                t.tokens += answer
        problem, version = child("renew", folder, damaged)
        assert ("wrong digest" in problem) == damaged
        lanes = [t.lane() for t in texts]
        answers = child.extend(lanes)
        mistakes += child.wrong(lanes, answers)
        for t, answer in zip(texts, answers, strict=True):
            t.tokens += answer
    assert version == 2
    assert (mistakes == 0) == (name == "Shared")
    for t in texts:
        child("forget", t.key)


@pytest.mark.parametrize("forgets", [True, False])
def test_one_that_slept_drafts_as_before_and_with_weights_that_came_meanwhile(
    child: Child, tmp_path_factory: pytest.TempPathFactory, forgets: bool
) -> None:
    """Keys are gone while it sleeps: who does not tell it to forget gets drafts of nothing."""
    seeds = (21, 11) if forgets else ()
    folders = [make_dense(tmp_path_factory.mktemp("weights"), f"seed={seed}") for seed in seeds]
    rng = random.Random(12)
    texts = [text(rng, i) for i in range(5)]
    begin(child)
    mistakes = 0
    for folder in ("", *folders):  # ends as it began
        for _ in range(3):
            for t, answer in zip(texts, child.extend([t.lane() for t in texts]), strict=True):
                t.tokens += answer
        for t in texts if forgets else []:
            child("forget", t.key)
        assert child("sleep") is False
        if folder:
            assert child("renew", folder, False)[0] == ""
        child("wake")
        lanes = [t.lane() for t in texts]
        answers = child.extend(lanes)
        mistakes += child.wrong(lanes, answers)
        for t, answer in zip(texts, answers, strict=True):
            t.tokens += answer
    assert (mistakes == 0) == forgets
    for t in texts:
        child("forget", t.key)


def branched(child: Child, texts: int, steps: int, seed: int) -> tuple[int, int, int]:
    """Texts that grow, each with a branch somewhere; (branches with an answer, wrong ones, wrong tokens of texts)."""
    rng = random.Random(seed)
    running = [text(rng, i) for i in range(texts)]
    answered = mistakes = others = 0
    for _ in range(steps):
        lanes = [t.lane() for t in running]
        branches = []
        for t, lane in zip(running, lanes, strict=True):
            if t.tokens:
                at = rng.randrange(len(t.tokens))
                tokens = [*t.tokens[:at], *(rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 4)))]
                branches.append(replace(lane, tokens=tokens, agreed=at, branch=at))
        answers = child.extend([*lanes, *branches])
        given = [(lane, answer) for lane, answer in zip(branches, answers[texts:], strict=True) if answer]
        answered += len(given)
        mistakes += child.wrong([lane for lane, _ in given], [answer for _, answer in given])
        others += child.wrong(lanes, answers[:texts])
        others += child.wrong(lanes, [[token] for token in child("runners_up")[:texts]], "runner_up")
        for t, answer in zip(running, answers[:texts], strict=True):
            t.tokens += answer
    for t in running:
        child("forget", t.key)
    return answered, mistakes, others


@pytest.mark.parametrize("name", ["Shared", "SharesATokenMore"])
def test_branches_go_on_from_their_own_tokens_and_leave_texts_alone(child: Child, name: str) -> None:
    begin(child, name)
    answered, mistakes, others = branched(child, texts=3, steps=12, seed=3)
    assert answered > 20
    assert (mistakes == 0) == (name == "Shared")
    assert others == 0
    assert child("state") == [0, BLOCKS, ROWS]


def test_branches_take_no_place_of_texts(child: Child) -> None:
    """With as many texts as there are rows, none is free."""
    begin(child)
    answered, _, others = branched(child, texts=ROWS, steps=3, seed=5)
    assert (answered, others) == (0, 0)


@pytest.mark.parametrize("name", ["Shared", "TellsOldRunnersUp", "NeverTellsThemAgain"])
def test_second_choices_are_there_while_they_are_wanted(child: Child, name: str) -> None:
    """And drafts are right in both cases."""
    rng = random.Random(14)
    texts = [text(rng, i) for i in range(5)]
    begin(child, name)
    mistakes = 0
    for wanted in (True, False, False, True):
        child("want", wanted)
        lanes = [t.lane() for t in texts]
        answers = child.extend(lanes)
        assert child.wrong(lanes, answers) == 0
        runners_up = child("runners_up")
        assert len(runners_up) == len(lanes)
        if wanted:
            mistakes += child.wrong(lanes, [[token] for token in runners_up], "runner_up")
        else:
            mistakes += sum(token is not None for token in runners_up)
        for t, answer in zip(texts, answers, strict=True):
            t.tokens += answer
    for t in texts:
        child("forget", t.key)
    assert (mistakes == 0) == (name == "Shared")
