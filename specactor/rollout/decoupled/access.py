"""How an engine reaches the drafter processes that draft for it."""

from __future__ import annotations

from dataclasses import dataclass

from specactor.rollout.decoupled.transport import Address


@dataclass(frozen=True, kw_only=True)
class DrafterAccess:
    """Of one engine."""

    drafters: tuple[Address, ...] = ()
    """They need not be there yet."""
    engine: str = "engine"
    """A name that no other engine has, the same after a restart."""
    may_be_none: bool = False
    """There may be no drafter processes: those on devices of engines, where no device may be lent."""
