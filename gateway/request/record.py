"""The record of one request: written by the lifecycle, read by the observers of its end."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final

from gateway.accounting.consumed import Consumption
from gateway.accounting.meter import Bill
from gateway.dialects.log_names import without_names
from gateway.dialects.table import OTHER_ENDPOINT, UNLOGGED, endpoint_of
from gateway.dialects.usage import Usage
from gateway.errors import CLIENT_LEFT
from gateway.request.client import USER_AGENT, Headers
from router import Booking

UNKNOWN: Final = "unknown"
NO_TENANT: Final = "none"  # tenant in logs and metrics of requests without one
MAX_CHARS: Final = 200  # of a session and a user agent
ADOPTED: Final = "adopted"  # field: the id of the request whose answer this one got, and which has its tokens
_ID_BYTES: Final = 16
_UNSAFE: Final = re.compile(r"[^ -~]")
_SAFE_ID: Final = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
# A replica may answer with any of 900 codes: codes without a standard are counted by their class.
_CODES: Final = {status.value: str(status.value) for status in HTTPStatus} | {CLIENT_LEFT: str(CLIENT_LEFT)}


def code_label(status: int) -> str:
    """A status as a label: "503", or the class of a status without a standard: "5xx"."""
    return _CODES.get(status) or f"{status // 100}xx"


def _new_ids() -> Iterator[str]:
    """Random ids: engines take them for their own, so no client may know one before its request runs."""
    while True:
        digits = os.urandom(256 * _ID_BYTES).hex()
        for at in range(0, len(digits), 2 * _ID_BYTES):
            yield f"wr-{digits[at : at + 2 * _ID_BYTES]}"


_ids: Final = _new_ids()


def new_record(offered: str | None, path: str, begun: float) -> SettledRequest:
    """The record of a new request. Its id is the client's x-request-id if that is safe in a log and a header."""
    own = next(_ids)
    if not (offered and _SAFE_ID.fullmatch(offered)):
        return SettledRequest(own, path, begun)
    record = SettledRequest(offered, path, begun)
    record.sent_id = own
    return record


def tenant_label(tenant: str) -> str:
    """The tenant for logs and labels: printable ASCII of limited length."""
    return _UNSAFE.sub("?", tenant)[:64] if tenant else NO_TENANT


def bounded(text: str) -> str:
    """A text that a client chose, for logs: at most MAX_CHARS characters, "?" for each that is not printable ASCII."""
    text = text[:MAX_CHARS]
    return text if text.isascii() and text.isprintable() else _UNSAFE.sub("?", text)


def user_agent_of(headers: Headers) -> str:
    """The name of a client's program, bounded."""
    return bounded(headers.get(USER_AGENT) or "")


class Sender:
    """The sender of a request. tenant, session, user_agent: bounded texts. key: the id of the client's API key, or "". session:
    the conversation that the request names, or "". agent, parent: as in `Caller`. client: its address, for IPv6 the network; it
    and user_agent are "" with `log_clients: false`, but for the address of a client that was refused for its key.
    """

    tenant = NO_TENANT
    key = ""
    session = ""
    agent = ""
    parent = ""
    client = ""
    user_agent = ""


class Subject:
    """The subject of a request. endpoint: the path's bounded name. label: the model's, for metrics. alias: the client's name
    for the model, "" if that was the model's own. metered: a generation. countable: the engine's count of prompt tokens is
    about this one prompt. generates: a model computes the answer, even if its usage is not read (metered).
    """

    alias = ""
    countable = False
    endpoint = OTHER_ENDPOINT
    generates = False
    label = UNKNOWN
    metered = False
    model = ""
    stream = False


class Placement:
    """The placement of a request. prefiller: the replica that has computed the prompt, if another one answers. failed_attempts:
    replica, reason and error of each. passed: earlier pools that could not serve it; then pool is the last one. asked: the
    request was sent, or was to be sent, to a replica. queued_s: seconds in queues of pools. held_s: seconds of waiting for
    another request that computed its prefix.
    """

    asked = False
    available_cached_tokens = 0
    estimated_prompt_tokens = 0
    failed_attempts: tuple[dict[str, str], ...] = ()
    held_s = 0.0
    passed: tuple[str, ...] = ()
    pool = ""
    predicted_cached_tokens = 0
    prefiller = ""
    queued_s = 0.0
    reason = ""
    replica = ""


class AnswerRecord:
    """The answer to a request. answered: the status of the replica's answer that the client got, 0: none. ok: the replica
    answered well. shown: at least a token of the answer has come. complete: the answer was good and sent completely. own: the
    gateway answers, and no replica. resumed: number of times that another replica continued it. translated: the replica was
    asked in chat. pulses: signs of life sent by the gateway. unread: a session (101) may have used tokens that its usage lacks.
    """

    answered = 0
    complete = False
    first_token: float | None = None
    last_byte: float | None = None
    ok = False
    own = False
    pulses = 0
    resumed = 0
    shown = False
    translated = False
    unread = False


class UsageRecord:
    """The consumption of a request. usage: as the engine reported it. consumed: the counted tokens, with estimates for missing
    counts. bill: made before a plain answer was sent, else by an observer.
    """

    bill: Bill | None = None
    consumed: Consumption | None = None
    usage: Usage | None = None


class SettledRequest:
    """The record of one request. Times are readings of the gateway's clock, in seconds; None: that point was not reached.

    id: for the client and the log. sent_id: for replicas, "" if it is the same. status: the client's, in the end. code: of the
    error that is its answer, or "". booking: None if no replica was chosen. breakpoint: set by an observer. cancelled: its
    client has cancelled it, so a missing end is no error. slots: values of features (`slots.py`), or None. fields: further
    fields of its line in the log, from features.
    """

    booking: Booking | None = None
    breakpoint = ""
    cancelled = False
    code = ""
    ended = 0.0
    error = ""
    fields: dict[str, Any] | None = None
    sent_id = ""
    slots: dict[Any, Any] | None = None
    status = 500

    def __init__(self, id_: str, path: str, begun: float) -> None:
        self.id = id_
        self.path = path
        self.begun = begun
        self.sender = Sender()
        self.subject = Subject()
        self.placement = Placement()
        self.answer = AnswerRecord()
        self.spent = UsageRecord()
        self.subject.endpoint = endpoint = endpoint_of(path)
        if endpoint == UNLOGGED:
            self.path = UNLOGGED
        elif endpoint != path:
            self.path = without_names(path)  # of a mistyped path, or of a response

    @property
    def told_code(self) -> str:
        """The code; ADOPTED for a good request that got the answer of another one; or ""."""
        return self.code or (ADOPTED if self.fields is not None and ADOPTED in self.fields else "")

    def __repr__(self) -> str:
        return f"<SettledRequest {self.id}, {self.status}>"
