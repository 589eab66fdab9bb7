"""The model that a request names outside of a JSON body: in a form with files, or in the query of its path.

    POST /v1/audio/transcriptions    multipart/form-data: a file, and `model` before or behind it
    POST /v1/files?model=NAME        any body

A form is searched for its delimiters, part by part, and only the heads of parts are parsed: nothing is copied, and the position
of a file does not matter. A file may be large, so the search is done in steps of STEP_BYTES. Of several fields `model` the last
one counts, as in engines (which use FastAPI). Bounded: the number of parts, the head of a part, the length of a name.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote_plus

from gateway.dialects.api_request import MAX_MODEL_CHARS

STEP_BYTES: Final = 1 << 18  # bytes per step: 0.2 ms, or 2 ms if all of it looks like delimiters
MAX_PARTS: Final = 1000
MAX_HEAD: Final = 8 << 10  # bytes of a part's head
_MAX_VALUE: Final = 4 * MAX_MODEL_CHARS  # bytes in UTF-8
_FIELD: Final = "model"

_FORM: Final = re.compile(r'[ \t]*multipart/form-data[ \t]*;.*?boundary=(?:"([^"\\]{1,200})"|([^\s;,"]{1,200}))', re.IGNORECASE)
_NAMED: Final = re.compile(
    rb"\r\ncontent-disposition[ \t]*+:[ \t]*+form-data[ \t]*+;"
    rb'[^\r\n]*?\bname=(?-i:"model"|model(?=[ \t]*+(?:;|\r|$)))[^\r\n]*+',
    re.IGNORECASE,
)
_PADDING: Final = re.compile(rb"[ \t]*+(\r\n)?+")


class FormModel:
    """Searches a form for the field `model`: `step` until the search is over. name: "" if there is none."""

    __slots__ = ("_at", "_body", "_delimiter", "_parts", "_step_bytes", "name")

    def __init__(self, body: bytes, boundary: bytes, step_bytes: int = STEP_BYTES) -> None:
        self.name = ""
        self._body = body
        self._delimiter = b"\r\n--" + boundary
        self._parts = 0
        self._step_bytes = step_bytes
        self._at = -1 if body.startswith(self._delimiter[2:]) else 0  # the search's position; -1: begins with a delimiter

    def step(self) -> bool:
        """Search some more. False: the search is over. O(step_bytes)."""
        left, body, delimiter = self._step_bytes, self._body, self._delimiter
        while left > 0:
            until = max(self._at, 0) + left + len(delimiter)
            found = -2 if self._at == -1 else body.find(delimiter, self._at, until)
            if found == -1:
                self._at += left
                return self._at < len(body)
            left -= found - self._at + MAX_HEAD // 8  # each delimiter costs time, too
            self._at = found + len(delimiter)
            self._parts += 1
            if self._parts > MAX_PARTS or not self._part():
                return False
        return True

    def _part(self) -> bool:
        """Read the head behind a delimiter, and the value if this is the field `model`. False: there is no further part."""
        body, begin = self._body, self._at
        padding = _PADDING.match(body, begin)
        if padding is None or not padding[1]:
            return not body.startswith(b"--", begin)  # the last delimiter; anything else is content that begins like one
        end = body.find(b"\r\n\r\n", padding.end() - 2, padding.end() + MAX_HEAD)
        if end < 0:
            return False
        self._at = end + 2  # an empty value is followed by its delimiter at once
        named = _NAMED.search(body, padding.end() - 2, end)
        if named is None or b"filename" in named[0].lower():
            return True
        start = end + 4
        stop = self._end_of(start)
        if stop >= start:
            self._take(start, stop)
        return True

    def _end_of(self, start: int) -> int:
        """The offset behind the value that begins at `start`; -1: it is too long, or has no end."""
        body, delimiter = self._body, self._delimiter
        at, most = start - 2, start + _MAX_VALUE + len(delimiter)
        while (at := body.find(delimiter, at, most)) >= 0:
            behind = at + len(delimiter)
            padding = _PADDING.match(body, behind)
            if body.startswith(b"--", behind) or (padding is not None and padding[1]):
                return at
            at = behind
        return -1

    def _take(self, start: int, end: int) -> None:
        name = self._body[start:end].decode("utf-8", "replace")
        if 0 < len(name) <= MAX_MODEL_CHARS and "\ufffd" not in name:
            self.name = name

    def __repr__(self) -> str:
        return f"<FormModel {self.name!r}, {self._parts} parts>"


def form_model(body: bytes, content_type: str, step_bytes: int = STEP_BYTES) -> FormModel | None:
    """The search for the model in a form; None if the body is no form."""
    found = _FORM.match(content_type) if body else None
    if found is None:
        return None
    return FormModel(body, (found[1] or found[2]).encode("utf-8", "surrogateescape"), step_bytes)


def query_model(target: str) -> str:
    """The last `model` in the query of a request's target; "" if there is none. O(length)."""
    found = ""
    for pair in target.partition("?")[2].split("&"):
        key, equals, value = pair.partition("=")
        if equals and unquote_plus(key) == _FIELD:
            name = unquote_plus(value)
            if 0 < len(name) <= MAX_MODEL_CHARS:
                found = name
    return found
