"""The buffer keeps the newest and longest rollouts within its bound, and draws the same after a resume."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specactor.trainer.drafter.buffer import DraftBuffer, TrainingExample, cut
from tests.trainer.drafter.cases import example, examples


def buffer(max_tokens: int = 10**6, seed: int = 0, longest: int = 10**6) -> DraftBuffer:
    return DraftBuffer(max_tokens=max_tokens, half_life_steps=2.0, seed=seed, max_example_tokens=longest)


def plain(length: int, *, version: int = 0, prompt: int = 1) -> TrainingExample:
    return TrainingExample(token_ids=np.zeros(length + prompt, np.int32), prompt_len=prompt, version=version)


def same(a: TrainingExample, b: TrainingExample) -> bool:
    def flat(x: TrainingExample) -> tuple[object, ...]:
        known = x.top_k
        return (
            x.token_ids.tobytes(),
            *(x.prompt_len, x.version, x.temperature),
            known and (known.tokens.tobytes(), known.logprobs.tobytes(), known.tokens.shape, known.logprobs.dtype.str),
        )

    return flat(a) == flat(b)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5)), max_size=25), st.integers(1, 200), st.integers(1, 40))
def test_the_bound_holds_and_what_left_was_older_or_shorter(
    made: list[tuple[int, int]], max_tokens: int, longest: int
) -> None:
    held = buffer(max_tokens, longest=longest)
    added = [replace(plain(length, version=version), temperature=1.0 + i) for i, (length, version) in enumerate(made)]
    room = min(longest, max_tokens)
    num_cut = held.add(added)
    assert held.num_tokens <= max_tokens
    fitting = [x if len(x.token_ids) <= room else cut(x, room) for x in added if room > 1]
    kept = {x.temperature for x in held.examples}
    assert all(same(x, fitting[int(x.temperature) - 1]) for x in held.examples)
    for x in fitting:
        if x.temperature not in kept:
            assert all((x.version, x.response_len) <= (y.version, y.response_len) for y in held.examples)
    too_long = sum(len(x.token_ids) > room for x in added)
    assert (num_cut, held.too_long) == ((too_long, 0) if room > 1 else (0, too_long))


def test_of_a_long_response_the_beginning_is_learned_from() -> None:
    held, long = buffer(longest=10), example(np.random.default_rng(3), longest=60)
    assert long.top_k is not None
    assert long.prompt_len < 10 < len(long.token_ids)
    assert held.add([long, plain(20, prompt=10), plain(5)]) == 1
    assert held.too_long == 1, "of the second the prompt alone is that long"
    first, second = held.examples
    assert same(second, plain(5))
    assert first.top_k is not None
    assert first.token_ids.tolist() == long.token_ids[:10].tolist()
    assert first.top_k.tokens.tolist() == long.top_k.tokens[: 10 - long.prompt_len].tolist()
    assert first.top_k.logprobs.tolist() == long.top_k.logprobs[: 10 - long.prompt_len].tolist()
    assert first.top_k.tokens.base is None, "what was cut off is not kept"
    assert held.take() == [first, second]
    assert (len(held), held.num_tokens) == (0, 0)


def test_draws_have_no_example_twice_and_fit() -> None:
    held = buffer()
    held.add(examples(40))
    for number in range(20):
        drawn = held.draw(number, 200)
        assert len({id(x) for x in drawn}) == len(drawn) > 1
        assert sum(len(x.token_ids) for x in drawn) <= 200
    assert len(held.draw(0, 1)) == 1, "one that is too long comes alone"
    assert buffer().draw(0, 100) == []


def test_newer_and_longer_responses_are_drawn_more_often() -> None:
    held = buffer()
    held.add([plain(10, version=0), plain(10, version=4), plain(40, version=4)])
    first = [held.draw(number, 1)[0] for number in range(4000)]
    share = [sum(x is y for x in first) / 4000 for y in held.examples]
    expected = np.array([10 * 0.25, 10, 40]) / 52.5
    assert np.abs(share - expected).max() < 0.03


def test_draws_depend_on_seed_number_and_content_alone() -> None:
    def drawn(held: DraftBuffer, number: int) -> list[bytes]:
        return [x.token_ids.tobytes() for x in held.draw(number, 300)]

    a, b, other = buffer(), buffer(), buffer(seed=1)
    for held in (a, b, other):
        held.add(examples(40))
    a.draw(7, 50)
    np.random.seed(3)
    assert drawn(a, 3) == drawn(b, 3)
    assert drawn(a, 3) != drawn(a, 4)
    assert drawn(a, 3) != drawn(other, 3)


def test_a_state_that_comes_back_is_equal_bit_for_bit() -> None:
    held, again = buffer(5000), buffer(5000)
    rng = np.random.default_rng(0)
    held.add([*examples(30), *examples(5, seed=1), example(rng, top_k=3)])
    again.add(examples(3, seed=9))
    again.restore(held.state())
    assert len(again) == len(held) > 30
    assert all(same(a, b) for a, b in zip(held.examples, again.examples, strict=True))
    assert all(same(a, b) for a, b in zip(held.draw(5, 300), again.draw(5, 300), strict=True))
    first = next(x.top_k for x in held.examples if x.top_k is not None)
    assert first.tokens.tobytes() in held.state()
    again.restore(held.state().replace(first.tokens.tobytes(), np.roll(first.tokens, 1).tobytes()))
    assert not all(same(a, b) for a, b in zip(held.examples, again.examples, strict=True))


def test_an_empty_state() -> None:
    again = buffer()
    again.add(examples(3))
    again.restore(buffer().state())
    assert len(again) == 0
