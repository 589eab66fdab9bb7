"""The ends of a router's prompts, most recently used first, found one by one while the index changes.

A replica's holds are in order of use, and a walk from the fresh end passes its ends. It can be continued behind the last passed
end, if that end is still at its place: a hold that is used again moves to the fresh end, a dropped hold is gone. Then the walk
is continued behind the previously passed end; holds between the two have gone, too, or are found again.

So a walk finds each end that is not used meanwhile. It may miss ends that are used meanwhile: these are at the fresh end, where
the next walk begins. It finds some ends twice, if a hold was dropped and the hold above it has become an end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Final

from router.index.holds import Hold
from router.index.trie import RadixTrie

KEPT: Final = 1024  # ends to which a walk can go back; beyond them it begins again, and skips the ends found already


class EvictionEnds:
    """The ends of all replicas together (see the module)."""

    def __init__(self, trie: RadixTrie, replicas: Sequence[str]) -> None:
        self._trie = trie
        self._replicas = replicas

    def walk(self, since: float, until: float = math.inf) -> Iterator[tuple[str, Hold] | None]:
        """(replica, end) for each end used after `since` and not after `until`; None if none was found yet. The index may
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
        """All ends used after `since`, at once; None if there are more than `most`. O(replicas + most edges of paths)."""
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
    """A walk over the ends of one replica. over: there are no more."""

    def __init__(self, trie: RadixTrie, replica: str, since: float, until: float) -> None:
        self.over = False
        self._trie = trie
        self._replica = replica
        self._since = since
        self._reached = until  # last use of the last end found
        self._passed: deque[tuple[Hold, float]] = deque(maxlen=KEPT)  # with the time of each use

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
        if end.used > self._reached:  # found before, or left to the next walk
            return None
        self._reached = end.used
        return end


def _staleness(end: tuple[str, Hold]) -> float:
    return -end[1].used
