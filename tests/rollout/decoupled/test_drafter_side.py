"""The drafter's end, event by event."""

from __future__ import annotations

from collections.abc import Sequence

from specactor.rollout.decoupled.drafter_side import TAILS_EVERY_S, MirroredRequests
from specactor.rollout.decoupled.protocol import (
    AHEAD,
    Beat,
    Close,
    Commits,
    Header,
    Open,
    Pulse,
    Resend,
    TailColumns,
    ToDrafter,
    ToEngine,
    decode_to_engine,
    encode,
    newest,
    unpack,
)
from specactor.waits import SILENT_S
from tests.rollout.decoupled.network import held
from tests.rollout.decoupled.scripted import Scripted, script

WINDOW = 3
PROMPT = [1, 2, 3, 4]
ENGINE = 20


class Drafter:
    """Mirrored requests with a scripted continuer, and an engine's words."""

    def __init__(self, max_tokens: int = 10_000) -> None:
        self.mirrors = MirroredRequests(5, max_tokens=max_tokens)
        self.continuer = Scripted()
        self.now_s = 50.0
        self.frame = 0

    def hear(self, *records: ToDrafter, session: int = ENGINE, number: int | None = None) -> None:
        self.frame += 1
        header = Header(sender=session, receiver=0, number=number or self.frame)
        self.mirrors.receive(session, encode(header, records), self.now_s)

    def steps(self, count: int, branches: int = 0) -> None:
        for _ in range(count):
            lanes = self.mirrors.wanted(100) + self.mirrors.branches(branches)
            drafts = self.continuer.extend(lanes)
            self.mirrors.extended(lanes, drafts, self.continuer.runners_up() if branches else None)

    def say(self, session: int = ENGINE, *, more: bool = False) -> list[ToEngine]:
        frames = self.mirrors.outgoing(session, version=3, now_s=self.now_s, more=more)
        return [record for frame in frames for record in decode_to_engine(frame)[1]]

    def tails(self, session: int = ENGINE) -> dict[int, tuple[int, list[int]]]:
        """Request -> base, tokens."""
        return tails(self.say(session))


def tails(said: Sequence[ToEngine]) -> dict[int, tuple[int, list[int]]]:
    """The same, of what it said."""
    records = [record for record in said if isinstance(record, TailColumns)]
    return {request: (base, unpack(tokens)) for request, base, tokens in newest(records)}


def beat(*requests: tuple[int, int, int], engine: str = "e") -> Beat:
    return Beat(engine=engine, requests=list(requests))


def opening(request: int = 1, prompt: Sequence[int] = PROMPT, output: Sequence[int] = (), window: int = WINDOW) -> Open:
    return Open(
        request=request, prompt_ids=list(prompt), output_ids=list(output), seed=1, temperature=1.0, window=window
    )


def commit(position: int, *tokens: int, request: int = 1) -> Commits:
    return Commits(requests=[request], positions=[position], counts=[len(tokens)], tokens=list(tokens))


def opened(*requests: int, max_tokens: int = 10_000) -> Drafter:
    drafter = Drafter(max_tokens)
    drafter.hear(beat(), *(opening(request) for request in requests or (1,)))
    return drafter


def test_drafts_ahead_as_far_as_two_windows_and_sends_it_once() -> None:
    drafter = opened()
    drafter.steps(2)
    assert drafter.tails() == {1: (0, script(PROMPT, [], 2))}
    assert drafter.tails() == {}
    drafter.steps(20)
    assert drafter.tails() == {1: (0, script(PROMPT, [], AHEAD * WINDOW))}
    assert drafter.mirrors.wanted(100) == []


def test_more_tokens_at_once_than_there_is_room_for() -> None:
    drafter = opened()
    for _ in range(3):
        lanes = drafter.mirrors.wanted(100)
        drafter.mirrors.extended(lanes, [[7] * 4 for _ in lanes])
    assert drafter.tails() == {1: (0, [7] * AHEAD * WINDOW)}


def test_a_commit_that_agrees_keeps_what_is_ahead() -> None:
    drafter = opened()
    drafter.steps(4)
    drafter.tails()
    text = script(PROMPT, [], 20)
    drafter.hear(commit(0, *text[:2]))
    assert drafter.tails() == {}, "the engine has it already"
    drafter.steps(1)
    assert drafter.tails() == {1: (2, text[2:5])}
    drafter.hear(commit(2, *text[2:8]))
    drafter.steps(1)
    assert drafter.tails() == {1: (8, text[8:9])}


def test_a_commit_that_differs_rolls_back_to_the_common_beginning() -> None:
    drafter = opened()
    drafter.steps(5)
    text = script(PROMPT, [], 1)
    drafter.hear(commit(0, *text, 99))
    [lane] = drafter.mirrors.wanted(10)
    assert (list(lane.tokens), lane.agreed) == ([*text, 99], 1)
    drafter.steps(1)
    assert drafter.tails() == {1: (2, script(PROMPT, [*text, 99], 1))}
    drafter.hear(beat((1, 4, 2)))
    assert drafter.say()[0] == Pulse(version=3, requests=1, drafted=6, wasted=4)


def test_old_and_overlapping_commits() -> None:
    drafter = opened()
    drafter.hear(commit(0, 7, 8))
    drafter.hear(commit(0, 7))
    drafter.hear(commit(1, 8, 9))
    [lane] = drafter.mirrors.wanted(10)
    assert list(lane.tokens) == [7, 8, 9]


def test_commits_of_several_requests() -> None:
    """Each gets its own tokens, from its own position on; one that lacks some costs the others nothing."""
    drafter = opened(1, 2, 3, 4)
    requests, positions, counts = [3, 1, 77, 2, 4, 1], [0, 0, 0, 0, 5, 1], [2, 3, 1, 0, 1, 3]
    drafter.hear(Commits(requests=requests, positions=positions, counts=counts, tokens=list(range(10, 20))))
    lanes = {lane.key[1]: list(lane.tokens) for lane in drafter.mirrors.wanted(10)}
    assert lanes == {1: [12, 13, 14, 19], 2: [], 3: [10, 11]}
    assert Resend(requests=[4]) in drafter.say()


def test_after_a_gap_it_asks_and_drafts_nothing_until_it_knows() -> None:
    drafter = opened()
    drafter.hear(commit(0, 7, 8))
    drafter.hear(commit(4, 9))
    assert drafter.mirrors.wanted(10) == []
    assert Resend(requests=[1]) in drafter.say()
    drafter.hear(opening(output=[7, 8, 5, 5, 9]))
    [lane] = drafter.mirrors.wanted(10)
    assert list(lane.tokens) == [7, 8, 5, 5, 9]


def test_a_beat_says_what_is_missing_and_what_is_over() -> None:
    drafter = opened(1, 2, 3)
    drafter.steps(1)
    drafter.tails()
    drafter.hear(beat((1, 4, 0), (2, 4, 6), (4, 9, 9)))
    pulse, resend, *others = drafter.say()
    assert isinstance(pulse, Pulse)
    assert resend == Resend(requests=[2, 4]), "lost a commit; lost the opening"
    assert list(tails(others)) == [1], "sent again, it may have been lost"
    assert drafter.mirrors.forgotten() == [(ENGINE, 3)]


def test_what_is_closed_is_forgotten() -> None:
    drafter = opened(1, 2)
    drafter.steps(2)
    drafter.hear(Close(request=1), Close(request=77))
    assert drafter.mirrors.forgotten() == [(ENGINE, 1)]
    assert drafter.mirrors.forgotten() == []
    assert list(drafter.tails()) == [2]
    drafter.hear(commit(0, 5), beat((2, 4, 0)))
    assert drafter.mirrors.num_requests == 1


def test_an_engine_that_starts_again_replaces_itself_and_no_other() -> None:
    drafter = opened()
    drafter.hear(beat(engine="other"), opening(), session=15)
    drafter.hear(beat(), session=ENGINE + 1)
    assert drafter.mirrors.sessions == [15, ENGINE + 1]
    assert drafter.mirrors.forgotten() == [(ENGINE, 1)]
    drafter.hear(beat(), opening(), session=ENGINE)
    assert drafter.mirrors.sessions == [15, ENGINE + 1], "a late frame of the first one"
    assert drafter.mirrors.drops.counts["foreign"] == 1


def test_a_silent_engine_is_forgotten() -> None:
    drafter = opened()
    drafter.now_s += SILENT_S - 1
    drafter.mirrors.tick(drafter.now_s)
    drafter.hear(beat((1, 4, 0), engine="other"), session=15)
    drafter.now_s += 2
    drafter.mirrors.tick(drafter.now_s)
    assert drafter.mirrors.sessions == [15]
    assert held(drafter.mirrors) == (0, 0)
    drafter.hear(commit(0, 5))
    assert drafter.mirrors.drops.counts["unannounced"] == 1
    drafter.hear(beat((1, 4, 0)))
    assert Resend(requests=[1]) in drafter.say()


def test_frames_count_once_and_in_order_and_from_who_sent_them() -> None:
    drafter = opened()
    drafter.hear(commit(0, 5), number=40)
    drafter.hear(Close(request=1), number=40)
    drafter.hear(Close(request=1), number=39)
    drafter.mirrors.receive(77, encode(Header(sender=ENGINE, receiver=0, number=41), [Close(request=1)]), 0.0)
    drafter.mirrors.receive(ENGINE, b"rubbish", 0.0)
    assert drafter.mirrors.num_requests == 1
    assert drafter.mirrors.drops.counts == {"repeated": 2, "foreign": 1, "malformed": 1}


def test_the_one_told_of_longest_ago_is_evicted_and_comes_back_when_there_is_room() -> None:
    room = len(PROMPT) + AHEAD * WINDOW
    drafter = opened(1, 2, 3, max_tokens=3 * room + 3)
    drafter.hear(commit(0, 7, request=1), commit(0, 7, request=3))
    drafter.hear(opening(4))
    assert drafter.mirrors.forgotten() == [(ENGINE, 2)]
    drafter.hear(commit(0, 7, request=2), beat((1, 4, 1), (2, 4, 1), (3, 4, 1), (4, 4, 0)))
    assert not [record for record in drafter.say() if isinstance(record, Resend)], "no room"
    drafter.hear(beat((1, 4, 1), (2, 4, 1), (3, 4, 1)))
    assert Resend(requests=[2]) in drafter.say(), "its windows are those of the others"


def test_a_request_larger_than_all_memory() -> None:
    drafter = opened(max_tokens=100)
    drafter.hear(opening(2, prompt=range(200)))
    assert drafter.mirrors.forgotten() == [(ENGINE, 2)], "nobody else"
    assert drafter.mirrors.num_requests == 1
    drafter.hear(beat((2, 200, 0)))
    assert [type(record) for record in drafter.say()] == [Pulse]


def test_those_with_the_least_ahead_go_first() -> None:
    drafter = opened(1, 2, 3)
    lanes = drafter.mirrors.wanted(100)[:2]
    drafter.mirrors.extended(lanes, [[5], [5, 5]])
    assert [lane.key for lane in drafter.mirrors.wanted(2)] == [(ENGINE, 3), (ENGINE, 1)]


def test_a_continuer_that_cannot_go_on_is_not_asked_again_before_the_next_commit() -> None:
    drafter = opened()
    lanes = drafter.mirrors.wanted(10)
    drafter.mirrors.extended(lanes, [[]])
    assert drafter.mirrors.wanted(10) == []
    drafter.hear(commit(0, 7))
    assert len(drafter.mirrors.wanted(10)) == 1


def test_a_text_that_is_still_being_read_is_asked_for_again_and_holds_nothing_back() -> None:
    drafter = opened()
    drafter.steps(1)
    drafter.say()
    drafter.hear(opening(2), commit(0, *script(PROMPT, [], 1)))
    for _ in range(3):
        lanes = drafter.mirrors.wanted(10)
        assert [lane.key for lane in lanes] == [(ENGINE, 2), (ENGINE, 1)]
        drafter.mirrors.extended(lanes, [None, [7]])
        assert set(tails(drafter.say(more=True))) == {1}
    drafter.hear(commit(0, 7, request=2))
    [*_, lane] = drafter.mirrors.wanted(10)
    assert (lane.key, list(lane.tokens), lane.agreed) == ((ENGINE, 2), [7], 0)
    drafter.mirrors.extended([lane], [None])
    [*_, lane] = drafter.mirrors.wanted(10)
    assert lane.agreed == 1, "it was shown"


def test_while_more_is_drafted_tails_go_now_and_then() -> None:
    drafter = opened()
    drafter.steps(1)
    assert 1 in tails(drafter.say(more=True)), "the first goes at once"
    drafter.steps(1)
    assert drafter.say(more=True) == []
    drafter.now_s += 2 * TAILS_EVERY_S
    assert tails(drafter.say(more=True)) == {1: (0, script(PROMPT, [], 2))}
    drafter.steps(1)
    assert drafter.say(more=True) == []
    assert tails(drafter.say()) == {1: (0, script(PROMPT, [], 3))}, "no more is drafted: all goes"


def test_nothing_is_held_back_while_a_prompt_is_read() -> None:
    drafter = opened()
    drafter.steps(1)
    drafter.say()
    drafter.steps(1)
    assert drafter.say(more=True) == []
    drafter.hear(opening(2))
    assert tails(drafter.say(more=True)) == {1: (0, script(PROMPT, [], 2))}
    drafter.steps(1)
    assert set(tails(drafter.say(more=True))) == {2}, "it was read"
    drafter.hear(opening(3))
    drafter.hear(Close(request=3))
    assert drafter.say(more=True) == [], "it need not be read any more"


def test_who_had_nothing_does_not_wait_for_others() -> None:
    drafter = opened(1, 2)
    drafter.steps(1)
    drafter.say()
    drafter.hear(commit(0, 999, request=2))
    drafter.steps(1)
    assert set(tails(drafter.say(more=True))) == {2}
    drafter.steps(1)
    assert drafter.say(more=True) == [], "both have some now"
    drafter.hear(beat((1, 4, 0), (2, 4, 1)))
    assert [type(record) for record in drafter.say(more=True)] == [Pulse], "a sign of life is not held back"
