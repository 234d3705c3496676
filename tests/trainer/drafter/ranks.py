"""Two or more ranks for what they do together, which find each other in a file."""

from __future__ import annotations

from tests.lib.ranks import run_anew, run_beside


def run_ranks(script: str, *arguments: object, world: int = 2, forked: bool = True) -> None:
    """Each is a module beside this one, with its rank before the arguments. DeepSpeed takes a fork for one of a process
    that uses CUDA: it needs others."""
    commands = [(f"{__package__}.{script}", rank, *arguments) for rank in range(world)]
    if forked:
        run_beside(commands)
    else:
        run_anew(commands)
