from __future__ import annotations

import pytest

from gateway.cluster.messages import MessageError
from gateway.cluster.topics import Topics


async def test_what_nobody_has_registered_is_passed_over() -> None:
    topics = Topics()
    assert topics.answer("toy", b"?") == b""
    topics.receive("toy", 1, b"!")
    await topics.execute("toy", b"!")
    topics.joined()
    topics.ended(1)
    assert repr(topics) == "<Topics: none>"


def test_a_part_that_fails_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    topics = Topics()
    received = list[tuple[int, bytes]]()

    def invalid(_question: bytes) -> bytes:
        raise MessageError("no question")

    def bug(_sender: int, _message: bytes) -> None:
        raise ZeroDivisionError

    topics.answers("invalid", invalid)
    topics.receives("bug", bug)
    topics.answers("toy", lambda question: question + b"!")
    topics.receives("toy", lambda sender, message: received.append((sender, message)))
    assert topics.answer("invalid", b"?") == b""
    topics.receive("bug", 1, b"x")
    assert topics.answer("toy", b"?") == b"?!"
    topics.receive("toy", 2, b"x")
    assert received == [(2, b"x")]
    assert "no question" in str([record.__dict__.get("error") for record in caplog.records])
    assert "ZeroDivisionError" in caplog.text
