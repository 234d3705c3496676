"""Messages between ranks that prove their sender, where the job has a key. Invariant: what a rank takes, a rank with
the key sent to it, in this run and order. Contents are not hidden.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from specactor.errors import ConfigError, PeerFailedError

KEY = "SPECACTOR_KEY"
"""Environment variable: the job's key, the same on all hosts; without one, ranks believe what comes."""
TAG_BYTES = 16


def job_key() -> bytes:
    """Return the job's key, or "". Raises ConfigError for a short one."""
    text = os.environ.get(KEY, "")
    if text and len(text) < 32:
        raise ConfigError.at(KEY, f"{len(text)} characters", ">= 32", "`openssl rand -hex 32` makes one.")
    return hashlib.blake2b(text.encode()).digest() if text else b""


def mark(key: bytes) -> str:
    """Return what tells two keys apart and no key; empty without one."""
    return hashlib.blake2b(b"mark", key=key, digest_size=4).hexdigest() if key else ""


class Seals:
    """Makes and checks a rank's seals; both ends count their messages."""

    def __init__(self, key: bytes, rank: int, nonces: Sequence[bytes]) -> None:
        """`nonces`: each rank's own, fresh in this run."""
        self._key, self._rank, self._nonces = key, rank, nonces
        self._sent, self._taken = Counter[int](), Counter[int]()
        # A core seals about a gigabyte in a second, and weights may be fifty of a rank: hashlib lets others run.
        share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._threads = ThreadPoolExecutor(min(8, max(1, share)), thread_name_prefix="seals")

    def tag(self, data: torch.Tensor, taker: int) -> Future[torch.Tensor]:
        """Begin to make the seal, uint8 [TAG_BYTES], of the next message to a rank."""
        self._sent[taker] += 1
        return self._threads.submit(self._made, data, taker, self._sent[taker])

    def check(self, data: torch.Tensor, tag: torch.Tensor, sender: int) -> Future[None]:
        """Begin to check that the rank sent this as its next message to us: the result raises PeerFailedError."""
        self._taken[sender] += 1
        return self._threads.submit(self._compare, data, tag, sender, self._taken[sender])

    def _made(self, data: torch.Tensor, taker: int, number: int) -> torch.Tensor:
        seal = self._seal(data, sender=self._rank, taker=taker, number=number)
        return torch.frombuffer(bytearray(seal), dtype=torch.uint8)

    def _compare(self, data: torch.Tensor, tag: torch.Tensor, sender: int, number: int) -> None:
        seal = self._seal(data, sender=sender, taker=self._rank, number=number)
        if not hmac.compare_digest(seal, tag.numpy().tobytes()):
            raise PeerFailedError(
                f"what came from rank {sender} has not the job's seal: somebody else sent it, or it was changed on its "
                "way. Nothing of it was used."
            )

    def _seal(self, data: torch.Tensor, *, sender: int, taker: int, number: int) -> bytes:
        header = struct.pack("<3Q", sender, taker, number) + self._nonces[taker]
        seal = hashlib.blake2b(header, key=self._key, digest_size=TAG_BYTES)
        seal.update(data.numpy().data)
        return seal.digest()
