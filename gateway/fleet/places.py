"""Places: how many sequences a replica's engine runs at once, learned from its reports and its first tokens.

An engine takes any number of requests, and serves them in order of arrival: it knows no priorities and no tenants. So while no
replica of a pool has a free place, further requests stay in the pool's queue (`admission/pool_queue.py`), where both count. A
replica has as many places as its engine runs, and some to spare, so that the engine finds the next request at once:

    evidence                                                  places
    a new replica                                             FIRST
    that many streams have their first token                  these, and spare ones
    none waits in the engine, and all places are taken        half as many again, or the running ones, and spare ones
    requests wait there, and no more run than a report ago    the running ones, and spare ones
    there are more sequences than this gateway has sent       unknown: a request that waits here loses its turn there
    no report for STALE_S, or one without figures             unknown

A request is as many sequences as it wants answers (`n`, a batch of prompts), MOST_SEQUENCES at most. It goes as soon as one
place is free, so that no number keeps it waiting, and no place is left empty for it. Sequences that the engine does not count
take no place, unless they wait in line (`router/late.py`). With unknown places requests are sent at once. Wrong figures harm
nobody: a request without a place is not refused, but sent when it has waited for `queue_s`; and what an engine reports changes
the places of its own replica only.

While requests wait for a place, first tokens count every LOOK_S, and engines are asked every ASK_S.
"""

from __future__ import annotations

from typing import Final

FIRST: Final = 8
MOST: Final = 1 << 20
FEW: Final = 4  # sequences more than were sent
STALE_S: Final = 7.0
LOOK_S: Final = 0.02
ASK_S: Final = 0.25
ASKED_AT_ONCE: Final = 16  # engines: each page takes a quarter of a millisecond of the event loop


class Places:
    """The places of one replica. value: their number, MOST: unknown. idle: sequences of ours that its engine did not count:
    idle sessions, requests that are still held back or on their way, answers that have ended. at: time of the last report.
    """

    __slots__ = ("_running", "at", "idle", "value")

    def __init__(self) -> None:
        self.value = MOST
        self.idle = 0
        self.at = float("-inf")
        self._running = -1  # of the last report with waiting requests; -1: none waited

    def learn(self, running: int | None, waiting: int | None, inflight: tuple[int, int], now: float) -> None:
        """Learn from one report. inflight: the least and the most sequences that this gateway had there while it asked."""
        least, most = inflight
        if running is None or waiting is None or running + waiting > most + max(FEW, most // 4):
            self.forget()
            return
        self.at, self.idle = now, max(0, least - running - waiting)
        if self.value == MOST:
            self.value = FIRST
        if waiting == 0:
            self._running = -1
            if most >= self.value <= running + 1:
                self.value = min(max(self.value + self.value // 2, with_spare(running)), MOST - 1)
        elif running > 0:
            if running <= self._running:
                self.value = with_spare(running)
            self._running = running

    def began(self, decoding: int) -> None:
        """So many streams are running: they have their first token. Plain answers show none."""
        if decoding >= self.value - 1:
            self.value = max(self.value, with_spare(decoding))

    def forget(self) -> None:
        self.value, self.idle, self._running = MOST, 0, -1

    def __repr__(self) -> str:
        return f"<Places {'unknown' if self.value == MOST else self.value}>"


def with_spare(running: int) -> int:
    return running + max(2, running // 4)
