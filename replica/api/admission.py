"""Bounds on the memory that clients' requests use: requests waiting for the engine, bytes of bodies, and bytes of whole answers
that were not sent yet.

An answer counts as waiting once its request is admitted. The engine does not know of it while its prompt is being prepared,
nor, if a prompt has several answers, until the first of them has its first token: until then an `AdmissionReservation` counts
it here. Requests waiting in the engine and reserved answers are together never more than `limit`.

The texts and values parsed from a body are several times as large. While they exist, a `BodyShare` counts the body's bytes,
from the first received one; once its prompts are tokens, the bytes of the tokens, which may be more. Announced bytes that were
not received do not count: otherwise a few clients that announce large bodies and send nothing could keep all others out.

A whole answer counts while it is sent. If there is no room for another request, the answers that have been sent for more than
PATIENCE_S are dropped, the oldest first, if that makes enough room: otherwise a few clients that read nothing could keep all
others out.
"""

import time
from collections.abc import Callable

from replica.api.stats import MINUTE_S
from replica.api.validation import ApiError

PATIENCE_S = 5.0


def _full(what: str, ahead: int, rate: float) -> ApiError:
    """The error without room. `ahead`: requests to be answered before there is room; `rate`: recent answers per second."""
    seconds = min(MINUTE_S, max(1, round(ahead / rate) if rate else 1))
    message = f"{what} Try again in {seconds} s, or at another replica."
    return ApiError(503, message, code="queue_full", retry_after_s=seconds)


class AdmissionQueue:
    """`waiting`: requests waiting in the engine now; `completion_rate`: recent answers per second. All methods O(1)."""

    def __init__(self, waiting: Callable[[], int], limit: int, completion_rate: Callable[[], float]) -> None:
        self._waiting, self._limit, self._completion_rate = waiting, limit, completion_rate
        self._reserved = 0

    def __repr__(self) -> str:
        return f"<AdmissionQueue {self._waiting()} waiting, {self._reserved} reserved, of {self._limit}>"

    def check(self, answers: int = 1, param: str = "n") -> None:
        """Raises ApiError if there is no room for this number of answers; `param`: the field that sets the number."""
        if answers > self._limit:
            message = f"{answers} answers in one request are more than the {self._limit} that may wait here: ask for fewer."
            raise ApiError(400, message, param)
        ahead = self._waiting() + self._reserved
        if ahead + answers > self._limit:
            raise _full(f"{ahead} requests wait already, and {self._limit} may.", ahead, self._completion_rate())

    def reserve(self, answers: int, param: str = "n") -> "AdmissionReservation":
        """Reserve room for answers. Raises as `check` does."""
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
        """One of its answers was submitted to the engine, which counts it from now on."""
        self._left -= 1
        self._queue._change(-1)

    def close(self) -> None:
        self._queue._change(-self._left)
        self._left = 0


class BodyBudget:
    """The budget of bodies longer than `free`, each of at most `limit`, and of answers. Nothing may begin that would exceed
    `limit` bytes in total, and nothing at all while answers exceed it. All methods O(1), except `check` without room:
    O(answers).
    """

    def __init__(
        self, limit: int, free: int, completion_rate: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: in seconds."""
        self._limit, self._free, self._completion_rate, self._clock = limit, free, completion_rate, clock
        self._held = self._bodies = 0
        self._untaken: dict[BodyShare, tuple[float, Callable[[], object]]] = {}  # answers: start of sending, how to drop them

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
        """The share of one body, to be closed when its request is over."""
        return BodyShare(self)

    def answer(self, size: int, drop: Callable[[], object]) -> "BodyShare":
        """The share of a whole answer, to be closed when it has been sent. `drop` ends the sending."""
        share = BodyShare(self)
        share.take(size)
        if share.counts:
            self._untaken[share] = self._clock(), drop
        return share

    def _missing(self, size: int, held: int) -> int:
        """Bytes missing for a body of this size; 0 or less: there is room for it."""
        return self._held - self._limit + (max(0, size - held) if size > self._free else 0)

    def _make_room(self, size: int, held: int) -> None:
        """Drop the answers that have been sent for longest, if that makes enough room."""
        late = [(share, drop) for share, (since, drop) in self._untaken.items() if self._clock() - since > PATIENCE_S]
        if sum(share.held for share, _ in late) < self._missing(size, held):
            return
        for share, drop in late:
            if self._missing(size, held) <= 0:
                return
            share.close()
            drop()

    def _change(self, size: int, held: int) -> int:
        """The counted bytes of a body that now has this size."""
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
        """Counted bytes."""
        return self._held

    @property
    def counts(self) -> bool:
        return self._held > 0

    def grow(self, size: int) -> None:
        """The body has grown to this size. Raises ApiError if there is no room for it."""
        self._budget.check(size, self._held)
        self.take(size)

    def take(self, size: int) -> None:
        """Count this size, even without room for it."""
        self._held = self._budget._change(size, self._held)

    def keep(self, size: int) -> None:
        """Count this size instead, if the body counts at all, even without room for it."""
        if self.counts:
            self.take(size)

    def close(self) -> None:
        self.take(0)
        self._budget._untaken.pop(self, None)
