"""Say at once that another program holds the port of HEAD; torchrun would wait for it for minutes.

    python3 launch/head_port.py HOST:PORT

The exit code is 3 where HOST is this host, and what listens there is no store of torchrun's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
from datetime import timedelta

ANSWER_S = 10.0


def is_held(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, 0), family=socket.getaddrinfo(host, port)[0][0]):
            pass
    except OSError:
        return False  # another host's, or a name that torchrun says more of
    try:
        both = socket.has_dualstack_ipv6()  # as torchrun's store does
        with socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both):
            return False
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return False
    from torch.distributed import TCPStore  # takes seconds, and the port is usually free

    answered = threading.Event()  # by torchrun's, of this job or of another one

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            TCPStore(host, port, is_master=False, timeout=timedelta(seconds=ANSWER_S))
            answered.set()

    threading.Thread(target=ask, daemon=True).start()  # its own limit is of connections, and not of answers
    return not answered.wait(ANSWER_S)


def main() -> int:
    host, _, port = sys.argv[1].rpartition(":")
    if not (port.isdigit() and is_held(host.strip("[]"), int(port))):
        return 0
    print(
        f"specactor: HEAD: got {sys.argv[1]}, where another program listens, expected a free port. Choose another one, "
        "the same on all nodes, or end that program.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(3)  # the thread may never end


if __name__ == "__main__":
    sys.exit(main())
