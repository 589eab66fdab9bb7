"""A client's request for a workflow as a model: its members as chat, and the form of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import orjson

from gateway.dialects.body import json_object
from gateway.dialects.dialect import StreamReader
from gateway.dialects.openai.request import CHAT
from gateway.errors import GatewayError
from gateway.features.translation.answers import TranslatedAnswers
from gateway.features.translation.table import TRANSLATIONS
from gateway.features.translation.translation import Translation
from gateway.features.workflows.compiler import require_body_size
from gateway.request.exchange import Exchange

_REFUSED: Final = ("tools", "functions", "response_format", "logprobs", "top_logprobs")
_PLAIN: Final[Mapping[str, Any]] = {"response_format": {"type": "text"}}  # the same as none
_COMMON: Final = frozenset(["model", "stream", "workflow_inputs", "metadata"])
_KNOWN: Final[Mapping[str, frozenset[str]]] = {
    CHAT: _COMMON | {"messages", "stream_options", "user", "store", "n"},
    "messages": _COMMON | {"messages", "system"},
    "responses": _COMMON | {"input", "instructions", "user", "store", "stream_options", "background"},
}
"""Members with an effect, or whose absence changes nothing, by dialect."""
_MAX_IGNORED: Final = 20  # names in the header
_MAX_NAME: Final = 64  # characters of each
_EARLIER: Final = ("previous_response_id", "conversation")  # members of Responses that name earlier turns
_INLINE_BYTES: Final = 1 << 16  # largest body that is translated in the event loop


async def form_of(exchange: Exchange) -> DoorForm:
    """The request as chat, and its answers in the client's dialect. Raises GatewayError 400 or 413."""
    name, raw = exchange.dialect.name, exchange.api.body
    require_body_size(raw)
    exchange.api.body = b""
    if name == CHAT:
        body = orjson.loads(raw)
        return DoorForm(exchange, body, None, _ignored(name, body))
    translation = TRANSLATIONS.get(name)
    if translation is None:
        raise unfit("model", f"A workflow answers chat, Messages and Responses, not {exchange.record.path[:60]}.")
    if exchange.dialect.in_background and exchange.api.stores:
        text = "As a model, a workflow does not run in the background; POST /v1/workflows/runs takes 'background'."
        raise unfit("background", text)
    if len(raw) > _INLINE_BYTES:
        translated = await asyncio.to_thread(_as_chat, name, translation, raw)
    else:
        translated = _as_chat(name, translation, raw)
    answers = TranslatedAnswers(translation, translated.echo, exchange.record.id, 0)
    return DoorForm(exchange, translated.body, answers, translated.ignored)


class _TranslatedBody(NamedTuple):
    """echo: the part of a request that its answer repeats. body: as chat. ignored: members without effect."""

    echo: bytes
    body: dict[str, Any]
    ignored: list[str]


def _as_chat(dialect: str, translation: Translation, raw: bytes) -> _TranslatedBody:
    """Raises GatewayError 400."""
    members = json_object(raw)
    for key in _EARLIER:
        if members.get(key) is not None:
            raise unfit(key, f"Answers of a workflow are not kept: leave {key!r} out, and send all turns in 'input'.")
    request = translation.request(raw)
    body: dict[str, Any] = orjson.loads(request.body)
    given = members.get("workflow_inputs")  # no member of these APIs
    return _TranslatedBody(
        request.echo, body if given is None else body | {"workflow_inputs": given}, _ignored(dialect, members)
    )


def _ignored(dialect: str, members: Mapping[str, Any]) -> list[str]:
    """Names of the members without effect, the first ones: a client may send any number."""
    names = (key for key, value in members.items() if key not in _KNOWN[dialect] and value is not None)
    fit = (key for key in names if key.isascii() and key.isidentifier() and len(key) <= _MAX_NAME)
    return list(islice(fit, _MAX_IGNORED))


class DoorForm:
    """The form of a client's request: its members as chat, and its answer's form. ignored: members without effect."""

    def __init__(
        self, exchange: Exchange, body: Mapping[str, Any], answers: TranslatedAnswers | None, ignored: Sequence[str]
    ) -> None:
        """Raises GatewayError 400 for members that a workflow cannot fulfil."""
        for key in _REFUSED:
            if body.get(key) and body[key] != _PLAIN.get(key):
                raise unfit(key, f"A workflow has its own steps: {key!r} is not possible here.")
        if body.get("n") not in (None, 1):
            raise unfit("n", "A workflow gives one answer: 'n' must be 1.")
        self.body = body
        self.ignored = ignored
        self._exchange = exchange
        self._answers = answers
        self._reader: StreamReader | None = None
        options = body.get("stream_options")
        asked = isinstance(options, dict) and options.get("include_usage") is True
        self.wants_usage = answers is not None or (asked and not exchange.api.strip_usage)

    def event(self, chunk: bytes) -> bytes:
        """An event of a chat stream, for the client. b"": nothing yet."""
        if self._answers is None:
            return chunk
        if self._reader is None:
            self._reader = self._answers.reader(self._exchange.api, watchful=False)
        return self._reader.feed(chunk)

    def whole(self, completion: bytes) -> bytes:
        return completion if self._answers is None else self._answers.whole(completion)

    def error(self, error: GatewayError) -> bytes:
        return self._exchange.dialect.error_event(error, self._reader) or b""


def unfit(param: str, message: str) -> GatewayError:
    return GatewayError(400, "workflow_door", message, param=param)
