"""What happened to one request: written by the lifecycle, read by the observers of its end."""

from __future__ import annotations

import itertools
import random
import re
from http import HTTPStatus
from typing import Any, Final

from gateway.accounting.consumed import Consumption
from gateway.accounting.meter import Bill
from gateway.dialects.table import OTHER_ENDPOINT, endpoint_of
from gateway.dialects.usage import Usage
from gateway.errors import CLIENT_LEFT
from router import Booking

UNKNOWN: Final = "unknown"
NO_TENANT: Final = "none"  # of requests without one, in logs and metrics
# An id has to differ from all others, not to be a secret.
_BEGIN: Final = f"{random.SystemRandom().getrandbits(96):024x}"
_numbers = itertools.count(1)
_UNSAFE: Final = re.compile(r"[^ -~]")
_SAFE_ID: Final = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
# A replica may answer with any of 900 codes: those that no standard knows are counted by their class.
_CODES: Final = {status.value: str(status.value) for status in HTTPStatus} | {CLIENT_LEFT: str(CLIENT_LEFT)}


def code_label(status: int) -> str:
    """A status as a label: "503", or the class of one that no standard knows: "5xx"."""
    return _CODES.get(status) or f"{status // 100}xx"


def request_id(offered: str | None) -> str:
    """The client's x-request-id if it can stand in a log and a header, else a new one."""
    if offered and _SAFE_ID.fullmatch(offered):
        return offered
    return f"wr-{_BEGIN}-{next(_numbers)}"


def tenant_label(tenant: str) -> str:
    """The tenant as it can stand in a log and a label: printable ASCII, not too long."""
    return _UNSAFE.sub("?", tenant)[:64] if tenant else NO_TENANT


class Sender:
    """Who has sent a request. tenant: bounded text. key: the id of the client's API key, "" without one. client: the address of
    one that was refused for its key, of IPv6 the network.
    """

    tenant = NO_TENANT
    key = ""
    client = ""


class Subject:
    """What a request asks for. endpoint: the path's bounded name. label: the model's, for metrics. alias: the name that the
    client has used for the model, "" if that was the model's own. metered: a generation; countable: the engine's count of
    prompt tokens is about this one prompt. generates: a model computes the answer, whether its usage is read (metered) or not.
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
    """Where a request was sent. failed_attempts: replica, reason and error of each. passed: the pools that could not serve it;
    then pool: the one that it went to in the end. asked: some replica was, or was to be reached at least. queued_s: seconds in
    queues of pools.
    """

    asked = False
    available_cached_tokens = 0
    estimated_prompt_tokens = 0
    failed_attempts: tuple[dict[str, str], ...] = ()
    passed: tuple[str, ...] = ()
    pool = ""
    predicted_cached_tokens = 0
    queued_s = 0.0
    reason = ""
    replica = ""


class AnswerRecord:
    """How a request was answered. answered: the status of the replica's answer that the client got, 0: it got none. ok: the
    replica answered as it should. complete: the answer was good and went out whole. resumed: how often another replica went on
    with it. translated: the replica was asked in chat. unread: a session (101) may have used tokens that its usage lacks.
    """

    answered = 0
    complete = False
    first_byte: float | None = None
    last_byte: float | None = None
    ok = False
    resumed = 0
    translated = False
    unread = False


class UsageRecord:
    """What a request has used. usage: as the engine reported it; consumed: what is counted, with estimates for what it did not.
    bill: made before a plain answer went out, else by an observer.
    """

    bill: Bill | None = None
    consumed: Consumption | None = None
    usage: Usage | None = None


class SettledRequest:
    """One request. Times are readings of the gateway's clock, in seconds; None: it did not come to that.

    status: what the client got in the end. code: of the error that is its answer, "" without one. booking: its way through the
    router, None if no replica was chosen. breakpoint: by an observer. cancelled: its client has asked for its end, so that it
    has none of its own is no error. slots: what features keep of it (`slots.py`), None: nothing. fields: further ones of its
    line in the log, by features.
    """

    booking: Booking | None = None
    breakpoint = ""
    cancelled = False
    code = ""
    ended = 0.0
    error = ""
    fields: dict[str, Any] | None = None
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
        self.subject.endpoint = endpoint_of(path)

    def __repr__(self) -> str:
        return f"<SettledRequest {self.id}, {self.status}>"
