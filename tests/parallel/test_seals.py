"""What ranks send each other proves that a rank with the job's key sent it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specactor.errors import ConfigError, PeerFailedError
from specactor.parallel import seals
from specactor.parallel.seals import Seals, job_key, mark
from tests.lib.ranks import run_ranks

NONCES = (b"0" * 16, b"1" * 16, b"2" * 16)
DATA = torch.arange(100, dtype=torch.uint8)


def of(rank: int, key: bytes = b"key", nonces: tuple[bytes, ...] = NONCES) -> Seals:
    return Seals(key, rank, nonces)


def test_what_a_rank_sent_is_taken_in_its_order() -> None:
    sender, taker = of(0), of(1)
    for data in (DATA, DATA, DATA[5:8], DATA[:0]):
        taker.check(data, sender.tag(data, 1).result(), 0).result()


def changed() -> None:
    tag = of(0).tag(DATA, 1).result()
    other = DATA.clone()
    other[7] ^= 1
    of(1).check(other, tag, 0).result()


def of_another_key() -> None:
    of(1).check(DATA, of(0, b"another").tag(DATA, 1).result(), 0).result()


def of_an_earlier_run() -> None:
    of(1).check(DATA, of(0, nonces=(NONCES[0], b"9" * 16, NONCES[2])).tag(DATA, 1).result(), 0).result()


def for_another_rank() -> None:
    of(1).check(DATA, of(0).tag(DATA, 2).result(), 0).result()


def of_another_rank() -> None:
    of(1).check(DATA, of(2).tag(DATA, 1).result(), 0).result()


def sent_twice() -> None:
    taker, tag = of(1), of(0).tag(DATA, 1).result()
    taker.check(DATA, tag, 0).result()
    taker.check(DATA, tag, 0).result()


def left_out() -> None:
    sender = of(0)
    sender.tag(DATA, 1).result()
    of(1).check(DATA, sender.tag(DATA, 1).result(), 0).result()


WRONG = (changed, of_another_key, of_an_earlier_run, for_another_rank, of_another_rank, sent_twice, left_out)


@pytest.mark.parametrize("message", WRONG)
def test_nothing_else_is_taken(message: Callable[[], None]) -> None:
    with pytest.raises(PeerFailedError, match=r"what came from rank 0 has not the job's seal"):
        message()


def test_a_key_is_long_and_told_apart_by_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(seals.KEY, raising=False)
    assert job_key() == b""
    assert mark(job_key()) == ""
    monkeypatch.setenv(seals.KEY, "x" * 31)
    with pytest.raises(ConfigError, match=r"SPECACTOR_KEY: got '31 characters', expected >= 32\. `openssl rand"):
        job_key()
    monkeypatch.setenv(seals.KEY, "x" * 32)
    first = job_key()
    monkeypatch.setenv(seals.KEY, "x" * 33)
    assert len({mark(first), mark(job_key()), ""}) == 3


def test_two_ranks_take_what_has_a_seal_and_refuse_what_was_changed(tmp_path: Path) -> None:
    """With a real group: the second message of rank 1 is another one than it sealed."""
    output = run_ranks(2, "tests.parallel.sealed_script", folder=tmp_path)
    told = sorted((json.loads(line) for line in output.splitlines() if line.startswith("{")), key=lambda r: r["rank"])
    assert [each["passed"] for each in told] == [True, True]
    assert "what came from rank 1 has not the job's seal" in told[0]["error"]
    assert told[1]["error"] == ""
