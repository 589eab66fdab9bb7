"""Prefixes that engines have computed for a client, at replicas that do not report cached tokens.

For money and limits a predicted cached token costs less than an uncached one. The index predicts from all requests, of other
clients and in flight, too; and a client should not pay less because it has led the index to a belief. So where an engine
reports no cached tokens, a prediction counts only as far as answers that were counted for this client have put it there.

The holders of this trie are pairs of a replica and a client. MAX_HOLDERS of them; the least recently counted is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from router.index.trie import RadixTrie
from router.types import BlockKeys, Prompt

MAX_HOLDERS: Final = 4096
MEMORY_SHARE: Final = 16  # of the index's memory


class PaidPrefixes:
    """The prefixes (see the module). Operations are as the trie's."""

    def __init__(self, ttl_s: float, memory_bytes: int) -> None:
        """memory_bytes: of the index."""
        self.trie = RadixTrie(ttl_s, memory_bytes // MEMORY_SHARE)
        self._holders: OrderedDict[str, None] = OrderedDict()

    def resize(self, memory_bytes: int, step: int = 0) -> bool:
        """See RadixTrie.resize. memory_bytes: of the index."""
        return self.trie.resize(memory_bytes // MEMORY_SHARE, step)

    def add(self, replica: str, prompt: Prompt, keys: BlockKeys, now: float) -> None:
        """An engine has computed these leading blocks of the prompt, and the client was charged for them."""
        holder = _holder(replica, prompt)
        if holder in self._holders:
            self._holders.move_to_end(holder)
        else:
            self._holders[holder] = None
            self.trie.add_replica(holder)
            if len(self._holders) > MAX_HOLDERS:
                self.trie.remove_replica(self._holders.popitem(last=False)[0])
        self.trie.insert(holder, keys, now)

    def remove_replica(self, replica: str) -> None:
        """The replica left. O(holders)."""
        for holder in [holder for holder in self._holders if holder.partition(" ")[2] == replica]:
            del self._holders[holder]
            self.trie.remove_replica(holder)

    def blocks(self, replica: str, prompt: Prompt, now: float) -> int:
        """Leading blocks of the prompt that were computed for its client there."""
        holder = _holder(replica, prompt)
        return self.trie.matched((holder,), prompt.keys, now).get(holder, 0) if holder in self._holders else 0

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken. O(everything)."""
        self.trie.check()
        assert len(self._holders) <= MAX_HOLDERS
        assert set(self.trie.held()) == set(self._holders)

    def __repr__(self) -> str:
        return f"<PaidPrefixes of {len(self._holders)} holders, {self.trie!r}>"


def _holder(replica: str, prompt: Prompt) -> str:
    return f"{prompt.origin:x} {replica}"
