"""The objects and events of one kind of run, as bytes: the only part of a run that depends on an API. Pure.

The feature that starts the runs implements it (`features/responses/background/response_runs.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import ClassVar, Final, NamedTuple


class EventKind(Enum):
    """Kinds of a replica's events. IGNORED: the gateway sends its own event instead. PART: part of the answer. LAST: the answer
    is complete.
    """

    IGNORED = 1
    FAILURE = 2
    PART = 3
    LAST = 4


class RunFailure(NamedTuple):
    """The reason why a run has no answer. status: HTTP status. code: from the replica, if any."""

    status: int
    message: str
    code: object = None


LOST: Final = RunFailure(500, "The end of the response could not be stored.")
RESTARTED: Final = RunFailure(503, "The gateway was restarted before the response was complete.")


class RunFormat:
    """max_answer: largest stored answer, in bytes. max_event: largest event, in bytes. advice: for clients with larger
    answers.
    """

    max_answer: ClassVar[int]
    max_event: ClassVar[int]
    advice: ClassVar[str]

    def in_state(self, response: bytes, status: str, failure: RunFailure | None = None) -> bytes:
        """The gateway's own object with another status."""
        raise NotImplementedError

    def event(self, status: str, number: int, response: bytes) -> bytes:
        """An event of the gateway: the status has changed. status: "created" or the status of the object."""
        raise NotImplementedError

    def last_event(self, response: bytes, number: int) -> bytes:
        """The last event of the stream of a stored object."""
        raise NotImplementedError

    def replayed(self, response: bytes, after: int | None) -> Iterator[bytes]:
        """The stream of a stored object of an ended run. after: the last event number of the client; None: none."""
        raise NotImplementedError

    def kind(self, event: bytes) -> EventKind:
        raise NotImplementedError

    def failure(self, event: bytes) -> RunFailure:
        """The failure reported by a FAILURE event."""
        raise NotImplementedError

    def numbered(self, event: bytes, number: int, id_: str) -> bytes:
        """A replica's event with this number, and with the id of the run's object. Raises GatewayError 502."""
        raise NotImplementedError
