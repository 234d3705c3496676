"""Rounds take and bring what the search predicts of uniform ones, and what drawing every token gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.planning.plans import RolloutPlan, ready
from specactor.planning.search import search
from specactor.rollout.speculation.acceptance import survival_of
from specactor.simulator.requests import COUPLED, DECOUPLED, OFF, Floats, Remote, Round, round_of
from tests.lib.pipelined import pipelined
from tests.simulator.small import W, candidates, cluster, drafting, requests, table

RoundOf = Callable[..., Round]


@given(st.lists(st.floats(0, 1), min_size=W + 1, max_size=W + 1), st.integers(1, W + 1))
def test_windows_are_ready_as_often_as_for_one_request(steps: list[float], window: int) -> None:
    survival = np.cumprod(steps)
    found = ready(survival[None])[0, window - 1]
    assert found == pytest.approx(pipelined(survival.tolist(), window).ready, abs=1e-12)


def of_plan(plan: RolloutPlan, n: int, p: float, table_of: object) -> Round:
    return round_of(
        np.tile(survival_of(p, W + 1), (n, 1)),
        np.full(n, {"off": OFF, "coupled": COUPLED}[plan.mode]),
        np.full(n, plan.window),
        table=table_of,  # type: ignore[arg-type]
        drafter=plan.drafter,
    )


def test_uniform_rounds_are_those_of_the_search() -> None:
    found, of = candidates(0.6), requests()
    plans = search(cluster(of), found.verifiers, found.drafters, max_window=W)
    seen = set()
    for plan in (plan for plan in plans if plan.mode != "decoupled"):  # whose rounds take what is there
        p = 0.66 if plan.drafter == "large" else 0.6
        made = of_plan(plan, plan.requests_per_engine, p, found.verifiers[0].costs)
        assert float(made.tokens.mean()) == pytest.approx(plan.tokens_per_round)
        assert made.seconds == pytest.approx(plan.round_s)
        seen.add(plan.mode)
    assert seen == {"off", "coupled"}


def drawn(survival: Floats, window: int, rounds: int, rng: np.random.Generator) -> float:
    """Tokens per round of one request, every token drawn."""
    step = np.concatenate([survival[:1], survival[1:] / survival[:-1]])
    tokens = 0
    for _ in range(rounds):
        accepted = 0
        while accepted < window and rng.random() < step[accepted]:
            accepted += 1
        tokens += accepted + 1
    return tokens / rounds


def never_restarting(*args: object, **more: object) -> Round:
    """Wrong: a drafter elsewhere always has the next window."""
    survival, _, window = args
    what = {"drafter": "small", **more, "table": table(base_s=0.0123, row_s=0.0, step_s=0.0)}
    return round_of(survival, np.full(len(window), COUPLED), window, **what)  # type: ignore[arg-type]


def without_bonus(*args: object, **more: object) -> Round:
    """Wrong: the token of the target's own is forgotten."""
    found = round_of(*args, **more)  # type: ignore[arg-type]
    return replace(found, tokens=found.tokens - 1.0)


def check_tokens(made: RoundOf) -> None:
    rng = np.random.default_rng(0)
    for p, window in ((0.5, 2), (0.8, 4)):
        survival = np.array(survival_of(p, W + 1))
        found = made(survival[None], np.array([COUPLED]), np.array([window]), table=table(), drafter="small")
        assert float(found.tokens[0]) == pytest.approx(drawn(survival, window, 20000, rng), rel=0.03)


def test_tokens_are_those_of_drawing_every_token() -> None:
    check_tokens(round_of)


def test_wrong_tokens_are_caught() -> None:
    with pytest.raises(AssertionError):
        check_tokens(without_bonus)


def drawn_ahead(p: float, window: int, *, round_s: float, token_s: float, rounds: int) -> tuple[float, float]:
    """(tokens, draft tokens verified) per round that waits for nobody, every token drawn. The drafter's steps begin at
    multiples of `token_s`, as it serves others too; what is drafted after a wrong token is wrong."""
    rng = np.random.default_rng(0)
    stock: list[bool] = []
    tokens = verified = 0
    now_s, lost = 0.0, True
    for _ in range(rounds):
        after_s = now_s + round_s
        begun = np.ceil(now_s / token_s) if lost else np.floor(now_s / token_s)
        count = max(0, int(np.floor(after_s / token_s) - begun))
        taken = min(window, len(stock))
        stock += [bool(right) for right in rng.random(min(count, 2 * W - len(stock))) < p]
        agreed = next((i for i, right in enumerate(stock[:taken]) if not right), taken)
        tokens, verified = tokens + agreed + 1, verified + taken
        lost = agreed == len(stock) or not stock[agreed]
        stock = [] if lost else stock[agreed + 1 :]
        now_s = after_s
    return tokens / rounds, verified / rounds


def check_ahead(made: RoundOf, *, host_s: float = 0.0) -> None:
    """Rounds of four draft steps and a little, whatever the rows and requests."""
    for p, window in ((0.5, 2), (0.8, 4), (0.9, 3)):
        flat = table(base_s=0.0123 - host_s, row_s=0.0)
        remote = Remote(seconds=drafting(0.003, request_s=0.0), served=1.0, message_s=0.0)
        survival = np.array(survival_of(p, W + 1))[None]
        what = {"table": flat, "remote": remote, "host_s": host_s}
        found = made(survival, np.array([DECOUPLED]), np.array([window]), **what)
        assert found.seconds == pytest.approx(0.0123)
        drawn = drawn_ahead(p, window, round_s=0.0123, token_s=0.003, rounds=40000)
        assert (float(found.tokens[0]), float(found.drafted[0])) == pytest.approx(drawn, rel=0.05)


@pytest.mark.parametrize("host_s", [0.0, 0.006])
def test_rounds_take_what_is_there(host_s: float) -> None:
    check_ahead(round_of, host_s=host_s)


def test_drafters_that_always_have_a_window_are_caught() -> None:
    with pytest.raises(AssertionError):
        check_ahead(never_restarting)


def host_afterwards(*args: object, host_s: float, **more: object) -> Round:
    """Wrong: drafters elsewhere stand still between two passes."""
    found = round_of(*args, **more)  # type: ignore[arg-type]
    return replace(found, seconds=found.seconds + host_s)


def test_drafters_that_stand_still_between_passes_are_caught() -> None:
    with pytest.raises(AssertionError):
        check_ahead(host_afterwards, host_s=0.006)


@pytest.mark.parametrize(("p", "window"), [(0.3, 1), (0.6, 3), (0.9, 4)])
def test_tokens_vary_as_drawn(p: float, window: int) -> None:
    survival = np.array(survival_of(p, W + 1))
    found = round_of(survival[None], np.array([COUPLED]), np.array([window]), table=table(), drafter="small")
    right_N = (np.random.default_rng(0).random((50000, window)) < p).cumprod(axis=1).sum(axis=1)
    assert float(found.variance[0]) == pytest.approx(float(right_N.var()), rel=0.03)
    assert found.most.tolist() == [window + 1]


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.floats(0, 1), st.integers(1, W))
def test_a_better_drafter_never_emits_less(rates: list[float], share: float, window: int) -> None:
    low = np.array([survival_of(p, W + 1) for p in rates])
    high = np.minimum.accumulate(low + share * (1.0 - low), axis=1)  # rounding may make it rise
    worse, better = (
        round_of(s, np.full(3, COUPLED), np.full(3, window), table=table(), drafter="small") for s in (low, high)
    )
    assert (better.tokens >= worse.tokens - 1e-12).all()
    assert (worse.tokens >= 1.0).all()


def test_without_windows_a_round_is_a_plain_step() -> None:
    found = round_of(np.zeros((4, W)), np.zeros(4, np.int64), np.zeros(4, np.int64), table=table())
    assert (found.seconds, found.tokens.tolist()) == (table().plain_s(4), [1.0] * 4)
