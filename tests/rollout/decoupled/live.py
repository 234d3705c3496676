"""Drafter processes over real sockets, and an engine whose target is the script with some other tokens."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from specactor.rollout.decoupled.remote_drafter import Decoupled, connect
from specactor.rollout.decoupled.spec import State
from specactor.rollout.decoupled.transport import Address, Keys
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.verification import common
from tests.rollout.decoupled.scripted import script

ROOT = Path(__file__).resolve().parents[3]
WINDOW = 4
PATIENCE_S = 60.0


class DrafterProcess:
    """Ends when its standard input does."""

    def __init__(self, endpoint: str, *, step_s: float = 0.0, keys: Keys | None = None) -> None:
        text = msgspec.json.encode(keys).decode() if keys else ""
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.rollout.decoupled.drafter_script",
                endpoint,
                str(step_s),
                text,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.endpoint = msgspec.json.decode(line, type=State).endpoint

    def end(self) -> dict[str, int]:
        """Orderly; what it said in the end."""
        self.process.terminate()
        said, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0
        return dict(json.loads(said.splitlines()[-1]))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Engine:
    """Rounds as a speculator makes them. A draft token on another prefix than its own fails the test."""

    def __init__(
        self,
        endpoints: list[str],
        *,
        keys: Keys | None = None,
        name: str = "engine",
        right: float = 0.9,
        pause_s: float = 0.005,
    ) -> None:
        """Args: how often draft tokens are right; what a round takes beside drafting."""
        self.drafter: Decoupled = connect(
            [Address(endpoint=endpoint, keys=keys) for endpoint in endpoints], engine=name, window=WINDOW
        )
        self.sequences: list[DraftSequence] = []
        self.accepted = 0
        self.longest_round_s = 0.0
        self._rng = random.Random(1)
        self._right = right
        self._pause_s = pause_s

    def open(self, count: int) -> None:
        for _ in range(count):
            number = len(self.sequences)
            prompt = tuple(self._rng.randrange(100) for _ in range(10))
            self.sequences.append(DraftSequence(request_id=f"request {number}", prompt_ids=prompt))
            self.drafter.open(self.sequences[-1])

    def round(self) -> int:
        """Returns how many draft tokens were right."""
        began = time.monotonic()
        drafts = self.drafter.propose(self.sequences, [WINDOW] * len(self.sequences))
        self.longest_round_s = max(self.longest_round_s, time.monotonic() - began)
        accepted = 0
        for sequence, draft in zip(self.sequences, drafts, strict=True):
            assert draft == script(sequence.prompt_ids, sequence.output_ids, len(draft)), "on another prefix"
            emitted = self._emitted(sequence, len(draft) + 1)
            right = common(draft, emitted)
            accepted += right
            tokens = emitted[: right + 1]
            sequence.output_ids.extend(tokens)
            self.drafter.commit(sequence, tokens)
        self.accepted += accepted
        time.sleep(self._pause_s)
        return accepted

    def _emitted(self, sequence: DraftSequence, count: int) -> list[int]:
        tokens = list(sequence.output_ids)
        for _ in range(count):
            token = script(sequence.prompt_ids, tokens, 1)[0]
            tokens.append(token if self._rng.random() < self._right else token + 1000)
        return tokens[len(sequence.output_ids) :]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Rounds until it holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, what
            self.round()

    def until_drafts(self, count: int = 20) -> None:
        """Until so many more draft tokens were right."""
        aim = self.accepted + count
        self.until(lambda: self.accepted >= aim, "no drafts")

    def close(self) -> None:
        for sequence in self.sequences:
            self.drafter.close(sequence)
        self.sequences = []
