"""The forms of requests for replicas without the request's dialect, and for engines that accept only texts."""

from __future__ import annotations

from functools import partial
from typing import Final

from gateway.dialects.dialect import Answers
from gateway.dialects.openai.request import CHAT
from gateway.dialects.salts import salted
from gateway.errors import UNFIT, GatewayError, ReplicaFailure
from gateway.features.translation.adaptation.answers import AdaptedAnswers
from gateway.features.translation.adaptation.request import adapted
from gateway.features.translation.answers import TranslatedAnswers
from gateway.features.translation.table import TRANSLATIONS
from gateway.features.translation.translation import CHAT_PATH, TranslatedRequest
from gateway.fleet.state import ReplicaState
from gateway.parser.parsing import SMALL_BYTES, Parsing
from gateway.request.exchange import Exchange, RewrittenRequest
from gateway.request.forms import Form
from gateway.upstream.client import ReplicaCall
from gateway.upstream.headers import with_bearer

OPERATION: Final = "translate"  # an operation of the parser process: dialect -> body, echo, left_out
_INLINE_BYTES: Final = 1 << 16  # largest body that is translated in the event loop


class AdaptedForm(Form):
    """A chat request for an engine that accepts only texts."""

    def call(self, exchange: Exchange, replica: ReplicaState, call: ReplicaCall) -> ReplicaCall:
        return _adapted(exchange, call, call.body, exchange.dialect)


class TranslatedForm(Form):
    """A request of another dialect, translated to chat."""

    def __init__(self, parsing: Parsing) -> None:
        self._parsing = parsing

    async def prepare(self, exchange: Exchange) -> None:
        """Raises GatewayError 400 for fields that chat cannot express, 500 or 503 if a large body could not be parsed."""
        if exchange.rewritten is not None:
            return
        name, body, client = exchange.dialect.name, exchange.api.body, exchange.request.lease.account.client
        translation, parsing = TRANSLATIONS[name], self._parsing
        if len(body) <= (SMALL_BYTES if parsing.turns.exceeds_share(client) else _INLINE_BYTES):
            request = await parsing.turns.take(partial(translation.request, body), client)
        else:
            request = TranslatedRequest(*await parsing.process.run((OPERATION, name), body, client))
        if request.left_out:
            record = exchange.record
            record.fields = {**(record.fields or {}), "left_out": list(request.left_out)}
        estimate = exchange.booking.decision.prompt_tokens
        answers = TranslatedAnswers(translation, request.echo, exchange.record.id, estimate)
        exchange.rewrite(RewrittenRequest(request.body, answers))

    def call(self, exchange: Exchange, replica: ReplicaState, call: ReplicaCall) -> ReplicaCall:
        rewritten, headers, of_client = exchange.rewritten, call.headers, exchange.request.headers
        assert rewritten is not None, "it is prepared"
        body, exchange.answers = rewritten.body, rewritten.answers
        if replica.engine.plain_chat:
            return _adapted(exchange, call, body, rewritten.answers)
        if exchange.salt and replica.engine.salts:
            body = salted(body, exchange.salt) or body
        key = of_client.get("X-Api-Key")
        if key and of_client.get("Authorization") is None:
            headers = with_bearer(headers, key)
        return ReplicaCall("POST", CHAT_PATH, headers, body, repeatable=call.repeatable, via=call.via)


class ChatForms:
    """Chooses the form for a replica."""

    def __init__(self, parsing: Parsing) -> None:
        self._adapted = AdaptedForm()
        self._translated = TranslatedForm(parsing)

    def of(self, exchange: Exchange, replica: ReplicaState, now: float) -> Form | None:
        """The form for this replica. None: no translation is needed."""
        dialect = exchange.dialect
        if dialect.translatable:
            chosen = exchange.target.translate
            forced = dialect.name in (replica.engine.partial if chosen is None else chosen)
            return None if replica.speaks(dialect.name, now) and not forced else self._translated
        return self._adapted if dialect.name == CHAT and replica.engine.plain_chat else None


def _adapted(exchange: Exchange, call: ReplicaCall, body: bytes, inner: Answers) -> ReplicaCall:
    """body: a chat request. inner: reads a chat answer for the client. Raises ReplicaFailure if the engine does not support the
    request.
    """
    try:
        chat = adapted(body)
    except GatewayError as error:
        exchange.attempts.unfit = error.again()
        raise ReplicaFailure(UNFIT, error.message, reached=0, blameless=True) from None
    exchange.answers = AdaptedAnswers(chat, inner, exchange.record.id)
    made = ReplicaCall("POST", CHAT_PATH, call.headers, chat.body, repeatable=call.repeatable, via=call.via)
    exchange.charge_copy(body)
    chat.body, made.adapted = b"", True
    return made
