"""Process that hosts one SGLang engine for a trainer rank: ``python -m specactor.rollout.sglang.host --fd N``.

It becomes the guard of its own child, which alone imports torch and SGLang. Standard output and error are the engine's
log.
"""

from __future__ import annotations

import argparse
import os

from specactor.rollout import process_guard


def main() -> None:
    """Entry point; does not return."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the trainer rank")
    fd: int = parser.parse_args().fd
    os.set_inheritable(fd, False)
    process_guard.run_guarded(fd, lambda: _host(fd))


def _host(fd: int) -> None:
    import socket

    from specactor.rollout.sglang import engine_server

    engine_server.run(socket.socket(fileno=fd))


if __name__ == "__main__":
    main()
