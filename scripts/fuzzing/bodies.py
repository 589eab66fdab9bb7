"""JSON bodies by shape and size, with the expected outcome of each: for `shapes.py`.

A recipe has: shape, of SHAPES; size: of the JSON, in bytes; pad: bytes of white space in it; coding, of CODINGS; level: of
the compression; alphabet: letters of random text (1: it shrinks to a thousandth); path; stream, options: whether and how it
requests usage; chunked: the transfer coding; seed: of the random values.
"""

from __future__ import annotations

import gzip
import random
import re
import zlib
from collections.abc import Callable, Mapping
from random import Random
from typing import Final, NamedTuple

from gateway.dialects.json_structure import MAX_STRUCTURE
from gateway.server.http.inflate import RATIO, RATIO_FROM
from scripts.fuzzing.stage import Recipe

BODY_MB: Final = 8
LARGEST: Final = BODY_MB << 20

CHAT, COMPLETION, OTHER = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
SERVED, REFUSED, EITHER = "served", "refused", "either"


class Body(NamedTuple):
    """JSON and its expected outcome. signs: brackets and commas outside of strings, where they were counted."""

    raw: bytes
    verdict: str
    signs: int = 0


# -- shapes: the value of a member "x", or of a message's content; (size, alphabet, chance) -> JSON


def _text(size: int, alphabet: int, chance: Random) -> bytes:
    letters = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,[]{}:"[:alphabet]
    return b'"' + bytes(chance.choices(letters, k=size)) + b'"' if alphabet > 1 else b'"' + b"a" * size + b'"'


def _of(item: bytes, between: bytes = b"") -> Callable[[int, int, Random], bytes]:
    """A string of equal items."""
    return lambda size, _alphabet, _chance: b'"' + between.join([item] * (size // len(item + between))) + b'"'


def _list(*items: bytes) -> Callable[[int, int, Random], bytes]:
    """A list of these items by turns."""

    def make(size: int, _alphabet: int, _chance: Random) -> bytes:
        turn = b",".join(items)
        return b"[" + b",".join([turn] * max(1, size // (len(turn) + 1))) + b"]"

    return make


def _nested(opening: bytes, closing: bytes, inside: bytes = b"1") -> Callable[[int, int, Random], bytes]:
    """alphabet: how often it is as deep as it is; beyond 1,000 levels it cannot be parsed."""

    def make(size: int, alphabet: int, _chance: Random) -> bytes:
        depth = min(size // (len(opening) + len(closing)), 900 if alphabet > 1 else 1 << 30)
        one = opening * depth + inside + closing * depth
        return b"[" + b",".join([one] * max(1, size // (len(one) + 1))) + b"]"

    return make


def _members(size: int, alphabet: int, _chance: Random) -> bytes:
    """Members of an object: of different names, or all of a few."""
    count = size // 14
    return b"{" + b",".join(b'"k%08d":1' % (number % alphabet if alphabet < 60 else number) for number in range(count)) + b"}"


def _numbers(size: int, alphabet: int, chance: Random) -> bytes:
    number = bytes([49 + chance.randrange(9)]) + b"7" * min(size, 10 * alphabet)
    return b"[" + b",".join([number] * max(1, size // (len(number) + 1))) + b"]"


_PART: Final = b'{"type":"text","text":"x"}'
_IMAGE: Final = b'{"type":"image_url","image_url":{"url":"data:;base64,' + b"A" * 3000 + b'"}}'
VALUES: Final[Mapping[str, Callable[[int, int, Random], bytes]]] = {
    "text": _text,
    "escapes": _of(b"\\u00e9"),
    "backslashes": _of(b"\\\\"),
    "quotes": _of(b'\\"'),
    "emoji": _of("a😀".encode()),
    "pairs of escapes": _of(b"\\ud83d\\ude00"),
    "signs in a text": _of(b'[{\\"a\\": [1, 2]}, {}], '),
    "lists": _list(b"[]"),
    "objects": _list(b"{}"),
    "strings": _list(b'""'),
    "escaped strings": _list(b'"\\\\"', b'"\\",["'),
    "zeros": _list(b"0"),
    "words": _list(b"null", b"true", b"false"),
    "spaced": _list(b" [ ] ", b"\n{ }\t"),
    "numbers": _numbers,
    "exponents": _list(b"1e300", b"-0.0e-999", b"1E+2"),
    "nested lists": _nested(b"[", b"]"),
    "nested objects": _nested(b'{"a":', b"}"),
    "members": _members,
}
CONTENTS: Final[Mapping[str, Callable[[int, int, Random], bytes]]] = {
    "content": _text,
    "parts": _list(_PART),
    "images": _list(_IMAGE),
    "mixed parts": _list(_PART, _IMAGE, b"{}"),
    "empty parts": _list(b"{}"),
    "marked parts": _list(b'{"type":"text","text":"x","cache_control":{"type":"ephemeral"}}'),
}
_HEAD: Final = b'{"model":"m","messages":['
_MESSAGE: Final = b'{"role":"user","content":"hi"}'


def _messages(size: int, _alphabet: int, _chance: Random) -> bytes:
    return _HEAD + b",".join([_MESSAGE] * max(1, size // (len(_MESSAGE) + 1))) + b"]}"


def _repeated(size: int, _alphabet: int, _chance: Random) -> bytes:
    """The same names again and again: the last one counts."""
    once = b'"messages":[' + _MESSAGE + b'],"stream":false,'
    return b"{" + once * max(1, size // len(once)) + b'"model":"m"}'


def _tools(size: int, _alphabet: int, _chance: Random) -> bytes:
    tool = b'{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"b":{},"a":{}}}}}'
    return _HEAD + _MESSAGE + b'],"tools":[' + b",".join([tool] * max(1, size // len(tool))) + b"]}"


def _tokens(size: int, _alphabet: int, _chance: Random) -> bytes:
    return b'{"model":"m","messages":[' + _MESSAGE + b'],"prompt":[' + b",".join([b"1"] * max(1, size // 2)) + b"]}"


WHOLE: Final[Mapping[str, Callable[[int, int, Random], bytes]]] = {
    "messages": _messages,
    "repeated names": _repeated,
    "tools": _tools,
    "tokens": _tokens,
}
# No JSON objects, or no requests: never served as a generation, at any size.
BROKEN: Final[Mapping[str, Callable[[int], bytes]]] = {
    "open lists": lambda size: b"[" * size,
    "open objects": lambda size: b'{"a":' * (size // 5),
    "open lists in a request": lambda size: _HEAD + _MESSAGE + b'],"x":' + b"[" * size,
    "an open string": lambda size: _HEAD + b'{"role":"user","content":"' + b"a" * size,
    "quotes only": lambda size: b'"' * size,
    "backslashes only": lambda size: b"\\" * size,
    "open escapes": lambda size: b'{"model":"' + b"\\" * size,
    "commas": lambda size: b"{" + b"," * size + b"}",
    "a number": lambda size: b"9" * size,
    "spaces": lambda size: b" " * size,
    "zero bytes": bytes,
    "a list": lambda size: b"[" + b"1," * (size // 2) + b"1]",
    "no UTF-8": lambda size: b'{"model":"m","x":"' + b"\xff" * size + b'"}',
    "UTF-16": lambda size: (_HEAD + _MESSAGE + b"]}").decode().encode("utf-16") + b" \0" * (size // 2),
    "a rest": lambda size: _HEAD + _MESSAGE + b"]}" + b"}" * (size + 1),
    "two objects": lambda size: (_HEAD + _MESSAGE + b"]}\n") * (2 + size // 50),
    "a lone surrogate": lambda size: _HEAD + _MESSAGE + b'],"x":"' + b"\\ud800" * (1 + size // 6) + b'"}',
    "too deep": lambda size: _HEAD + _MESSAGE + b'],"x":' + b"[" * (2000 + size // 2) + b"]" * (2000 + size // 2) + b"}",
    "no number": lambda size: _HEAD + _MESSAGE + b'],"x":[' + b"NaN," * (size // 4) + b"Infinity]}",
    "a long name": lambda size: b'{"model":"' + b"m" * (size + 257) + b'","messages":[' + _MESSAGE + b"]}",
    "a word for messages": lambda size: b'{"model":"m","messages":"' + b"m" * size + b'"}',
}
SHAPES: Final = (*VALUES, *CONTENTS, *WHOLE, *BROKEN)

OPTIONS: Final[Mapping[str, bytes]] = {
    "": b"",
    "none": b',"stream_options":null',
    "empty": b',"stream_options":{}',
    "off": b',"stream_options":{"include_usage":false,"x":[1,{}]}',
    "on": b',"stream_options":{"include_usage":true}',
    "escaped": b',"stream_opt\\u0069ons":{"include_us\\u0061ge":false}',
    "twice": b',"stream_options":{"include_usage":true},"stream_options":{"include_usage":false,"include_usage":null}',
}


# What reads differently when it is parsed and written again.
_AWKWARD: Final = b', "z" : 12345678901234567890123 ,"a":{"z":1.0e2,"a":-0.0},"\\u0061\\/":"\\u00e9"'


def body_of(recipe: Recipe) -> Body:
    """The JSON of a recipe, of its size if its shape can have any length."""
    shape, chance = recipe["shape"], random.Random(recipe["seed"])
    size = max(0, recipe["size"] - recipe["pad"])
    if shape in BROKEN:
        raw = BROKEN[shape](min(size, LARGEST + 10))
        return Body(raw, EITHER if recipe["path"] == OTHER else REFUSED)
    alphabet = recipe["alphabet"]
    if shape in WHOLE:
        raw = WHOLE[shape](size, alphabet, chance)
    elif shape in CONTENTS:
        raw = _HEAD + b'{"role":"user","content":' + CONTENTS[shape](size, alphabet, chance) + b"}]}"
    else:
        raw = _HEAD + _MESSAGE + b'],"x":' + VALUES[shape](size, alphabet, chance) + b"}"
    extra = b',"prompt":"hello","input":"hello"' if shape != "tokens" else b',"input":"hello"'
    if recipe["stream"]:
        extra += _AWKWARD
        extra += b',"stream":true' + OPTIONS[recipe["options"]]
    raw = raw[:-1] + extra + b" " * recipe["pad"] + b"}"
    verdict = SERVED
    if shape == "numbers" and alphabet > 30:  # a number of more than 300 digits is infinite as a float
        verdict = EITHER
    if shape.startswith("nested") and alphabet == 1:
        verdict = EITHER
    return Body(raw, verdict, raw.count(b"{") + raw.count(b"[") + raw.count(b","))


# -- requests


def _deflated(raw: bytes, level: int, bits: int) -> bytes:
    made = zlib.compressobj(level, wbits=bits)
    return made.compress(raw) + made.flush()


def _members_of(raw: bytes, level: int) -> bytes:
    third = len(raw) // 3 + 1
    return b"".join(gzip.compress(raw[at : at + third], level) for at in range(0, len(raw), third))


# name -> (the header's value, the function that encodes the body, whether the result can be decompressed)
CODINGS: Final[Mapping[str, tuple[bytes, Callable[[bytes, int], bytes], str]]] = {
    "": (b"", lambda raw, _: raw, SERVED),
    "identity": (b"identity", lambda raw, _: raw, SERVED),
    "gzip": (b"gzip", gzip.compress, SERVED),
    "x-gzip": (b"X-GZip", gzip.compress, SERVED),
    "members": (b"gzip", _members_of, SERVED),
    "deflate": (b"deflate", lambda raw, level: _deflated(raw, level, 15), SERVED),
    "raw deflate": (b"deflate", lambda raw, level: _deflated(raw, level, -15), SERVED),
    "cut": (b"gzip", lambda raw, level: gzip.compress(raw, level)[:-9], REFUSED),
    "a rest": (b"gzip", lambda raw, level: gzip.compress(raw, level) + b"rest", REFUSED),
    "not compressed": (b"gzip", lambda raw, _: raw, REFUSED),
    "twice": (b"gzip, gzip", lambda raw, level: gzip.compress(gzip.compress(raw, level)), EITHER),
    "unknown": (b"br", lambda raw, _: raw, EITHER),
    "many members": (b"gzip", lambda raw, level: gzip.compress(b"", level) * 3000 + gzip.compress(raw), REFUSED),
}


class Sent(NamedTuple):
    """A request: its bytes, the body as a replica should get it, in which coding it was sent, and what should become of it."""

    data: bytes
    body: Body
    coded: bytes
    verdict: str


def sent_of(recipe: Recipe, number: int) -> Sent:
    """number: goes with the request to the replica."""
    body = body_of(recipe)
    header, code, decodes = CODINGS[recipe["coding"]]
    coded = code(body.raw, recipe["level"])
    head = [b"POST " + recipe["path"].encode() + b" HTTP/1.1", b"Host: h", b"X-Number: %d" % number]
    if header:
        head.append(b"Content-Encoding: " + header)
    head.append(b"Transfer-Encoding: chunked" if recipe["chunked"] else b"Content-Length: %d" % len(coded))
    wire = _chunks(coded) if recipe["chunked"] else coded
    return Sent(b"\r\n".join((*head, b"", b"")) + wire, body, coded, _verdict(recipe, body, len(coded), decodes))


def _chunks(coded: bytes) -> bytes:
    pieces = [coded[at : at + 100_000] for at in range(0, len(coded), 100_000)]
    return b"".join(b"%x\r\n" % len(piece) + piece + b"\r\n" for piece in pieces) + b"0\r\n\r\n"


def _verdict(recipe: Recipe, body: Body, coded: int, decodes: str) -> str:
    size, inflated = len(body.raw), recipe["coding"] not in ("", "identity", "unknown", "twice")
    if decodes == EITHER:
        return EITHER if recipe["path"] == OTHER else REFUSED
    if decodes == REFUSED and (size or recipe["coding"] != "not compressed"):
        return REFUSED
    if size > LARGEST or coded > LARGEST:
        return REFUSED
    if inflated and size > RATIO_FROM and size > RATIO * coded:
        return REFUSED
    if inflated and size > RATIO_FROM and size > RATIO * coded * 0.8:
        return EITHER  # the bound holds for every beginning of the body, too
    if recipe["path"] != OTHER and body.signs > MAX_STRUCTURE:
        return EITHER if "signs" in recipe["shape"] or recipe["alphabet"] > 60 else _beyond(recipe, body)
    return body.verdict


def _beyond(recipe: Recipe, body: Body) -> str:
    """The verdict on a body that may have too many signs outside of strings."""
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", body.raw)
    return REFUSED if sum(map(outside.count, (b"{", b"[", b","))) > MAX_STRUCTURE else body.verdict
