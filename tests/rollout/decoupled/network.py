"""Engines, drafters and a bad network between them, in one process and without a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from specactor.rollout.decoupled.drafter_side import MirroredRequests
from specactor.rollout.decoupled.engine_side import BEAT_EVERY_S, Tails
from specactor.rollout.decoupled.protocol import AHEAD, TOKEN_BYTES
from specactor.waits import MOMENT_S
from tests.rollout.decoupled.scripted import WRONG, Scripted, script

WINDOW = 3
SESSIONS = count(1)
"""Rising, as they are where a process is not started twice in a millisecond."""


def held(end: Tails | MirroredRequests) -> tuple[int, int]:
    """(requests, tokens) that an end has room taken for: an engine's draft tokens, or all tokens of a drafter."""
    if isinstance(end, MirroredRequests):
        return end.num_requests, end._reserved
    requests = end._requests.values()
    return len(requests), sum(len(request.tokens or b"") for request in requests) // TOKEN_BYTES


@dataclass
class Text:
    """A request as its engine has it."""

    prompt: tuple[int, ...]
    output: list[int] = field(default_factory=list)


class EngineEnd:
    def __init__(self, name: str, num_drafters: int, kind: type[Tails]) -> None:
        self.session = next(SESSIONS)
        self.tails = kind(self.session, engine=name, num_drafters=num_drafters, window=WINDOW)
        self.texts: dict[str, Text] = {}


class DrafterEnd:
    def __init__(self, max_tokens: int, kind: type[MirroredRequests]) -> None:
        self.mirrors = kind(next(SESSIONS), max_tokens=max_tokens)
        self.continuer = Scripted()

    def step(self, now_s: float) -> list[tuple[int, bytes]]:
        """One turn; (session, frame) of what it sends."""
        mirrors = self.mirrors
        mirrors.tick(now_s)
        for key in mirrors.forgotten():
            self.continuer.forget(key)
        lanes = mirrors.wanted(4)
        for lane in lanes:
            assert len(lane.prompt_ids) + len(lane.tokens) < mirrors._oldest[lane.key].reserved, "keys beyond the bound"
        lanes += mirrors.branches(3)
        if lanes:
            unread = [lane.key not in self.continuer.seen for lane in lanes]  # a text is read in its first call
            made = zip(unread, self.continuer.extend(lanes), strict=True)
            drafts = [None if is_unread else draft for is_unread, draft in made]
            mirrors.extended(lanes, drafts, self.continuer.runners_up())
        return [
            (session, frame)
            for session in mirrors.sessions
            for frame in mirrors.outgoing(session, version=1, now_s=now_s)
        ]


@dataclass
class Frame:
    engine: int
    drafter: int
    up: bool
    """To the drafter."""
    sender: int
    data: bytes


class World:
    """`flying` are the frames that were sent and have neither arrived nor been lost."""

    def __init__(
        self,
        *,
        engines: int = 2,
        drafters: int = 2,
        max_tokens: int = 100_000,
        tails: type[Tails] = Tails,
        mirrors: type[MirroredRequests] = MirroredRequests,
    ) -> None:
        self.now_s = 100.0
        self.kinds = tails, mirrors
        self.max_tokens = max_tokens
        self.engines = [EngineEnd(f"engine {i}", drafters, tails) for i in range(engines)]
        self.places = {end.session: i for i, end in enumerate(self.engines)}
        self.drafters = [DrafterEnd(max_tokens, mirrors) for _ in range(drafters)]
        self.flying: list[Frame] = []
        self.past: list[Frame] = []
        self.count = 0

    # ----------------------------------------------------------------------------------------------------- the engine

    def open(self, engine: int, prompt: tuple[int, ...], output: Sequence[int] = ()) -> str:
        end, name = self.engines[engine], f"request {self.count}"
        self.count += 1
        text = end.texts[name] = Text(prompt, list(output))
        end.tails.open(name, text.prompt, text.output, 7, 1.0)
        return name

    def commit(self, engine: int, name: str, right: int, wrong: int = 0) -> None:
        """Tokens of the script, then others."""
        end = self.engines[engine]
        text = end.texts[name]
        text.output += script(text.prompt, text.output, right)
        for _ in range(wrong):
            text.output.append(script(text.prompt, text.output, 1)[0] + WRONG)
        end.tails.commit([name])

    def close(self, engine: int, name: str) -> None:
        self.engines[engine].tails.close(name)
        del self.engines[engine].texts[name]

    def draft(self, engine: int, name: str, window: int = WINDOW) -> list[int]:
        """With the check that every token stands on the text that it was drafted for."""
        end = self.engines[engine]
        text = end.texts[name]
        draft = end.tails.drafts([name], [window])[0]
        assert len(draft) <= window
        assert draft == script(text.prompt, text.output, len(draft)), "drafted for another prefix"
        return draft

    # ---------------------------------------------------------------------------------------------------- the network

    def flush(self, engine: int) -> None:
        end = self.engines[engine]
        end.tails.tick(self.now_s)
        for drafter in range(len(self.drafters)):
            for data in end.tails.outgoing(drafter, self.now_s):
                self.flying.append(Frame(engine, drafter, True, end.session, data))

    def step(self, drafter: int) -> None:
        for session, data in self.drafters[drafter].step(self.now_s):
            # What was meant for an engine that is gone arrives at the next one of its place.
            self.flying.append(Frame(self.places[session], drafter, False, session, data))

    def deliver(self, frame: Frame) -> None:
        self.past = [*self.past[-20:], frame]
        if frame.up:
            self.drafters[frame.drafter].mirrors.receive(frame.sender, frame.data, self.now_s)
        else:
            self.engines[frame.engine].tails.receive([(frame.drafter, frame.data)], self.now_s)

    def restart_engine(self, engine: int) -> None:
        """Its requests are begun again by the new one, under other numbers."""
        old = self.engines[engine]
        self.engines[engine] = EngineEnd(old.tails.engine, len(self.drafters), self.kinds[0])
        self.places[self.engines[engine].session] = engine
        for text in reversed(old.texts.values()):
            self.open(engine, text.prompt, text.output[: len(text.output) // 2])

    def restart_drafter(self, drafter: int) -> None:
        self.drafters[drafter] = DrafterEnd(self.max_tokens, self.kinds[1])

    def settle(self, rounds: int = 12, *, down: Sequence[int] = ()) -> None:
        """Time passes, and the network works; drafters that are `down` do nothing."""
        for _ in range(rounds):
            self.now_s += BEAT_EVERY_S + 0.01
            for engine in range(len(self.engines)):
                self.flush(engine)
            self.deliver_all(down)
            for _ in range(AHEAD * WINDOW):
                for drafter in range(len(self.drafters)):
                    if drafter not in down:
                        self.step(drafter)
                self.deliver_all(down)

    def deliver_all(self, down: Sequence[int] = ()) -> None:
        """What goes to one engine arrives together, as it does between two rounds."""
        flying, self.flying = self.flying, []
        arriving: dict[int, list[tuple[int, bytes]]] = {}
        for frame in flying:
            if frame.drafter in down:
                continue
            if frame.up:
                self.deliver(frame)
            else:
                self.past = [*self.past[-20:], frame]
                arriving.setdefault(frame.engine, []).append((frame.drafter, frame.data))
        for engine, frames in arriving.items():
            self.engines[engine].tails.receive(frames, self.now_s)

    # -------------------------------------------------------------------------------------------------- what must hold

    def check(self) -> None:
        """Invariants that hold at any time."""
        for drafter in self.drafters:
            mirrors = drafter.mirrors
            num_tokens = 0
            for key, mirror in mirrors._oldest.items():
                num_tokens += len(mirror.opening.prompt_ids) + len(mirror.tokens)
                assert 0 <= mirror.num_ahead <= AHEAD * WINDOW
                assert all(mirror.committed <= at < len(mirror.tokens) for at in mirror.branches)
                text = self._text(key)
                if text is not None:
                    assert list(text.prompt) == list(mirror.opening.prompt_ids)
                    assert mirror.tokens[: mirror.committed] == text.output[: mirror.committed], "not what was told"
            assert num_tokens <= held(mirrors)[1] <= mirrors.max_tokens, "memory"
            assert sum(len(session.mirrors) for session in mirrors._sessions.values()) == mirrors.num_requests
        for end in self.engines:
            num_requests, num_tokens = held(end.tails)
            assert num_requests == len(end.texts)
            assert num_tokens <= AHEAD * WINDOW * len(end.texts)

    def _text(self, key: tuple[int, int]) -> Text | None:
        for end in self.engines:
            for request in end.tails._requests.values() if end.session == key[0] else ():
                if request.number == key[1]:
                    return end.texts[request.name]
        return None

    def check_quiet(self) -> None:
        """After a while without trouble: both ends agree, and drafts are there for every request."""
        self.settle(int(MOMENT_S / BEAT_EVERY_S) + 6)
        for engine, end in enumerate(self.engines):
            assert end.tails.live == list(range(len(self.drafters)))
            for name, text in end.texts.items():
                assert len(self.draft(engine, name)) == WINDOW, "no drafts"
                request = end.tails._requests[name]
                holding = [
                    drafter
                    for drafter, other in enumerate(self.drafters)
                    if (end.session, request.number) in other.mirrors._oldest
                ]
                assert holding == [request.drafter], "held by another drafter, or by none"
                mirror = self.drafters[holding[0]].mirrors._oldest[end.session, request.number]
                assert mirror.tokens[: mirror.committed] == text.output
        self.check()

    def check_closed(self) -> None:
        """All requests are closed: nothing is left on either side."""
        for engine, end in enumerate(self.engines):
            for name in list(end.texts):
                self.close(engine, name)
        self.settle()
        for end in self.engines:
            tails = end.tails
            assert held(tails) == (0, 0)
            assert not any(d.requests or d.unopened or d.grown or d.closed or d.arrived for d in tails._drafters)
        for drafter in self.drafters:
            assert held(drafter.mirrors) == (0, 0)
            assert drafter.continuer.seen == {}
