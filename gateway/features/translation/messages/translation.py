"""Translation of Messages for replicas that support only chat."""

from __future__ import annotations

from typing import ClassVar, Final

import orjson

from gateway.dialects.anthropic.errors import error_body
from gateway.dialects.anthropic.messages import Messages
from gateway.dialects.excerpt import message_of as error_message
from gateway.errors import GatewayError
from gateway.features.translation.messages.answer import message_of
from gateway.features.translation.messages.echo import read_echo
from gateway.features.translation.messages.request import chat_request
from gateway.features.translation.messages.stream import MessageWriter
from gateway.features.translation.translation import EventWriter, TranslatedRequest, Translation

_MAX_MESSAGE: Final = 4096  # characters of an error


class MessagesTranslation(Translation):
    """POST /v1/messages."""

    name: ClassVar[str] = Messages.name

    def request(self, raw: bytes) -> TranslatedRequest:
        return chat_request(raw)

    def answer(self, body: bytes, echo: bytes, seed: str = "", estimate: int = 0) -> bytes:
        return message_of(body, read_echo(echo), estimate)

    def error(self, status: int, body: bytes, request_id: str = "") -> bytes:
        """The engine's message, in any format; text that is not JSON is used as it is."""
        try:
            message = error_message(orjson.loads(body))
        except orjson.JSONDecodeError:
            message = ""
        message = (message or body.decode("utf-8", "replace").strip())[:_MAX_MESSAGE]
        error = GatewayError(status, "replica_error", message or f"The replica answered with status {status}.")
        return error_body(error, request_id)

    def writer(self, echo: bytes, seed: str = "", estimate: int = 0) -> EventWriter:
        return MessageWriter(read_echo(echo), estimate)
