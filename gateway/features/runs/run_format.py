"""The objects and events of one kind of runs, as bytes: the only part of a run that depends on an API. Pure.

The feature that starts runs implements it (`features/responses/background/response_runs.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import ClassVar, Final, NamedTuple


class EventKind(Enum):
    """Kinds of a replica's events. IGNORED: the gateway sends its own in its place. PART: of the answer. LAST: the answer is
    complete.
    """

    IGNORED = 1
    FAILURE = 2
    PART = 3
    LAST = 4


class RunFailure(NamedTuple):
    """The reason for which a run has no answer. status: of HTTP. code: of the replica, if it has sent one."""

    status: int
    message: str
    code: object = None


LOST: Final = RunFailure(500, "How the response has ended could not be kept.")
RESTARTED: Final = RunFailure(503, "The gateway was restarted before the response was complete.")


class RunFormat:
    """See the top of this file. most: bytes of an answer that is stored; most_of_event: of one event. advice: for clients whose
    answers are too large.
    """

    most: ClassVar[int]
    most_of_event: ClassVar[int]
    advice: ClassVar[str]

    def in_state(self, response: bytes, status: str, failure: RunFailure | None = None) -> bytes:
        """The gateway's own object in another state."""
        raise NotImplementedError

    def event(self, status: str, number: int, response: bytes) -> bytes:
        """An event of the gateway's own: the object's state has changed. status: "created" or that of the object."""
        raise NotImplementedError

    def last_event(self, response: bytes, number: int) -> bytes:
        """The end of the stream of a stored object."""
        raise NotImplementedError

    def replayed(self, response: bytes, after: int | None) -> Iterator[bytes]:
        """The stream of a stored object that has ended. after: the last number that the client has, None: it has none."""
        raise NotImplementedError

    def kind(self, event: bytes) -> EventKind:
        raise NotImplementedError

    def failure(self, event: bytes) -> RunFailure:
        """The failure that an event of this kind reports."""
        raise NotImplementedError

    def numbered(self, event: bytes, number: int, id_: str) -> bytes:
        """A replica's event with this number, and the id of the run's object. Raises GatewayError 502."""
        raise NotImplementedError
