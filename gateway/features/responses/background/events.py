"""The events of a background run: the replica's events with new numbers, and the gateway's events at both ends.

    gateway's   response.created, response.queued, response.in_progress        response.failed, response.cancelled
    replica's                                         the output's, response.completed or .incomplete

So the numbers of a run have no gaps, independent of the replica's numbers, and the client knows the id before a replica is
asked. Pure.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.dialects.events.sse import EventData, data_of
from gateway.dialects.json_edits import read_object
from gateway.dialects.json_structure import exceeds
from gateway.errors import GatewayError
from gateway.features.histories.kept import MAX_KEPT, MAX_VALUES
from gateway.features.runs.run_format import RunFailure

COMPLETE: Final = frozenset(["response.completed", "response.incomplete"])
MAX_EVENT: Final = MAX_KEPT + (64 << 10)  # bytes
_NUMBER: Final = "sequence_number"


def numbered(event: bytes, number: int, id_: str) -> bytes:
    """A replica's event with this number. id_: of the response, replaces the event's response_id. Raises GatewayError 502.
    O(length).
    """
    data = EventData(event)
    if exceeds(data.text, MAX_VALUES):
        raise _garbage()
    try:
        members = read_object(data.text)
        values = {_NUMBER: b"%d" % number}
        if "response_id" in members.spans:
            values["response_id"] = orjson.dumps(id_)
        return data.edited(members.put_all(values))
    except (ValueError, IndexError) as error:
        raise _garbage() from error


def failure_in(event: bytes) -> RunFailure:
    """The failure reported by an engine's event."""
    found = _object(event)
    response = found.get("response")
    error = response.get("error") if isinstance(response, dict) else found.get("error")
    details: dict[str, Any] = error if isinstance(error, dict) else found
    message = details.get("message")
    return RunFailure(
        502, message if isinstance(message, str) else "The replica failed while it answered.", details.get("code")
    )


def _object(event: bytes) -> dict[str, Any]:
    text = data_of(event)
    if exceeds(text, MAX_VALUES):
        return {}
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _garbage() -> GatewayError:
    return GatewayError(502, "replica_failed", "The replica has sent an event that does not belong to a response.")
