"""Settings of `paced` on a clock instead of processes: the shipped ends of the protocol, or the shipped speculator.

What is left out: sockets, the scheduler, all computing. A decoupled engine verifies whatever is there;
a coupled one is decided by the `Speculator`, whose clock this is.

Invariants: equal arguments give equal results; a draft token is accepted if it is what the request emits there.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from benchmarks.dialled import Elsewhere, InEngine, Script, Text
from benchmarks.paced_devices import MAX_WINDOW, Setting, response_tokens
from specactor.config import SpeculationConfig
from specactor.rollout.decoupled.drafter_side import MirroredRequests
from specactor.rollout.decoupled.engine_side import Tails
from specactor.rollout.decoupled.main import MAX_LANES, BatchTiming
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.speculator import Speculator

MESSAGE_S = 5e-4  # from one end to the other, without the delay of a link
HOST_S = 3e-3  # between two passes, dilated as the setting is
IDLE_S = 2e-3  # between two looks of a drafter that has nothing to do
BEGIN_S = 0.2  # prompts are read, and first windows drafted
DRAFTER = 1 << 20  # its session


@dataclass(frozen=True, kw_only=True)
class Played:
    over_off: float
    empty: float  # share of turns without drafts
    tokens: float  # per turn
    begin: float = 0.0  # tokens/s over plain decoding until the first response of a group ends; of coupled drafting


@dataclass(kw_only=True)
class Texts:
    """What every request emits, and has emitted."""

    right: dict[str, list[int]]
    output: dict[str, list[int]]
    turns: int = 0
    empty: int = 0

    @classmethod
    def of(cls, names: Sequence[str], setting: Setting, seed: int) -> Texts:
        draw = random.Random(seed)
        lengths = [response_tokens(setting, draw) for _ in names]
        right = {name: [draw.randrange(16) for _ in range(of)] for name, of in zip(names, lengths, strict=True)}
        return cls(right=right, output={name: of[:1] for name, of in right.items()})

    def left(self, name: str) -> int:
        return len(self.right[name]) - len(self.output[name])

    def verify(self, name: str, draft: Sequence[int]) -> int:
        """Emit the draft tokens that are right, and one more; return how many were right."""
        output, right = self.output[name], self.right[name]
        start = len(output)
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(draft, right[start:], strict=False)))
        output += right[start : start + agreed + 1]
        self.turns += 1
        self.empty += not draft
        return agreed

    def played(self, *, over_off: float, begin: float = 0.0) -> Played:
        emitted = sum(map(len, self.output.values())) - len(self.output)
        return Played(over_off=over_off, empty=self.empty / self.turns, tokens=emitted / self.turns, begin=begin)


def off_s(setting: Setting) -> float:
    """Return the dilated seconds of plain decoding on all groups, of which the slowest counts."""
    each = -(-setting.batch // setting.groups)
    slowest_s = max(setting.of_group(group).pass_s(each, each) for group in range(setting.groups))
    return (setting.tokens - 1) * (slowest_s + HOST_S)


def message_s(setting: Setting) -> float:
    """Return the dilated seconds from an engine to its drafter, or back."""
    return MESSAGE_S + setting.pace.dilation * setting.link_s


def script(setting: Setting, right: dict[str, list[int]], runner_up: float) -> Script:
    return Script(
        acceptance=setting.acceptance, spread=setting.spread, runner_up=runner_up, step_s=[0.0], outputs=right
    )


class Continuer(Elsewhere):
    def __init__(self, known: Script) -> None:
        self._script, self._runners_up = known, []


@dataclass(kw_only=True)
class Drafting:
    """A drafter process: its turns, without sockets."""

    continuer: Continuer
    step_s: list[float]
    message_s: float = MESSAGE_S
    mirrors: MirroredRequests = field(default_factory=lambda: MirroredRequests(DRAFTER, max_tokens=1 << 40))
    timing: BatchTiming = field(default_factory=BatchTiming)
    now_s: float = 0.0
    inbox: list[tuple[float, int, bytes]] = field(default_factory=list)  # (when it arrives, session, frame)
    outbox: dict[int, list[tuple[float, bytes]]] = field(default_factory=dict)

    def until(self, end_s: float, *, branches: bool) -> None:
        """Take turns until then; as in `DrafterLoop.turn`."""
        while self.now_s <= end_s:
            here = [mail for mail in self.inbox if mail[0] <= self.now_s]
            self.inbox = [mail for mail in self.inbox if mail[0] > self.now_s]
            for _, session, frame in here:
                self.mirrors.receive(session, frame, self.now_s)
            self.mirrors.forgotten()
            self._send()
            lanes = self.mirrors.wanted(MAX_LANES)
            if branches:
                lanes += self.mirrors.branches(self.timing.free(len(lanes), MAX_LANES))
            if not lanes:
                self.now_s += IDLE_S
                continue
            step_s = self.step_s[len(lanes) - 1]
            self.timing.batch(len(lanes), step_s)
            self.now_s += step_s
            self.mirrors.extended(lanes, self.continuer.extend(lanes), self.continuer.runners_up())
            self._send()

    def _send(self) -> None:
        for session in self.mirrors.sessions:
            for frame in self.mirrors.outgoing(session, version=1, now_s=self.now_s):
                self.outbox.setdefault(session, []).append((self.now_s + self.message_s, frame))

    def mail(self, session: int, now_s: float) -> list[tuple[int, bytes]]:
        waiting = self.outbox.get(session, [])
        self.outbox[session] = [mail for mail in waiting if mail[0] > now_s]
        return [(0, frame) for at_s, frame in waiting if at_s <= now_s]


@dataclass(kw_only=True)
class Verifier:
    """An engine between two rounds: it sends, and takes what has come."""

    index: int
    tails: Tails
    texts: Texts
    drafter: Drafting
    live: list[str]
    drafts: list[list[int]] = field(default_factory=list)
    pass_s: float = 0.0  # of the round that goes on; 0: none does

    def ended(self) -> None:
        """Commit what the round emitted."""
        for name, draft in zip(self.live, self.drafts, strict=True):
            self.texts.verify(name, draft)
        self.pass_s = 0.0
        for name in [name for name in self.live if not self.texts.left(name)]:
            self.live.remove(name)
            self.tails.close(name)

    def begin(self, now_s: float) -> None:
        self.tails.commit(self.live)
        self.drafter.inbox += [
            (now_s + self.drafter.message_s, self.index + 1, frame) for frame in self.tails.outgoing(0, now_s)
        ]
        self.tails.receive(self.drafter.mail(self.index + 1, now_s), now_s)
        self.tails.tick(now_s)
        windows = [min(MAX_WINDOW, self.texts.left(name) - 1) for name in self.live]
        self.drafts = self.tails.drafts(self.live, windows)


def decoupled(setting: Setting, *, runner_up: float, seed: int = 0) -> Played:
    """Play a batch on all groups but the last, which drafts, or on all where another device drafts."""
    names = [str(1000 * seed + i) for i in range(setting.batch)]
    texts = Texts.of(names, setting, seed)
    delay_s = message_s(setting)
    drafter = Drafting(
        continuer=Continuer(script(setting, texts.right, runner_up)),
        step_s=setting.step_s(MAX_LANES),
        message_s=delay_s,
    )
    engines, begin_s = setting.verifiers, BEGIN_S + 2 * delay_s
    verifiers = []
    for k in range(engines):
        tails = Tails(k + 1, engine=f"engine {k}", num_drafters=1, window=MAX_WINDOW)
        for name in names[k::engines]:
            tails.open(name, (1,), texts.output[name], int(name), 1.0)
        drafter.inbox += [(delay_s, k + 1, frame) for frame in tails.outgoing(0, 0.0)]
        verifiers.append(Verifier(index=k, tails=tails, texts=texts, drafter=drafter, live=names[k::engines]))
    due = [(begin_s, k) for k in range(engines)]
    while due:
        now_s, k = heapq.heappop(due)
        verifier = verifiers[k]
        drafter.until(now_s, branches=runner_up > 0)
        if verifier.pass_s:
            verifier.ended()
        if not verifier.live:
            continue
        verifier.begin(now_s)
        rows = len(verifier.live) + sum(map(len, verifier.drafts))
        verifier.pass_s = setting.of_group(k).pass_s(len(verifier.live), rows)
        heapq.heappush(due, (now_s + HOST_S + verifier.pass_s, k))
    return texts.played(over_off=off_s(setting) / (now_s - begin_s))


class OnClock(InEngine):
    """Drafts in the engine; its steps move the clock."""

    def __init__(self, setting: Setting, known: Script, group: int) -> None:
        self._script, self.pace, self.now_s = known, setting.of_group(group), 0.0
        self._step_s = self.pace.step_s(setting.batch)

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        for depth in range(max(windows)):
            self.now_s += self._step_s[sum(window > depth for window in windows) - 1]
        return super().propose(sequences, windows)


class TextOnClock(Text):
    def __init__(self, known: Script) -> None:
        self._script = self.erring_elsewhere(known)


def coupled(setting: Setting, *, seed: int = 0, with_text: bool = False) -> Played:
    """Play the second batch of every group: the first tells what costs and acceptance are. The slowest group counts.

    `with_text`: in mode auto, with a drafter over text beside the one on the engine's device.
    """
    worst_s, begin = 0.0, 0.0
    both: list[Texts] = []
    names = ("benchmarks.dialled:InEngine", *(("benchmarks.dialled:Text",) if with_text else ()))
    config = SpeculationConfig(
        mode="auto" if with_text else "coupled", drafters=names, max_window=MAX_WINDOW, draft_model=("there",)
    )
    for group in range(setting.groups):
        each = len(range(group, setting.batch, setting.groups))
        texts = [
            Texts.of([str(1000 * seed + 2 * setting.batch * batch + setting.groups * i + group) for i in range(each)],
                     setting, 2 * seed + batch)
            for batch in range(2)
        ]  # fmt: skip
        known = script(setting, texts[0].right | texts[1].right, 0.0)
        drafter = OnClock(setting, known, group)
        drafters = [drafter, *([TextOnClock(known)] if with_text else [])]
        speculator = Speculator(config, drafters, clock=lambda drafter=drafter: drafter.now_s)  # type: ignore[misc]
        for batch in texts:
            began_s = drafter.now_s
            rate = _play(speculator, drafter, batch)
        worst_s, begin = max(worst_s, drafter.now_s - began_s), begin + rate
        both.append(texts[1])
    merged = Texts(
        right={}, output={n: o for t in both for n, o in t.output.items()},
        turns=sum(t.turns for t in both), empty=sum(t.empty for t in both),
    )  # fmt: skip
    over_off = max(_plain_s(setting, group, of) for group, of in enumerate(both)) / worst_s
    return merged.played(over_off=over_off, begin=begin / _plain_rate(setting))


def _plain_s(setting: Setting, group: int, texts: Texts) -> float:
    """Return the seconds of plain decoding, in which a group's requests become fewer."""
    left = [len(of) - 1 for of in texts.right.values()]
    running = [sum(tokens > turn for tokens in left) for turn in range(max(left))]
    return sum(setting.of_group(group).pass_s(live, live) + HOST_S for live in running)


def _plain_rate(setting: Setting) -> float:
    """Return tokens/s of plain decoding, all groups, until a response ends."""
    sizes = [len(range(group, setting.batch, setting.groups)) for group in range(setting.groups)]
    return sum(size / (setting.of_group(group).pass_s(size, size) + HOST_S) for group, size in enumerate(sizes))


def _play(speculator: Speculator, drafter: OnClock, texts: Texts) -> float:
    """Decode a batch; return tokens/s until the first response ends."""
    started_s, batch, emitted_total, rate = drafter.now_s, len(texts.output), 0, 0.0
    live = [
        DraftSequence(request_id=name, prompt_ids=(1,), output_ids=output, seed=int(name), temperature=1.0)
        for name, output in texts.output.items()
    ]
    for sequence in live:
        speculator.open(sequence)
    while live:
        began_s = drafter.now_s
        limits = [min(MAX_WINDOW, texts.left(s.request_id) - 1) for s in live]
        decision = speculator.decide(live, limits)
        if decision.together:
            speculator.draft(decision.drafter, live, decision.to_draft)
        # A request has a draft of one drafter, or none.
        all_drafts = zip(decision.drafts, *decision.beside.values(), strict=True)
        drafts: list[list[int]] = [next(filter(None, of), []) for of in all_drafts]
        drafter.now_s += HOST_S + drafter.pace.pass_s(len(live), len(live) + sum(map(len, drafts)))
        befores = [len(s.output_ids) for s in live]
        agreed = [texts.verify(s.request_id, draft) for s, draft in zip(live, drafts, strict=True)]
        emitted = [s.output_ids[before:] for s, before in zip(live, befores, strict=True)]
        for s, before in zip(live, befores, strict=True):
            del s.output_ids[before:]  # it learns before it is told
        accepted = [draft[:k] for draft, k in zip(drafts, agreed, strict=True)]
        speculator.learn(live, accepted, round_s=drafter.now_s - began_s)
        for s, tokens in zip(live, emitted, strict=True):
            s.output_ids.extend(tokens)
        if len(live) == batch:
            emitted_total += sum(map(len, emitted))
            rate = emitted_total / (drafter.now_s - started_s)
        for s in [s for s in live if not texts.left(s.request_id)]:
            live.remove(s)
            speculator.close(s)
    return rate
