"""Addresses of name servers. Pure."""

from __future__ import annotations

import ipaddress
import re

from gateway.config.addresses import AddressError, parse_port, shown


def name_server(text: str) -> str:
    """IP:PORT of a name server, the port 53 if none is given. IPv6 with a port: [IP]:PORT. Raises AddressError."""
    bracketed = re.fullmatch(r"\[([^\]]+)\](?::([0-9]{1,5}))?", text)
    host, port = (bracketed[1], bracketed[2]) if bracketed else (text, None)
    if not bracketed and text.count(":") == 1:
        host, _, port = text.partition(":")
    try:
        address = ipaddress.ip_address("" if "%" in host else host)  # c-ares takes no zones
    except ValueError:
        raise AddressError(f"{shown(text)} is not the address of a name server such as 10.96.0.10:53") from None
    number = 53 if port is None else parse_port(port)
    if not number:
        raise AddressError(f"{shown(text)} has no valid port")
    return f"[{address}]:{number}" if address.version == 6 else f"{address}:{number}"
