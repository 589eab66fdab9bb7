"""Heads and frames that other gateways have acknowledged. No contents. Pure.

A key begins with its scope, a digest of the caller and of the other gateway: no caller's head is used for another one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MOST: Final = 65_536


class AcknowledgedHeads:
    """The least recently used ones are forgotten. All operations are O(1). most: maximum number of keys."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._expiries = OrderedDict[bytes, float]()

    def add(self, key: bytes, expires: float) -> None:
        """expires: Unix seconds."""
        self._expiries[key] = expires
        self._expiries.move_to_end(key)
        if len(self._expiries) > self._most:
            self._expiries.popitem(last=False)

    def has(self, key: bytes, now: float) -> bool:
        """True if it is acknowledged, and kept at this time (Unix seconds)."""
        expires = self._expiries.get(key)
        if expires is None:
            return False
        if expires <= now:
            del self._expiries[key]
            return False
        self._expiries.move_to_end(key)
        return True

    def forget(self, key: bytes) -> None:
        self._expiries.pop(key, None)

    def __len__(self) -> int:
        return len(self._expiries)

    def __repr__(self) -> str:
        return f"<AcknowledgedHeads, {len(self)} of {self._most}>"
