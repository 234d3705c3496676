"""Faults, one by one, each in a copy of a recorded run: `first_difference` names the step and the cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from specactor.cpu.sglang_ops import sample_with_noise
from specactor.errors import DataError
from specactor.replay import records
from specactor.replay.audit import gumbel
from specactor.replay.compare import first_difference
from specactor.replay.records import RankWeights, SampleRecord, StepRecord

VOCABULARY, GROUPS, SAMPLES, TOKENS, STEPS = 50, 4, 4, 40, 4
CONFIG: dict[str, Any] = {
    "data": {"train": "chain_sum", "prompt_template": "{prompt}="},
    "rollout": {"temperature": 1.0, "speculation": {"mode": "coupled"}},
    "train": {"learning_rate": 1e-3},
    "tracking": {"record": "full"},
}


@dataclass(frozen=True)
class Made:
    """What the samples of a step are made with."""

    problem: int = 0
    prompt: int = 0
    seed: int = 0
    scale: float = 1.0
    """Of the logits: another temperature."""
    model: int = 0
    drawn_with: int = 0
    """Added to the seed that is drawn with, which is not the one that is recorded."""
    wrong_at: int | None = None
    """A token here is not the one that the noise picks."""
    nudge: float = 0.0
    """Added to the second best score at one place, as another kernel's rounding is."""


def sample(step: int, group: int, k: int, made: Made, *, is_whole: bool = True) -> SampleRecord:
    """A response that a random model emits, drawn as engines draw."""
    seed, prompt = 1000 * step + 10 * group + k + made.seed, [1, 2, group, made.prompt]
    random = np.random.default_rng([step, group, k, made.model])
    tokens, logprobs = [], []
    for at in range(TOKENS):
        logits = torch.tensor(random.normal(size=VOCABULARY)) * 2 * made.scale
        values = torch.log_softmax(logits, -1)
        drawn = torch.tensor([seed + made.drawn_with])
        token = int(sample_with_noise(values[None], drawn, torch.tensor([len(prompt) + at - 1])))
        if at == made.wrong_at:
            token = int(values.argsort(descending=True)[0 if token != int(values.argmax()) else 1])
        if at == 7 and made.nudge:  # the runner-up wins: scores are made to lie this near to each other
            scores = values + torch.tensor([gumbel(seed, len(prompt) + at, v) for v in range(VOCABULARY)])
            second = int(scores.argsort(descending=True)[1])
            values[second] += scores.max() - scores[second] - made.nudge
            token = second if made.nudge < 0 else token
        tokens.append(token)
        logprobs.append(float(values[token].to(torch.float32)))
    return SampleRecord.of(
        request_id=f"{step}.{group}.{k}",
        group=group,
        sample=k,
        problem=group + made.problem,
        seed=seed,
        spans=((step - 1, 0, TOKENS),),
        finish_reason="length",
        prompt_ids=prompt,
        token_ids=tokens,
        logprobs=logprobs,
        routed_experts=bytes([step, group, k]),
        score=float(k % 2),
        reward=float(k % 2),
        advantage=k % 2 - 0.5,
        is_whole=is_whole,
    )


def samples(
    step: int,
    made: Made | None = None,
    only: Callable[[int, int], bool] = lambda g, k: True,
    *,
    is_whole: bool = True,
) -> tuple[SampleRecord, ...]:
    made = made or Made()
    places = [(g, k) for g in range(GROUPS) for k in range(SAMPLES)]
    return tuple(sample(step, g, k, made if only(g, k) else Made(), is_whole=is_whole) for g, k in places)


def weights(step: int) -> tuple[RankWeights, ...]:
    """Two data-parallel ranks: the same places, the same digests."""
    digests = {"decoder.layers.0.weight": 10 * step, "decoder.layers.0.mlp.experts.fc1.weight": 10 * step + 1}
    return tuple(RankWeights(place=(0, 0, 0, 0), digests=dict(digests), optimizer=step + 1) for _ in range(2))


METRICS = {"loss": 0.5, "grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 640.0, "num_microbatches": 2.0}


def run() -> list[StepRecord]:
    about: dict[str, Any] = {"config": CONFIG, "libraries": {"torch": "2.13.0"}, "engines": 2}
    start = StepRecord(step=0, weights=weights(0), **about)
    steps = [
        StepRecord(
            step=s, version=s - 1, samples=samples(s), metrics=dict(METRICS), weights=weights(s), data=s, **about
        )
        for s in range(1, STEPS)
    ]
    return [start, *steps]


RUN = run()


def faulty(step: int, **changes: Any) -> list[StepRecord]:
    return [msgspec.structs.replace(record, **changes) if record.step == step else record for record in RUN]


def with_setting(key: str, value: Any) -> dict[str, Any]:
    section, name = key.split(".")
    return {**CONFIG, section: {**CONFIG[section], name: value}}


def later(name: str, value: float) -> list[StepRecord]:
    """A metric of training is another from step 2 on."""
    return [
        msgspec.structs.replace(record, metrics={**record.metrics, name: value}) if record.step >= 2 else record
        for record in RUN
    ]


def one_copy(step: int) -> tuple[RankWeights, ...]:
    first, second = weights(step)
    return first, RankWeights(place=second.place, digests={**second.digests, "decoder.layers.0.weight": 99})


def swapped(step: int) -> tuple[RankWeights, ...]:
    name = "decoder.layers.0.mlp.experts.fc1.weight"
    return tuple(RankWeights(place=r.place, digests={**r.digests, name: 77}) for r in weights(step))


def other_moments(step: int) -> tuple[RankWeights, ...]:
    first, second = weights(step)
    return first, msgspec.structs.replace(second, optimizer=30)


def changed(step: int, **fields: Any) -> tuple[SampleRecord, ...]:
    """The second sample of the step has other fields."""
    own = list(samples(step))
    own[1] = msgspec.structs.replace(own[1], **fields)
    return tuple(own)


WITHOUT = {**CONFIG, "rollout": {"temperature": 1.0, "speculation": {"mode": "off"}}}
FAULTS: dict[str, tuple[list[StepRecord], int, str]] = {
    "a flipped bit in the weights of one engine": (
        faulty(2, samples=samples(2, Made(model=1), lambda g, k: g % 2 == 1)),
        2,
        "weights or arithmetic of engine 1",
    ),
    "... whose samples were not kept whole": (
        faulty(2, samples=samples(2, Made(model=1), lambda g, k: g % 2 == 1, is_whole=False)),
        2,
        "weights or arithmetic of engine 1",
    ),
    "a stale version": (faulty(2, samples=changed(2, spans=((0, 0, TOKENS),))), 2, "weight version"),
    "a seed off by one": (faulty(2, samples=samples(2, Made(seed=1))), 2, "noise: another seed"),
    "noise that is not of the seed": (
        faulty(2, samples=samples(2, Made(drawn_with=1))),
        2,
        "noise: the second run did not sample with its seeds",
    ),
    "another temperature": (
        faulty(2, samples=samples(2, Made(scale=0.5)), config=with_setting("rollout.temperature", 2.0)),
        2,
        "sampling settings",
    ),
    "another template": (
        faulty(2, samples=samples(2, Made(prompt=1)), config=with_setting("data.prompt_template", "{prompt}")),
        2,
        "prompt template or tokenizer",
    ),
    "a reward that changed": (faulty(3, samples=changed(3, score=0.25, reward=0.25)), 3, "reward or environment"),
    "shaping that changed": (faulty(3, samples=changed(3, reward=0.25)), 3, "shaping of rewards"),
    "other advantages": (faulty(3, samples=changed(3, advantage=7.0)), 3, "advantages"),
    "a data order that changed": (faulty(2, samples=samples(2, Made(problem=5))), 2, "data order"),
    "another learning rate from a step on": (later("learning_rate", 2e-3), 2, "learning rate"),
    "a swapped expert": (faulty(2, weights=swapped(2)), 2, "weights changed outside of training"),
    "other moments of the optimizer": (faulty(2, weights=other_moments(2)), 2, "optimizer: its moments"),
    "a data stream that stands elsewhere": (faulty(2, data=9), 2, "data order"),
    "other weights at the start": (faulty(0, weights=swapped(0)), 0, "weights at the start"),
    "a lost microbatch": (later("tokens", 320.0), 2, "microbatches"),
    "another loss": (later("loss", 0.75), 2, "training: loss or gradient"),
    "a gradient that was not reduced on one rank": (
        faulty(2, weights=one_copy(2)),
        2,
        "gradients were not reduced over all ranks",
    ),
    "a verification that accepts a wrong token": (
        faulty(2, samples=samples(2, Made(wrong_at=20), lambda g, k: (g, k) == (1, 2))),
        2,
        "speculation: the second run emitted a token",
    ),
    "a verification that accepts a wrong token, whose verdict decides what is drawn next": (
        faulty(2, samples=samples(2, Made(wrong_at=20), lambda g, k: (g, k) == (1, 2)), data=9),
        2,
        "speculation: the second run emitted a token",
    ),
    "a sampler that emits a wrong token, without speculation": (
        faulty(2, samples=samples(2, Made(wrong_at=20), lambda g, k: (g, k) == (1, 2)), config=WITHOUT),
        2,
        "sampling: the second run emitted a token",
    ),
    "a branch of an agent's session": (faulty(2, samples=changed(2, branches=5)), 2, "a further sequence of an agent"),
    "another library": (
        faulty(2, samples=samples(2, Made(model=1)), libraries={"torch": "2.14.1"}),
        2,
        "library version: torch 2.13.0, 2.14.1",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_step_and_the_cause_are_named(name: str) -> None:
    theirs, step, cause = FAULTS[name]
    found = first_difference(RUN, theirs, noise=gumbel)
    assert found is not None
    assert found.step == step
    assert found.cause.startswith(cause), found
    assert ("speculation" in found.cause) == name.startswith("a verification")


def test_what_does_not_matter_is_no_difference() -> None:
    """Speculation, a drafter that lies, where records go: tokens are the same."""
    other = [
        msgspec.structs.replace(r, config={**WITHOUT, "tracking": {"record": "sampled"}, "name": "b"}, engines=1)
        for r in RUN
    ]
    assert first_difference(RUN, other, noise=gumbel) is None


def test_a_tie_is_a_tie() -> None:
    """Two tokens score within rounding of each other, and each run emits one of them."""
    ours, theirs = (
        faulty(2, samples=samples(2, Made(nudge=nudge), lambda g, k: (g, k) == (2, 3))) for nudge in (1e-6, -1e-6)
    )
    found = first_difference(ours, theirs, noise=gumbel)
    assert found is not None
    assert (found.step, found.cause) == (2, "a kernel's tie")
    assert "token 7 of 40" in found.where


def test_foreign_noise_is_no_evidence() -> None:
    """An agent's later turns have seeds of their own; what differs in a first turn is told first."""

    def seeded(made: Made, only: Callable[[int, int], bool]) -> list[StepRecord]:
        turns = [msgspec.structs.replace(s, seeded=10) for s in samples(2, made, only)]
        return faulty(2, samples=tuple(turns))

    ours = seeded(Made(), lambda g, k: False)
    found = first_difference(ours, seeded(Made(wrong_at=20), lambda g, k: (g, k) == (1, 2)), noise=gumbel)
    assert found is not None
    assert (found.cause, found.token) == ("sampling", 20)
    assert "later turn of an agent" in found.evidence[-1]
    found = first_difference(ours, seeded(Made(wrong_at=5), lambda g, k: (g, k) == (1, 2)), noise=gumbel)
    assert found is not None
    assert found.cause.startswith("speculation: the second run")


def test_a_sample_alone_is_compared_alone() -> None:
    [alone] = [s for s in samples(2) if (s.group, s.sample) == (3, 1)]
    replayed = [StepRecord(step=2, version=1, samples=(alone,), config=WITHOUT, engines=1)]
    assert first_difference(RUN, replayed, noise=gumbel) is None
    other = msgspec.structs.replace(sample(2, 3, 1, Made(wrong_at=5)))
    replayed = [StepRecord(step=2, version=1, samples=(other,), config=WITHOUT, engines=1)]
    found = first_difference(RUN, replayed, noise=gumbel)
    assert found is not None
    assert "group 3, sample 1" in found.where


def test_another_layout_trains_alike_but_for_rounding() -> None:
    """One rank in place of two: what it trains is near; what it samples afterwards is another run, and that is said."""
    one = [
        msgspec.structs.replace(
            r,
            weights=(RankWeights(place=(0, 0, 0, 0), digests={"w": 1}),),
            metrics={**r.metrics, "grad_norm": 1.00001, "num_microbatches": 4.0} if r.metrics else {},
        )
        for r in RUN
    ]
    assert first_difference(RUN, one, noise=gumbel) is None
    other = [msgspec.structs.replace(r, samples=samples(3, Made(model=1))) if r.step == 3 else r for r in one]
    found = first_difference(RUN, other, noise=gumbel)
    assert found is not None
    assert (found.step, found.cause.partition(":")[0]) == (3, "another layout of ranks")
    far = [msgspec.structs.replace(r, metrics={**r.metrics, "grad_norm": 1.1}) if r.step == 1 else r for r in one]
    found = first_difference(RUN, far, noise=gumbel)
    assert found is not None
    assert (found.step, found.cause) == (1, "training: loss or gradient")


def test_the_noise_is_the_samplers() -> None:
    values = torch.randn(64, dtype=torch.float64)
    for seed, position in ((0, 0), (5, 17), (2**31 - 1, 4096)):
        token = sample_with_noise(values[None], torch.tensor([seed]), torch.tensor([position]))
        scores = [float(values[v]) + gumbel(seed, position + 1, v) for v in range(64)]
        assert int(token) == int(np.argmax(scores))


def test_a_record_comes_back_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    size = records.write(tmp_path, RUN[2])
    file = records.file_of(tmp_path, 2)
    assert file.stat().st_size == size
    assert records.read(file) == RUN[2]
    assert records.steps_of(tmp_path) == [2]
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:40] + bytes([whole[40] ^ 1]) + whole[41:], b""):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match="cut or changed"):
            records.read(file)
    file.write_bytes(whole[:4] + (7).to_bytes(4, "little") + whole[8:])
    with pytest.raises(DataError, match="got format 7, expected 1"):
        records.read(file)
    with pytest.raises(DataError, match="cannot be read"):
        records.read(records.file_of(tmp_path, 3))


def test_a_few_that_were_not_kept_whole_are_blamed_on_neither_sampler_nor_engine_alone() -> None:
    ours = [msgspec.structs.replace(r, samples=samples(r.step, is_whole=False), engines=1) for r in RUN]
    other = samples(2, Made(wrong_at=5), lambda g, k: (g, k) == (1, 2), is_whole=False)
    theirs = [msgspec.structs.replace(r, samples=other) if r.step == 2 else r for r in ours]
    found = first_difference(ours, theirs, noise=gumbel)
    assert found is not None
    assert (found.step, found.token, found.cause) == (2, None, "sampling or arithmetic of engines")
