"""Messages between a gateway process and its parser process, over a socket pair.

    job:     length of the arguments (4 bytes), length of the body (8), arguments, body
    result:  length of the result (4 bytes), result

One job at a time: a job is written, then its result is read. Arguments and results are marshalled tuples of plain values: both
ends are processes of this gateway with the same Python, and no other process has the sockets.
"""

from __future__ import annotations

import marshal
import struct
from typing import Any, Final, NamedTuple

from gateway.dialects.api_request import ApiRequest
from gateway.dialects.diagnosis import Diagnosis, Head
from gateway.dialects.json_edits import Edit
from gateway.dialects.prompt.segments import Packed, packed, unpacked
from gateway.errors import GatewayError
from router import Prompt

JOB: Final = struct.Struct("<IQ")
RESULT: Final = struct.Struct("<I")

PARSE: Final = "parse"  # dialect, block_bytes, block_tokens, scope, aliases, outlined -> the fields of `ParsedBody`
CONTINUE: Final = "continue"  # dialect, text, tokens -> verdict, edits (Continuation.request)
MEMBERS: Final = "members"  # -> spans, end (json_edits.Members)
CUTS: Final = "cuts"  # names -> edits (json_edits.cuts)

DONE: Final = "done"
REFUSED: Final = "refused"  # with a GatewayError for the client
FAILED: Final = "failed"  # a bug, with its traceback


class ParsedBody(NamedTuple):
    """An ApiRequest without its body. edits: of the body. billing, prewarm: edits of the edited body. prompt, breakpoints: the
    fields of a router.Prompt.
    """

    model: str
    salt: str
    stream: bool
    metered: bool
    stores: bool | None
    strip_usage: bool
    countable: bool
    textual: bool
    steers: bool
    harmless: bool
    edits: list[Edit]
    billing: list[Edit]
    prewarm: list[Edit]
    diagnosis: tuple[str, Head, list[Edit]] | None
    session: str
    adapter: str
    alias: str
    refers: str
    references: bool
    keeps: bool
    size: int
    images: int
    answers: int
    output: int
    breakpoints: tuple[tuple[int, int], ...]
    outline: Packed
    prompt: tuple[bytes, int, int, str] | None


def parsed_body(api: ApiRequest) -> ParsedBody:
    """The result of the parser process. api: with its block keys."""
    made, asked = api.made, api.diagnosis
    prompt = (made.keys, made.units, made.block_units, made.scale) if made else None
    return ParsedBody(
        api.model,
        api.salt,
        api.stream,
        api.metered,
        api.stores,
        api.strip_usage,
        api.countable,
        api.textual,
        api.steers,
        api.harmless,
        list(api.edits),
        api.billing,
        api.prewarm,
        (asked.previous, asked.head, asked.edits) if asked else None,
        api.session,
        api.adapter,
        api.alias,
        api.refers,
        api.references,
        api.keeps,
        api.size,
        api.images,
        api.answers,
        api.output,
        made.breakpoints if made else (),
        packed(api.outline),
        prompt,
    )


def request_of(parsed: ParsedBody, body: bytes) -> ApiRequest:
    """The request from the parser process's result. body: with the edits applied."""
    api = ApiRequest(parsed.model, None, parsed.salt, stream=parsed.stream, metered=parsed.metered, body=body)
    api.stores = parsed.stores
    api.strip_usage = parsed.strip_usage
    api.countable = parsed.countable
    api.textual = parsed.textual
    api.harmless, api.steers = parsed.harmless, parsed.steers
    api.billing = parsed.billing
    api.prewarm = parsed.prewarm
    api.diagnosis = Diagnosis(*parsed.diagnosis) if parsed.diagnosis else None
    api.session, api.adapter = parsed.session, parsed.adapter
    api.alias = parsed.alias
    api.refers = parsed.refers
    api.references = parsed.references
    api.keeps = parsed.keeps
    api.size = parsed.size
    api.images = parsed.images
    api.answers, api.output = parsed.answers, parsed.output
    api.outline = unpacked(parsed.outline)
    if parsed.prompt:
        api.made = Prompt(*parsed.prompt)
        api.made.breakpoints = parsed.breakpoints
    return api


def job(arguments: tuple[Any, ...], length: int) -> bytes:
    """A job without its body. length: of the body, in bytes."""
    packed = marshal.dumps(arguments)
    return JOB.pack(len(packed), length) + packed


def result(status: str, *values: Any) -> bytes:
    packed = marshal.dumps((status, *values))
    return RESULT.pack(len(packed)) + packed


def refusal(error: GatewayError) -> bytes:
    return result(REFUSED, error.status, error.code, error.message, error.param)
