"""A bound on the number of requests that wait for the engine.

An answer counts as waiting from the moment its request is admitted. The engine does not know of it while its prompt is being
prepared, nor, if a prompt has several answers, until the first of them has its first token: until then it is counted here,
by a `Reservation`. Requests waiting in the engine and reserved answers are together never more than `limit`.
"""

from collections.abc import Callable

from replica.api.stats import MINUTE_S
from replica.api.validation import ApiError


class AdmissionQueue:
    """`waiting`: requests waiting in the engine now; `completion_rate`: answers per second lately. All methods O(1)."""

    def __init__(self, waiting: Callable[[], int], limit: int, completion_rate: Callable[[], float]) -> None:
        self._waiting, self._limit, self._completion_rate = waiting, limit, completion_rate
        self._reserved = 0

    def __repr__(self) -> str:
        return f"<AdmissionQueue {self._waiting()} waiting, {self._reserved} reserved, of {self._limit}>"

    def check(self, answers: int = 1) -> None:
        """Raises ApiError if there is no room for this number of answers."""
        if answers > self._limit:
            message = f"{answers} answers in one request are more than the {self._limit} that may wait here: ask for fewer."
            raise ApiError(400, message, "n")
        ahead = self._waiting() + self._reserved
        if ahead + answers <= self._limit:
            return
        rate = self._completion_rate()
        seconds = min(MINUTE_S, max(1, round(ahead / rate) if rate else 1))
        message = f"{ahead} requests wait already, and {self._limit} may. Try again in {seconds} s, or at another replica."
        raise ApiError(503, message, code="queue_full", retry_after_s=seconds)

    def reserve(self, answers: int) -> "Reservation":
        """Raises as `check` does."""
        self.check(answers)
        return Reservation(self, answers)

    def _change(self, change: int) -> None:
        self._reserved += change


class Reservation:
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
