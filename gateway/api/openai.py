"""The OpenAI dialect: a request body is parsed once into a frozen request with its canonical prompt; errors in its shape.

What a client sends goes to the replica as it came, byte for byte (vendor fields included); the one thing that is added is the
wish for usage at the end of a stream, because without it nothing could be metered.

Parsing is synchronous. How much of it the event loop may do at once is for the caller to say (`most`): beyond that NeedsHelper
is raised, and the same functions run in another process (gateway/parser/).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

from gateway.api.prompt import NeedsHelper, chat_prompt, completion_prompt, head_digest, is_batch, short_digest
from gateway.api.splice import Edit, apply, read_object
from gateway.errors import GatewayError, bad_request
from router import Prompt, seed, text_keys, token_keys

CHAT: Final = "chat"
COMPLETION: Final = "completion"
OTHER: Final = "other"
TEXT: Final = "text"
GUESS: Final = "guess"  # a chat if it has messages, else a completion: for a dry run, which has no path to tell

_KINDS: Final = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
_OPTIONS: Final = "stream_options"
_WANTED: Final = "include_usage"
_OTHERS: Final = ("model", "stream", "store", "background", "cache_salt")  # read of a body on another path, beside its prompt
_ASK_USAGE: Final = b',"stream_options":{"include_usage":true}'
# Fields that make an engine count other prompt tokens than those of the one prompt that we read, unless they have these values.
_COUNTED_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "truncate_prompt_tokens": (None,),
    "truncation": (None, "disabled"),
    "input_ids": (None,),
    "prompt_embeds": (None,),
}
_UNCOUNTED: Final = tuple(_COUNTED_VALUES)
MAX_MODEL_CHARS: Final = 256
MAX_SALT_CHARS: Final = 64  # a longer one is replaced by its digest
_SEPARATOR: Final = "\x1c"  # before the digest of a salt, and between a salt and the digest of a prompt's head
_MAX_SCANNED: Final = 1 << 20  # strings and brackets, in a body with too many values to be parsed
SCANNED_AT_ONCE: Final = 1 << 15  # bytes that may be scanned in the event loop


class ApiRequest:
    """One request, understood as far as routing and metering need it.

    kind: CHAT or COMPLETION (generation, metered), OTHER (passed through).
    prompt: canonical text or token ids, None where the body has none that we know. made: instead of it, where another process
    has parsed the body, the prompt with its block keys.
    salt: of fixed length at most; what keeps this prompt apart from others that read the same.
    body: what goes to the replica. strip_usage: the usage event of the stream is ours, not the client's.
    stores: whether the answer is to be kept by the server, where a body on another path says so.
    countable: the engine's count of prompt tokens is about this one prompt, so that the router may learn from it. Not so for
    a batch of prompts, several answers, or a prompt that the engine cuts or replaces.
    """

    __slots__ = ("body", "countable", "kind", "made", "model", "prompt", "salt", "stores", "stream", "strip_usage")

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
        self.made: Prompt | None = None
        self.stores: bool | None = None
        self.countable = True

    def drop(self) -> None:
        """The request is over: drop what is large, whoever still refers to it."""
        self.body, self.prompt, self.made = b"", None, None

    @property
    def metered(self) -> bool:
        return self.kind != OTHER

    @property
    def repeatable(self) -> bool:
        """Sending it twice does no harm: it computes something from a prompt (unlike a file upload, say)."""
        return self.metered or self.has_prompt

    @property
    def has_prompt(self) -> bool:
        """Whether the body has a prompt that we know."""
        return self.prompt is not None or self.made is not None

    def keeps_nothing(self, path: str) -> bool:
        """Whether the server need not keep anything for this request: the Responses API does unless it says `store: false`."""
        return not (path.endswith("/responses") if self.stores is None else self.stores)

    def __repr__(self) -> str:
        return f"<ApiRequest {self.kind} {self.model!r}, {len(self.body)} bytes>"


def kind_of(path: str) -> str:
    return _KINDS.get(path, OTHER)


def parse(kind: str, raw: bytes, most: int = 0) -> ApiRequest:
    """Parse a generation request. Raises GatewayError 400 that names the field and says what it should be.

    most: how many parts its prompt may have, or NeedsHelper is raised; 0: any number.
    """
    api, body = read(kind, raw, most)
    if api.strip_usage:
        if _OPTIONS not in body:
            last = raw.rindex(b"}")  # a body with a model is not empty: the comma is right
            api.body = b"".join((raw[:last], _ASK_USAGE, raw[last:]))
        elif most and len(raw) > SCANNED_AT_ONCE:
            raise NeedsHelper
        else:
            api.body = apply(raw, usage_edits(raw, body))
    return api


def read(kind: str, raw: bytes, most: int = 0) -> tuple[ApiRequest, dict[str, Any]]:
    """The same, before usage is asked for; and the parsed body."""
    body = _json_object(raw)
    model = body.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL_CHARS:
        raise bad_request("'model' is required and must be a string: the name of a model that GET /v1/models lists.", "model")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise bad_request("'stream' must be true or false.", "stream")
    prompt: bytes | list[int]
    if kind == CHAT or (kind == GUESS and "messages" in body):
        prompt, salt = chat_prompt(body, most), _salt(body)
    else:
        prompt, salt = completion_prompt(body, "prompt"), _headed_salt(body)
    strip = bool(stream) and not _asks_usage(body)
    api = ApiRequest(kind, model, prompt, salt, stream=bool(stream), strip_usage=strip, body=raw)
    api.countable = _counts_prompt(body) and (kind == CHAT or not is_batch(body.get("prompt")))
    return api, body


def parse_other(raw: bytes, most: int = 0) -> ApiRequest:
    """Read what can be read of a body on a path that we only pass through; nothing in it is an error."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        return _unreadable(raw)
    prompt, salt = _lenient_prompt(body, most)
    return _other(raw, body, prompt, salt)


def scan_other(raw: bytes) -> ApiRequest:
    """The same for a body with more values than are parsed: its model, and whether it streams; no prompt."""
    try:
        spans = read_object(raw, most=_MAX_SCANNED).spans
        body = dict[str, Any]()
        for name in _OTHERS:
            if name in spans:
                start, end = spans[name]
                body[name] = orjson.loads(raw[start:end])
    except (ValueError, IndexError):
        return _unreadable(raw)
    return _other(raw, body, None, _salt(body))


def unread(raw: bytes) -> ApiRequest:
    """A body that is passed on as it is."""
    return ApiRequest(OTHER, "", None, "", stream=False, strip_usage=False, body=raw)


def _unreadable(raw: bytes) -> ApiRequest:
    """A body that is not JSON here, but may be for an engine (NaN, half a surrogate pair). It may have a cache salt, so it is
    kept apart from all other bodies. O(length), about 1 ms a MiB.
    """
    api = unread(raw)
    api.salt = _digested(raw)
    return api


def _other(raw: bytes, body: Mapping[str, Any], prompt: bytes | list[int] | None, salt: str) -> ApiRequest:
    model = body.get("model")
    model = model if isinstance(model, str) and len(model) <= MAX_MODEL_CHARS else ""
    api = ApiRequest(OTHER, model, prompt, salt, stream=body.get("stream") is True, strip_usage=False, body=raw)
    api.stores = _stores(body)
    return api


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON in UTF-8: {error}.", code="invalid_json") from error
    if not isinstance(body, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    return body


def _lenient_prompt(body: Mapping[str, Any], most: int) -> tuple[bytes | list[int] | None, str]:
    """The prompt, if it has one that we know, and its salt."""
    try:
        if "messages" in body:
            return chat_prompt(body, most), _salt(body)
        return completion_prompt(body, "prompt" if "prompt" in body else "input"), _headed_salt(body)
    except GatewayError:
        return None, _salt(body)


def _stores(body: Mapping[str, Any]) -> bool | None:
    """Whether the answer is to be kept (what runs in the background is, to be fetched); None: the path decides."""
    if body.get("background") is True:
        return True
    store = body.get("store")
    return store if isinstance(store, bool) else None


def _counts_prompt(body: dict[str, Any]) -> bool:
    """Whether the engine's count of prompt tokens is about the prompt that we read, by the fields in _COUNTED_VALUES."""
    for name in _UNCOUNTED:  # noqa: SIM110  (every request comes here: a generator would cost ten times as much)
        if name in body and body[name] not in _COUNTED_VALUES[name]:
            return False
    return True


def _salt(body: Mapping[str, Any]) -> str:
    salt = body.get("cache_salt")
    if not isinstance(salt, str):
        return ""
    return salt if len(salt) <= MAX_SALT_CHARS and _SEPARATOR not in salt else _digested(salt.encode())


def _digested(data: bytes) -> str:
    """The digest of a salt, in a form that no salt can have by itself."""
    return f"{_SEPARATOR}digest:{short_digest(data)}"


def _headed_salt(body: Mapping[str, Any]) -> str:
    """The salt of a prompt that has no head of its own: the fields that belong into one are in it."""
    head = head_digest(body)
    return f"{_salt(body)}{_SEPARATOR}{head}" if head else _salt(body)


def _asks_usage(body: Mapping[str, Any]) -> bool:
    options = body.get(_OPTIONS)
    return isinstance(options, dict) and options.get(_WANTED) is True


def usage_edits(raw: bytes, body: Mapping[str, Any]) -> list[Edit]:
    """What has to be changed in a body so that it asks for usage."""
    if _OPTIONS not in body:
        last = raw.rindex(b"}")
        return [(last, last, _ASK_USAGE)]
    options = body[_OPTIONS]
    if options is not None and not isinstance(options, dict):
        raise bad_request("'stream_options' must be an object.", _OPTIONS)
    members = read_object(raw)
    if options is None:
        return [members.put(_OPTIONS, b'{"include_usage":true}')]
    return [read_object(raw, members.spans[_OPTIONS][0]).put(_WANTED, b"true")]


def router_prompt(
    api: ApiRequest,
    blocks: tuple[int, int],
    scale: str = TEXT,
    session: str = "",
    client: int = 0,
    scope: tuple[str, ...] = (),
) -> Prompt:
    """The prompt for the router: its block keys, in units of bytes of its canonical text, or of token ids.

    Seeded so that models and cache salts never match each other, nor do different scopes (names that the caller adds).
    blocks: the length of a block in bytes, and in token ids. scale: the name under which bytes per token are learned.

    O(length of the prompt) the first time. From then on the request has the keys, and no longer the canonical prompt; one that
    was parsed by another process has them from the beginning, made with the blocks and the scope of then.
    """
    if (made := api.made) is not None:
        return Prompt(made.keys, made.units, made.block_units, scale if made.scale else "", session, client)
    prompt = api.prompt
    if prompt is None:
        return Prompt(b"", 0, blocks[0], scale, session, client)
    name = seed(api.model, api.salt, *scope)
    if isinstance(prompt, bytes):
        made = Prompt(text_keys(prompt, blocks[0], name), len(prompt), blocks[0], scale, session, client)
    else:
        made = Prompt(token_keys(prompt, blocks[1], name), len(prompt), blocks[1], "", session, client)
    api.made, api.prompt = made, None
    return made


def error_body(error: GatewayError) -> bytes:
    """OpenAI's error shape."""
    return orjson.dumps(error_of(error))


def error_of(error: GatewayError) -> dict[str, dict[str, str | None]]:
    """The same, before it is JSON."""
    kind = "invalid_request_error" if error.fault == "client" else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def model_list(entries: Iterable[bytes]) -> bytes:
    """The answer to GET /v1/models. entries: of models, as JSON."""
    return b'{"object":"list","data":[%b]}' % b",".join(entries)
