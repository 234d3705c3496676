"""The engine's end, event by event."""

from __future__ import annotations

import pytest

from specactor.rollout.decoupled import protocol
from specactor.rollout.decoupled.engine_side import BEAT_EVERY_S, Tails
from specactor.rollout.decoupled.protocol import (
    Beat,
    Close,
    Commits,
    Header,
    Open,
    Pulse,
    Resend,
    Tail,
    TailColumns,
    ToDrafter,
    ToEngine,
    columns,
    decode_to_drafter,
    encode,
    pack,
)
from specactor.waits import MOMENT_S
from tests.rollout.decoupled.network import held
from tests.rollout.decoupled.wrong_ends import ArrivedKept, ForeignTaken

ENGINE, DRAFTER = 20, 50


class End:
    """Tails and the words of its drafters."""

    def __init__(self, num_drafters: int = 1, *, kind: type[Tails] = Tails, session: int = ENGINE) -> None:
        self.tails = kind(session, engine="e", num_drafters=num_drafters, window=4)
        self.outputs: dict[str, list[int]] = {}
        self.now_s = 50.0
        self.frame = 0

    def hear(
        self, *records: ToEngine, index: int = 0, session: int = 0, receiver: int = ENGINE, number: int = 0
    ) -> None:
        self.tails.receive(
            [self.frame_of(*records, index=index, session=session, receiver=receiver, number=number)], self.now_s
        )

    def frame_of(
        self, *records: ToEngine, index: int = 0, session: int = 0, receiver: int = ENGINE, number: int = 0
    ) -> tuple[int, bytes]:
        self.frame += 1
        header = Header(sender=session or DRAFTER + index, receiver=receiver, number=number or self.frame)
        return index, encode(header, records)

    def open(self, name: str, *output: int) -> None:
        self.outputs[name] = list(output)
        self.tails.open(name, (1, 2, 3), self.outputs[name], 9, 0.5)

    def commit(self, name: str, *tokens: int) -> None:
        self.outputs[name] += tokens
        self.tails.commit([name])

    def say(self, index: int = 0) -> list[ToDrafter]:
        return [r for frame in self.tails.outgoing(index, self.now_s) for r in decode_to_drafter(frame)[1]]

    def draft(self, name: str, window: int = 4) -> list[int]:
        return self.tails.drafts([name], [window])[0]

    def requests(self, index: int = 0) -> list[int]:
        return list(self.tails._drafters[index].requests)


def pulse(requests: int = 0) -> Pulse:
    return Pulse(version=1, requests=requests, drafted=0, wasted=0)


def tails(*of_requests: Tail) -> TailColumns:
    return columns(of_requests)


def tail(base: int, *tokens: int, request: int = 1) -> TailColumns:
    return tails(Tail(request, base, pack(tokens)))


def ready(num_drafters: int = 1, **options: type[Tails]) -> End:
    """Its drafters have answered."""
    end = End(num_drafters, **options)
    for index in range(num_drafters):
        end.say(index)
        end.hear(pulse(), index=index)
    return end


def test_nothing_but_beats_is_said_to_a_drafter_that_was_never_heard() -> None:
    end = End()
    end.open("a")
    assert end.say() == [Beat(engine="e", requests=[])]
    end.commit("a", 5)
    assert end.say() == []
    end.now_s += BEAT_EVERY_S
    assert end.say() == [Beat(engine="e", requests=[])]
    end.hear(pulse())
    assert end.say() == [Open(request=1, prompt_ids=[1, 2, 3], output_ids=[5], seed=9, temperature=0.5, window=4)]


def test_what_an_engine_says_of_a_request() -> None:
    end = ready()
    end.open("a")
    end.commit("a", 5)
    assert end.say() == [Open(request=1, prompt_ids=[1, 2, 3], output_ids=[5], seed=9, temperature=0.5, window=4)]
    end.commit("a", 6, 7)
    end.commit("a", 8)
    assert end.say() == [Commits(requests=[1], positions=[1], counts=[3], tokens=[6, 7, 8])]
    end.commit("a", 9)
    end.tails.close("a")
    assert end.say() == [Close(request=1)]
    end.open("b")
    end.tails.close("b")
    assert end.say() == [], "the drafter need never know"
    end.open("a")
    end.open("a")
    assert [record.request for record in end.say() if isinstance(record, Open)] == [4], "a number is used once"


def test_what_all_requests_grew_by_is_one_record_but_for_what_is_long() -> None:
    end = ready()
    for name in ("a", "b", "c"):
        end.open(name, 1)
    end.say()
    end.commit("c", 10, 11)
    end.commit("b", *range(20, 26))  # more than a round emits
    end.commit("a", 30)
    first, second = end.say()
    assert isinstance(first, Commits)
    assert isinstance(second, Commits)
    assert list(first) == [(2, 1, [20, 21, 22, 23, 24, 25])]
    assert list(second) == [(3, 1, [10, 11]), (1, 1, [30])]
    assert end.tails.num_owed(["a", "b", "c"]) == 3, "two of them since they were opened"
    end.hear(tail(1, 5, request=1), tail(3, 6, request=3), tail(3, 7, request=2))
    assert end.tails.num_owed(["a", "b", "c"]) == 1
    end.hear(tail(7, 8, request=2))
    assert end.tails.num_owed(["a", "b", "c"]) == 0


def test_long_commits_go_in_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    end = ready()
    names = [str(number) for number in range(5)]
    for name in names:
        end.open(name, 1)
    end.say()
    for name in names:
        end.commit(name, *range(1000, 1100))
    monkeypatch.setattr(protocol, "MAX_FRAME_BYTES", 800)
    frames = end.tails.outgoing(0, end.now_s)
    assert len(frames) > 2
    rows = [row for frame in frames for record in decode_to_drafter(frame)[1] for row in record]  # type: ignore[attr-defined]
    assert rows == [(number, 1, list(range(1000, 1100))) for number in range(1, 6)]
    assert not end.tails.drops.counts


def test_a_draft_is_what_is_beyond_the_output_where_all_before_agrees() -> None:
    end = ready()
    end.open("a", 5)
    end.say()
    end.hear(tail(1, 10, 11, 12, 13, 14, 15))
    assert end.draft("a") == [10, 11, 12, 13]
    assert end.draft("a", 2) == [10, 11]
    assert end.draft("a", 0) == []
    end.commit("a", 10, 11)
    assert end.draft("a") == [12, 13, 14, 15]
    end.commit("a", 99)
    assert end.draft("a") == []
    assert end.tails.drops.counts["stale"] == 1
    assert held(end.tails)[1] == 0
    assert end.draft("unknown") == []


def test_a_tail_that_is_used_up_is_no_mismatch() -> None:
    end = ready()
    end.open("a")
    end.say()
    end.hear(tail(0, 10))
    end.commit("a", 10)
    assert end.draft("a") == []
    end.hear(tail(0, 10, 11))
    assert end.draft("a") == [11]


def test_which_tails_are_dropped() -> None:
    end = ready(2)
    end.open("a", 1, 2, 3)
    end.say()
    end.hear(tail(3, 10, 11))
    end.hear(tail(2, 3, 12))  # of an earlier state
    end.hear(tail(1, 2, 3))  # nothing new
    end.hear(tail(4, 13))  # not told of so far
    end.hear(tail(3, 14, request=2))
    end.hear(tail(3, 15), index=1)  # another drafter's request
    assert end.draft("a") == [10, 11]
    end.tails.close("a")
    end.hear(tail(3, 16))
    assert end.tails.drops.counts == {"stale": 2, "future": 1, "late": 3}
    assert held(end.tails)[1] == 0


def test_of_tails_that_arrive_together_every_requests_last_counts() -> None:
    end = ready(2)
    for name in ("a", "b", "c"):  # the second one with the other drafter
        end.open(name)
    for index in range(2):
        end.say(index)
    records: list[ToEngine] = [
        tails(Tail(1, 0, pack([10])), Tail(3, 0, pack([30]))),
        tail(0, 10, 11),
        tail(0, 10, 11, 12),
    ]
    others = [end.frame_of(tail(0, 20, 21, request=2), index=1), end.frame_of(tail(0, 99, request=1), index=1)]
    end.tails.receive([*(end.frame_of(record) for record in records), *others], end.now_s)
    assert [end.draft(name) for name in ("a", "b", "c")] == [[10, 11, 12], [20, 21], [30]]
    assert end.tails.drops.counts == {"late": 1}


@pytest.mark.parametrize("kind", [Tails, ArrivedKept])
def test_tails_that_arrive_with_the_first_words_of_the_next_incarnation(kind: type[Tails]) -> None:
    end = ready(kind=kind)
    end.open("a")
    end.say()
    frames = [end.frame_of(tail(0, 10)), end.frame_of(pulse(), session=DRAFTER + 1, number=1)]
    end.tails.receive(frames, end.now_s)
    assert end.draft("a") == ([] if kind is Tails else [10])


def test_which_frames_are_dropped() -> None:
    end = ready()
    end.open("a")
    end.say()
    end.hear(tail(0, 10), number=30)
    end.hear(tail(0, 10, 11), number=30)
    end.hear(tail(0, 10, 12), number=29)
    end.hear(tail(0, 10, 13), number=31, receiver=ENGINE - 1)
    end.hear(tail(0, 10, 14), number=31, session=DRAFTER - 1)
    end.tails.receive([(0, b"rubbish")], 0.0)
    assert end.draft("a") == [10]
    assert end.tails.drops.counts == {"repeated": 2, "foreign": 2, "malformed": 1}


@pytest.mark.parametrize("kind", [Tails, ForeignTaken])
def test_what_was_drafted_for_the_last_incarnation(kind: type[Tails]) -> None:
    """The request of the same number may be another one."""
    end = ready(kind=kind)
    end.open("a")
    end.say()
    end.hear(tail(0, 10), receiver=ENGINE - 1)
    assert end.draft("a") == ([] if kind is Tails else [10])


def test_a_new_incarnation_of_a_drafter_is_told_everything() -> None:
    end = ready()
    end.open("a", 5)
    end.open("b")
    end.say()
    end.hear(tail(1, 10))
    end.hear(pulse(), session=DRAFTER + 1, number=1)
    assert end.draft("a") == [], "it was drafted by a process that is gone"
    assert [(r.request, r.output_ids) for r in end.say() if isinstance(r, Open)] == [(1, [5]), (2, [])]


def test_what_a_drafter_asks_for_is_sent_again_but_not_all_the_time() -> None:
    end = ready(2)
    end.open("a", 5)
    end.open("b")  # with the other drafter
    end.say()
    end.hear(Resend(requests=[1, 2, 77]))
    assert end.say() == [], "just opened"
    end.now_s += 0.1
    end.hear(Resend(requests=[1, 2, 77]))
    assert [record.request for record in end.say() if isinstance(record, Open)] == [1]


def test_requests_are_spread_by_load() -> None:
    end = ready(3)
    end.hear(pulse(requests=4), index=1)  # of other engines
    for number in range(8):
        end.open(str(number))
    assert [len(end.requests(index)) for index in range(3)] == [4, 0, 4]
    for number in range(6):
        end.open(f"more {number}")
    assert [len(end.requests(index)) for index in range(3)] == [6, 2, 6]


def test_requests_of_a_silent_drafter_go_to_the_others_and_some_come_back() -> None:
    end = ready(2)
    for number in range(4):
        end.open(str(number), 7)
    end.now_s += 100.0  # nothing was said, so nothing was to be answered
    end.tails.tick(end.now_s)
    assert end.tails.live == [0, 1]
    for index in range(2):
        end.say(index)
    end.now_s += MOMENT_S + 0.01
    end.hear(pulse(), index=1)
    end.tails.tick(end.now_s)
    assert end.tails.live == [1]
    assert end.requests(1) == [2, 4, 1, 3]
    assert [record.request for record in end.say(1) if isinstance(record, Open)] == [1, 3]
    end.hear(pulse(), index=0)
    assert sorted(end.requests(0)) == [1, 3], "the youngest go back"
    said = end.say(0)
    assert sorted(record.request for record in said if isinstance(record, Open)) == [1, 3]
    assert [record.request for record in end.say(1) if isinstance(record, Close)]


def test_the_end_is_told_to_all_that_may_hold_something() -> None:
    end = ready(2)
    for number in range(4):
        end.open(str(number))
    for index in range(2):
        end.say(index)
    end.now_s += BEAT_EVERY_S
    end.say(0)
    end.now_s += MOMENT_S + 0.01
    end.tails.tick(end.now_s)
    assert end.tails.live == [1]
    end.say(0)
    end.tails.close_all()
    assert [end.say(index)[0] for index in range(2)] == [Beat(engine="e", requests=[])] * 2


def test_without_any_drafter() -> None:
    for end in (End(0), End(1)):
        end.open("a")
        end.commit("a", 5)
        assert end.draft("a") == []
        end.tails.tick(end.now_s)
        end.tails.close("a")
        assert held(end.tails)[0] == 0
        assert end.tails.version == 0


def test_a_second_choice_has_its_drafts_at_once() -> None:
    end = End()
    end.open("a")
    end.hear(pulse())
    end.say()
    end.hear(tails(*(Tail(1, 0, pack(tokens)) for tokens in ((5, 6, 7), (5, 9, 8, 3), (4, 1, 2)))))
    assert end.draft("a") == [5, 6, 7]
    end.commit("a", 5, 9)
    assert end.draft("a") == [8, 3]
    end.commit("a", 8)
    assert end.draft("a") == [3]
    end.commit("a", 7)
    assert end.draft("a") == []
    assert end.tails.drops.counts["stale"] == 1


def test_branches_are_those_of_the_last_tail() -> None:
    end = End()
    end.open("a")
    end.hear(pulse())
    end.say()
    end.hear(tails(Tail(1, 0, pack((5, 6))), Tail(1, 0, pack((9, 8)))))
    end.hear(tail(0, 5, 6, 7))
    end.commit("a", 9)
    assert end.draft("a") == []
