"""Rewrites `Location` headers of replicas for clients: a URL of the replica itself becomes a path.

An engine that redirects builds the URL from the `Host` header, which is its internal address: clients cannot reach it and must
not learn it. The path alone leads them back to the gateway. A URL of any other origin is unchanged.

Pure.
"""

from __future__ import annotations

import re
from typing import Final

_ABSOLUTE: Final = re.compile(rb"[ \t]*(?:(https?):)?//(?:[^/?#\\]*@)?([^/?#\\@]*)(.*)", re.IGNORECASE | re.DOTALL)
_AUTHORITY: Final = re.compile(rb"(\[[^\[\]]*\]|[^\[\]:]*)(?::([0-9]{0,5}))?")


def relative(location: bytes, *, tls: bool, netloc: str, path: str) -> bytes:
    """The location for clients. tls, netloc, path: of the replica's base URL. O(length)."""
    found = _ABSOLUTE.fullmatch(location)
    if found is None or not _is_own(found[1], found[2], netloc.encode("ascii"), tls=tls):
        return location
    rest, base = found[3], path.encode("ascii")
    if base and rest.startswith(base) and rest[len(base) : len(base) + 1] in (b"", b"/", b"?", b"#"):
        rest = rest[len(base) :]
    return b"/" + rest.lstrip(b"/\\")  # two leading slashes would name another host


def _is_own(scheme: bytes | None, authority: bytes, netloc: bytes, *, tls: bool) -> bool:
    """True if a URL is the replica's. An engine behind a TLS proxy may use another scheme with the same authority."""
    if authority.lower() == netloc.lower():
        return True
    named_tls = tls if scheme is None else scheme.lower() == b"https"
    own = _host_and_port(netloc, tls=tls)
    return own is not None and _host_and_port(authority, tls=named_tls) == own


def _host_and_port(authority: bytes, *, tls: bool) -> tuple[bytes, int] | None:
    found = _AUTHORITY.fullmatch(authority)
    return (found[1].lower(), int(found[2] or (443 if tls else 80))) if found else None
