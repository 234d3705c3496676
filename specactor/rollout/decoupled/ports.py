"""TCP ports for processes that are started later, and started again.

A port is kept by a socket that is bound to it and never listens: Linux gives it to nobody who asks for any port, and
lets one who asks for this very port listen there, as ZeroMQ does (both with SO_REUSEADDR). While nobody listens, who
connects is refused at once.

Invariant: no port is taken twice while it is kept, and none is kept after `close` or the end of the process.
"""

from __future__ import annotations

import socket
from types import TracebackType


class Ports:
    """Of one address of this host."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._kept: list[socket.socket] = []

    def take(self) -> str:
        """An endpoint that is nobody else's until `close`. Raises OSError for an address of another host."""
        is_v6 = ":" in self._address
        keeper = socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET)
        self._kept.append(keeper)
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind((self._address, 0))
        host = f"[{self._address}]" if is_v6 else self._address
        return f"tcp://{host}:{keeper.getsockname()[1]}"

    def close(self) -> None:
        """Harmless the second time."""
        for keeper in self._kept:
            keeper.close()
        self._kept.clear()

    def __enter__(self) -> Ports:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
