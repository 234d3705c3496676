"""What a child does whose every word a test decides: it passes bytes between its owner and a socket of the test."""

from __future__ import annotations

import os
import select
import socket

PATH = "PUPPET_PATH"
"""Environment variable: where the test listens."""


def run(owner: socket.socket) -> None:
    """Until either end is closed."""
    with socket.socket(socket.AF_UNIX) as test:
        test.connect(os.environ[PATH])
        ways = {owner: test, test: owner}
        while True:
            for source in select.select(list(ways), [], [])[0]:
                data = source.recv(1 << 16)
                if not data:
                    return
                ways[source].sendall(data)
