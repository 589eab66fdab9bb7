"""OpenAI's request bodies: chat, completions, and whatever of a body on another path reads like one of them.

What a client sends goes to the replica as it came, byte for byte (vendor fields included); the one thing that is added is the
wish for usage at the end of a stream, because without it nothing could be metered.

Parsing is synchronous. How much of it the event loop may do at once is for the caller to decide (`most`): beyond that
NeedsHelper is raised, and the same functions run in another process (gateway/parser/).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.dialects.api_request import MAX_MODEL_CHARS, ApiRequest, NeedsHelper
from gateway.dialects.canonical import chat_prompt, completion_prompt, head_digest, is_batch, short_digest
from gateway.dialects.json_edits import Edit, read_object
from gateway.errors import bad_request

CHAT: Final = "chat"
COMPLETION: Final = "completion"
GUESS: Final = "guess"  # a chat if it has messages, else a completion: for a dry run, whose path does not show which

_OPTIONS: Final = "stream_options"
_WANTED: Final = "include_usage"
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
MAX_SALT_CHARS: Final = 64  # a longer one is replaced by its digest
_SEPARATOR: Final = "\x1c"  # before the digest of a salt, and between a salt and the digest of a prompt's head
SCANNED_AT_ONCE: Final = 1 << 15  # bytes that may be scanned in the event loop


def parse(kind: str, raw: bytes, most: int = 0) -> ApiRequest:
    """Parse a generation request. Raises GatewayError 400 that names the field and says what it should be.

    kind: CHAT, COMPLETION or GUESS. most: how many parts its prompt may have, or NeedsHelper is raised; 0: any number.
    """
    body = _json_object(raw)
    model = body.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MAX_MODEL_CHARS:
        raise bad_request("'model' is required and must be a string: the name of a model that GET /v1/models lists.", "model")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise bad_request("'stream' must be true or false.", "stream")
    prompt: bytes | list[int]
    if kind == CHAT or (kind == GUESS and "messages" in body):
        prompt, salt = chat_prompt(body, most), salt_of(body)
    else:
        prompt, salt = completion_prompt(body, "prompt"), headed_salt(body)
    api = ApiRequest(model, prompt, salt, stream=bool(stream), metered=True, body=raw)
    api.countable = _counts_prompt(body) and (kind == CHAT or not is_batch(body.get("prompt")))
    if stream and not _asks_usage(body):
        if most and _OPTIONS in body and len(raw) > SCANNED_AT_ONCE:
            raise NeedsHelper
        api.strip_usage, api.edits = True, usage_edits(raw, body)
    return api


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON in UTF-8: {error}.", code="invalid_json") from error
    if not isinstance(body, dict):
        raise bad_request("The body must be a JSON object.", code="invalid_json")
    return body


def _counts_prompt(body: dict[str, Any]) -> bool:
    """Whether the engine's count of prompt tokens is about the prompt that we read, by the fields in _COUNTED_VALUES."""
    for name in _UNCOUNTED:  # noqa: SIM110  (every request comes here: a generator would cost ten times as much)
        if name in body and body[name] not in _COUNTED_VALUES[name]:
            return False
    return True


def salt_of(body: Mapping[str, Any]) -> str:
    """The cache salt, of bounded length; "": there is none."""
    salt = body.get("cache_salt")
    if not isinstance(salt, str):
        return ""
    return salt if len(salt) <= MAX_SALT_CHARS and _SEPARATOR not in salt else digested(salt.encode())


def digested(data: bytes) -> str:
    """The digest of a salt, in a form that no salt can have by itself."""
    return f"{_SEPARATOR}digest:{short_digest(data)}"


def headed_salt(body: Mapping[str, Any]) -> str:
    """The salt of a prompt that has no head of its own: the fields that belong into one are in it."""
    head = head_digest(body)
    return f"{salt_of(body)}{_SEPARATOR}{head}" if head else salt_of(body)


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
