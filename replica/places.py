"""How many requests may wait for the engine.

An answer has a place from the moment its request is let in. The engine does not know of it while its prompt is prepared, nor,
of several to one prompt, until the first of them has its first token: so long it is counted here, by a `Booking`. What waits in
the engine and what is booked are never more than `most`.
"""

from collections.abc import Callable

from replica.fields import ApiError
from replica.stats import MINUTE_S


class Places:
    """`waiting` tells how many wait in the engine, `pace` how many have ended a second lately. All methods O(1)."""

    def __init__(self, waiting: Callable[[], int], most: int, pace: Callable[[], float]) -> None:
        self._waiting, self._most, self._pace = waiting, most, pace
        self._booked = 0

    def __repr__(self) -> str:
        return f"<Places {self._waiting()} waiting, {self._booked} booked, of {self._most}>"

    def check(self, answers: int = 1) -> None:
        """Raises ApiError where there is no place for so many."""
        if answers > self._most:
            message = f"{answers} answers in one request are more than the {self._most} that may wait here: ask for fewer."
            raise ApiError(400, message, "n")
        ahead = self._waiting() + self._booked
        if ahead + answers <= self._most:
            return
        # Who waits now leaves as fast as others have ended lately.
        pace = self._pace()
        seconds = min(MINUTE_S, max(1, round(ahead / pace) if pace else 1))
        message = f"{ahead} requests wait already, and {self._most} may. Try again in {seconds} s, or elsewhere."
        raise ApiError(503, message, code="queue_full", retry_after_s=seconds)

    def book(self, answers: int) -> "Booking":
        """Raises as `check` does."""
        self.check(answers)
        return Booking(self, answers)

    def _count(self, change: int) -> None:
        self._booked += change


class Booking:
    """Places of one request. `close` exactly once."""

    def __init__(self, places: Places, answers: int) -> None:
        self._places, self._left = places, answers
        places._count(answers)

    def begun(self) -> None:
        """The engine knows of one more of them."""
        self._left -= 1
        self._places._count(-1)

    def close(self) -> None:
        self._places._count(-self._left)
        self._left = 0
