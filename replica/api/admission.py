"""Bounds on what clients can make a replica keep: requests that wait for the engine, the bytes of bodies, and those of whole
answers that have not been taken yet.

An answer counts as waiting from the moment its request is admitted. The engine does not know of it while its prompt is being
prepared, nor, if a prompt has several answers, until the first of them has its first token: until then it is counted here,
by a `AdmissionReservation`. Requests waiting in the engine and reserved answers are together never more than `limit`.

What is made of a body, its texts and values, is some times as large. So long as it is there a `BodyShare` counts its bytes,
from the first one that comes; once its prompts are tokens, the bytes of these, which may be more. What has not come does not
count: else a few clients that announce large bodies and send nothing could keep all others out.

A whole answer counts while it is sent. If there is no room for another request, the clients that have needed more than
PATIENCE_S for theirs lose them, the longest ones first, if that makes enough of it: else a few that take nothing could keep
all others out.
"""

import time
from collections.abc import Callable

from replica.api.stats import MINUTE_S
from replica.api.validation import ApiError

PATIENCE_S = 5.0


def _full(what: str, ahead: int, rate: float) -> ApiError:
    """`ahead`: requests that have to be answered before there is room; `rate`: answers per second lately."""
    seconds = min(MINUTE_S, max(1, round(ahead / rate) if rate else 1))
    message = f"{what} Try again in {seconds} s, or at another replica."
    return ApiError(503, message, code="queue_full", retry_after_s=seconds)


class AdmissionQueue:
    """`waiting`: requests waiting in the engine now; `completion_rate`: answers per second lately. All methods O(1)."""

    def __init__(self, waiting: Callable[[], int], limit: int, completion_rate: Callable[[], float]) -> None:
        self._waiting, self._limit, self._completion_rate = waiting, limit, completion_rate
        self._reserved = 0

    def __repr__(self) -> str:
        return f"<AdmissionQueue {self._waiting()} waiting, {self._reserved} reserved, of {self._limit}>"

    def check(self, answers: int = 1, param: str = "n") -> None:
        """Raises ApiError if there is no room for this number of answers; `param`: the field that asks for so many."""
        if answers > self._limit:
            message = f"{answers} answers in one request are more than the {self._limit} that may wait here: ask for fewer."
            raise ApiError(400, message, param)
        ahead = self._waiting() + self._reserved
        if ahead + answers > self._limit:
            raise _full(f"{ahead} requests wait already, and {self._limit} may.", ahead, self._completion_rate())

    def reserve(self, answers: int, param: str = "n") -> "AdmissionReservation":
        """Raises as `check` does."""
        self.check(answers, param)
        return AdmissionReservation(self, answers)

    def _change(self, change: int) -> None:
        self._reserved += change


class AdmissionReservation:
    """One request's share of the queue. `close` exactly once."""

    def __init__(self, queue: AdmissionQueue, answers: int) -> None:
        self._queue, self._left = queue, answers
        queue._change(answers)

    def submitted(self) -> None:
        """One more of its answers is in the engine, which counts it from now on."""
        self._left -= 1
        self._queue._change(-1)

    def close(self) -> None:
        self._queue._change(-self._left)
        self._left = 0


class BodyBudget:
    """Of bodies longer than `free`, each of which is at most `limit` itself, and of answers: nothing is begun that would make
    them more than `limit` bytes, nor anything, however small, while answers have made them more. All methods O(1), but for
    `check` where there is no room: O(answers)."""

    def __init__(
        self, limit: int, free: int, completion_rate: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: in seconds."""
        self._limit, self._free, self._completion_rate, self._clock = limit, free, completion_rate, clock
        self._held = self._bodies = 0
        self._untaken: dict[BodyShare, tuple[float, Callable[[], object]]] = {}  # answers: since when, how to drop them

    def __repr__(self) -> str:
        return f"<BodyBudget {self._held} bytes of {self._bodies} bodies, of {self._limit}>"

    def check(self, size: int, held: int = 0) -> None:
        """Raises ApiError if there is no room for a body of this size, of which some bytes are `held`."""
        if self._missing(size, held) > 0:
            self._make_room(size, held)
        if self._missing(size, held) > 0:
            what = f"The requests that are being served have {self._held:,} bytes here, and {self._limit:,} may be."
            raise _full(what, self._bodies, self._completion_rate())

    def share(self) -> "BodyShare":
        """Of one body, to be closed when its request is over."""
        return BodyShare(self)

    def answer(self, size: int, drop: Callable[[], object]) -> "BodyShare":
        """Of a whole answer, to be closed when it has been sent. `drop` ends that."""
        share = BodyShare(self)
        share.take(size)
        if share.counts:
            self._untaken[share] = self._clock(), drop
        return share

    def _missing(self, size: int, held: int) -> int:
        """Bytes that are too many for a body of this size; not above 0: there is room for it."""
        return self._held - self._limit + (max(0, size - held) if size > self._free else 0)

    def _make_room(self, size: int, held: int) -> None:
        """Drop the answers that have been sent for longest, if that is enough."""
        late = [(share, drop) for share, (since, drop) in self._untaken.items() if self._clock() - since > PATIENCE_S]
        if sum(share.held for share, _ in late) < self._missing(size, held):
            return
        for share, drop in late:
            if self._missing(size, held) <= 0:
                return
            share.close()
            drop()

    def _change(self, size: int, held: int) -> int:
        """What is held of a body that now has this size."""
        now = size if size > self._free else 0
        self._held += now - held
        self._bodies += (now > 0) - (held > 0)
        return now


class BodyShare:
    """The bytes of one body, or of one answer. `close` at least once."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget, self._held = budget, 0

    @property
    def held(self) -> int:
        """Bytes that count."""
        return self._held

    @property
    def counts(self) -> bool:
        return self._held > 0

    def grow(self, size: int) -> None:
        """The body has this size by now. Raises ApiError if there is no room for it."""
        self._budget.check(size, self._held)
        self.take(size)

    def take(self, size: int) -> None:
        """It has this size, whether there is room for it or not."""
        self._held = self._budget._change(size, self._held)

    def keep(self, size: int) -> None:
        """Of one that counts, this is left, or was made. Whether there is room for it or not."""
        if self.counts:
            self.take(size)

    def close(self) -> None:
        self.take(0)
        self._budget._untaken.pop(self, None)
