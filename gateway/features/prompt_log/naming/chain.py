"""The hash chain: names of frames and of logs (version prompt-log/1).

    frame   pf1_ + base64url(SHA-256("prompt-log/1 frame\\n" + JCS(frame)))
    h(0)    SHA-256("prompt-log/1 log\\n")
    h(i)    SHA-256("prompt-log/1 log\\n" + h(i-1) + SHA-256("prompt-log/1 entry\\n" + JCS(entry i)))
    head    pl1_ + base64url(h(n))

A chain has 32 bytes at any length. Pure.
"""

from __future__ import annotations

import base64
import binascii
from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any, Final

from gateway.dialects.log_names import HEAD
from gateway.features.prompt_log.naming.canonical import NoNameError, canonical

_LOG: Final = b"prompt-log/1 log\n"
_ENTRY: Final = b"prompt-log/1 entry\n"
_FRAME: Final = b"prompt-log/1 frame\n"
EMPTY: Final = sha256(_LOG).digest()
DIGEST: Final = len(EMPTY)  # bytes


def digest_of(entry: dict[str, Any]) -> bytes:
    """Raises NoNameError."""
    return sha256(_ENTRY + canonical(entry)).digest()


def digests_of(entries: Iterable[dict[str, Any]]) -> bytes:
    """The digests of entries, DIGEST bytes each. Raises NoNameError."""
    digests = list[bytes]()
    for index, entry in enumerate(entries):
        try:
            digests.append(digest_of(entry))
        except NoNameError as error:
            raise NoNameError(f"in entry {index + 1}, {error.reason}", error.param) from None
    return b"".join(digests)


def chain_of(entries: Iterable[dict[str, Any]], base: bytes = EMPTY) -> Iterator[bytes]:
    """Yields the chain after each entry. base: the chain before them. Raises NoNameError."""
    return chains_of(digests_of(entries), base)


def linked(chain: bytes, digest: bytes) -> bytes:
    """The chain after an entry with this digest."""
    return sha256(_LOG + chain + digest).digest()


def chains_of(digests: bytes, base: bytes = EMPTY) -> Iterator[bytes]:
    """Yields the chain after each entry. digests: of the entries, DIGEST bytes each."""
    for at in range(0, len(digests), DIGEST):
        base = linked(base, digests[at : at + DIGEST])
        yield base


def extended(base: bytes, entries: Iterable[dict[str, Any]]) -> bytes:
    """The chain after all entries. Raises NoNameError."""
    last = deque(chain_of(entries, base), maxlen=1)
    return last[0] if last else base


def frame_name(frame: dict[str, Any]) -> str:
    """Raises NoNameError."""
    return f"pf1_{_encoded(sha256(_FRAME + canonical(frame)).digest())}"


def head_name(chain: bytes) -> str:
    """The head of a log with this chain."""
    return f"{HEAD}{_encoded(chain)}"


def chain_named(head: str) -> bytes | None:
    """The chain of a head; None: the text is no head."""
    if not head.startswith(HEAD) or not head.isascii():
        return None
    try:
        chain = base64.urlsafe_b64decode(f"{head.removeprefix(HEAD)}=")
    except binascii.Error:
        return None
    return chain if head_name(chain) == head and len(chain) == len(EMPTY) else None


def _encoded(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).decode("ascii").rstrip("=")
