"""Adapters (LoRA) that replicas have loaded, and the time that a load takes.

An engine computes a request with an adapter only once that is loaded, in the place of the least recently used one. Engines do
not report idle adapters, so the router remembers its own requests, and the requests of the routers that it follows: a replica
has the `slots` adapters that were used there last. An adapter of an open request counts as loaded, too, so that a burst for it
goes to one replica; it takes no other one's place before a token was seen. So requests that an engine refuses change nothing,
and only the names of `slots` adapters and of open requests are stored. The price of a replica without the adapter includes the
load time. A wrong belief costs one load.

The load time is learned from first tokens of requests whose adapter was to be loaded: the time beyond their prefill at the
replica's rate. Only other requests teach that rate. Each client has an estimate, and their median counts: no single client
moves it for others once there are three.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from router.learning.learned import Median

SLOTS: Final = 8  # of a replica, until its engine reports them
LOAD_S: Final = 0.1, 0.001, 5.0  # initial value, minimum, maximum
MAX_CLIENTS: Final = 16  # the latest


class LoadTime:
    """The learned time of a load. value: in seconds. Operations are O(MAX_CLIENTS log MAX_CLIENTS)."""

    __slots__ = ("_clients", "value")

    def __init__(self) -> None:
        self.value = LOAD_S[0]
        self._clients: OrderedDict[int, Median] = OrderedDict()

    def learn(self, client: int, seconds: float) -> None:
        """A load for this client took so long, as far as its first token shows; an error may make it negative."""
        own = self._clients.get(client)
        if own is None:
            own = self._clients[client] = Median(self.value, LOAD_S[1], LOAD_S[2])
            if len(self._clients) > MAX_CLIENTS:
                self._clients.popitem(last=False)
        else:
            self._clients.move_to_end(client)
        own.learn(seconds, 1.0)
        values = sorted([each.value for each in self._clients.values()])
        self.value = values[(len(values) - 1) // 2]

    def __repr__(self) -> str:
        return f"<LoadTime {self.value:.3g} s by {len(self._clients)} clients>"


class LoadedAdapters:
    """The adapters of one replica (see the module). All operations O(1), but `resize`."""

    __slots__ = ("_open", "_slots", "_used")

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._used: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._open: dict[str, int] = {}  # number of open requests

    def holds(self, name: str) -> bool:
        return name in self._used or name in self._open

    def open(self, name: str) -> None:
        """A request with this adapter was sent."""
        self._open[name] = self._open.get(name, 0) + 1

    def use(self, name: str) -> None:
        """It has its first token, or a good end."""
        self._used[name] = None
        self._used.move_to_end(name)
        self.resize(self._slots)

    def end(self, name: str) -> None:
        """The request is over."""
        if (left := self._open.pop(name, 0) - 1) > 0:
            self._open[name] = left

    def resize(self, slots: int) -> None:
        self._slots = slots
        while len(self._used) > slots:
            self._used.popitem(last=False)

    def lose(self) -> None:
        """Its engine has lost all that it had loaded."""
        self._used.clear()

    @property
    def open_requests(self) -> int:
        return sum(self._open.values())

    def check(self) -> None:
        """Raises AssertionError if a bound is exceeded."""
        assert len(self._used) <= self._slots
        assert all(count > 0 for count in self._open.values())

    def __repr__(self) -> str:
        return f"<LoadedAdapters {', '.join(self._used)} of {self._slots}; {self.open_requests} open requests>"


class Adapters:
    """The adapters of all replicas. Calls for unknown replicas have no effect. load: the time of a load, anywhere."""

    __slots__ = ("_of", "load")

    def __init__(self) -> None:
        self.load = LoadTime()
        self._of: dict[str, LoadedAdapters] = {}

    def add(self, replica: str, slots: int | None) -> None:
        """A replica joined, or the number of its adapters has changed. None: unknown."""
        known = self._of.get(replica)
        if known is None:
            self._of[replica] = LoadedAdapters(slots or SLOTS)
        else:
            known.resize(slots or SLOTS)

    def remove(self, replica: str) -> None:
        self._of.pop(replica, None)

    def load_s(self, replica: str, adapter: str) -> float:
        """The time of the load that a request with this adapter needs there; 0: none."""
        known = self._of.get(replica)
        return 0.0 if known is not None and known.holds(adapter) else self.load.value

    def open(self, replica: str, adapter: str) -> bool:
        """A request with this adapter was sent there. True if it needs a load."""
        known = self._of.get(replica)
        if known is None:
            return False
        loads = not known.holds(adapter)
        known.open(adapter)
        return loads

    def use(self, replica: str, adapter: str) -> None:
        """See `LoadedAdapters.use`."""
        if (known := self._of.get(replica)) is not None:
            known.use(adapter)

    def end(self, replica: str, adapter: str, *, used: bool) -> None:
        """A request is over. used: it had a token."""
        if (known := self._of.get(replica)) is not None:
            known.end(adapter)
            if used:
                known.use(adapter)

    def lose(self, replica: str) -> None:
        """See `LoadedAdapters.lose`."""
        if (known := self._of.get(replica)) is not None:
            known.lose()

    @property
    def open_requests(self) -> int:
        return sum(known.open_requests for known in self._of.values())

    def check(self) -> None:
        for known in self._of.values():
            known.check()

    def __repr__(self) -> str:
        return f"<Adapters {self._of!r}, {self.load!r}>"
