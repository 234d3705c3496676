"""Ends of the protocol with one mistake each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specactor.rollout.decoupled import protocol
from specactor.rollout.decoupled.drafter_side import MirroredRequests
from specactor.rollout.decoupled.engine_side import Tails
from specactor.rollout.decoupled.protocol import Beat, Commits, TailColumns


class LengthsCompared(Tails):
    """Takes a tail that is long enough for one that fits."""

    def drafts(self, names: Sequence[str], windows: Sequence[int]) -> list[list[int]]:
        return [self._draft(self._requests[name], window) for name, window in zip(names, windows, strict=True)]

    def _draft(self, request: Any, window: int) -> list[int]:
        if request.tokens is None:
            return []
        start = len(request.output_ids) - request.base
        return protocol.unpack(request.tokens)[start : start + window]


class FutureTaken(Tails):
    """Takes a tail that begins beyond what is committed, as if it began there."""

    def drafts(self, names: Sequence[str], windows: Sequence[int]) -> list[list[int]]:
        return [self._draft(self._requests[name], window) for name, window in zip(names, windows, strict=True)]

    def _draft(self, request: Any, window: int) -> list[int]:
        if request.tokens is None:
            return []
        known, tokens = request.output_ids[request.base :], protocol.unpack(request.tokens)
        return tokens[len(known) :][:window] if tokens[: len(known)] == known else tokens[:window]


class AnyTail(Tails):
    """Gives a tail to the request of that place, whoever it was for."""

    def _tails(self, index: int, records: Sequence[TailColumns]) -> None:
        for _, base, tokens in protocol.newest(records):
            for request in list(self._requests.values())[-1:]:
                request.base, request.tokens = base, tokens


class AnyBranch(Tails):
    """Goes over to a branch whatever it begins with."""

    @staticmethod
    def _branch(request: Any, known: Sequence[int]) -> list[int]:
        request.tokens = request.branches[0] if request.branches else None
        return protocol.unpack(request.tokens) if request.tokens is not None else []


class BranchesKept(MirroredRequests):
    """Keeps branches of tokens that were thrown away."""

    def _commit(self, session: Any, request: int, position: int, tokens: Sequence[int]) -> None:
        mirror = session.mirrors.get(request)
        before = dict(mirror.branches) if mirror is not None else {}
        super()._commit(session, request, position, tokens)
        if mirror is not None and mirror.num_ahead == 0:
            mirror.branches |= {at: branch for at, branch in before.items() if at > mirror.committed}


class ResendIgnored(Tails):
    def _resend(self, index: int, record: Any, now_s: float) -> None:
        pass


class SilenceIgnored(Tails):
    """A drafter that was there once is there for ever; its next incarnation is taken for the last one."""

    def _meet(self, index: int, session: int) -> None:
        self._drafters[index].session = session

    def _resend(self, index: int, record: Any, now_s: float) -> None:
        pass


class ForeignTaken(Tails):
    """Takes what was meant for the engine's last incarnation."""

    def _receive(self, index: int, data: bytes, now_s: float) -> None:
        try:
            header, records = protocol.decode_to_engine(data)
        except protocol.FrameError:
            return
        super()._receive(index, _readdressed(header, records, self.session), now_s)


def _readdressed(header: protocol.Header, records: Sequence[protocol.ToEngine], receiver: int) -> bytes:
    return protocol.encode(protocol.Header(sender=header.sender, receiver=receiver, number=header.number), records)


class ArrivedKept(Tails):
    """Looks into what arrived from a drafter's last incarnation together with the first words of the next."""

    def _meet(self, index: int, session: int) -> None:
        drafter = self._drafters[index]
        arrived = list(drafter.arrived)
        super()._meet(index, session)
        drafter.arrived += arrived


class ClosesForgotten(Tails):
    """Keeps what it knew of a request."""

    def close(self, name: str) -> None:
        if name in self._requests:
            self._leave(self._requests[name])


class RowsShifted(MirroredRequests):
    """Gives the tokens of a row to the one before it."""

    def receive(self, sender: int, data: bytes, now_s: float) -> None:
        try:
            header, records = protocol.decode_to_drafter(data)
        except protocol.FrameError:
            return
        super().receive(sender, protocol.encode(header, [_shifted(record) for record in records]), now_s)


def _shifted(record: protocol.ToDrafter) -> protocol.ToDrafter:
    if not isinstance(record, Commits):
        return record
    tokens = [*record.tokens[1:], *record.tokens[:1]]
    return Commits(requests=record.requests, positions=record.positions, counts=record.counts, tokens=tokens)


class GapIgnored(MirroredRequests):
    """Tokens are put behind those that are there, wherever they belong."""

    def _commit(self, session: Any, request: int, position: int, tokens: Sequence[int]) -> None:
        mirror = session.mirrors.get(request)
        if mirror is not None:
            position = min(position, mirror.committed)
        super()._commit(session, request, position, tokens)


class PositionIgnored(MirroredRequests):
    """Tokens that were committed before are committed again."""

    def _commit(self, session: Any, request: int, position: int, tokens: Sequence[int]) -> None:
        mirror = session.mirrors.get(request)
        if mirror is not None:
            position = mirror.committed
        super()._commit(session, request, position, tokens)


class RollbackForgotten(MirroredRequests):
    """Keeps what it drafted after a commit that differs."""

    def _commit(self, session: Any, request: int, position: int, tokens: Sequence[int]) -> None:
        mirror = session.mirrors.get(request)
        before = [] if mirror is None else list(mirror.tokens)
        super()._commit(session, request, position, tokens)
        if mirror is not None:
            extra = before[len(mirror.tokens) :][: mirror.window]
            mirror.tokens += extra
            mirror.unsent = mirror.unsent or bool(extra)


class AgreedTooMuch(MirroredRequests):
    """Does not tell the continuer of a rollback."""

    def wanted(self, max_lanes: int, **named: Any) -> Any:
        lanes = super().wanted(max_lanes, **named)
        for lane in lanes:
            lane.agreed = len(lane.tokens)
        return lanes


class CloseIgnored(MirroredRequests):
    """Keeps what its engine has closed, and what its engine does not list."""

    def _beat(self, session: Any, beat: Beat) -> None:
        listed = {number for number, _, _ in beat.requests}
        kept = [(number, 0, 0) for number in session.mirrors if number not in listed]
        super()._beat(session, Beat(engine=beat.engine, requests=[*beat.requests, *kept]))

    def _forget(self, key: Any) -> None:
        if self._reserved > self.max_tokens:
            super()._forget(key)


class UnlistedKept(MirroredRequests):
    """Believes that every close arrives."""

    def _beat(self, session: Any, beat: Beat) -> None:
        listed = {number for number, _, _ in beat.requests}
        kept = [(number, 0, 0) for number in session.mirrors if number not in listed]
        super()._beat(session, Beat(engine=beat.engine, requests=[*beat.requests, *kept]))


class NoBound(MirroredRequests):
    """Never evicts."""

    def _account(self, mirror: Any) -> None:
        bound, self.max_tokens = self.max_tokens, 1 << 60
        super()._account(mirror)
        self.max_tokens = bound


class AheadWithoutBound(MirroredRequests):
    def extended(self, lanes: Any, drafts: Any, runners_up: Any = None) -> None:
        super().extended(lanes, drafts, runners_up)
        for lane in lanes:
            if self._oldest[lane.key].num_ahead > 5:
                lane.tokens.extend([0] * 5)


class AnsweredToAnother(MirroredRequests):
    """Says to one engine what it has drafted for another."""

    def outgoing(self, session: int, **named: Any) -> list[bytes]:
        other = self.sessions[self.sessions.index(session) - 1]
        frames = super().outgoing(other, **named)
        return [_readdressed(*protocol.decode_to_engine(frame), session) for frame in frames]


class NeverAsks(MirroredRequests):
    """Waits for what was lost."""

    def _beat(self, session: Any, beat: Beat) -> None:
        super()._beat(session, beat)
        session.resend.clear()
