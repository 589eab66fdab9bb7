"""The canonical prompt: the input of the engine's chat template as bytes. Its form, and the writing of it for all dialects.

The essential property: a conversation that extends another one in the engine extends it here, byte for byte. So the parts stand
in the order of a template (tools first, then the turns), each turn begins with a separator, and fields that do not enter the
prompt (sampling, limits, ids) are omitted. Two prompts that differ for the engine must differ here, too, or an engine's report
about one would be taken for one about the other. So values keep the order of their keys, because templates print objects in
that order, and the head has every field of the body that shapes the prompt or turns the engine's cache off.

The same conversation has the same canonical prompt in every dialect, because engines make the same prompt of it (checked on
vLLM and llama.cpp: `docs/agents.md`):

    head                        tools as OpenAI's chat writes them, and other fields that shape the prompt (head.py)
    turn, turn, ...             role, content (content.py), further fields: the reasoning, tool calls without ids (calls.py)

Fields that no template prints, or that only some templates print (the reasoning of earlier turns, `documents`, unknown members
of a message), are digests of a fixed length: prompts that differ in them stay different, but their text is no part of the
prompt's length, and no block is credited for it.

A client that types separators into its text only spoils the prediction for its own requests.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
import xxhash

from gateway.dialects.api_request import NeedsHelper
from gateway.dialects.prompt.marks import Marks
from gateway.errors import bad_request

# ASCII separators: file (head parts), group (content parts), record (turns), unit (fields of a turn).
HEAD: Final = b"\x1c"
PART: Final = b"\x1d"
TURN: Final = b"\x1e"
FIELD: Final = b"\x1f"
DIGEST: Final = b"\x1a"

MAX_NAME: Final = 64  # characters of a role or a name that are written

MAX_FILLER: Final = 4 << 20  # bytes of a prompt that stand only for the size of images and files


class CanonicalPrompt:
    """A prompt under construction: `parts`, joined at the end so that a long text is copied once, and `marks` in it. refers:
    the body has ids in place of some of its items. images: number of images. textual: nothing stands only for the size of
    something else (`filled`).

    most: maximum number of parts; beyond it NeedsHelper is raised. 0: no maximum. Fields with many values are counted before
    they are read, so that at most `most` values are read in vain.
    """

    __slots__ = ("_digested", "_filler", "_signs", "images", "inline", "marks", "most", "parts", "refers", "textual")

    def __init__(self, most: int = 0) -> None:
        self.parts = list[bytes]()
        self.inline = most > 0
        self.most = most or 1 << 62
        self.marks = Marks()
        self.refers = False
        self.images = 0
        self.textual = True
        self._filler = 0
        self._digested = 0  # values without a part of their own
        self._signs = 0

    def begin(self, role: str) -> None:
        """Begin a turn of this role; its content follows."""
        self.parts.append(TURN + short(role))
        self.parts.append(FIELD)

    def field(self, name: bytes, value: bytes) -> None:
        """Add a field to the turn. value: JSON."""
        self.parts.append(FIELD + name + b"=" + value)

    def unprinted(self, name: bytes, value: bytes) -> None:
        """Add a field to the turn that few templates print, or none: its digest."""
        self.parts.append(FIELD + name + b"=" + DIGEST + xxhash.xxh3_128_digest(value))

    def require(self, count: int) -> None:
        """Raises NeedsHelper if this many further parts would exceed the maximum."""
        if len(self.parts) + self._digested + count > self.most:
            raise NeedsHelper

    def digests(self, count: int) -> None:
        """This many values were read for one digest; they count as parts."""
        self._digested += count

    def filled(self, digest: bytes, size: int) -> bytes:
        """A digest repeated to a length of `size` bytes, so that blocks, sizes and loads fit the tokens of the image or file.

        size: bytes; at most MAX_FILLER are written in one prompt.
        """
        self.textual = False
        size = min(size, MAX_FILLER - self._filler)
        if size <= len(digest):
            return DIGEST + digest
        self._filler += size
        return DIGEST + digest * (size // len(digest))

    def takes(self, signs: int, limit: int) -> bool:
        """True if JSON within JSON with this many brackets and commas is to be parsed: at most `limit` of them in a prompt."""
        if self._signs + signs > limit:
            return False
        self._signs += signs
        return True

    def breakpoints(self) -> tuple[tuple[int, int], ...]:
        """The places of the marks (`Marks.places`)."""
        return self.marks.places(self.parts)

    def joined(self) -> bytes:
        """The whole prompt. O(its length)."""
        return b"".join(self.parts)

    def __repr__(self) -> str:
        return f"<CanonicalPrompt, {len(self.parts)} parts>"


def short(name: str) -> bytes:
    """A role, or a name: a long one, which no template knows, as its digest."""
    return name.encode() if len(name) <= MAX_NAME else DIGEST + xxhash.xxh3_128_digest(name.encode())


def to_json(value: Any) -> bytes:
    """JSON with the keys in their original order. Raises GatewayError 400 for a value that is nested too deeply."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise bad_request("The body is nested too deeply.", code="invalid_json") from error


def without(part: dict[str, Any], *names: str) -> dict[str, Any]:
    """A copy without the named fields, in the same order. A part may have 100,000 fields: they are not copied one by one."""
    others = part.copy()
    for name in names:
        others.pop(name, None)
    return others
