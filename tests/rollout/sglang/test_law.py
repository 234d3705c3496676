"""What a speculating engine samples follows transformers' law of every next token; wrong versions do not.

The law is exact (reference_law.py), so p-values of the whole sample can be asked to be as small as is wanted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import msgspec
import pytest

from specactor.config import EngineConfig, SpeculationConfig
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.speculation.verification import accepted_path, chain
from specactor.types import RolloutRequest, SamplingParams
from tests.rollout.conftest import VOCAB, start_script
from tests.rollout.law import Law, Reference, Response, Sample, entropy, p_values, surprise
from tests.rollout.sglang.test_verify_worker import configure, report

HERE = "tests.rollout.sglang.law_versions"
TOO_SMALL = 1e-6
"""p-values of right versions are larger; of wrong ones, at least one is smaller."""
PROMPTS = [tuple(3 + (7 * group + 5 * j * j) % (VOCAB - 3) for j in range(4 + group)) for group in range(4)]
TOKENS = 12
"""Of a response."""
RUNNING = 256
AT_ONCE = 1024
"""Requests of one call, at most."""
MANY, FEW = 2112, 128
"""Responses to each prompt."""
PAIRS = 400
"""The same, of pairs of which one is kept."""
WINDOW = 4
WRONG = {
    "likeliest": AT_ONCE,
    "likeliest_for_drafts": AT_ONCE,
    "accepts_the_likely": AT_ONCE,
    "emits_the_rejected": AT_ONCE,
    "noise_of_the_batch": AT_ONCE,
    "noise_of_the_row": 32,
}
"""Name of a wrong version -> requests of one call."""


def speculation(version: str = "right", **fields: object) -> SpeculationConfig:
    chosen: dict[str, object] = {"mode": "coupled", "window": WINDOW, "max_window": WINDOW, **fields}
    return SpeculationConfig(drafters=(f"{HERE}:{version}",), **chosen)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reference(model_dir: str) -> Iterator[Reference]:
    with start_script("reference_law.py", model_dir) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        @cache  # backends that are right give equal samples
        def ask(sample: Sample) -> Law:
            asked = {"prompt": sample.prompt, "responses": sample.responses, "after": sample.frequent}
            stdin.write(json.dumps(asked) + "\n")
            stdin.flush()
            return msgspec.json.decode(stdout.readline().removeprefix("ANSWERS "), type=Law)

        yield ask
        stdin.close()
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def speculating(make_spec: Callable[..., EngineSpec]) -> Iterator[Engine]:
    spec = make_spec(
        40,
        config=EngineConfig(max_running_requests=RUNNING, max_total_tokens=16_384),
        speculation=speculation(),
    )
    with running(spec) as engine:
        yield engine


def sampled(engine: Engine, count: int, *, at_once: int = AT_ONCE, **sampling: object) -> list[Sample]:
    """`count` responses to each prompt; seeds count up, so weak noise would show."""
    chosen: dict[str, object] = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True, **sampling}
    params = SamplingParams(**chosen)  # type: ignore[arg-type]
    requests = [
        RolloutRequest(
            request_id=f"r{i}",
            prompt_ids=PROMPTS[i % len(PROMPTS)],
            sampling=params,
            seed=i,
            group_id=i % len(PROMPTS),
        )
        for i in range(count * len(PROMPTS))
    ]
    engine.flush()
    texts = [
        trajectory.token_ids
        for start in range(0, len(requests), at_once)
        for trajectory in engine.generate(requests[start : start + at_once])
    ]
    return [Sample(prompt=prompt, responses=tuple(texts[g :: len(PROMPTS)])) for g, prompt in enumerate(PROMPTS)]


def sampled_as(
    engine: Engine, config: SpeculationConfig, count: int = FEW, *, at_once: int = AT_ONCE, **sampling: object
) -> list[Sample]:
    configure(engine, config)
    return sampled(engine, count, at_once=at_once, **sampling)


@pytest.fixture(scope="module")
def many(speculating: Engine) -> list[Sample]:
    return sampled_as(speculating, speculation(), MANY)


def test_a_hundred_thousand_speculated_tokens_follow_the_law(
    speculating: Engine, many: list[Sample], reference: Reference
) -> None:
    counts = report(speculating)
    assert sum(len(r) for s in many for r in s.responses) >= 100_000
    assert counts.drafted > 100_000
    assert 10_000 < counts.accepted < counts.drafted / 2
    assert counts.failures == 0
    check(many, reference)


def check(samples: Sequence[Sample], reference: Reference) -> None:
    values = p_values(samples, reference)
    assert min(values.values()) > TOO_SMALL, values


def assert_caught(samples: Sequence[Sample], reference: Reference) -> None:
    values = p_values(samples, reference)
    assert min(values.values()) < TOO_SMALL, values


def check_entropy(samples: Sequence[Sample], reference: Reference) -> None:
    """Neither greedy nor cooled down, and there is entropy to be missed."""
    laws = [reference(sample) for sample in samples]
    assert entropy(laws) > 1.0
    assert abs(surprise(laws)) < 5


@pytest.mark.parametrize("backend", ["plain", "plain on two ranks", "off", "auto", "coupled"])
def test_every_backend_samples_at_temperature_one(
    engines: tuple[Engine, Engine], speculating: Engine, reference: Reference, backend: str
) -> None:
    match backend:
        case "plain":
            samples = sampled(engines[0], FEW)
        case "plain on two ranks":
            samples = sampled(engines[1], FEW)
        case "auto":
            samples = sampled_as(speculating, speculation(mode="auto", window=None))
        case mode:
            samples = sampled_as(speculating, speculation(mode=mode))
    if backend in ("auto", "coupled"):
        assert report(speculating).accepted > 0
    check_entropy(samples, reference)
    check(samples, reference)


@pytest.mark.parametrize("version", WRONG)
def test_wrong_versions_are_caught(speculating: Engine, reference: Reference, version: str) -> None:
    assert_caught(sampled_as(speculating, speculation(version), at_once=WRONG[version]), reference)
    assert report(speculating).failures == 0


@pytest.mark.parametrize(
    "ignored", [{"temperature": 0.9}, {"temperature": 1.1}, {"top_p": 0.95}, {"top_k": 20}], ids=str
)
def test_parameters_that_nobody_asked_for_are_caught(
    speculating: Engine, reference: Reference, ignored: dict[str, object]
) -> None:
    """An engine that takes these for those of the law."""
    assert_caught(sampled_as(speculating, speculation(), **ignored), reference)


def rounds(response: Response, following: Mapping[int, int]) -> int:
    """Rounds in which a response is generated when a token's most frequent successor is drafted."""
    count, done = 0, 1
    while done < len(response):
        draft = [following.get(response[done - 1], 0)]
        while len(draft) < min(WINDOW, len(response) - done - 1):
            draft.append(following.get(draft[-1], 0))
        samples = [*response[done:], *[0] * WINDOW]
        done += len(accepted_path(chain(draft), samples))
        count += 1
    return count


def test_the_faster_of_two_with_coins_of_their_own_is_caught(many: list[Sample], reference: Reference) -> None:
    """Of two responses with independent noise, the one that was easy to draft is kept."""
    pairs = Counter(pair for s in many for r in s.responses for pair in pairwise(r))
    following = {a: b for (a, b), _ in reversed(pairs.most_common())}
    halves = [(s, s.responses[:PAIRS], s.responses[PAIRS : 2 * PAIRS]) for s in many]

    def easy(response: Response) -> int:
        return rounds(response, following)

    first = [replace(s, responses=one) for s, one, _ in halves]
    faster = [
        replace(s, responses=tuple(min(pair, key=easy) for pair in zip(one, other, strict=True)))
        for s, one, other in halves
    ]
    check(first, reference)
    assert_caught(faster, reference)


def test_the_right_version_is_right_again(speculating: Engine, reference: Reference) -> None:
    """No wrong version left anything behind."""
    check(sampled_as(speculating, speculation()), reference)
