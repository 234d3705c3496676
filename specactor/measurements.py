"""Metrics of one step, by the names of `specactor.metrics`. PURE."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from specactor.errors import SpecActorError
from specactor.metrics import SPECULATION
from specactor.rollout.speculation.counters import Counts
from specactor.trainer.advantages import informative
from specactor.types import ScoredGroup, TrainSequence, Trajectory

if TYPE_CHECKING:  # these import torch, or start processes
    from specactor.rollout.resume import OpenGroup
    from specactor.trainer.policy import TrainStats
    from specactor.weights_sync.sender import SyncReport


def is_right(score: float) -> bool:
    return score >= 0.999  # a verifier's sum of parts may be rounded


def accuracy(scores: Sequence[float]) -> float:
    return fmean(map(is_right, scores))


def of_evaluation(sets: Mapping[str, Sequence[ScoredGroup]]) -> dict[str, float]:
    """Return each held-out set's mean score, avg@n and pass@k, k = 2, 4, .. and n, of responses that have a score."""
    found: dict[str, float] = {}
    for name, groups in sets.items():
        key, scores = f"accuracy/{name}", [score for group in groups for score in group.scores]
        samples = max(len(group.scores) for group in groups)
        if scores:
            found |= {key: accuracy(scores), f"score/{name}": fmean(scores)}
        for k in (*(2**i for i in range(1, (samples - 1).bit_length())), *([samples] if samples > 1 else [])):
            found[f"{key}/pass@{k}"] = fmean(pass_at(k, of.scores) for of in groups if len(of.scores) >= k)
    return found


def pass_at(k: int, scores: Sequence[float]) -> float:
    """Return P(one of k responses is right), an unbiased estimate from n (arXiv 2107.03374 eq. 1). Integers are rounded
    once."""
    wrong, draws = sum(not is_right(score) for score in scores), math.comb(len(scores), k)
    return (draws - math.comb(wrong, k)) / draws


def of_step(
    groups: Sequence[ScoredGroup],
    batch: Sequence[TrainSequence],
    stats: TrainStats,
    report: SyncReport,
    *,
    version: int,
) -> dict[str, float]:
    """Return what is logged for a step, but for times and memory."""
    trajectories = [t for g in groups for t in g.trajectories]
    parts = [(t, *t.branches) for t in trajectories]  # of a session all its sequences
    lengths = sorted(sum(len(t.token_ids) for t in of_one) for of_one in parts)
    rewards = [r for g in groups for r in g.rewards]
    return {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/uninformative_groups": fmean(not informative(g.rewards) for g in groups),
        "accuracy/train": accuracy([s for g in groups for s in g.scores]),
        "response/length_mean": fmean(lengths),
        "response/length_p95": lengths[(len(lengths) * 95 - 1) // 100],
        "response/length_max": lengths[-1],
        "response/cut_fraction": fmean(any(t.finish_reason == "length" for t in of_one) for of_one in parts),
        "policy/loss": stats.loss,
        "policy/entropy": stats.entropy,
        "policy/clip_fraction": stats.clip_fraction,
        "policy/kl": stats.kl,
        **({} if stats.mtp_loss is None else {"policy/mtp_loss": stats.mtp_loss}),
        "policy/grad_norm": stats.grad_norm,
        "policy/learning_rate": stats.learning_rate,
        "agreement/logprob_gap_max": stats.logprob_gap_max,
        "agreement/logprob_gap_mean": stats.logprob_gap_mean,
        "agreement/logprob_gap_share": stats.logprob_gap_share,
        "correction/effective_share": stats.effective_share,
        "correction/cut_fraction": stats.cut_fraction,
        **({f"critic/{name}": value for name, value in (stats.critic or {}).items()}),
        "rollout/tokens": sum(t.num_sampled for t in trajectories),
        "rollout/responses": len(lengths),
        **({"rollout/expert_bytes": experts} if (experts := sum(map(_expert_bytes, trajectories))) else {}),
        "train/tokens": sum(len(s.token_ids) for s in batch),
        "train/sequences": len(batch),
        "train/microbatches": stats.num_microbatches,
        "weights/version": version,
        "sync/bytes": report.num_bytes,
        "sync/buckets": report.num_rounds,
        "sync/gb_per_s": report.gb_per_s,
    }


def _expert_bytes(response: Trajectory) -> int:
    own = len(response.routed_experts) * getattr(response.routed_experts, "itemsize", 1)  # an array, or bytes
    return own + sum(map(_expert_bytes, response.branches))


def of_environments(groups: Sequence[ScoredGroup], num_failed: int) -> dict[str, float]:
    talks = [t for g in groups for t in g.trajectories if t.environment_s]
    if not talks and not num_failed:
        return {}
    turns = [t.num_turns for t in talks]
    return {
        "environment/turns_mean": fmean(turns) if talks else 0.0,
        "environment/observations": sum(turns) - sum(1 + len(t.branches) for t in talks),
        "environment/observation_tokens": sum(b.loss_mask.count(False) for t in talks for b in (t, *t.branches)),
        "environment/failed": num_failed,
        "time/environment_s": sum(t.environment_s for t in talks),
    }


def of_speculation(counts: Mapping[str, Counts]) -> dict[str, float]:
    rounds = sum(of.rounds for of in counts.values())
    return {
        f"speculation/{name}/{key}": value
        for name, of in counts.items()
        if of.rounds or of.drafted or of.failures
        for key, value in _of_drafter(of, rounds).items()
    }


def of_tail(
    woken: int | None,
    moved: int | None,
    left: Sequence[OpenGroup] | None,
    open_tokens: int,
    batch: Sequence[TrainSequence],
) -> dict[str, float]:
    """Return what was done with a step's last requests and incomplete groups.

    Args:
        woken: drafters woken on idle devices; None: none can be.
        moved: groups that another engine took; None: there is one engine.
        left: incomplete groups; None: the step waits for all.
        open_tokens: tokens of their unfinished responses.
    """
    found: dict[str, float] = {} if moved is None else {"tail/groups_moved": moved}
    if woken is not None:
        found["tail/drafters_woken"] = woken
    if left is not None:
        found |= {
            "tail/open_groups": len(left),
            "tail/open_requests": sum(len(group.pending) for group in left),
            "tail/open_tokens": open_tokens,
            "tail/stale_tokens": sum(sequence.num_stale for sequence in batch),
        }
    return found


def of_drafters(counts: Mapping[str, Counts], work: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Return what drafters count themselves. `work` is (seconds of drafting, drops) of each drafter process."""
    own = {
        f"speculation/{drafter}/{name}": value
        for drafter, of in counts.items()
        for name, value in of.figures.items()
        if name in SPECULATION
    }
    if not work:
        return own
    busy_s, dropped = map(sum, zip(*work, strict=True))
    told = {"busy_s": busy_s, "processes": len(work), "dropped_by_drafters": dropped}
    return own | {f"speculation/decoupled/{name}": value for name, value in told.items()}


def _of_drafter(counts: Counts, rounds: int) -> dict[str, float]:
    always: dict[str, float] = {
        "share_of_rounds": counts.rounds / max(1, rounds),
        "draft_s": counts.draft_s,
        "verify_s": counts.verify_s,
        "predicted_s": counts.predicted_s,
        "measured_s": counts.measured_s,
    }
    always |= {name: count for name in ("failures", "cut_drafts") if (count := getattr(counts, name))}
    if not counts.drafted:
        return always
    used = [j for j, drafted in enumerate(counts.drafted_at) if drafted]
    return always | {
        "switches": counts.switches,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "wasted": counts.wasted,
        "accept_rate": counts.accepted / counts.drafted,
        **({"accept_length": counts.emitted / counts.verifies} if counts.verifies else {}),
        **{f"drafted_at_{j + 1}": counts.drafted_at[j] for j in used},
        **{f"accepted_at_{j + 1}": counts.accepted_at[j] for j in used},
    }


def of_time(metrics: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    spent = {f"time/{phase}_s": value for phase, value in seconds.items()}
    rates = {"rollout/tokens_per_s": ("rollout/tokens", "rollout"), "train/tokens_per_s": ("train/tokens", "train")}
    busy_s, processes = (metrics.get(f"speculation/decoupled/{name}", 0.0) for name in ("busy_s", "processes"))
    if processes and seconds.get("rollout"):
        spent["speculation/decoupled/utilisation"] = busy_s / (processes * seconds["rollout"])
    return spent | {
        name: metrics[tokens] / seconds[phase]
        for name, (tokens, phase) in rates.items()
        if tokens in metrics and seconds.get(phase)
    }


def check_agreement(stats: TrainStats, *, step: int, bound: float, routes_freely: bool) -> None:
    """Raise SpecActorError when log-probabilities of too many tokens differ by more than `bound` between engine and
    trainer. `routes_freely`: rounding may choose other experts."""
    # Where rounding chooses experts, one sampled token of 256,000 was so far apart; wrong weights show in nearly all.
    allowed = 0.01 if routes_freely else 0.0
    if stats.logprob_gap_share <= allowed:  # nan is no agreement either
        return
    raise SpecActorError(
        f"train.max_logprob_gap: at step {step} the engine and the trainer differ by up to {stats.logprob_gap_max:.2e} "
        f"in the log-probabilities of sampled tokens, by more than {bound:.2e} in {stats.logprob_gap_share:.2%} of "
        f"them, more than {allowed:.0%}. In float32 this means wrong weights or a wrong model in one of them; in "
        "bfloat16 leave --train.max-logprob-gap None, with algorithm.correction; nan is a fault in any type."
    )
