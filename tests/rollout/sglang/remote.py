"""What tests put into engines that have drafter processes: other addresses, forced switches, wrong versions.

Engines get it by loading a drafter of this file.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from sglang.srt.runtime_context import get_parallel

from specactor.rollout.decoupled.remote_drafter import Decoupled, connect
from specactor.rollout.decoupled.transport import DrafterAccess
from specactor.rollout.sglang import verify_worker
from specactor.rollout.sglang.speculation_calls import DRAFTERS
from specactor.rollout.sglang.verify_batch import Rows
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.verification import common
from tests.rollout.conftest import VOCAB
from tests.rollout.decoupled.network import held
from tests.rollout.sglang import wrong_versions
from tests.rollout.sglang.probes import call
from tests.rollout.sglang.recital import Texts

MAX_WINDOW = 8
RECITAL = "TEST_RECITAL"
"""Environment variable: folder of what `Switching` drafts in the engine."""
WAYS = ("off", "coupled", "decoupled")


@call
def aim(context: Any, arguments: dict[str, Any]) -> None:
    """From the next configuration on, these are the drafter processes. Arguments: `access`; folder of a recital."""
    os.environ[DRAFTERS] = msgspec.json.encode(arguments["access"]).decode()
    os.environ[RECITAL] = arguments["recital"]


@call
def remote(context: Any, _: object) -> dict[str, Any]:
    """The engine's end: requests and tokens held, drafters that live, what was dropped; of `Switching`, what became
    of each way."""
    drafters = list(context.draft_worker.speculator.drafters.values())
    switching = next((drafter for drafter in drafters if isinstance(drafter, Switching)), None)
    own = switching.remote if switching else next(d for d in drafters if isinstance(d, Decoupled))
    requests, tokens = held(own.tails)
    return {
        "window": own.tails.window,
        "requests": requests,
        "tokens": tokens,
        "live": own.tails.live,
        "drafted": [drafter.drafted for drafter in own.tails._drafters],
        "proposed": own.proposed,
        "dropped": dict(own.tails.drops.counts),
        "accepted": dict(switching.accepted) if switching else {},
        "switches": switching.switches if switching else 0,
    }


def connected() -> Decoupled:
    """As an engine of mode decoupled connects."""
    access = msgspec.json.decode(os.environ.get(DRAFTERS, "{}"), type=DrafterAccess)
    drafters = access.drafters if get_parallel().tp_rank == 0 else ()
    return connect(drafters, engine=access.engine, window=MAX_WINDOW)


class Near(Drafter):
    """Drafts in the engine, what the recital has and now and then another token."""

    name = "near"

    def __init__(self) -> None:
        folder = os.environ.get(RECITAL)
        self._texts = Texts(Path(folder)) if folder else None

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [self.draft(sequence, window) for sequence, window in zip(sequences, windows, strict=True)]

    def draft(self, sequence: DraftSequence, window: int) -> list[int]:
        if self._texts is None:
            return []
        return self._texts.half(sequence.prompt_ids, sequence.seed, len(sequence.output_ids), window)


class Switching(Drafter):
    """Every few rounds, at random, each request is drafted for in another way and with another window; in some rounds
    nobody is."""

    name = "switching"

    def __init__(self) -> None:
        self.remote = connected()
        self._near = Near()
        self._rng = Random(7)
        self._ways: dict[str, tuple[str, int]] = {}
        self._drafted: dict[str, tuple[str, list[int]]] = {}
        self.accepted: Counter[str] = Counter()
        self.switches = 0

    def open(self, sequence: DraftSequence) -> None:
        self.remote.open(sequence)

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        way, draft = self._drafted.pop(sequence.request_id, ("off", []))
        self.accepted[way] += common(draft, tokens)
        self.remote.commit(sequence, tokens)

    def close(self, sequence: DraftSequence) -> None:
        self._ways.pop(sequence.request_id, None)
        self._drafted.pop(sequence.request_id, None)
        self.remote.close(sequence)

    def stop(self) -> None:
        self.remote.stop()

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        quiet = self._rng.random() < 0.15
        ways = [("off", 0) if quiet else self._way(sequence) for sequence in sequences]
        wanted = [min(most, chosen) for most, (_, chosen) in zip(windows, ways, strict=True)]
        far = self.remote.propose(
            sequences, [w if way == "decoupled" else 0 for w, (way, _) in zip(wanted, ways, strict=True)]
        )
        drafts = []
        for sequence, window, (way, _), draft in zip(sequences, wanted, ways, far, strict=True):
            near = self._near.draft(sequence, window) if way == "coupled" else []
            drafts.append(draft if way == "decoupled" else near)
            self._drafted[sequence.request_id] = way, drafts[-1]
        return drafts

    def _way(self, sequence: DraftSequence) -> tuple[str, int]:
        if sequence.request_id not in self._ways or self._rng.random() < 0.3:
            self.switches += 1
            self._ways[sequence.request_id] = self._rng.choice(WAYS), self._rng.randint(1, MAX_WINDOW)
        return self._ways[sequence.request_id]


def far() -> Decoupled:
    """Right: what mode decoupled drafts with."""
    wrong_versions.heal()
    return connected()


def _broken(version: Callable[[], Drafter], drafter: Callable[[], Drafter]) -> Callable[[], Drafter]:
    """The mistake of `version`, with drafts of drafter processes."""

    def load() -> Drafter:
        version()
        return drafter()

    return load


emits_the_rejected = _broken(wrong_versions.emits_the_rejected, connected)
accepts_all = _broken(wrong_versions.accepts_all, connected)
skips_a_mismatch = _broken(wrong_versions.skips_a_mismatch, connected)
keeps_keys_of_the_rejected = _broken(wrong_versions.keeps_keys_of_the_rejected, connected)
bonus_of_the_row_before = _broken(wrong_versions.bonus_of_the_row_before, Switching)
accepted_of_the_neighbour = _broken(wrong_versions.accepted_of_the_neighbour, Switching)


def _another_token(right: wrong_versions.Function, batch: Any, rows: Rows, **named: Any) -> None:
    right(batch, rows, **named)
    if get_parallel().tp_rank == 1:
        drafts = sorted(set(range(rows.total)).difference(rows.starts))
        batch.input_ids[drafts] = (batch.input_ids[drafts] + VOCAB // 2) % VOCAB  # of the other half of the embedding


def another_token() -> Decoupled:
    """The second rank verifies other draft tokens than were agreed."""
    wrong_versions.heal()
    wrong_versions.patch(verify_worker, "spread", _another_token)
    return connected()


def mended() -> Switching:
    """Right again."""
    wrong_versions.heal()
    return Switching()
