"""The opening handshake of a WebSocket (RFC 6455, section 4.2)."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Final

from gateway.errors import GatewayError, bad_request
from gateway.server.http.request import HttpRequest
from gateway.server.http.request_head import HeaderFields

VERSION: Final = "13"
WRONG_VERSION: Final = 426
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_KEY_BYTES: Final = 16
_CREDENTIALS: Final = "openai-insecure-api-key."  # browser programs send their API key with this prefix; it is not a protocol


def wants_websocket(request: HttpRequest) -> bool:
    if request.method != "GET" or not request.head.http11:
        return False
    fields = request.fields
    tokens = fields.joined("Connection").lower().split(",")
    return (fields.get("Upgrade") or "").lower() == "websocket" and "upgrade" in [token.strip() for token in tokens]


def accept_head(fields: HeaderFields) -> bytes:
    """The response head that accepts a handshake, without extensions. Raises GatewayError 400 or 426."""
    if (fields.get("Sec-WebSocket-Version") or "").strip() != VERSION:
        text = f"The gateway speaks version {VERSION} of the WebSocket protocol."
        raise GatewayError(WRONG_VERSION, "websocket_version", text)
    key = (fields.get("Sec-WebSocket-Key") or "").strip()
    try:
        valid = len(base64.b64decode(key, validate=True)) == _KEY_BYTES
    except (binascii.Error, ValueError):
        valid = False
    if not valid:
        raise bad_request(f"Sec-WebSocket-Key must be {_KEY_BYTES} bytes in base64.")
    accept = base64.b64encode(hashlib.sha1(key.encode("ascii") + _GUID, usedforsecurity=False).digest())
    lines = [b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Accept: " + accept, b"Server: warmroute"]
    offered = [token.strip() for token in fields.joined("Sec-WebSocket-Protocol").split(",")]
    if chosen := next((token for token in offered if _is_token(token)), ""):
        lines.append(b"Sec-WebSocket-Protocol: " + chosen.encode("ascii"))  # a browser fails if none of its protocols is chosen
    return b"HTTP/1.1 101 Switching Protocols\r\n" + b"\r\n".join(lines) + b"\r\n\r\n"


def _is_token(name: str) -> bool:
    plain = name.isascii() and name.replace("-", "").replace(".", "").replace("_", "").isalnum()
    return plain and len(name) <= 100 and not name.startswith(_CREDENTIALS)
