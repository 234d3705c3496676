"""Second choices: where drafts go on from them, and what they cost those who do not need them."""

from __future__ import annotations

from specactor.config import MAX_WINDOW
from specactor.rollout.decoupled.drafter_side import Mirror
from specactor.rollout.decoupled.engine_side import Tails
from specactor.rollout.decoupled.protocol import AHEAD, Commits, Resend, TailColumns, newest, unpack
from tests.rollout.decoupled.scripted import WRONG, script
from tests.rollout.decoupled.test_drafter_side import (
    ENGINE,
    PROMPT,
    WINDOW,
    Drafter,
    beat,
    commit,
    opened,
    opening,
)

ALL = 1000
"""Lanes for branches: enough for all of them."""


def mirror_of(drafter: Drafter) -> Mirror:
    [mirror] = drafter.mirrors._oldest.values()
    return mirror


def lengths(drafter: Drafter) -> dict[int, int]:
    """Output position -> tokens of the branch there."""
    return {at: len(branch) for at, branch in mirror_of(drafter).branches.items()}


def test_after_a_rejection_it_goes_on_with_what_followed_the_second_choice() -> None:
    drafter = opened()
    drafter.steps(4, branches=3)
    right = script(PROMPT, [], 1)
    output = [*right, script(PROMPT, right, 1)[0] + WRONG]
    ahead = [
        unpack(tokens)
        for record in drafter.say()
        if isinstance(record, TailColumns)
        for _, _, tokens in newest([record])
    ]
    assert ahead[0] == script(PROMPT, [], 4)
    assert [*output, *script(PROMPT, output, 2)] in ahead[1:]
    drafter.hear(Commits(requests=[1], positions=[0], counts=[2], tokens=output))
    mirror = mirror_of(drafter)
    assert mirror.tokens == [*output, *script(PROMPT, output, 2)]
    assert not mirror.branches
    assert not mirror.unsent  # the engine has it
    drafter.steps(1)
    assert drafter.tails() == {1: (2, script(PROMPT, output, 3))}


def test_every_draft_token_is_ahead_or_wasted_or_committed() -> None:
    drafter = opened()
    drafter.steps(4, branches=3)
    [session] = drafter.mirrors._sessions.values()
    mirror = mirror_of(drafter)
    assert session.drafted == mirror.num_drafted > 4 + 4
    drafter.hear(Commits(requests=[1], positions=[0], counts=[2], tokens=script(PROMPT, [], 2)))
    assert session.drafted == mirror.num_drafted + session.wasted + 2
    drafter.hear(Commits(requests=[1], positions=[2], counts=[1], tokens=[3]))
    assert session.drafted == session.wasted + 2
    assert not mirror.branches


def test_branches_with_fewest_tokens_and_decided_first_come_first() -> None:
    drafter = opened()
    drafter.steps(3, branches=1)
    mirror = mirror_of(drafter)
    assert [len(mirror.branches[at]) for at in range(3)] == [2, 2, 1]
    assert [lane.branch for lane in drafter.mirrors.branches(2)] == [2, 0]
    assert drafter.mirrors.branches(0) == []


def test_an_incomplete_request_has_no_branch_to_draft() -> None:
    """A commit is missing: the texts of its branches may be no more."""
    drafter = opened()
    drafter.steps(3, branches=1)
    mirror = mirror_of(drafter)
    assert mirror.short_branches()
    drafter.hear(Commits(requests=[1], positions=[2], counts=[1], tokens=[3]))
    assert not mirror.complete
    assert mirror.branches
    assert not drafter.mirrors.branches(3)


def test_branches_within_the_window_have_a_window_and_one_token_and_others_none() -> None:
    """A second choice is a token of its own; a round never takes one that is behind the window."""
    drafter = opened()
    drafter.steps(4 * AHEAD * WINDOW, branches=9)
    assert lengths(drafter) == {0: 4, 1: 4, 2: 4, 3: 1, 4: 1, 5: 1}
    drafter.hear(commit(0, *script(PROMPT, [], 2)))
    drafter.steps(4 * AHEAD * WINDOW, branches=9)
    assert lengths(drafter) == {2: 4, 3: 4, 4: 4, 5: 1, 6: 1, 7: 1}


def test_a_second_choice_that_is_unknown_or_the_first_one_is_none() -> None:
    drafter = opened()
    for runner_up in (None, 7, 8):
        drafter.mirrors.extended(drafter.mirrors.wanted(10), [[7]], [runner_up])
    assert mirror_of(drafter).branches == {2: [8]}


def test_a_branch_that_is_refused_is_not_asked_for_again() -> None:
    drafter = opened()
    drafter.steps(WINDOW, branches=1)
    lanes = drafter.mirrors.branches(ALL)
    assert len(lanes) == WINDOW
    drafter.mirrors.extended(lanes, [[]] * len(lanes))
    assert drafter.mirrors.branches(ALL) == []
    drafter.steps(AHEAD * WINDOW)
    assert drafter.tails() == {1: (0, script(PROMPT, [], AHEAD * WINDOW))}, "the request itself goes on"


def test_branches_evict_no_request() -> None:
    room = len(PROMPT) + AHEAD * WINDOW
    drafter = opened(1, 2, 3, max_tokens=3 * room + 3)
    drafter.steps(4 * AHEAD * WINDOW, branches=ALL)
    assert sum(mirror.num_drafted for mirror in drafter.mirrors._oldest.values()) > 3 * room
    for request in (1, 2, 3):
        drafter.hear(commit(0, *script(PROMPT, [], 1), request=request))
    assert drafter.mirrors.num_requests == 3
    drafter.hear(opening(4))
    assert drafter.mirrors.forgotten() == [(ENGINE, 1)], "a request does"
    drafter.hear(beat((1, 4, 1), (3, 4, 1), (4, 4, 0)))
    assert Resend(requests=[1]) in drafter.say(), "there is room for it where another has ended"


def test_the_longest_branch_arrives_and_is_drafted_to_its_end() -> None:
    """At the last position of the largest window, with a window and one token: as long as a tail may be."""
    drafter, output = Drafter(), list[int]()
    tails = Tails(ENGINE, engine="e", num_drafters=1, window=MAX_WINDOW)
    tails.open("a", PROMPT, output, 1, 1.0)
    for _ in range(2):  # they meet, and the request is opened
        drafter.mirrors.receive(ENGINE, tails.outgoing(0, drafter.now_s)[-1], drafter.now_s)
        drafter.steps(4 * AHEAD * MAX_WINDOW, branches=ALL)
        frames = drafter.mirrors.outgoing(ENGINE, version=1, now_s=drafter.now_s)
        tails.receive([(0, frame) for frame in frames], drafter.now_s)
    output += script(PROMPT, [], MAX_WINDOW - 1)
    output.append(script(PROMPT, output, 1)[0] + WRONG)
    ahead = script(PROMPT, output, MAX_WINDOW)
    for count in range(MAX_WINDOW + 1):
        assert tails.drafts(["a"], [MAX_WINDOW]) == [ahead[count:]]
        output += ahead[count : count + 1]
