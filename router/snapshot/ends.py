"""Where the prompts of a router end, most recently used first, found one by one while the index goes on changing.

A replica's holds are in order of use, and a walk from the fresh end passes its ends. It can be continued behind the last end
that it has passed, as long as that is where it was: what is used again goes to the fresh end, what is dropped is not there at
all. Then it is continued behind the one passed before that; what was between them has gone, too, or is found again.

So a walk finds each end that is not used meanwhile. What is used meanwhile it may miss: that is at the fresh end, where the
next walk begins. It finds some of them twice, where a hold was dropped and the one above it has become an end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Final

from router.index.holds import Hold
from router.index.trie import RadixTrie

KEPT: Final = 1024  # ends that a walk can go back to; then it begins anew, and passes what it has found


class EvictionEnds:
    """See the top of this file. Of all replicas together."""

    def __init__(self, trie: RadixTrie, replicas: Sequence[str]) -> None:
        self._trie = trie
        self._replicas = replicas

    def walk(self, since: float, until: float = math.inf) -> Iterator[tuple[str, Hold] | None]:
        """(replica, end) for each that was used after `since` and by `until`; None where nothing was found yet. The index may
        change between any two items. O(edges of a path + log replicas) each.
        """
        walks = [_Walk(self._trie, replica, since, until) for replica in self._replicas]
        found: list[tuple[float, int, Hold]] = []  # the next end of each replica
        sought = list(range(len(walks)))  # replicas whose next end is not found yet
        while sought or found:
            if not sought:
                _, number, first = heappop(found)
                sought.append(number)
                yield self._replicas[number], first
                continue
            number = sought[-1]
            end = walks[number].step()
            if end is not None:
                heappush(found, (-end.used, number, end))
            if end is not None or walks[number].over:
                sought.pop()
            if end is None or sought:
                yield None

    def few(self, since: float, most: int) -> list[tuple[str, Hold]] | None:
        """All that were used after `since`, at once; None if there are more than `most`. O(replicas + most edges of paths)."""
        found: list[tuple[str, Hold]] = []
        for replica in self._replicas:
            end = self._trie.next_end(replica, None, since)
            while end is not None:
                if len(found) == most:
                    return None
                found.append((replica, end))
                end = self._trie.next_end(replica, end, since)
        found.sort(key=_staleness)
        return found


class _Walk:
    """Over the ends of one replica. over: there are no more."""

    def __init__(self, trie: RadixTrie, replica: str, since: float, until: float) -> None:
        self.over = False
        self._trie = trie
        self._replica = replica
        self._since = since
        self._reached = until  # when the last end that was found had been used
        self._passed: deque[tuple[Hold, float]] = deque(maxlen=KEPT)  # and when each was used

    def step(self) -> Hold | None:
        """The next end; None: not found yet, or over. O(edges of a path)."""
        after: Hold | None = None
        if self._passed:
            after, used = self._passed[-1]
            if after.used != used or not self._trie.lives(self._replica, after):
                self._passed.pop()
                return None
        end = self._trie.next_end(self._replica, after, self._since)
        if end is None:
            self.over = True
            return None
        self._passed.append((end, end.used))
        if end.used > self._reached:  # it was found before, or is for the next walk
            return None
        self._reached = end.used
        return end


def _staleness(end: tuple[str, Hold]) -> float:
    return -end[1].used
