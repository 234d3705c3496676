"""Metrics of a step, on a step worked out by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor import measurements
from specactor.config import TrackingConfig
from specactor.errors import SpecActorError
from specactor.metrics import METRICS, TAIL, Tracker
from specactor.rollout.resume import OpenGroup
from specactor.rollout.speculation.counters import Counts, added
from specactor.types import (
    Begun,
    FinishReason,
    Problem,
    RolloutRequest,
    SamplingParams,
    ScoredGroup,
    TrainSequence,
    Trajectory,
    VersionSpan,
)
from specactor.weights_sync.sender import SyncReport

PROBLEM = Problem(index=0, prompt="", prompt_ids=(1,), answer="", verifier="exact", metadata={})
STATS = SimpleNamespace(  # a TrainStats; its module would bring Megatron into this process
    loss=0.5,
    grad_norm=2.0,
    entropy=1.0,
    clip_fraction=0.1,
    logprob_gap_max=1e-6,
    logprob_gap_mean=1e-7,
    logprob_gap_share=0.0,
    effective_share=0.9,
    cut_fraction=0.2,
    kl=0.0,
    tokens=6,
    num_microbatches=1,
    learning_rate=1e-4,
    mtp_loss=None,
    critic=None,
)


OF_CRITIC = {"loss": 0.25, "grad_norm": 3.0, "explained_variance": 0.75, "clip_fraction": 0.5}


@dataclass
class Response:
    length: int
    finish: FinishReason = "stop"


def group(responses: list[Response], scores: tuple[float, ...], rewards: tuple[float, ...]) -> ScoredGroup:
    trajectories = tuple(
        Trajectory(
            request_id="",
            group_id=0,
            prompt_ids=(1,),
            token_ids=(2,) * r.length,
            logprobs=(0.0,) * r.length,
            finish_reason=r.finish,
            spans=(),
        )
        for r in responses
    )
    return ScoredGroup(problem=PROBLEM, trajectories=trajectories, scores=scores, rewards=rewards)


def test_a_step_by_hand() -> None:
    groups = [
        group([Response(1), Response(5, "length")], (1.0, 0.0), (1.0, -0.5)),
        group([Response(2), Response(4)], (1.0, 1.0), (1.0, 1.0)),
    ]
    batch = [TrainSequence(token_ids=(1,) * 4, prompt_len=1)] * 3
    report = SyncReport(num_bytes=10**9, num_rounds=2, seconds=0.5)
    seen = measurements.of_step(groups, batch, STATS, report, version=7)
    assert set(seen) <= set(METRICS)
    assert seen["reward/mean"] == pytest.approx(2.5 / 4)
    assert seen["accuracy/train"] == 0.75
    assert seen["reward/uninformative_groups"] == 0.5
    assert (seen["response/length_mean"], seen["response/length_max"], seen["response/length_p95"]) == (3, 5, 5)
    assert seen["response/cut_fraction"] == 0.25
    assert (seen["rollout/tokens"], seen["train/tokens"], seen["train/sequences"]) == (12, 12, 3)
    assert (seen["weights/version"], seen["sync/gb_per_s"]) == (7, 2.0)


def test_a_session_is_as_long_as_its_sequences_together_and_cut_where_one_is() -> None:
    """Whichever of them comes first. Wrong: the first one's length and end."""
    [one] = [group([Response(1), Response(4, "length")], (1.0, 1.0), (1.0, 1.0))]
    short, cut = one.trajectories
    for first, other in ((short, cut), (cut, short)):
        session = replace(one, trajectories=(replace(first, branches=(other,)), short))
        seen = measurements.of_step([session], [], STATS, SyncReport(num_bytes=1, num_rounds=1, seconds=1.0), version=1)  # type: ignore[arg-type]
        assert (seen["response/length_mean"], seen["response/length_max"]) == (3, 5)
        assert seen["response/cut_fraction"] == 0.5


def test_a_step_with_a_critic_an_mtp_layer_and_experts_by_hand() -> None:
    [one] = [group([Response(1), Response(3)], (1.0, 0.0), (1.0, 0.0))]
    first, second = (replace(t, routed_experts=b"1234") for t in one.trajectories)
    one = replace(one, trajectories=(first, replace(second, branches=(first,))))
    stats = SimpleNamespace(**vars(STATS) | {"critic": OF_CRITIC, "mtp_loss": 1.5})
    seen = measurements.of_step([one], [], stats, SyncReport(num_bytes=1, num_rounds=1, seconds=1.0), version=1)  # type: ignore[arg-type]
    assert set(seen) <= set(METRICS)
    assert (seen["critic/explained_variance"], seen["critic/loss"], seen["rollout/expert_bytes"]) == (0.75, 0.25, 12)
    assert seen["policy/mtp_loss"] == 1.5
    assert (seen["correction/effective_share"], seen["correction/cut_fraction"]) == (0.9, 0.2)


def test_what_environments_did_by_hand() -> None:
    mask = (True, True, False, False, True)
    talked = Trajectory(
        request_id="a",
        group_id=0,
        prompt_ids=(1,),
        token_ids=(1,) * 5,
        logprobs=(0.0,) * 5,
        finish_reason="stop",
        spans=(),
        loss_mask=mask,
        reward=1.0,
        environment_s=0.5,
    )
    assert (talked.first_turn.token_ids, talked.first_turn.logprobs) == ((1, 1), (0.0, 0.0)), (
        "what an audit begins again"
    )
    once = replace(talked, loss_mask=(), environment_s=0.25)
    assert once.first_turn is once
    groups = [ScoredGroup(problem=PROBLEM, trajectories=(talked, once), scores=(1.0, 0.0), rewards=(1.0, 0.0))]
    seen = measurements.of_environments(groups, 3)
    assert seen == {
        "environment/turns_mean": 1.5,
        "environment/observations": 1,
        "environment/observation_tokens": 2,
        "environment/failed": 3,
        "time/environment_s": 0.75,
    }
    assert set(seen) <= set(METRICS)
    assert measurements.of_environments([group([Response(1)], (1.0,), (1.0,))], 0) == {}


@given(st.lists(st.booleans(), max_size=20), st.lists(st.booleans(), max_size=5))
def test_a_turn_is_a_stretch_of_what_was_sampled(mask: list[bool], other: list[bool]) -> None:
    def turns(of: list[bool]) -> int:
        return sum(sampled for sampled, _ in itertools.groupby(of or [True]))

    response = group([Response(1)], (1.0,), (1.0,)).trajectories[0]
    branch = replace(response, loss_mask=tuple(other))
    assert replace(response, loss_mask=tuple(mask), branches=(branch,)).num_turns == turns(mask) + turns(other)


def test_turns_are_counted_once_for_all_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank for all ranks' responses."""
    counted: list[int] = []

    def count(_: Trajectory) -> int:
        counted.append(1)
        return 2

    monkeypatch.setattr(Trajectory, "num_turns", property(count))
    [response] = group([Response(1)], (1.0,), (1.0,)).trajectories
    talked = replace(response, environment_s=1.0)
    groups = [ScoredGroup(problem=PROBLEM, trajectories=(talked,), scores=(1.0,), rewards=(1.0,))]
    assert measurements.of_environments(groups, 0)["environment/observations"] == 1
    assert len(counted) == 1


def test_pass_at_k_is_the_share_of_draws_with_a_right_one() -> None:
    for scores in itertools.product((0.0, 1.0), repeat=5):
        for k in range(1, 6):
            draws = list(itertools.combinations(scores, k))
            assert measurements.pass_at(k, scores) == pytest.approx(sum(max(draw) for draw in draws) / len(draws))
    groups = [group([Response(1)] * 4, s, s) for s in ((1.0, 0.0, 0.0, 0.0), (0.0,) * 4)]
    assert measurements.of_evaluation({"eval": groups, "hard": groups[:1]}) == {
        "accuracy/eval": 0.125,
        "accuracy/eval/pass@2": 0.25,
        "accuracy/eval/pass@4": 0.5,
        "score/eval": 0.125,
        "accuracy/hard": 0.25,
        "accuracy/hard/pass@2": 0.5,
        "accuracy/hard/pass@4": 1.0,
        "score/hard": 0.25,
    }


def test_the_scores_of_a_reward_model_have_a_mean(tmp_path: Path) -> None:
    """None of them need ever be 1."""
    groups = [group([Response(1)] * 2, s, s) for s in ((0.5, -1.0), (0.25, 0.75))]
    found = measurements.of_evaluation({"eval": groups, "hard": groups[:1]})
    assert (found["accuracy/eval"], found["score/eval"], found["score/hard"]) == (0.0, 0.125, -0.25)
    with Tracker(tmp_path, {}, TrackingConfig(wandb="off")) as tracker:
        tracker.log(0, found)  # known names


@pytest.mark.parametrize(
    ("samples", "wanted"), [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 4, 8]), (9, [2, 4, 8, 9]), (12, [2, 4, 8, 12])]
)
def test_pass_at_k_is_told_of_powers_of_two_and_of_all_samples(samples: int, wanted: list[int]) -> None:
    """Of each set by itself, whatever the others solve."""
    sets = {
        name: [group([Response(1)] * samples, s, s) for s in scores]
        for name, scores in (("eval", [(1.0,) + (0.0,) * (samples - 1)]), ("hard", [(0.0,) * samples] * 2))
    }
    found = measurements.of_evaluation(sets)
    for name, right in (("eval", 1), ("hard", 0)):
        told = {int(key.rpartition("@")[2]): v for key, v in found.items() if key.startswith(f"accuracy/{name}/pass@")}
        assert told == {k: pytest.approx(right * k / samples) for k in wanted}


PassAt = Callable[[int, list[float]], float]


def check_pass_at(estimate: PassAt) -> None:
    """Against products of fractions, which the paper's own program computes, as exact rationals."""
    for n, right in ((7, 2), (64, 1), (1000, 3), (4096, 1), (4096, 4095), (300, 0), (300, 300)):
        for k in sorted({1, 2, 3, n // 2, n - 1, n}):
            none = math.prod((Fraction(n - right - i, n - i) for i in range(k)), start=Fraction(1))
            assert estimate(k, [1.0] * right + [0.0] * (n - right)) == float(1 - max(none, Fraction(0)))


def test_pass_at_k_is_exact_for_many_samples() -> None:
    check_pass_at(measurements.pass_at)


def _biased(k: int, scores: list[float]) -> float:
    return 1 - (1 - sum(scores) / len(scores)) ** k


def _rounded_twice(k: int, scores: list[float]) -> float:
    wrong = len(scores) - int(sum(scores))
    return 1 - math.comb(wrong, k) / math.comb(len(scores), k)


@pytest.mark.parametrize("wrong", [_biased, _rounded_twice])
def test_a_wrong_pass_at_k_is_caught(wrong: PassAt) -> None:
    with pytest.raises(AssertionError):
        check_pass_at(wrong)


def test_rates_come_from_the_seconds_of_their_phase() -> None:
    seen = measurements.of_time({"rollout/tokens": 100.0, "train/tokens": 60.0}, {"rollout": 2.0, "sync": 1.0})
    assert seen == {"time/rollout_s": 2.0, "time/sync_s": 1.0, "rollout/tokens_per_s": 50.0}


def test_figures_of_drafters_and_the_utilisation_of_their_processes() -> None:
    parts = [{"drafted_ahead": 1.0, "stale_tails": 2.0}, {"drafted_ahead": 0.5}]
    counts = added({"decoupled": Counts(figures=figures)} for figures in parts)
    seen = measurements.of_drafters(counts | {"mine": Counts(figures={"unheard_of": 3.0})}, [(1.0, 3), (2.0, 4)])
    assert seen == {
        "speculation/decoupled/drafted_ahead": 1.5,
        "speculation/decoupled/stale_tails": 2.0,
        "speculation/decoupled/busy_s": 3.0,
        "speculation/decoupled/processes": 2,
        "speculation/decoupled/dropped_by_drafters": 7,
    }
    assert measurements.of_time(seen, {"rollout": 6.0})["speculation/decoupled/utilisation"] == 0.25
    assert "speculation/decoupled/utilisation" not in measurements.of_time(seen, {"train": 6.0})
    assert measurements.of_drafters({}, []) == {}


def test_what_was_done_with_the_last_requests() -> None:
    begun = Begun(token_ids=(1, 2, 3), logprobs=(0.0,) * 3, spans=(VersionSpan(version=0, start=0, end=3),))
    sampling = SamplingParams(temperature=1.0, max_new_tokens=9)
    requests = [
        RolloutRequest(request_id=name, prompt_ids=(1,), sampling=sampling, seed=0, group_id=0, begun=of)
        for name, of in (("a", begun), ("b", None), ("c", begun))
    ]
    [done] = group([Response(3)], (0.0,), (0.0,)).trajectories
    left = [OpenGroup(problem=0, requests=tuple(requests), finished={"c": done})]
    batch = [
        TrainSequence(token_ids=(1,) * 4, prompt_len=1, num_stale=2),
        TrainSequence(token_ids=(1, 2), prompt_len=1),
    ]
    seen = measurements.of_tail(5, 6, left, 3, batch)
    assert {name.removeprefix("tail/") for name in seen} == set(TAIL)
    assert (seen["tail/drafters_woken"], seen["tail/groups_moved"]) == (5, 6)
    assert (seen["tail/open_groups"], seen["tail/open_requests"], seen["tail/open_tokens"]) == (1, 2, 3)
    assert seen["tail/stale_tokens"] == 2
    assert measurements.of_tail(None, None, None, 0, batch) == {}


def test_nearly_full_marks_count_as_correct_and_parts_do_not() -> None:
    assert measurements.accuracy([1.0, 0.9995, 0.99, 0.0]) == 0.5


@pytest.mark.parametrize(
    ("share", "free", "agrees"),
    [
        (0.0, False, True),
        (0.001, True, True),  # two experts of a mixture scored within rounding of each other
        (0.001, False, False),
        (0.02, True, False),
        (math.nan, True, False),
    ],
)
def test_log_probabilities_that_are_apart_are_an_error(share: float, free: bool, agrees: bool) -> None:
    stats = SimpleNamespace(logprob_gap_share=share, logprob_gap_max=0.5)
    said = r"train\.max_logprob_gap: at step 3 .* by up to 5\.00e-01"
    with nullcontext() if agrees else pytest.raises(SpecActorError, match=said):
        measurements.check_agreement(stats, step=3, bound=1e-4, routes_freely=free)  # type: ignore[arg-type]
