"""The engine's end of decoupled drafting: each request's drafter, and its *tail*, the draft tokens from an output
position.

PURE: frames and seconds in, frames out. Events: docs/decoupled.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specactor.rollout.decoupled import protocol
from specactor.waits import MOMENT_S

BEAT_EVERY_S = MOMENT_S / 4
"""A drafter hears between any two passes of its model, however much it reads, so one that has not answered a beat in
`MOMENT_S` is gone; the beats between are for those that were lost."""


@dataclass(slots=True, eq=False)
class Request:
    number: int
    name: str
    prompt_ids: Sequence[int]
    output_ids: list[int]  # the list of the `DraftSequence`, which grows (`DrafterSet`)
    seed: int
    temperature: float
    drafter: int | None = None
    num_sent: int = 0  # output tokens that the drafter was sent
    owed_from: int | None = 0  # it was sent much at once, up to here, and has not answered since
    opened_s: float = float("-inf")
    base: int = 0  # position of the tail's first token
    tokens: bytes | None = None  # the tail, packed: a list is ten times as much to fetch after a verify
    branches: list[bytes] = field(default_factory=list)  # tails from there that leave it at a second choice


@dataclass(slots=True)
class Peer:
    out: protocol.Numbering
    session: int = 0  # of the incarnation that was heard last; 0: of none
    frame: int = 0
    live: bool = False
    asked_s: float | None = None  # since when a beat is unanswered
    beat_s: float = float("-inf")
    others: int = 0  # requests of other engines there, as it said last
    requests: dict[int, Request] = field(default_factory=dict)
    unopened: dict[int, Request] = field(default_factory=dict)  # of those, the ones that it must be sent
    grown: dict[int, Request] = field(default_factory=dict)  # of those, the ones with new tokens
    closed: list[int] = field(default_factory=list)  # numbers that it need not hold any longer
    arrived: list[protocol.TailColumns] = field(default_factory=list)
    version: int = 0
    drafted: int = 0  # as it said last, in this incarnation
    wasted: int = 0

    @property
    def load(self) -> int:
        return self.others + len(self.requests)


class Tails:
    """An engine's open requests, and its drafters.

    Invariants: no draft token stands on another prefix than its own; a request is with one drafter or none, and only
    that one's last message counts; a drafter silent for `MOMENT_S` loses its requests.
    """

    def __init__(self, session: int, *, engine: str, num_drafters: int, window: int) -> None:
        """Start empty; restarts keep the name `engine`, and a verify takes at most `window` tokens."""
        self.session = session
        self.engine = engine
        self.window = window
        self.drops = protocol.Drops(f"engine {engine}")
        self._drafters = [Peer(out=protocol.Numbering(session)) for _ in range(num_drafters)]
        self._requests: dict[str, Request] = {}
        self._next = 1
        self.drafted = self.wasted = 0  # tokens, of all drafters

    @property
    def live(self) -> list[int]:
        return [index for index, drafter in enumerate(self._drafters) if drafter.live]

    @property
    def version(self) -> int:
        """Return live drafters' oldest weights, or 0."""
        return min((drafter.version for drafter in self._drafters if drafter.live), default=0)

    # --------------------------------------------------------------------------------------------- what the engine does

    def open(self, name: str, prompt_ids: Sequence[int], output_ids: list[int], seed: int, temperature: float) -> None:
        """Start a request; `output_ids` is read again whenever something is sent."""
        self.close(name)
        request = Request(self._next, name, prompt_ids, output_ids, seed, temperature)
        self._next += 1
        self._requests[name] = request
        self._place(request)

    def commit(self, names: Iterable[str]) -> None:
        for request in map(self._requests.get, names):
            if request is not None and request.drafter is not None and request.num_sent < len(request.output_ids):
                self._drafters[request.drafter].grown[request.number] = request

    def close(self, name: str) -> None:
        """End a request; unknown names are ignored."""
        request = self._requests.pop(name, None)
        if request is not None:
            self._leave(request)

    def num_owed(self, names: Sequence[str]) -> int:
        """Count requests whose drafters owe an answer to more than a window."""
        requests = map(self._requests.get, names)
        return sum(r is not None and r.drafter is not None and r.owed_from is not None for r in requests)

    def close_all(self) -> None:
        """End the engine; the next messages say so."""
        for name in list(self._requests):
            self.close(name)
        for drafter in self._drafters:
            drafter.beat_s = float("-inf")

    def drafts(self, names: Sequence[str], windows: Sequence[int]) -> list[list[int]]:
        """Return what may follow each request's output, at most its window."""
        drafts: list[list[int]] = []
        stale = 0
        for request, window in zip(map(self._requests.get, names), windows, strict=True):
            if request is None or request.tokens is None:
                drafts.append([])
                continue
            tokens = protocol.unpack(request.tokens)
            known = request.output_ids[request.base :]
            start = len(known)
            if tokens[:start] != known:
                tokens = self._branch(request, known)
                stale += not tokens
            drafts.append(tokens[start : start + window])
        self.drops.expect("stale", stale)
        return drafts

    @staticmethod
    def _branch(request: Request, known: Sequence[int]) -> list[int]:
        head = protocol.pack(known)
        request.tokens = next((tail for tail in request.branches if tail.startswith(head)), None)
        request.branches = []
        return protocol.unpack(request.tokens) if request.tokens is not None else []

    # ---------------------------------------------------------------------------------------------------- what arrives

    def receive(self, frames: Iterable[tuple[int, bytes]], now_s: float) -> None:
        for index, data in frames:
            self._receive(index, data, now_s)
        for index, drafter in enumerate(self._drafters):
            if drafter.arrived:
                self._tails(index, drafter.arrived)
                drafter.arrived.clear()

    def _receive(self, index: int, data: bytes, now_s: float) -> None:
        try:
            header, records = protocol.decode_to_engine(data)
        except protocol.FrameError as error:
            self.drops.add("malformed", str(error))
            return
        drafter = self._drafters[index]
        if header.receiver != self.session or (drafter.live and header.sender < drafter.session):
            self.drops.add("foreign", f"session {header.sender} to {header.receiver}")
            return
        if header.sender != drafter.session:
            self._meet(index, header.sender)
        elif header.number <= drafter.frame:
            self.drops.add("repeated", f"frame {header.number} of drafter {index} after {drafter.frame}")
            return
        drafter.frame = header.number
        drafter.asked_s = None
        for record in records:
            match record:
                case protocol.TailColumns():
                    drafter.arrived.append(record)
                case protocol.Resend():
                    self._resend(index, record, now_s)
                case protocol.Pulse():
                    drafter.version = record.version
                    drafter.others = max(0, record.requests - len(drafter.requests))
                    self._count(drafter, record)
        if not drafter.live:
            drafter.live = True
            self._balance()

    def _count(self, drafter: Peer, pulse: protocol.Pulse) -> None:
        # A drafter that has forgotten this engine counts anew from 0.
        self.drafted += pulse.drafted - (drafter.drafted if pulse.drafted >= drafter.drafted else 0)
        self.wasted += pulse.wasted - (drafter.wasted if pulse.wasted >= drafter.wasted else 0)
        drafter.drafted, drafter.wasted = pulse.drafted, pulse.wasted

    def _meet(self, index: int, session: int) -> None:
        drafter = self._drafters[index]
        drafter.session, drafter.frame = session, 0
        drafter.drafted = drafter.wasted = 0
        drafter.closed.clear()
        drafter.arrived.clear()
        for request in drafter.requests.values():
            request.num_sent, request.tokens, request.branches = 0, None, []
            drafter.unopened[request.number] = request

    def _tails(self, index: int, records: Sequence[protocol.TailColumns]) -> None:
        find = self._drafters[index].requests.get
        late = stale = 0
        kept = -1  # the last request whose tail was kept
        for number, base, tokens in protocol.newest(records):  # without calls: hundreds of requests per round
            request = find(number)
            if request is None:
                late += 1
                continue
            if request.owed_from is not None and base >= request.owed_from:
                request.owed_from = None
            if base > request.num_sent:
                self.drops.add("future", f"tail at {base} from drafter {index}, which was told of {request.num_sent}")
            elif base + len(tokens) // protocol.TOKEN_BYTES <= len(request.output_ids) or (
                request.tokens is not None and base < request.base
            ):
                stale += number != kept
            elif number == kept and base == request.base:
                request.branches.append(tokens)
            else:
                request.base, request.tokens, request.branches, kept = base, tokens, [], number
        self.drops.expect("late", late)
        self.drops.expect("stale", stale)

    def _resend(self, index: int, record: protocol.Resend, now_s: float) -> None:
        drafter = self._drafters[index]
        for number in record.requests:
            request = drafter.requests.get(number)
            if request is not None and now_s - request.opened_s >= 0.1:  # no more often, whatever its drafter says
                drafter.unopened[number] = request

    # ------------------------------------------------------------------------------------------------------ what leaves

    def outgoing(self, index: int, now_s: float) -> list[bytes]:
        drafter = self._drafters[index]
        records: list[protocol.ToDrafter] = []
        if now_s - drafter.beat_s >= BEAT_EVERY_S:
            records.append(self._beat(drafter, now_s))
        elif not drafter.live:
            return []
        records += [protocol.Close(request=number) for number in drafter.closed]
        for number, request in drafter.unopened.items():
            records.append(self._opening(request, now_s))
            drafter.grown.pop(number, None)
        records += self._commits(drafter.grown)
        drafter.closed.clear()
        drafter.unopened.clear()
        drafter.grown.clear()
        return drafter.out.frames(records, self.drops, receiver=drafter.session)

    def _beat(self, drafter: Peer, now_s: float) -> protocol.Beat:
        drafter.beat_s = now_s
        if drafter.asked_s is None:
            drafter.asked_s = now_s
        held = [(number, len(request.prompt_ids), request.num_sent) for number, request in drafter.requests.items()]
        return protocol.Beat(engine=self.engine, requests=held)

    def _opening(self, request: Request, now_s: float) -> protocol.Open:
        request.opened_s = now_s
        request.num_sent = request.owed_from = len(request.output_ids)
        return protocol.Open(
            request=request.number,
            prompt_ids=list(request.prompt_ids),
            output_ids=request.output_ids,
            seed=request.seed,
            temperature=request.temperature,
            window=self.window,
        )

    def _commits(self, grown: Mapping[int, Request]) -> list[protocol.Commits]:
        """Give requests that grew by much records of their own, so that each fits a frame."""
        longest = self.window + 1
        records: list[protocol.Commits] = []
        requests: list[int] = []
        positions: list[int] = []
        counts: list[int] = []
        tokens: list[int] = []
        for number, request in grown.items():
            sent = request.num_sent
            fresh = request.output_ids[sent:]
            count = len(fresh)
            request.num_sent = sent + count
            if count > longest:
                request.owed_from = request.num_sent
                records.append(protocol.Commits(requests=[number], positions=[sent], counts=[count], tokens=fresh))
                continue
            requests.append(number)
            positions.append(sent)
            counts.append(count)
            tokens += fresh
        if requests:
            records.append(protocol.Commits(requests=requests, positions=positions, counts=counts, tokens=tokens))
        return records

    def tick(self, now_s: float) -> None:
        """Drop silent drafters; call it after `receive`."""
        for drafter in self._drafters:
            if drafter.live and drafter.asked_s is not None and now_s - drafter.asked_s > MOMENT_S:
                drafter.live = False
                drafter.others = 0
                requests = list(drafter.requests.values())
                for request in requests:
                    self._leave(request)
                drafter.closed.clear()  # it will be sent what it should hold
                for request in requests:
                    self._place(request)

    # ------------------------------------------------------------------------------------------------------------ where

    def _place(self, request: Request) -> None:
        live = self.live
        if not (live and request.prompt_ids):
            return
        index = min(live, key=lambda i: (self._drafters[i].load, i))
        drafter = self._drafters[index]
        request.drafter, request.num_sent, request.opened_s = index, 0, float("-inf")
        drafter.requests[request.number] = drafter.unopened[request.number] = request

    def _balance(self) -> None:
        """Place requests without a drafter, and move others until loads differ by one at most."""
        for request in self._requests.values():
            if request.drafter is None:
                self._place(request)
        while True:
            loads = [self._drafters[index] for index in self.live]
            lightest = min(loads, key=lambda drafter: drafter.load)
            busy = [drafter for drafter in loads if drafter.requests]
            heaviest = max(busy, key=lambda drafter: drafter.load, default=lightest)
            if heaviest.load - lightest.load <= 1:
                return
            request = heaviest.requests[next(reversed(heaviest.requests))]  # the youngest: the least to be read again
            self._leave(request)
            self._place(request)

    def _leave(self, request: Request) -> None:
        if request.drafter is None:
            return
        drafter = self._drafters[request.drafter]
        del drafter.requests[request.number]
        drafter.grown.pop(request.number, None)
        if drafter.unopened.pop(request.number, None) is None or request.num_sent:
            drafter.closed.append(request.number)
        request.drafter = request.tokens = None
        request.branches = []
