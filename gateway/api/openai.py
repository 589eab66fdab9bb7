"""The OpenAI dialect: a request body is parsed once into a frozen request with its canonical prompt; errors in its shape.

What a client sends goes to the replica as it came (vendor fields included); the one thing that is added is the wish for
usage at the end of a stream, because without it nothing could be metered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.api.prompt import canonical_json, chat_prompt, completion_prompt
from gateway.errors import GatewayError, bad_request

CHAT: Final = "chat"
COMPLETION: Final = "completion"
OTHER: Final = "other"

_KINDS: Final[Mapping[str, str]] = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
_ASK_USAGE: Final = b'"stream_options":{"include_usage":true}}'
MAX_MODEL_CHARS: Final = 256


Keyed = bytes | list[int]  # canonical text, or token ids


class ApiRequest:
    """One request, understood as far as routing and metering need it.

    kind: CHAT or COMPLETION (generation, metered), OTHER (passed through).
    prompt: canonical text or token ids, None where the body has none that we know.
    body: what goes to the replica. strip_usage: the usage event of the stream is ours, not the client's.
    stores: whether the answer is to be kept by the server, where a body on another path says so.
    """

    __slots__ = ("body", "kind", "model", "prompt", "salt", "stores", "stream", "strip_usage")

    def __init__(
        self,
        kind: str,
        model: str,
        prompt: bytes | list[int] | None,
        salt: str,
        *,
        stream: bool,
        strip_usage: bool,
        body: bytes,
    ) -> None:
        self.kind = kind
        self.model = model
        self.prompt = prompt
        self.salt = salt
        self.stream = stream
        self.strip_usage = strip_usage
        self.body = body
        self.stores: bool | None = None

    @property
    def metered(self) -> bool:
        return self.kind != OTHER

    @property
    def repeatable(self) -> bool:
        """Sending it twice does no harm: it computes something from a prompt (unlike a file upload, say)."""
        return self.metered or self.prompt is not None

    def keeps_nothing(self, path: str) -> bool:
        """Whether the server need not keep anything for this request: the Responses API does unless it says `store: false`."""
        return not (path.endswith("/responses") if self.stores is None else self.stores)

    def __repr__(self) -> str:
        return f"<ApiRequest {self.kind} {self.model!r}, {len(self.body)} bytes>"


def kind_of(path: str) -> str:
    return _KINDS.get(path, OTHER)


def parse(kind: str, raw: bytes) -> ApiRequest:
    """Parse a generation request. Raises GatewayError 400 that names the field and says what it should be."""
    body = _json_object(raw)
    model = body.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL_CHARS:
        raise bad_request("'model' is required and must be a string: the name of a model that GET /v1/models lists.", "model")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise bad_request("'stream' must be true or false.", "stream")
    prompt = chat_prompt(body) if kind == CHAT else completion_prompt(body, "prompt")
    strip = bool(stream) and not _asks_usage(body)
    sent = _with_usage(raw, body) if strip else raw
    return ApiRequest(kind, model, prompt, _salt(body), stream=bool(stream), strip_usage=strip, body=sent)


def parse_other(raw: bytes) -> ApiRequest:
    """Read what can be read of a body on a path that we only pass through; nothing in it is an error."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        return ApiRequest(OTHER, "", None, "", stream=False, strip_usage=False, body=raw)
    model = body.get("model")
    model = model if isinstance(model, str) and len(model) <= MAX_MODEL_CHARS else ""
    stream = body.get("stream") is True
    api = ApiRequest(OTHER, model, _lenient_prompt(body), _salt(body), stream=stream, strip_usage=False, body=raw)
    api.stores = _stores(body)
    return api


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(body, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    return body


def _lenient_prompt(body: Mapping[str, Any]) -> bytes | list[int] | None:
    try:
        if "messages" in body:
            return chat_prompt(body)
        return completion_prompt(body, "prompt" if "prompt" in body else "input")
    except GatewayError:
        return None


def _stores(body: Mapping[str, Any]) -> bool | None:
    """Whether the answer is to be kept (what runs in the background is, to be fetched); None: the path decides."""
    if body.get("background") is True:
        return True
    store = body.get("store")
    return store if isinstance(store, bool) else None


def _salt(body: Mapping[str, Any]) -> str:
    salt = body.get("cache_salt")
    return salt if isinstance(salt, str) else ""


def _asks_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _with_usage(raw: bytes, body: dict[str, Any]) -> bytes:
    """The body with `stream_options.include_usage`; spliced in as bytes where that is possible."""
    if "stream_options" not in body:
        return raw.rstrip()[:-1] + b"," + _ASK_USAGE  # a body with a model is not empty: the comma is right
    options = body["stream_options"]
    if options is not None and not isinstance(options, dict):
        raise bad_request("'stream_options' must be an object.", "stream_options")
    return canonical_json({**body, "stream_options": {**(options or {}), "include_usage": True}})


def error_body(error: GatewayError) -> bytes:
    """OpenAI's error shape."""
    kind = "invalid_request_error" if error.fault == "client" else "server_error"
    return orjson.dumps({"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}})


def stream_error(error: GatewayError) -> bytes:
    """An error after a stream began: the frame that makes official clients raise, then the end, as vLLM does."""
    return b"data: " + error_body(error) + b"\n\ndata: [DONE]\n\n"


def model_list(models: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The answer to GET /v1/models."""
    return orjson.dumps({"object": "list", "data": list(models.values())})
