"""Keys that are remembered until a time: heads that other gateways have acknowledged, models without logs. Pure."""

from __future__ import annotations

from collections import OrderedDict


class ExpiringKeys:
    """The least recently used ones are forgotten. All operations are O(1). most: maximum number of keys. Times: in seconds."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._expiries = OrderedDict[bytes, float]()

    def add(self, key: bytes, expires: float) -> None:
        self._expiries[key] = expires
        self._expiries.move_to_end(key)
        if len(self._expiries) > self._most:
            self._expiries.popitem(last=False)

    def has(self, key: bytes, now: float) -> bool:
        """True if it was added, and has not expired."""
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
        return f"<ExpiringKeys, {len(self)} of {self._most}>"
