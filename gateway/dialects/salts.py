"""Cache salts of tenants, for isolated tenants (`routing.isolation`): engines never share a cache between different salts.

Engines that support `cache_salt` (`fleet/engines.py`) read it from the JSON bodies of all dialects, so the salt is added to any
JSON object, even to bodies of unknown dialects.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Final

from gateway.errors import bad_request

_OBJECT: Final = re.compile(rb"[ \t\r\n]*+\{")
# An object in UTF-8, UTF-16 or UTF-32, of either byte order, with or without byte order marks.
_ENCODED_OBJECT: Final = re.compile(rb"(?:[\0 \t\r\n]|\xef\xbb\xbf|\xff\xfe|\xfe\xff)*+\{")
_SPACE: Final = re.compile(rb"[ \t\r\n]*+")


def tenant_salt(tenant: str, salt: str) -> bytes:
    """A cache salt that no other tenant can have, even with a salt of its own. salt: the client's own."""
    name, own = tenant.encode("utf-8", "surrogatepass"), salt.encode("utf-8", "surrogatepass")
    return blake2b(len(name).to_bytes(8, "little") + name + own, digest_size=16).hexdigest().encode("ascii")


def salted(body: bytes, salt: bytes) -> bytes | None:
    """A JSON object with this `cache_salt` as its last member, which overrides a salt of the client.

    None: it is no JSON object in UTF-8. The salt is added even if the prompt was not understood, because an engine may
    understand it.
    """
    return with_member(body, b'"cache_salt":"%b"' % salt)


def with_member(body: bytes, member: bytes) -> bytes | None:
    """A JSON object with this as its last member, which overrides an earlier one of the same name; None: the body is none."""
    span = _members_of(body)
    if span is None:
        return None
    first, last = span
    comma = b"," if _end_of_space(body, first) < last else b""
    return b"".join((memoryview(body)[:last], comma, member, b"}"))


def require_saltable(body: bytes, content_type: str) -> None:
    """Raises GatewayError 400 for a body that an engine may read as JSON although `salted` cannot add a salt.

    Engines in Python also read JSON in UTF-16 and UTF-32, and behind a byte order mark. RFC 8259 allows neither.
    """
    if not body or _members_of(body):
        return
    if _ENCODED_OBJECT.match(body) or "json" in content_type.lower():
        text = (
            "The body must be a JSON object in UTF-8, without a byte order mark, because this gateway isolates tenants "
            "(routing.isolation)."
        )
        raise bad_request(text, code="invalid_json")


def is_object(body: bytes) -> bool:
    """True if `salted` can add a salt to a body. O(1) except for white space."""
    return _members_of(body) is not None


def _members_of(body: bytes) -> tuple[int, int] | None:
    """The offsets of the first member and of the closing brace of a JSON object; None for anything else. Nothing is parsed."""
    begin, last = _OBJECT.match(body), body.rfind(b"}")
    if begin is None or last < begin.end() or _end_of_space(body, last + 1) < len(body):
        return None
    return begin.end(), last


def _end_of_space(body: bytes, at: int) -> int:
    found = _SPACE.match(body, at)
    assert found is not None  # the pattern also matches the empty text
    return found.end()
