"""Paths that the gateway passes on without fully parsing them: embeddings, uploads, APIs that have no dialect yet.

If the body is a JSON object with a model or a cache salt, the request is routed by them; nothing in the body is an error. A
prompt in it counts by its size only: nothing shows that an engine computes it, and puts it into its prefix cache. Answers pass
unchanged. A broken stream is cut, because its clients may not know an error event. Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, Final

import orjson

from gateway.dialects.api_request import MAX_MODEL_CHARS, ApiRequest
from gateway.dialects.body import digested, headed_salt, named_adapter, other_spelling, salt_of
from gateway.dialects.dialect import Dialect, StreamReader
from gateway.dialects.json_edits import read_object
from gateway.dialects.lenient import BOM
from gateway.dialects.openai.errors import error_body
from gateway.dialects.openai.stream import ChunkReader
from gateway.dialects.prompt.batch import pairs_prompt, sized_prompt
from gateway.dialects.prompt.chat import chat_prompt
from gateway.dialects.steering import steers
from gateway.errors import GatewayError

_MEMBERS: Final = ("model", "stream", "store", "background", "cache_salt", "lora_path")  # read beside the prompt
_MAX_SCANNED: Final = 1 << 20  # strings and brackets, in a body with too many values to be parsed
# In UTF-8, UTF-16 or UTF-32: engines in Python read each.
_NO_OBJECT: Final = re.compile(rb"(?:\xef\xbb\xbf)?+[ \t\r\n]{0,1024}+[^ \t\r\n{\0\xff\xfe]")


class PassThrough(Dialect):
    """Any path without a dialect of its own."""

    name: ClassVar[str] = "other"
    strict: ClassVar[bool] = False

    def parse(self, raw: bytes, most: int = 0) -> ApiRequest:
        return parse_leniently(raw, most)

    def is_opaque(self, raw: bytes) -> bool:
        return _NO_OBJECT.match(raw) is not None

    def parse_complex(self, raw: bytes) -> ApiRequest | None:
        return scan(raw)

    def may_store(self, api: ApiRequest, path: str) -> bool:
        """True for the Responses API unless the body says `store: false`."""
        return path.endswith("/responses") if api.stores is None else api.stores

    def reader(self, api: ApiRequest, *, watchful: bool) -> StreamReader:
        return ChunkReader(strip_usage=False)

    def error_body(self, error: GatewayError, request_id: str = "") -> bytes:
        return error_body(error)


class Tokenize(PassThrough):
    """Engines' /tokenize: it takes prompts, but puts nothing into a cache."""

    name: ClassVar[str] = "tokenize"

    def parse(self, raw: bytes, most: int = 0) -> ApiRequest:
        api = parse_leniently(raw, most)
        api.prompt, api.harmless = None, True
        return api


def parse_leniently(raw: bytes, most: int = 0) -> ApiRequest:
    """Parse a body of an unknown API as far as possible; nothing in it is an error."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        return _unreadable(raw)
    prompt, size, salt = _lenient_prompt(body, most)
    api = _other(raw, body, prompt, salt)
    api.size = size
    if other_spelling(body):
        api.model = ""  # the model that the engine would take is unknown
    return api


def scan(raw: bytes) -> ApiRequest:
    """Reads model and stream of a body with too many values to be parsed; no prompt."""
    try:
        spans = read_object(raw, most=_MAX_SCANNED).spans
        body = dict[str, Any]()
        for name in _MEMBERS:
            if name in spans:
                start, end = spans[name]
                body[name] = orjson.loads(raw[start:end])
        if other_spelling(spans):
            body.pop("model", None)
    except (ValueError, IndexError):
        return _unreadable(raw)
    api = _other(raw, body, None, salt_of(body))
    api.steers = steers(spans)
    return api


def _unreadable(raw: bytes) -> ApiRequest:
    """A body that is no JSON here, but may be JSON for an engine (NaN, half a surrogate pair, UTF-16). It may have a cache
    salt, so its own digest is the salt, which matches no other body. O(length), about 4 ms a MiB.
    """
    api = ApiRequest("", None, "", stream=False, metered=False, body=raw)
    api.salt = digested(raw)
    try:
        text = _in_utf8(raw)
        api.steers = steers(read_object(text, most=_MAX_SCANNED).spans)
    except (ValueError, IndexError):
        return api
    if api.steers:
        api.body = text
    return api


def _in_utf8(raw: bytes) -> bytes:
    """A JSON text of any encoding that engines read, without a byte order mark. Raises ValueError."""
    encoding = json.detect_encoding(raw)
    if encoding.startswith("utf-8"):
        return raw.removeprefix(BOM)
    return raw.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")


def _other(raw: bytes, body: dict[str, Any], prompt: bytes | list[int] | None, salt: str) -> ApiRequest:
    model = body.get("model")
    model = model if isinstance(model, str) and len(model) <= MAX_MODEL_CHARS else ""
    api = ApiRequest(model, prompt, salt, stream=body.get("stream") is True, metered=False, body=raw)
    api.stores, api.steers = _stores(body), steers(body)
    api.adapter = named_adapter(body) if model else ""  # without a model it is a path, of an adapter to be loaded
    return api


def _lenient_prompt(body: dict[str, Any], most: int) -> tuple[bytes | list[int] | None, int, str]:
    """An empty prompt in the form of the body's (None: it has none in a known form), the size of the request, and the salt."""
    try:
        if "messages" in body:
            return b"", sum(map(len, chat_prompt(body, most).parts)), salt_of(body)
        prompt, size = pairs_prompt(body, most) or sized_prompt(body, "prompt" if "prompt" in body else "input", most)
        return prompt[:0], size, headed_salt(body)
    except GatewayError:
        return None, 0, salt_of(body)


def _stores(body: dict[str, Any]) -> bool | None:
    """The body's choice to have the answer stored (background responses are stored, to be fetched); None: the path decides."""
    if body.get("background") is True:
        return True
    store = body.get("store")
    return store if isinstance(store, bool) else None
