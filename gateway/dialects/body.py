"""The fields that the JSON bodies of all dialects share: model, stream, session, cache salt."""

from __future__ import annotations

from typing import Any, Final

import orjson

from gateway.dialects.api_request import MAX_MODEL_CHARS, MAX_SESSION_CHARS
from gateway.dialects.prompt.head import head_digest, short_digest
from gateway.errors import bad_request

SEVERAL_ADAPTERS: Final = "*"  # of a batch
MAX_SALT_CHARS: Final = 64  # a longer one is replaced by its digest
_MAX_DIGITS: Final = 32
_SESSIONS: Final[tuple[str, ...]] = ("prompt_cache_key", "conversation", "session_params")
_DIGEST: Final = "digest:"
_SEPARATOR: Final = "\x1c"  # before the digest of a salt, and between a salt and the digest of a prompt's head


def json_object(raw: bytes) -> dict[str, Any]:
    """The parsed body. Raises GatewayError 400 if it is no JSON object."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON in UTF-8: {error}.", code="invalid_json") from error
    if not isinstance(body, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    return body


def model_of(body: dict[str, Any]) -> str:
    """The model's name. Raises GatewayError 400 if there is none, or if the field also occurs in another spelling."""
    if spelling := other_spelling(body):
        raise bad_request(f"The body has a field {spelling!r}: the name of the model belongs into 'model'.", "model")
    model = body.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL_CHARS:
        raise bad_request("'model' is required and must be a string: the name of a model that GET /v1/models lists.", "model")
    return model


def named_adapter(body: dict[str, Any]) -> str:
    """The adapter in `lora_path`, by which SGLang computes chats, completions and embeddings. "": none; SEVERAL_ADAPTERS: one
    for each prompt of a batch.
    """
    adapter = body.get("lora_path")
    if not adapter:
        return ""
    return adapter[:MAX_MODEL_CHARS] if isinstance(adapter, str) else SEVERAL_ADAPTERS


def other_spelling(names: dict[str, Any]) -> str:
    """A member that is "model" except for upper case; "" if there is none. Engines that ignore case (Go's JSON, so Ollama)
    would serve the model that it names, unchecked by keys, prices and routes.
    """
    for name in names:
        if len(name) == 5 and name != "model" and name.lower() == "model":
            return name
    return ""


def wants_stream(body: dict[str, Any]) -> bool:
    """True if the body asks for a stream. Raises GatewayError 400 unless `stream` is a boolean or missing."""
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise bad_request("'stream' must be true or false.", "stream")
    return bool(stream)


def output_limit(body: dict[str, Any], names: tuple[str, ...]) -> int:
    """The most tokens of an answer: the largest number in these fields; 0 without a limit, or if one is unclear: a count above
    the limit is not believed.
    """
    most = 0
    for name in names:
        if name in body:
            value = body[name]
            if value is None:
                continue
            number = whole_number(value)
            if number is None or number < 0:  # less than 0: engines' word for no limit
                return 0
            most = max(most, number)
    return most


def whole_number(value: Any) -> int | None:
    """The integer that an engine may read in a field: also as a number with a point, or in a text. None: there is none."""
    if type(value) is int:
        return value
    if isinstance(value, str) and len(value) <= _MAX_DIGITS:
        try:
            value = float(value)
        except ValueError:
            return None
    return int(value) if type(value) is float and value.is_integer() else None


def session_of(body: dict[str, Any]) -> str:
    """The conversation that a body names, cut to MAX_SESSION_CHARS; "" if it names none.

    `prompt_cache_key` (OpenAI's APIs; Codex's session), `conversation` (Responses), `session_params.session_id` (SGLang).
    """
    for name in _SESSIONS:
        if name in body:
            value = body[name]
            if isinstance(value, dict):
                value = value.get("id") or value.get("session_id")
            if isinstance(value, str) and value:
                return value[:MAX_SESSION_CHARS]
    return ""


def salt_of(body: dict[str, Any]) -> str:
    """The cache salt, of bounded length; "": there is none."""
    salt = body.get("cache_salt")
    if not isinstance(salt, str):
        return ""
    return salt if len(salt) <= MAX_SALT_CHARS and _SEPARATOR not in salt else digested(salt.encode())


def digested(data: bytes) -> str:
    """The digest of a salt, in a form that no salt can have by itself."""
    return f"{_SEPARATOR}{_DIGEST}{short_digest(data)}"


def parts_of_salt(salt: str) -> tuple[str, str]:
    """Splits a request's salt into the client's own salt and the digest of the prompt's head, "" if it has none
    (`headed_salt`).
    """
    own, separator, head = salt.rpartition(_SEPARATOR)
    return (own, head) if separator and not head.startswith(_DIGEST) else (salt, "")


def join_salt(own: str, head: str) -> str:
    """The inverse of `parts_of_salt`."""
    return f"{own}{_SEPARATOR}{head}" if head else own


def headed_salt(body: dict[str, Any]) -> str:
    """The salt of a prompt without a head: it includes a digest of the fields that belong into a head."""
    head = head_digest(body)
    return join_salt(salt_of(body), head)
