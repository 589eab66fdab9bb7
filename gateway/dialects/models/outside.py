"""The model that a request names outside of a JSON body: in a form with files, or in the query of its path.

    POST /v1/audio/transcriptions    multipart/form-data: a file, and `model` before or behind it
    POST /v1/files?model=NAME        any body

A form is searched for its delimiters, part by part, and only the heads of parts are parsed: nothing is copied, and the position
of a file does not matter. A file may be large, so the search is done in steps of STEP_BYTES. Of several fields `model` the last
one counts, as in engines (which use FastAPI). Bounded: the number of parts, the head of a part, the length of a name.

Readers of forms disagree about unusual ones. For callers that may use some models only, a form counts as read if all readers
find the same in it (`plain`): each part has one usual disposition, and one field is called `model`.
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
# The head of a part as clients write it (RFC 7578, section 4.2): one disposition, no folded lines, no encoding.
_LINE: Final = rb"(?:\r\n(?!content-disposition|content-transfer-encoding)[!-9;-~]++:[^\r\n]*+)*+"
_USUAL: Final = re.compile(
    _LINE + rb'\r\ncontent-disposition: ?form-data; ?name="([^"\\\r\n]*+)"'
    rb'(; ?filename="[^"\\\r\n]*+"(?:; ?filename\*=[^;"\s]*+)?+)?+' + _LINE,
    re.IGNORECASE,
)
_USUAL_TYPE: Final = re.compile(r'multipart/form-data; ?boundary=(?:"[^"\\\s]{1,200}"|[^\s;,"]{1,200})', re.IGNORECASE)
_FORMS: Final = ("multipart/", "application/x-www-form-urlencoded")
# Neither a space, a mark or a zero byte of UTF-16 and UTF-32, nor the begin of an object.
_NO_OBJECT: Final = re.compile(rb"[\xef\xbb\xbf\xff\xfe\0 \t\r\n]{0,1024}+[^\xef\xbb\xbf\xff\xfe\0 \t\r\n{]")


class FormModel:
    """Searches a form for the field `model`: `step` until the search is over. name: "" if there is none. plain: all readers
    find the same, as far as it was searched, if its delimiter occurs `delimiters` times.
    """

    __slots__ = ("_at", "_delimiter", "_fields", "_step_bytes", "body", "delimiters", "mark", "name", "plain")

    def __init__(self, body: bytes, boundary: bytes, step_bytes: int = STEP_BYTES) -> None:
        self.name = ""
        self.plain = True
        self.delimiters = 0
        self._fields = 0
        self.body = body
        self.mark = b"--" + boundary
        self._delimiter = b"\r\n" + self.mark
        self._step_bytes = step_bytes
        self._at = -1 if body.startswith(self._delimiter[2:]) else 0  # the search's position; -1: begins with a delimiter

    def step(self) -> bool:
        """Search some more. False: the search is over. O(step_bytes)."""
        left, body, delimiter = self._step_bytes, self.body, self._delimiter
        while left > 0:
            until = max(self._at, 0) + left + len(delimiter)
            found = -2 if self._at == -1 else body.find(delimiter, self._at, until)
            if found == -1:
                self._at += left
                return self._at < len(body)
            left -= found - self._at + MAX_HEAD // 8  # each delimiter costs time, too
            self._at = found + len(delimiter)
            self.delimiters += 1
            if self.delimiters > MAX_PARTS or not self._part():
                return False
        return True

    def _part(self) -> bool:
        """Read the head behind a delimiter, and the value if this is the field `model`. False: there is no further part."""
        body, begin = self.body, self._at
        padding = _PADDING.match(body, begin)
        if padding is None or not padding[1]:
            last = body.startswith(b"--", begin)
            self.plain = self.plain and last
            return not last  # anything else is content that begins like a delimiter
        end = body.find(b"\r\n\r\n", padding.end() - 2, padding.end() + MAX_HEAD)
        if end < 0:
            self.plain = False
            return False
        self.plain = self.plain and padding[0] == b"\r\n"
        self._check_head(padding.end() - 2, end)
        self._at = end + 2  # an empty value is followed by its delimiter at once
        named = _NAMED.search(body, padding.end() - 2, end)
        if named is None or b"filename" in named[0].lower():
            return True
        start = end + 4
        stop = self._end_of(start)
        if stop >= start:
            self._take(start, stop)
        return True

    def _check_head(self, start: int, end: int) -> None:
        """Notes a head that readers may read differently, and a second field `model`."""
        usual = _USUAL.fullmatch(self.body, start, end)
        if usual is None:
            self.plain = False
        elif usual[1].lower() == _FIELD.encode():
            self._fields += 1
            self.plain = self.plain and self._fields == 1 and usual[2] is None

    def _end_of(self, start: int) -> int:
        """The offset behind the value that begins at `start`; -1: it is too long, or has no end."""
        body, delimiter = self.body, self._delimiter
        at, most = start - 2, start + _MAX_VALUE + len(delimiter)
        while (at := body.find(delimiter, at, most)) >= 0:
            behind = at + len(delimiter)
            padding = _PADDING.match(body, behind)
            if body.startswith(b"--", behind) or (padding is not None and padding[1]):
                return at
            at = behind
        return -1

    def _take(self, start: int, end: int) -> None:
        name = self.body[start:end].decode("utf-8", "replace")
        if 0 < len(name) <= MAX_MODEL_CHARS and "\ufffd" not in name:
            self.name = name

    def __repr__(self) -> str:
        return f"<FormModel {self.name!r}, {self.delimiters} delimiters>"


def form_model(body: bytes, content_type: str, step_bytes: int = STEP_BYTES) -> FormModel | None:
    """The search for the model in a form; None if the body is no form."""
    found = _FORM.match(content_type) if body else None
    if found is None:
        return None
    return FormModel(body, (found[1] or found[2]).encode("utf-8", "surrogateescape"), step_bytes)


def is_form(content_type: str) -> bool:
    """True if readers take a body of this type for a form."""
    return content_type.strip().lower().startswith(_FORMS)


def is_usual(content_type: str) -> bool:
    """True if all readers read a body of this type in the same way: a form with one boundary, or no form."""
    return not is_form(content_type) or _USUAL_TYPE.fullmatch(content_type.strip()) is not None


def may_be_object(body: bytes) -> bool:
    """True if an engine may read the body as a JSON object, in any encoding. O(1)."""
    return bool(body) and _NO_OBJECT.match(body) is None


def query_models(target: str) -> list[str]:
    """Each `model` in the query of a request's target. O(length)."""
    found = list[str]()
    for pair in target.partition("?")[2].split("&"):
        key, equals, value = pair.partition("=")
        if equals and unquote_plus(key) == _FIELD:
            name = unquote_plus(value)
            if 0 < len(name) <= MAX_MODEL_CHARS:
                found.append(name)
    return found
