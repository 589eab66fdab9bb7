"""Generation and hashing of keys. A key is `wr-`, the key's id, `-`, and 256 random bits.

Only the SHA-256 of a key is stored. A slow hash is unnecessary, because 256 random bits cannot be guessed. Keys are looked up
by digest, so the duration of a look-up reveals nothing about the bytes of a guess.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Final

PREFIX: Final = "wr-"  # lets secret scanners recognize keys
ID_CHARS: Final = 8
MAX_CHARS: Final = 16_384  # longer credentials are rejected unread; equal to the largest request head
_ALPHABET: Final = "abcdefghijkmnpqrstuvwxyz23456789"  # without characters that look alike
_SECRET_BYTES: Final = 32
SHAPE: Final = re.compile(r"wr-[a-z0-9]{8}-[A-Za-z0-9_-]{43}")
ID: Final = re.compile(r"[a-z0-9]{8}")
DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def new_id() -> str:
    return "".join([secrets.choice(_ALPHABET) for _ in range(ID_CHARS)])


def new_key(id_: str) -> str:
    """A new secret for a key id. It is shown once and never stored."""
    return f"{PREFIX}{id_}-{secrets.token_urlsafe(_SECRET_BYTES)}"


def digest_of(key: str) -> bytes:
    """The SHA-256 of a key. O(characters)."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
