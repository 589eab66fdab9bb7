"""Decides when a hot prefix gets a further copy: rent or buy.

A widely shared prefix (a long system prompt, a hot document) starts on one replica. Computing it on another is always too
expensive for a single request, even while the holders' queues stay long: the price of a copy is paid once, its use is shared by
all later requests. That is the ski-rental problem. Until there is a copy, every request that waits in a holder's queue while a
replica without a copy is idle pays rent; once the rent of a prefix equals the price of a copy, it is copied. So waiting for
lack of copies never costs more than about the price of the copies.

Waiting for the first computation of the prefix itself is no rent: a copy would have to be computed as long. So several requests
that begin at once with one cold prefix stay together (the steps of a workflow, sub-agents), and it is computed once.

Rent is stored by the key of the prefix's last block. A conversation has another key with each turn, so rent adds up only if
many requests share the same prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_PREFIXES: Final = 1024


class Rents:
    """Rent paid so far, in seconds, for the MAX_PREFIXES prefixes that paid most recently. All operations O(1)."""

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

    def record(self, prefix: bytes, seconds: float | None) -> None:
        """Record rent (`pay`), or with None a copy (`bought`)."""
        if seconds is None:
            self.bought(prefix)
        else:
            self.pay(prefix, seconds)

    def entries(self) -> list[tuple[bytes, float]]:
        """(prefix, seconds), for another router's `pay`. O(prefixes)."""
        return list(self._paid.items())

    def __len__(self) -> int:
        return len(self._paid)

    def __repr__(self) -> str:
        return f"<Rents for {len(self._paid)} prefixes, {sum(self._paid.values()):.3g} s>"
