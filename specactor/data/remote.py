"""A verifier behind HTTP: ``http://host:port/path`` in place of a name.

It gets a POST with ``{"response", "prompt", "answer", "index", "metadata"}``, and answers ``{"score": number}``. A
server that cannot be reached, or says that it is busy (429) or broken (5xx), is asked again; any other answer counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec

from specactor.errors import DataError
from specactor.types import Problem

ATTEMPTS = 4
MAX_BYTES = 1 << 20
"""Of an answer that are read."""
PAUSE_S = 0.5
"""Before the second attempt; it doubles every further time."""


class _Answer(msgspec.Struct):
    score: float


def verifier(url: str) -> Callable[[str, Problem], Awaitable[float]]:
    """Return the verifier at that address. Raises DataError for what is none."""
    try:
        parts = urlsplit(url)
        good = bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise DataError(f"got {url!r}, expected the address of a verifier, as http://host:port/path. Correct it.")

    async def verify(response: str, problem: Problem) -> float:
        import aiohttp  # takes a quarter of a second, and few need it

        body = msgspec.json.encode(
            {
                "response": response,
                "prompt": problem.prompt,
                "answer": problem.answer,
                "index": problem.index,
                "metadata": problem.metadata,
            }
        )
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as client:  # the caller bounds it all
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    async with client.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                        if attempt == ATTEMPTS or (answer.status != 429 and answer.status < 500):
                            answer.raise_for_status()
                            return msgspec.json.decode(await answer.content.read(MAX_BYTES), type=_Answer).score
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                    if attempt == ATTEMPTS:
                        raise
                await asyncio.sleep(PAUSE_S * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")

    return verify
