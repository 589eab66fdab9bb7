"""Reads the first event of a stream, which may be the failure of its engine: then nothing has been sent to the client yet, and
another replica gets the request.

Everything else that a stream begins with is a sign of life, and passes on at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.dialects.events.sse import LONGEST_END, end_of
from gateway.errors import ReplicaFailure

MAX_FIRST: Final = 64 << 10  # bytes; a longer event is no error

FailureOf = Callable[[bytes], ReplicaFailure | None]
"""Reads the engine's failure from an error event; None for other events, and for errors that the client caused."""


class FirstEvent:
    """Reads one event. may_fail: True if an event with this beginning may be an error. O(bytes)."""

    def __init__(self, may_fail: Callable[[bytes], bool], failure_of: FailureOf) -> None:
        self._may_fail = may_fail
        self._failure_of = failure_of
        self._event = bytearray()

    def feed(self, data: bytes) -> bool:
        """Take the next bytes. True: the stream has begun well; False: more bytes are needed.

        Raises ReplicaFailure if it begins with the engine's failure.
        """
        searched = max(0, len(self._event) - LONGEST_END + 1)
        self._event += data
        if len(self._event) > MAX_FIRST or not self._may_fail(bytes(self._event[:MAX_NAMED])):
            return True
        end = end_of(self._event, searched)
        if end < 0:
            return False
        if failure := self._failure_of(bytes(self._event[:end])):
            raise failure
        return True


MAX_NAMED: Final = 300  # bytes at the start of an event that show whether it may be an error
