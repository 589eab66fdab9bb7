"""The work of a conversation, as learned from requests."""

from __future__ import annotations

import pytest

from router.learning.conversations import MEMORY, MOST_REQUESTS, ConversationWork


def learned(conversations: int, turns: int, seconds: float) -> ConversationWork:
    work = ConversationWork()
    for _ in range(conversations):
        for turn in range(turns):
            work.sent(begins=turn == 0)
            work.worked(seconds)
    return work


def test_a_conversation_is_worth_the_work_of_all_its_requests() -> None:
    assert ConversationWork().value == 0.0
    assert learned(1000, 1, 2.0).value == pytest.approx(2.0, rel=0.05)
    assert learned(1000, 10, 2.0).value == pytest.approx(20.0, rel=0.1)


def test_a_shared_head_is_no_endless_conversation() -> None:
    assert learned(1, 5000, 0.5).value == pytest.approx(0.5 * MOST_REQUESTS, rel=0.01)


def test_the_share_of_next_turns_is_learned() -> None:
    assert ConversationWork().returning == 1.0
    assert learned(1000, 1, 2.0).returning == pytest.approx(0.0, abs=0.01)
    assert learned(1000, 4, 2.0).returning == pytest.approx(0.75, abs=0.01)


def test_old_requests_are_forgotten() -> None:
    work = learned(1, int(4 * MEMORY), 1.0)
    for _ in range(int(4 * MEMORY)):
        work.sent(begins=True)
        work.worked(0.25)
    assert work.value == pytest.approx(0.25, rel=0.2)
