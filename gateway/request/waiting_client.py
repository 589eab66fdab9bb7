"""A client that waits for a stream, as `pulses.py` watches it."""

from __future__ import annotations

from router.native import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class WaitingClient:
    """The client of one stream."""

    __slots__ = ()

    def served_at(self) -> float:
        """Reading of the clock when it got bytes last, or its request began."""
        raise NotImplementedError

    def pulse(self, now: float) -> bool:
        """Send a sign of life, if one may follow the bytes sent so far. False: not now; it is to be asked again soon."""
        raise NotImplementedError
