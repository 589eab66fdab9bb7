"""Translation of OpenAI's Responses for replicas that support only chat."""

from __future__ import annotations

from typing import Any, ClassVar

import orjson

from gateway.dialects.excerpt import excerpt
from gateway.dialects.openai.errors import error_body
from gateway.errors import GatewayError
from gateway.features.translation.responses.request import chat_request
from gateway.features.translation.responses.stream import ResponseWriter, response_of
from gateway.features.translation.translation import EventWriter, TranslatedRequest, Translation


class ResponsesTranslation(Translation):
    """POST /v1/responses."""

    name: ClassVar[str] = "responses"

    def request(self, raw: bytes) -> TranslatedRequest:
        return chat_request(raw)

    def answer(self, body: bytes, echo: bytes, seed: str = "", estimate: int = 0) -> bytes:
        return response_of(body, echo, seed)

    def error(self, status: int, body: bytes, request_id: str = "") -> bytes:
        """Chat errors already have the format of Responses; others are wrapped."""
        try:
            answer: Any = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = None
        error = answer.get("error") if isinstance(answer, dict) else None
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return body
        text = excerpt(body) or f"The replica answered with the status {status}."
        return error_body(GatewayError(status, "invalid_request" if status < 500 else "server_error", text))

    def writer(self, echo: bytes, seed: str = "", estimate: int = 0) -> EventWriter:
        return ResponseWriter(echo, seed)
