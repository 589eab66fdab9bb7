"""Forms of a request: the bytes sent to a replica, and the reader of its answer. Chosen once per attempt.

    extensions.forms, asked in turn ── the first form ──► prepare ──┐
                                    └─ none: NATIVE ────────────────┴──► call ──► send ──► the replica ──► exchange.answers
                                                                          └── another call ◄── instead ──┘

The native form is the client's own dialect, with the additions or removals that this replica's engine needs. A form that
rewrites the request stores the new body in the exchange (`Exchange.rewrite`): further replicas of that form get the same body.
A form is one object for all requests; the `Answers` that it sets belong to one request.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Final

from gateway.dialects.dialect import Answers, StreamReader
from gateway.dialects.json_edits import Edit, apply
from gateway.dialects.openai.chat_answer import ChatAssembler, collected_body
from gateway.dialects.salts import is_object, salted
from gateway.errors import ReplicaFailure
from gateway.fleet.state import ReplicaState
from gateway.request.exchange import Exchange
from gateway.upstream.client import ReplicaAnswer, ReplicaCall

EVENT_STREAM: Final = "text/event-stream"
EVENTS_LINE: Final = b"Content-Type: text/event-stream\r\n"
_BRACE: Final = 0x7B
SHOWN: Final = 16  # bytes that show whether an answer consists of events
_EVENTS: Final = re.compile(rb"(?:\xef\xbb\xbf)?+[\r\n]*+(?:data:|event:|:)")


Sender = Callable[[ReplicaState, ReplicaCall], Awaitable[ReplicaAnswer]]
"""Sends a call to a replica, with the request's priority and the replica's rank."""


class Form:
    """The native form, and the base class of the others."""

    async def prepare(self, exchange: Exchange) -> None:
        """Called before `call`, except for the native form. Raises GatewayError."""

    def call(self, exchange: Exchange, replica: ReplicaState, call: ReplicaCall) -> ReplicaCall:
        """The call for this replica; sets `exchange.answers`. Native form: the client's billing line is removed if the pool
        wants that, a token is requested if the engine must generate one, and the salt is added if the engine supports it.

        Raises GatewayError without room for the copy of a large body, ReplicaFailure if the engine lacks a needed capability.
        """
        body = call.body
        exchange.answers = exchange.dialect
        edits = self.edits(exchange, replica)
        if edits:
            exchange.charge_copy(body)
            call = call.with_body(apply(body, edits))
        if not exchange.salt or not replica.engine.salts:
            return call
        if is_object(call.body):
            exchange.charge_copy(call.body)
        with_salt = salted(call.body, exchange.salt)
        return call if with_salt is None else call.with_body(with_salt)

    def edits(self, exchange: Exchange, replica: ReplicaState) -> list[Edit]:
        """The edits of the client's body for this replica, in the client's own dialect."""
        api = exchange.api
        edits = api.billing if api.billing and exchange.target.strip_billing_header else []
        if api.prewarm and not replica.engine.prewarms:
            edits = edits + api.prewarm
        if api.diagnosis and exchange.diagnoses:
            edits = edits + api.diagnosis.edits
        return edits

    async def send(self, exchange: Exchange, replica: ReplicaState, call: ReplicaCall, sender: Sender) -> ReplicaAnswer:
        """Send the call, made by `call`, to this replica, and await the head of its answer. Not for the native form. Raises
        ReplicaFailure.
        """
        return await sender(replica, call)

    async def instead(
        self, exchange: Exchange, replica: ReplicaState, call: ReplicaCall, answer: ReplicaAnswer
    ) -> ReplicaCall | None:
        """The call that this replica gets at once in place of the answered one; None: the answer counts. Not for the native
        form. The head of the answer has arrived. It must be None after a few calls.
        """
        return None


NATIVE: Final = Form()
FormOf = Callable[[Exchange, ReplicaState, float], Form | None]


async def collected(answer: ReplicaAnswer, reader: StreamReader, answers: Answers, charge: Callable[[int], None]) -> bytes:
    """The plain answer that a stream of chat is: of an engine that is always asked for a stream, because only while it streams
    does it notice a client that has disconnected, or of an engine that streams unasked. reader: its output is chat.
    charge: called with the size of each piece; may raise. Raises ReplicaFailure.
    """
    if answer.content_type != EVENT_STREAM:
        raise not_streamed(answer)
    assembler = ChatAssembler()
    while True:
        data = answer.take()
        charge(len(data))
        assembler.feed(reader.feed(data))
        if reader.enough or answer.complete or assembler.answer() is None:
            break
        await answer.more()
    assembler.feed(reader.finish())
    return answers.whole(collected_body(assembler))


def is_odd(answer: ReplicaAnswer, begin: bytes) -> bool:
    """True if the first byte of an answer may belong to another form than its content type says."""
    is_object = begin != b"" and begin[0] == _BRACE
    return is_object if answer.content_type == EVENT_STREAM else not is_object


def _as_received(data: bytes) -> bytes:
    return data


async def note_form(answer: ReplicaAnswer, shown: Callable[[bytes], bytes] = _as_received, most: int = SHOWN) -> None:
    """Sets the answer's content type by its first bytes: some servers write events under another type, or an object under
    theirs. shown: the bytes that the received ones stand for. most: received bytes that are enough in any case.
    """
    data = answer.peek()
    begin = shown(data)
    while len(begin) < SHOWN and not (len(data) >= most or answer.complete or _EVENTS.match(begin)):
        await answer.more()
        data = answer.peek()
        begin = shown(data[:most])
    if _EVENTS.match(begin):
        answer.content_type = EVENT_STREAM
    elif answer.content_type == EVENT_STREAM:
        answer.content_type = ""


def not_streamed(answer: ReplicaAnswer) -> ReplicaFailure:
    return ReplicaFailure("garbage", f"asked for a stream, it answers with {answer.content_type or 'no content type'!r}")
