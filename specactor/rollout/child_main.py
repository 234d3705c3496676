"""A child process of a trainer rank: ``python -m specactor.rollout.child_main MODULE:FUNCTION --fd N``.

It becomes the guard of its own child, the host, which alone imports the module, and calls the function with the
inherited socket N. The end of that socket's stream is the sign to end. Standard output and error are the log.
"""

from __future__ import annotations

import argparse
import importlib
import os
import socket

from specactor.rollout import process_guard


def main() -> None:
    """Run the child; does not return."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="what the host does, as in package.module:function")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the owner")
    options = parser.parse_args()
    os.set_inheritable(options.fd, False)

    def host() -> None:
        module, _, function = options.run.partition(":")
        getattr(importlib.import_module(module), function)(socket.socket(fileno=options.fd))

    process_guard.run_guarded(options.fd, host)


if __name__ == "__main__":
    main()
