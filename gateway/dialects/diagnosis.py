"""Where a prompt has left an earlier one: what a client asks, and what is remembered of prompts to answer that.

A dialect whose clients can ask sets `ApiRequest.diagnosis`, and words the answer (`Dialect.compared`). Pure.
"""

from __future__ import annotations

from typing import Final

from gateway.dialects.json_edits import Edit

MAX_KEYS: Final = 1 << 17  # bytes of block keys that are remembered of a prompt
NOTHING: Final = b"null"

Head = tuple[str, ...]
"""Digests of what the dialect compares beside the prompt's blocks, in its order."""


class Diagnosis:
    """What a request asks. previous: the id of an earlier answer, "" where this is the first. edits: of the body, for replicas.
    told: the answer, JSON, once it is known.
    """

    __slots__ = ("edits", "head", "previous", "told")

    def __init__(self, previous: str, head: Head, edits: list[Edit]) -> None:
        self.previous = previous
        self.head = head
        self.edits = edits
        self.told = NOTHING

    def __repr__(self) -> str:
        return f"<Diagnosis after {self.previous!r}>"


class Fingerprint:
    """An earlier prompt. keys: of its first blocks; tokens: of all of it, as far as is known."""

    __slots__ = ("head", "keys", "model", "tokens")

    def __init__(self, model: str, head: Head, keys: bytes, tokens: int) -> None:
        self.model = model
        self.head = head
        self.keys = keys[:MAX_KEYS]
        self.tokens = tokens

    @property
    def size(self) -> int:
        """Bytes, more or less."""
        return len(self.keys) + 500

    def __repr__(self) -> str:
        return f"<Fingerprint of {self.tokens} tokens>"
