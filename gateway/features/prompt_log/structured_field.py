"""Dictionaries of structured fields (RFC 9651): the grammar, and the bare items of their members as text. Pure.

Values are not decoded: a reader looks at the members that it knows. O(length).
"""

from __future__ import annotations

import re
from typing import Final

_KEY: Final = r"[a-z*][a-z0-9_\-.*]*+"
_STRING: Final = r'"(?:[ !#-\[\]-~]|\\["\\])*+"'
_NUMBER: Final = r"-?(?:\d{1,12}\.\d{1,3}|\d{1,15})(?![\d.])"
_TOKEN: Final = r"[A-Za-z*][!#$%&'*+\-.^_`|~:/0-9A-Za-z]*+"
_BYTES: Final = r":[A-Za-z0-9+/]*+={0,2}:"
_DISPLAY: Final = r'%"(?:[ !#$&-~]|%[0-9a-f]{2})*+"'
_BARE: Final = rf"(?:{_STRING}|@-?\d{{1,15}}(?![\d.])|{_NUMBER}|\?[01]|{_BYTES}|{_DISPLAY}|{_TOKEN})"
_PARAMETERS: Final = rf"(?:;[ ]*+{_KEY}(?:={_BARE})?)*+"
_ITEM: Final = rf"{_BARE}{_PARAMETERS}"
_LIST: Final = rf"\([ ]*+(?:{_ITEM}(?:[ ]++{_ITEM})*+)?[ ]*+\)"
_MEMBER: Final = re.compile(rf"({_KEY})(?:=(?:({_BARE})|{_LIST}))?{_PARAMETERS}", re.ASCII)
_COMMA: Final = re.compile(r"[ \t]*+,[ \t]*+")
_TRUE: Final = "?1"  # a member without a value
_A_LIST: Final = "()"


def dictionary(field: str) -> dict[str, str] | None:
    """The bare item of each member, as it is written ("()" for a list); None: the field is no dictionary. The last one of equal
    members counts.
    """
    field = field.strip(" ")
    found = dict[str, str]()
    at = 0
    while at < len(field):
        member = _MEMBER.match(field, at)
        if member is None:
            return None
        has_value = field.startswith("=", member.end(1))
        found[member[1]] = (member[2] or _A_LIST) if has_value else _TRUE
        at = member.end()
        if at == len(field):
            break
        comma = _COMMA.match(field, at)
        if comma is None or comma.end() == len(field):
            return None
        at = comma.end()
    return found
