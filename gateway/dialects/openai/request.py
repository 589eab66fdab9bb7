"""OpenAI's request bodies: chat, completions, and bodies of the same form on other paths.

The client's body goes to the replica byte for byte (vendor fields included). One member is added: the wish for usage at the end
of a stream, which metering needs.

Parsing is synchronous. The caller decides how much of it the event loop may do (`most`): beyond that NeedsHelper is raised, and
the same functions run in another process (gateway/parser/).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.dialects.api_request import ApiRequest, NeedsHelper
from gateway.dialects.body import (
    headed_salt,
    json_object,
    model_of,
    named_adapter,
    output_limit,
    salt_of,
    session_of,
    wants_stream,
    whole_number,
)
from gateway.dialects.json_edits import Edit, read_object
from gateway.dialects.prompt.batch import is_batch, sized_prompt
from gateway.dialects.prompt.chat import chat_prompt
from gateway.dialects.steering import steers
from gateway.errors import bad_request

CHAT: Final = "chat"
COMPLETION: Final = "completion"
GUESS: Final = "guess"  # a chat if the body has messages, else a completion: for a dry run, whose path is the same for both

_OPTIONS: Final = "stream_options"
_WANTED: Final = "include_usage"
_ASK_USAGE: Final = b',"stream_options":{"include_usage":true}'
# Fields that make an engine count more prompt tokens than the parsed prompt has, unless they have one of these values.
_COUNTED_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "truncate_prompt_tokens": (None,),
    "truncation": (None, "disabled"),
    "input_ids": (None,),
    "prompt_embeds": (None,),
}
_UNCOUNTED: Final = tuple(_COUNTED_VALUES)
_LIMITS: Final[tuple[str, ...]] = ("max_tokens", "max_completion_tokens", "n_predict")  # llama.cpp prefers its own name
SCANNED_AT_ONCE: Final = 1 << 15  # bytes that the event loop may scan


def parse(kind: str, raw: bytes, most: int = 0) -> ApiRequest:
    """Parse a generation request. Raises GatewayError 400 that names the field and its valid values.

    kind: CHAT, COMPLETION or GUESS. most: maximum number of parts of its prompt; beyond it NeedsHelper is raised. 0: no
    maximum.
    """
    body = json_object(raw)
    model, stream = model_of(body), wants_stream(body)
    prompt: bytes | list[int]
    breakpoints: tuple[tuple[int, int], ...]
    if kind == CHAT or (kind == GUESS and "messages" in body):
        chat = chat_prompt(body, most)
        prompt, salt, breakpoints, size, images = chat.joined(), salt_of(body), chat.breakpoints(), 0, chat.images
        textual = chat.textual
    else:
        breakpoints, images, textual = (), 0, True
        (prompt, size), salt = sized_prompt(body, "prompt", most), headed_salt(body)
    api = ApiRequest(model, prompt, salt, stream=stream, metered=True, body=raw)
    api.countable = _counts_prompt(body) and (kind == CHAT or not is_batch(body.get("prompt")))
    api.session, api.breakpoints, api.size, api.images = session_of(body), breakpoints, size, images
    api.output, api.textual, api.steers = output_limit(body, _LIMITS), textual, steers(body)
    api.adapter = named_adapter(body)
    if not api.countable:
        api.answers = _answers(body, kind)
    if stream and not _asks_usage(body):
        if most and _OPTIONS in body and len(raw) > SCANNED_AT_ONCE:
            raise NeedsHelper
        api.strip_usage, api.edits = True, usage_edits(raw, body)
    return api


def _counts_prompt(body: dict[str, Any]) -> bool:
    """True if the engine's count of prompt tokens is about the parsed prompt, by the fields in _COUNTED_VALUES."""
    for name in _UNCOUNTED:  # noqa: SIM110  (called for each request: a generator would take ten times as long)
        if name in body and body[name] not in _COUNTED_VALUES[name]:
            return False
    return True


def _answers(body: dict[str, Any], kind: str) -> int:
    """The number of answers: `n` or `best_of` for each prompt of a batch."""
    each = max(1, whole_number(body.get("n")) or 1, whole_number(body.get("best_of")) or 1)
    return each * len(body["prompt"]) if kind != CHAT and is_batch(body.get("prompt")) else each


def _asks_usage(body: dict[str, Any]) -> bool:
    options = body.get(_OPTIONS)
    return isinstance(options, dict) and options.get(_WANTED) is True


def without_usage(body: bytes) -> bytes:
    """A body without the gateway's wish for usage; unchanged if the client's own options have it. O(length)."""
    at = body.rfind(_ASK_USAGE)
    return body if at < 0 else body[:at] + body[at + len(_ASK_USAGE) :]


def usage_edits(raw: bytes, body: Mapping[str, Any]) -> list[Edit]:
    """The edits that make a body ask for usage."""
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
