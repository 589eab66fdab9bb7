"""Where a prompt differs from an earlier one: the client's question, and the stored fingerprint of an earlier prompt.

A dialect with such a question sets `ApiRequest.diagnosis`, and writes the answer (`Dialect.compared`). Pure.
"""

from __future__ import annotations

from typing import Final

from gateway.dialects.json_edits import Edit

MAX_KEYS: Final = 1 << 17  # bytes of block keys stored for a prompt
NOTHING: Final = b"null"

Head = tuple[str, ...]
"""Digests of the prompt's head that a dialect compares beside the blocks, in its order."""


class Diagnosis:
    """A request's question. previous: the id of an earlier answer, "" for a first message. edits: of the body, for replicas.
    told: the answer as JSON, once it is known.
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
    """An earlier prompt. keys: of its first blocks. tokens: of the whole prompt, as far as they are known."""

    __slots__ = ("head", "keys", "model", "tokens")

    def __init__(self, model: str, head: Head, keys: bytes, tokens: int) -> None:
        self.model = model
        self.head = head
        self.keys = keys[:MAX_KEYS]
        self.tokens = tokens

    @property
    def size(self) -> int:
        """Approximate memory, in bytes."""
        return len(self.keys) + 500

    def __repr__(self) -> str:
        return f"<Fingerprint of {self.tokens} tokens>"
