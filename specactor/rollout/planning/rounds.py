"""How many tokens a round of speculation emits, coupled and decoupled. PURE: probabilities in, tokens out.

survival_j = P(the first j draft tokens are accepted). A round verifies w draft tokens and emits those accepted and one
of the target's own:
    coupled:   1 + sum_{j <= w} survival_j    (2211.17192, equation 1, where survival_j = p^j)

Decoupled, a drafter runs ahead of the verifier, and nobody waits for a redraft. A request is in one of two states:
    ready      the next w draft tokens are there: the round emits what a coupled one does. It stays ready if all are
               accepted and the drafter's next token is the one that the target added (survival_{w+1}), or if the
               outcome was drafted for in advance (2603.03251; `hit_rate`).
    redrafting the drafter starts again from the commit: a plain step of one token. The request is ready again if the
               drafter's first token is the one that this step adds (survival_1, or a hit).
The share of rounds that are ready follows, and with it tokens and rows per round. It is a ratio of averages; the
paper's tau (`paper.py`) averages ratios.

Invariants: at least 1 token per round; tokens and share do not fall when survivals or the hit rate rise; with a hit
rate of 1 decoupled rounds emit what coupled ones do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from operator import mul

from specactor.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """Decoupled rounds of one request, on average."""

    ready: float
    """Share of rounds that verify a window."""
    tokens_when_ready: float

    @property
    def tokens(self) -> float:
        """Emitted per round."""
        return self.tokens_at(self.ready)

    def tokens_at(self, share: float) -> float:
        """Where windows are verified in that share of rounds only; at most `ready`."""
        return 1.0 + share * (self.tokens_when_ready - 1.0)


def survival_of(p: float, window: int) -> tuple[float, ...]:
    """p, p^2, .., p^window: every draft token is accepted with probability p."""
    if not 0 <= p <= 1 or window < 0:
        raise PlanError(f"acceptance: got {p} for {window} positions, expected a probability in 0..1, and >= 0.")
    return tuple(accumulate(repeat(p, window), mul))


def checked(survival: Sequence[float]) -> tuple[float, ...]:
    """The same. Raises PlanError for what are no survivals."""
    if not survival or any(not 0 <= b <= a for a, b in pairwise((1.0, *survival))):
        raise PlanError(
            f"survival: got {tuple(survival)}, expected probabilities that do not rise, at least one. "
            "Give P(the first j draft tokens are accepted) for j = 1, 2, .."
        )
    return tuple(survival)


def coupled_tokens(survival: Sequence[float], window: int) -> float:
    """Emitted per round of a window."""
    return 1.0 + sum(survival[:window])


def pipelined(survival: Sequence[float], window: int, *, hit_rate: float = 0.0) -> Pipelined:
    """Decoupled rounds of a window. `survival` has at least `window` entries; the next one is extrapolated if missing.

    hit_rate: P(what the verify ended with was drafted for in advance), given that the tail ended there.
    """
    if not 1 <= window <= len(survival) or not 0 <= hit_rate <= 1:
        raise PlanError(
            f"pipelined: got window {window}, hit rate {hit_rate}; expected 1..{len(survival)} (as many as there are "
            "survivals) and 0..1."
        )
    onward = survival[window] if len(survival) > window else _next(survival[:window])
    stays = onward + (1.0 - onward) * hit_rate
    returns = survival[0] + (1.0 - survival[0]) * hit_rate
    leaves = 1.0 - stays
    ready = returns / (returns + leaves) if returns + leaves > 0 else 1.0
    return Pipelined(ready=ready, tokens_when_ready=coupled_tokens(survival, window))


def _next(survival: Sequence[float]) -> float:
    """Of one more position, accepted as often as the last."""
    last, before = survival[-1], survival[-2] if len(survival) > 1 else 1.0
    return last * last / before if before > 0 else 0.0
