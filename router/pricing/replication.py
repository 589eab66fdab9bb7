"""When a hot prefix deserves a further copy: rent or buy.

A prefix that everybody shares (a long system prompt, a hot document) begins on one replica. Computing it again on another
always looks too dear for the one request that would pay, however long the holders' queues stay: the price of a copy is paid
once, its use is shared by all later requests. That is the ski-rental problem. Until there is a copy, every request that waits
in a holder's queue while a replica without a copy is idle pays rent; as soon as a prefix has cost as much rent as a copy costs,
it gets the copy. So the waiting for lack of copies never costs more than about what the copies cost.

The rent is kept by the key of the prefix's last block. A conversation moves on to another key with each turn, so that rent
adds up only where many requests end in the same prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_PREFIXES: Final = 1024


class Rents:
    """Seconds waited so far for want of a copy, for the MAX_PREFIXES prefixes that paid last. All operations O(1)."""

    def __init__(self) -> None:
        self._paid: OrderedDict[bytes, float] = OrderedDict()

    def paid(self, prefix: bytes) -> float:
        return self._paid.get(prefix, 0.0)

    def pay(self, prefix: bytes, seconds: float) -> None:
        if seconds <= 0:
            return
        self._paid[prefix] = self._paid.pop(prefix, 0.0) + seconds
        if len(self._paid) > MAX_PREFIXES:
            self._paid.popitem(last=False)

    def bought(self, prefix: bytes) -> None:
        """There is a new copy."""
        self._paid.pop(prefix, None)

    def settle(self, prefix: bytes, seconds: float | None) -> None:
        """Pay, or (None) buy."""
        if seconds is None:
            self.bought(prefix)
        else:
            self.pay(prefix, seconds)

    def __len__(self) -> int:
        return len(self._paid)

    def __repr__(self) -> str:
        return f"<Rents for {len(self._paid)} prefixes, {sum(self._paid.values()):.3g} s>"
