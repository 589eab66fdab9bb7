"""Background responses as runs (`features/runs/run_format.py`), with the objects and events of OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from gateway.dialects.events.named import ERRORS, name_of
from gateway.dialects.responses.stream import QUIET
from gateway.features.histories.kept import MAX_KEPT
from gateway.features.histories.replay import event_of, last_event_of, replayed
from gateway.features.responses.background.events import COMPLETE, MAX_EVENT, failure_in, numbered
from gateway.features.responses.background.objects import error_in, in_state
from gateway.features.runs.run_format import EventKind, RunFailure, RunFormat


class ResponseRuns(RunFormat):
    """The format of background responses."""

    max_answer: ClassVar[int] = MAX_KEPT
    max_event: ClassVar[int] = MAX_EVENT
    advice: ClassVar[str] = "Ask for a shorter answer (max_output_tokens), or without 'background'."

    def in_state(self, response: bytes, status: str, failure: RunFailure | None = None) -> bytes:
        return in_state(response, status, error_in(*failure) if failure is not None else None)

    def event(self, status: str, number: int, response: bytes) -> bytes:
        return event_of(f"response.{status}", number, response)

    def last_event(self, response: bytes, number: int) -> bytes:
        return last_event_of(response, number)

    def replayed(self, response: bytes, after: int | None) -> Iterator[bytes]:
        return replayed(response, after)

    def kind(self, event: bytes) -> EventKind:
        name = name_of(event)
        if name in QUIET:
            return EventKind.IGNORED
        if name in ERRORS:
            return EventKind.FAILURE
        return EventKind.LAST if name in COMPLETE else EventKind.PART

    def failure(self, event: bytes) -> RunFailure:
        return failure_in(event)

    def numbered(self, event: bytes, number: int, id_: str) -> bytes:
        return numbered(event, number, id_)
