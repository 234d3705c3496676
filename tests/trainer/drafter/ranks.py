"""Two or more ranks for what they do together, which find each other in a file."""

from __future__ import annotations

from tests.lib.ranks import run_beside


def run_ranks(script: str, *arguments: object, world: int = 2) -> None:
    """Each is a module beside this one, with its rank before the arguments."""
    run_beside([(f"{__package__}.{script}", rank, *arguments) for rank in range(world)])
