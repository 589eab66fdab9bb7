"""The work of a conversation: the seconds of prefill that one brings to its replica, over all of its requests.

Its mean is the mean work of a request, divided by the share of the requests that begin a conversation. A request whose replica
holds at least half of its prompt is taken for a next turn. So are prompts with a long shared head, so a conversation counts as
at most MOST_REQUESTS requests.
"""

from __future__ import annotations

from typing import Final

MOST_REQUESTS: Final = 32.0
MEMORY: Final = 2000.0  # requests; then all counts are halved
PRIOR: Final = 10.0  # next turns, and beginnings, without work: the value grows from 0, and `returning` falls from 1


class ConversationWork:
    """The work of a conversation of one pool (see the module). value: seconds. request_s: of one request. returning: the share
    of the requests that are next turns.
    """

    __slots__ = ("_begun", "_requests", "_seconds", "request_s", "returning", "value")

    def __init__(self) -> None:
        self._begun = self._seconds = self.value = self.request_s = 0.0
        self._requests = PRIOR
        self.returning = 1.0

    def sent(self, *, begins: bool) -> None:
        """A request was sent. begins: it is no next turn."""
        self._requests += 1.0
        if begins:
            self._begun += 1.0
        if self._requests > MEMORY:
            self._seconds /= 2.0
            self._requests /= 2.0
            self._begun /= 2.0
        self.returning = 1.0 - self._begun / self._requests

    def worked(self, seconds: float) -> None:
        """A request was computed for so long."""
        self._seconds += seconds
        self.request_s = self._seconds / self._requests
        self.value = min(self._seconds / (self._begun + PRIOR), MOST_REQUESTS * self.request_s)

    def __repr__(self) -> str:
        return f"<ConversationWork {self.value:.3g} s>"
