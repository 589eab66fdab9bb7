"""Signs of progress of one replica that has requests, and the silence that its work explains. Pure: time is an argument.

A sign is anything that only a computing engine gives: a first token or the good end of an answer, in any worker
(`ReplicaLoad.computed_at`), a further token of a running stream, a change of the engine's own metrics of progress. A byte is
none: servers send keep-alives, refuse bad requests and count tokens while their engine hangs.

The silence of a prefill is explained, with doubt about the estimate: the work may be DOUBT times as much as the router expects,
which is also its own bound for one measurement, and the cache may hold nothing of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from gateway.fleet.engines import Facts
from router.load import Lease, ReplicaLoad

FLOOR_S: Final = 5.0  # a shorter silence shows nothing
FIRST_FLOOR_S: Final = 60.0  # the same before its first answer: engines compile kernels at their first requests
DOUBT: Final = 4.0  # times the expected prefill
DOUBT_CACHED: Final = 2.0  # times the prefill of the whole prompt, if nothing of it is cached
SLOW_RATE: Final = 100.0  # tokens of prefill per second of a replica whose rate is unknown: a small machine without a GPU
FIRST_RATE: Final = 25.0  # the same for its first prompt, without metrics of progress: a check may only wait behind it
MAX_PATIENCE: Final = 64.0  # largest factor of the silence before the next check
LOOKED_AT: Final = 64  # requests of one replica at each look


class ReplicaProgress:
    """The signs of one replica since it has requests. since: time of the last sign, or the begin of its work. patience: factor
    of the explained silence; it grows with each check that the engine has answered without another sign.
    """

    __slots__ = ("_checked", "_facts", "_tokens", "counted_at", "patience", "since")

    def __init__(self, now: float) -> None:
        self.since = now
        self.patience = 1.0
        self.counted_at = float("-inf")  # time of the last page with metrics of progress
        self._facts: Facts | None = None
        self._tokens: Mapping[object, int] = {}
        self._checked = False  # the engine's metrics may next move for the check's own token

    def sign(self, at: float) -> None:
        """The replica has computed something at this time."""
        if at > self.since:
            self.since, self.patience = at, 1.0

    def page(self, facts: Facts, now: float) -> None:
        """The engine's present facts: a new object for each page. O(1)."""
        before = self._facts
        if facts is before:
            return
        self._facts = facts
        if facts.progress:
            self.counted_at = now
            if before is not None and before.progress and facts.progress != before.progress:
                self.since = now
                if not self._checked:
                    self.patience = 1.0
                self._checked = False

    def tokens(self, streams: Mapping[object, int], now: float) -> None:
        """The numbers of tokens of running streams so far, by stream."""
        before, self._tokens = self._tokens, streams
        if any(stream in before and tokens > before[stream] for stream, tokens in streams.items()):
            self.sign(now)

    def checked(self, now: float, *, factor: float) -> None:
        """A check has shown that the engine works, or nothing: the next one follows after a longer silence."""
        self.since, self.patience, self._checked = now, min(MAX_PATIENCE, self.patience * factor), True

    def counts(self, now: float, fresh_s: float) -> bool:
        """True if the engine's own metrics have been read since the last sign, and are not older than fresh_s."""
        return self.counted_at > self.since and now - self.counted_at <= fresh_s

    def __repr__(self) -> str:
        return f"<ReplicaProgress since {self.since:.3f}, patience {self.patience:g}>"


def explained_s(load: ReplicaLoad, leases: Iterable[Lease], *, first: bool, counts: bool) -> float:
    """The longest silence in seconds that the work of a healthy replica explains.

    leases: the requests without a first token, of which LOOKED_AT are enough. first: it has computed nothing yet. counts: its
    own metrics show progress at least once in a prompt; else only the end of the whole queue may be seen.
    """
    rate = load.rate.value if load.rate.pool.known else FIRST_RATE if first and not counts else SLOW_RATE
    works = [max(DOUBT * lease.uncached_tokens, DOUBT_CACHED * lease.prompt_tokens) for lease in leases]
    work = max(works, default=0.0) if counts else sum(works)
    return (FIRST_FLOOR_S if first else FLOOR_S) + work / rate
