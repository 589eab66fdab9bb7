"""Keys as clients send them: `wr-`, the key's id, `-`, 256 random bits. Pure, but for the random bits.

Nothing keeps a key, only its SHA-256. A slow hash would add nothing: there is nothing to guess in 256 random bits. A key is
looked up by its digest, so how long that takes says nothing about which bytes of a guess are right.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Final

PREFIX: Final = "wr-"  # by which scanners of secrets find keys
ID_CHARS: Final = 8
MAX_CHARS: Final = 16_384  # of credentials that are looked at at all: as long as a head may be
_ALPHABET: Final = "abcdefghijkmnpqrstuvwxyz23456789"  # no two of them look alike
_SECRET_BYTES: Final = 32
SHAPE: Final = re.compile(r"wr-[a-z0-9]{8}-[A-Za-z0-9_-]{43}")
ID: Final = re.compile(r"[a-z0-9]{8}")
DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def new_id() -> str:
    return "".join([secrets.choice(_ALPHABET) for _ in range(ID_CHARS)])


def new_key(id_: str) -> str:
    """To be shown once."""
    return f"{PREFIX}{id_}-{secrets.token_urlsafe(_SECRET_BYTES)}"


def digest_of(key: str) -> bytes:
    """O(characters)."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
