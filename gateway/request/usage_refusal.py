"""Recognises servers that refuse the gateway's wish for the usage of a stream (`stream_options`), which they do not know.

Such a server gets the request again without the wish, and later requests at once; the usage of its streams is estimated. Its
error may name the field, or say only that a field is unknown, without the name of any other: then the second answer shows the
cause.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.dialects.json_edits import read_object

MOST_READ: Final = 4096  # bytes of the error
_REFUSED: Final = frozenset([400, 422, 500])
_FAILED: Final = 500  # of servers that do not expect the field: their error has to name it
_MOST_VALUES: Final = 1 << 12
_NAMED: Final = re.compile(rb"stream_options|include_usage")
_UNNAMED: Final = re.compile(
    rb"(?:extra|additional|unexpected|unknown|unrecogni[sz]ed|invalid|unsupported) "
    rb"(?:\w+ )?(?:input|field|key|parameter|propert|argument)|not (?:permitted|allowed|supported)",
    re.IGNORECASE,
)


def may_be(status: int) -> bool:
    """True if an answer with this status may be such a refusal."""
    return status in _REFUSED


def is_refusal(status: int, error: bytes, body: bytes) -> bool:
    """True if the error may be about `stream_options`. error: its first MOST_READ bytes. body: of the request, which is scanned
    if the error names no field.
    """
    if _NAMED.search(error):
        return True
    if status == _FAILED or not _UNNAMED.search(error):
        return False
    try:
        names = read_object(body, most=_MOST_VALUES).spans
    except ValueError:
        return False
    return not any(error.find(name.encode("utf-8", "replace")) >= 0 for name in names)
