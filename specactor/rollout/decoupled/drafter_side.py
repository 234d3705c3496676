"""The drafter's end of decoupled drafting. PURE: frames and seconds in, frames out. Events: docs/decoupled.md."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from specactor.config import MAX_WINDOW
from specactor.rollout.decoupled import protocol
from specactor.rollout.decoupled.protocol import (
    AHEAD,
    Beat,
    Close,
    Commits,
    Drops,
    Numbering,
    Open,
    Pulse,
    Resend,
    Tail,
)
from specactor.rollout.speculation.verification import common
from specactor.waits import SILENT_S

if TYPE_CHECKING:
    from specactor.weights_sync.messages import DraftWeights

TAILS_EVERY_S = 1e-3  # while more is drafted at once: frames cost more than what is in them
Key = tuple[int, int]  # session of the engine, number of the request there


@dataclass(slots=True, kw_only=True)
class Lane:
    key: Hashable  # of the request, among the requests of all engines
    prompt_ids: Sequence[int]  # never empty
    tokens: Sequence[int]  # output so far: committed tokens, then draft tokens ahead of them
    seed: int
    temperature: float  # 0: the likeliest token is wanted
    agreed: int  # leading `tokens` that are as in the key's last call; keys and values of later ones may be dropped
    branch: int | None = None
    """Output position from which the lane follows a second choice. Keys and values before are those of the request's
    own lane; later ones need not be kept, since their tokens are shown in every call."""


class Continuer:
    """Continues texts in a drafter process: the draft model, or a stand-in. It serves all requests, from one thread.
    Engines verify its answers."""

    version = 0  # of the weights that it drafts with
    wants_runners_up = False  # whether those of the next call are of use; where they are not, they may be unknown

    def extend(self, lanes: Sequence[Lane]) -> Sequence[Sequence[int] | None]:
        """Return tokens that may follow each lane, none where it cannot go on, and None where its text is still being
        read: it is asked for again. Keys are unique. Engines are not heard meanwhile, and give up who is silent for
        long."""
        raise NotImplementedError

    def forget(self, key: Hashable) -> None:
        """Forget a request; unknown keys are ignored."""

    def runners_up(self) -> Sequence[int | None]:
        """Return, per lane of the last call, the second choice for its first token, None where it is unknown; [] where
        no lane's is ever known."""
        return []

    def renew(self, weights: DraftWeights) -> str:
        """Draft with these weights from now on, or return why not."""
        return "its continuer has no weights"

    def sleep(self) -> None:
        """Keep only weights, in host memory, where they may be renewed. Requests were forgotten before."""

    def wake(self) -> None:
        """Take the device again."""


@dataclass(slots=True, eq=False)
class Mirror:
    """One request, and what is drafted ahead of it."""

    key: Key
    opening: Open
    tokens: list[int]  # committed, then drafted ahead
    committed: int
    reserved: int = 0  # tokens that count against the bound
    complete: bool = True  # whether no commit is missing
    unsent: bool = False  # there are draft tokens that the engine was not sent
    is_awaited: bool = True  # the engine has no draft token of it
    # by output position of drafted tokens: the second choice, and what may follow it
    branches: dict[int, list[int]] = field(default_factory=dict)
    _stuck: bool = False  # the continuer had nothing to add to these tokens
    _shown_from: int = 0
    _shown: list[int] = field(default_factory=list)  # tokens of the last lane, from `_shown_from` on

    @property
    def window(self) -> int:
        return self.opening.window

    @property
    def num_ahead(self) -> int:
        return len(self.tokens) - self.committed

    @property
    def num_drafted(self) -> int:
        return self.num_ahead + sum(map(len, self.branches.values()))

    @property
    def wants_token(self) -> bool:
        return self.complete and not self._stuck and self._room > 0

    @property
    def _room(self) -> int:
        return AHEAD * self.window - self.num_ahead

    def lane(self, branch: int | None = None) -> Lane:
        """Return the lane of the request, or a branch's, valid until the mirror changes."""
        if branch is None:
            tokens = self.tokens
            agreed = self._shown_from + common(self._shown, self.tokens[self._shown_from :])
        else:
            tokens, agreed = [*self.tokens[:branch], *self.branches[branch]], branch
        return Lane(
            key=self.key,
            prompt_ids=self.opening.prompt_ids,
            tokens=tokens,
            seed=self.opening.seed,
            temperature=self.opening.temperature,
            agreed=agreed,
            branch=branch,
        )

    def short_branches(self) -> list[tuple[int, int, int]]:
        """Return (tokens, tokens drafted before, position) of branches that want a token."""
        if not self.complete:
            return []
        last = self.committed + self.window
        return [
            (len(branch), at - self.committed, at)
            for at, branch in self.branches.items()
            if at < last and len(branch) <= self.window
        ]

    def branched(self, at: int, draft: Sequence[int] | None) -> int:
        if not draft:
            del self.branches[at]
            return 0
        self.branches[at].append(draft[0])
        self.unsent = True
        return 1

    def extended(self, lane: Lane, draft: Sequence[int] | None, runner_up: int | None = None) -> int:
        """Append the answer to the last lane; return how many tokens were kept."""
        self._shown_from, self._shown = self.committed, list(lane.tokens[self.committed :])
        tokens = (draft or [])[: self._room]
        kept = len(tokens)
        if tokens and runner_up is not None and runner_up != tokens[0]:
            self.branches[len(self.tokens)] = [runner_up]
            kept += 1
        self.tokens += tokens
        self._stuck = draft is not None and not tokens
        self.unsent = self.unsent or bool(tokens)
        return kept

    def commit(self, fresh: Sequence[int]) -> int:
        """Append committed tokens; return how many drafted ones are thrown away."""
        before = self.num_drafted
        agreed = common(self.tokens[self.committed :], fresh)
        if agreed < len(fresh):
            self._take_branch(self.committed + agreed, fresh[agreed:])
            agreed = common(self.tokens[self.committed :], fresh)
        if agreed < len(fresh):
            self.tokens[self.committed + agreed :] = fresh[agreed:]
            self.branches.clear()
        self.committed += len(fresh)
        self.branches = {at: branch for at, branch in self.branches.items() if at >= self.committed}
        self.unsent = self.unsent and self.num_ahead > 0
        self._stuck = False
        wasted = max(0, before - agreed - self.num_drafted)
        self.is_awaited = self.is_awaited or not self.num_ahead
        return wasted

    def _take_branch(self, at: int, fresh: Sequence[int]) -> None:
        branch = self.branches.get(at)
        if branch is None or branch[0] != fresh[0]:
            return
        self.tokens[at:] = branch
        self.branches.clear()

    def tails(self) -> list[Tail]:
        """Return all that is drafted ahead, the likeliest first."""
        self.unsent = self.is_awaited = False
        request, base = self.key[1], self.committed
        ahead = self.tokens[base:]
        paths = [[*ahead[: at - base], *branch] for at, branch in self.branches.items() if len(branch) > 1]
        return [
            Tail(request=request, base=base, tokens=protocol.pack(ahead)),
            *(Tail(request, base, protocol.pack(path[: protocol.MAX_TAIL_TOKENS])) for path in paths),
        ]


@dataclass(slots=True)
class _Session:
    number: int
    engine: str
    heard_s: float
    frame: int = 0  # number of the last frame that counted
    mirrors: dict[int, Mirror] = field(default_factory=dict)
    drafted: int = 0
    wasted: int = 0
    window: int = MAX_WINDOW  # its own, once it has opened a request
    pulse: bool = False  # a beat is to be answered
    resend: set[int] = field(default_factory=set)
    tails_s: float = float("-inf")  # when all of them that were unsent went last


class MirroredRequests:
    """The requests of all engines.

    Invariants: a mirror holds what its engine committed, then at most `AHEAD` windows drafted from that alone; prompts,
    committed tokens and room for drafts, but not for branches, are at most `max_tokens`; a drafted token has at most
    one branch; short requests do not wait for others.
    """

    def __init__(self, session: int, *, max_tokens: int, drops: Drops | None = None) -> None:
        self.session = session
        self.max_tokens = max_tokens
        self.drops = drops or Drops("drafter")
        self._out = Numbering(session)  # one for all engines: it outlasts an engine that was forgotten and comes back
        self._sessions: dict[int, _Session] = {}
        self._engines: dict[str, int] = {}
        self._oldest: OrderedDict[Key, Mirror] = OrderedDict()  # the one heard of longest ago first
        self._unread: set[Key] = set()  # opened, and never drafted for
        self._reserved = 0
        self._forgotten: list[Key] = []

    @property
    def num_wasted(self) -> int:
        return sum(session.wasted for session in self._sessions.values())

    @property
    def num_requests(self) -> int:
        return len(self._oldest)

    @property
    def sessions(self) -> list[int]:
        return list(self._sessions)

    # ------------------------------------------------------------------------------------------------ what arrives

    def receive(self, sender: int, data: bytes, now_s: float) -> None:
        try:
            header, records = protocol.decode_to_drafter(data)
        except protocol.FrameError as error:
            self.drops.add("malformed", str(error))
            return
        session = self._session(sender, header, records, now_s)
        if session is None:
            return
        session.heard_s = now_s
        for record in records:
            match record:
                case Commits():
                    for request, position, tokens in record:
                        self._commit(session, request, position, tokens)
                case Open():
                    self._open(session, record)
                case Close():
                    self._forget((session.number, record.request))
                case Beat():
                    self._beat(session, record)

    def _session(
        self, sender: int, header: protocol.Header, records: Sequence[protocol.ToDrafter], now_s: float
    ) -> _Session | None:
        if header.sender != sender:
            self.drops.add("foreign", f"session {header.sender} in the name of {sender}")
            return None
        session = self._sessions.get(sender)
        if session is None:
            beat = records[0] if records else None
            if not isinstance(beat, Beat) or len(self._sessions) >= 1024:
                self.drops.add("unannounced", f"session {sender}")
                return None
            if sender < self._engines.get(beat.engine, 0):
                self.drops.add("foreign", f"session {sender} of {beat.engine}, which has been started again since")
                return None
            session = self._begin(sender, beat.engine, now_s)
        if header.number <= session.frame:
            self.drops.add("repeated", f"frame {header.number} of {session.engine} after {session.frame}")
            return None
        session.frame = header.number
        return session

    def _begin(self, number: int, engine: str, now_s: float) -> _Session:
        """Begin an engine's new session: what the last one asked for is over."""
        if engine in self._engines:
            self._end(self._sessions[self._engines[engine]])
        session = _Session(number=number, engine=engine, heard_s=now_s)
        self._sessions[number] = session
        self._engines[engine] = number
        return session

    def _end(self, session: _Session) -> None:
        for request in list(session.mirrors):
            self._forget((session.number, request))
        del self._sessions[session.number]
        del self._engines[session.engine]

    def _beat(self, session: _Session, beat: Beat) -> None:
        session.pulse = True
        listed = {request for request, _, _ in beat.requests}
        for request in [request for request in session.mirrors if request not in listed]:
            self._forget((session.number, request))
        free = self.max_tokens - self._reserved
        for request, prompt, committed in beat.requests:
            mirror = session.mirrors.get(request)
            if mirror is None:
                size = prompt + committed + AHEAD * session.window
                if size <= free:
                    free -= size
                    session.resend.add(request)
            elif mirror.committed < committed or not mirror.complete:
                mirror.complete = False
                session.resend.add(request)
            else:
                mirror.unsent = mirror.num_ahead > 0

    def _open(self, session: _Session, record: Open) -> None:
        key = (session.number, record.request)
        session.resend.discard(record.request)
        session.window = record.window
        known = session.mirrors.get(record.request)
        if known is not None and known.tokens[: known.committed] == record.output_ids[: known.committed]:
            known.complete = True
            known.unsent = known.num_ahead > 0
            self._commit(session, record.request, 0, record.output_ids)
            return
        self._forget(key)
        mirror = Mirror(key=key, opening=record, tokens=record.output_ids.copy(), committed=len(record.output_ids))
        session.mirrors[record.request] = mirror
        self._oldest[key] = mirror
        self._unread.add(key)
        self._account(mirror)

    def _commit(self, session: _Session, request: int, position: int, tokens: Sequence[int]) -> None:
        mirror = session.mirrors.get(request)
        if mirror is None:
            return  # evicted or never opened; the next beat says whether it is wanted
        if position > mirror.committed:
            mirror.complete = False
            session.resend.add(request)
            return
        fresh = tokens[mirror.committed - position :]
        if not fresh:
            return
        session.wasted += mirror.commit(fresh)
        self._oldest.move_to_end(mirror.key)
        self._account(mirror)

    # -------------------------------------------------------------------------------------------------- what drafts

    def wanted(self, max_lanes: int) -> list[Lane]:
        """Return lanes that want a token, valid until the next call, the shortest first."""
        ready = [mirror for mirror in self._oldest.values() if mirror.wants_token]
        if len(ready) > max_lanes:
            ready.sort(key=lambda mirror: mirror.num_ahead)
            del ready[max_lanes:]
        return [mirror.lane() for mirror in ready]

    def branches(self, max_lanes: int) -> list[Lane]:
        """Return lanes of branches, valid until the next call, short ones first."""
        short = [(*found, mirror) for mirror in self._oldest.values() for found in mirror.short_branches()]
        if len(short) > max_lanes:
            short.sort(key=lambda found: found[:2])
            del short[max(0, max_lanes) :]
        return [mirror.lane(at) for _, _, at, mirror in short]

    def extended(
        self,
        lanes: Sequence[Lane],
        drafts: Sequence[Sequence[int] | None],
        runners_up: Sequence[int | None] | None = None,
    ) -> None:
        """Append answers; `runners_up` are second choices for their first tokens."""
        for lane, draft, runner_up in zip(lanes, drafts, runners_up or [None] * len(lanes), strict=True):
            key = cast(Key, lane.key)
            mirror, session = self._oldest[key], self._sessions[key[0]]
            if lane.branch is not None:
                session.drafted += mirror.branched(lane.branch, draft)
                continue
            if draft is not None:
                self._unread.discard(key)
            session.drafted += mirror.extended(lane, draft, runner_up)

    def forget_all(self) -> None:
        for session in list(self._sessions.values()):
            self._end(session)

    def forgotten(self) -> list[Key]:
        keys, self._forgotten = self._forgotten, []
        return keys

    # -------------------------------------------------------------------------------------------------- what leaves

    def outgoing(self, session: int, *, version: int, now_s: float, more: bool = False) -> list[bytes]:
        """Return frames for one engine, with the weights' `version`. If `more` is drafted at once, tails may wait for
        `TAILS_EVERY_S`, unless their request had none, or a prompt is read first."""
        peer = self._sessions[session]
        records: list[protocol.ToEngine] = []
        if peer.pulse:
            peer.pulse = False
            records.append(Pulse(version=version, requests=self.num_requests, drafted=peer.drafted, wasted=peer.wasted))
        if peer.resend:
            records.append(Resend(requests=sorted(peer.resend)))
            peer.resend.clear()
        due = not more or bool(self._unread) or now_s - peer.tails_s >= TAILS_EVERY_S
        unsent = [mirror for mirror in peer.mirrors.values() if mirror.unsent and (due or mirror.is_awaited)]
        if unsent and due:
            peer.tails_s = now_s
        tails = [tail for mirror in unsent for tail in mirror.tails()]
        for first in range(0, len(tails), protocol.MAX_ROWS):
            records.append(protocol.columns(tails[first : first + protocol.MAX_ROWS]))
        return self._out.frames(records, self.drops, receiver=session)

    def tick(self, now_s: float) -> None:
        for session in list(self._sessions.values()):
            if now_s - session.heard_s > SILENT_S:
                self._end(session)

    # ---------------------------------------------------------------------------------------------------- the bound

    def _account(self, mirror: Mirror) -> None:
        # The most tokens that it may hold before the next commit.
        size = len(mirror.opening.prompt_ids) + mirror.committed + AHEAD * mirror.window
        self._reserved += size - mirror.reserved
        mirror.reserved = size
        while self._reserved > self.max_tokens:
            key = mirror.key if size > self.max_tokens else next(iter(self._oldest))
            self.drops.add("evicted", f"more than max_tokens = {self.max_tokens}: raise it, or add drafters")
            self._forget(key)

    def _forget(self, key: Key) -> None:
        mirror = self._oldest.pop(key, None)
        if mirror is None:
            return
        self._unread.discard(key)
        session = self._sessions[key[0]]
        del session.mirrors[key[1]]
        session.wasted += mirror.num_drafted
        self._reserved -= mirror.reserved
        self._forgotten.append(key)
