"""Checks of URLs of token issuers and of their keys. Pure."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from gateway.config.addresses import AddressError, is_loopback, parse_base_url, shown

_QUERY = re.compile(r"([\w.~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2}){0,1024}", re.ASCII)
ISSUER_URL: Final = "an https URL (http for this machine only), without credentials"


def issuer_url(url: str) -> str:
    """The checked URL. It must be https, because its content decides which tokens are valid. Raises AddressError."""
    parse_base_url(url)
    if not url.lower().startswith("https://") and not is_loopback(urlsplit(url).hostname or ""):
        raise AddressError(f"{ISSUER_URL} is expected, got {shown(url)}")
    return url


def jwks_url(url: str) -> str:
    """The checked URL, which may have a query or be empty. Raises AddressError."""
    if url:
        base, _, query = url.partition("?")
        issuer_url(base)
        if not _QUERY.fullmatch(query):
            raise AddressError(f"{ISSUER_URL} is expected, got {shown(url)}")
    return url


def host_name(url: str) -> str:
    """The host of a checked URL, as a name for logs."""
    return re.sub(r"[^A-Za-z0-9.-]", "-", urlsplit(url).hostname or "")[:64]
