"""Learned units of a prompt (bytes of canonical text) per token of an engine, for each model.

A token is between a part of a character and a long word: text has MIN_UNITS to MAX_UNITS bytes per token. Other reported values
are clamped. Values far outside are not about text (an image is a thousand tokens in a few bytes), or wrong, and are ignored.

A client chooses its prompts, and what its engine prints of them; a replica chooses its counts. So each client has an estimate
from each replica. A client's estimate is the median over its replicas, and the scale is the median over the clients, weighted
by tokens up to a bound. The bound is low for replicas, because a wrong one may count more tokens than others. So no single
client and no single replica moves the scale once there are others. Of two, the first one decides; a restored estimate decides
only until a client has shown another one, because another model may have the name now.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from router.learning.learned import Ratio

DEFAULT_UNITS_PER_TOKEN: Final = 4.0  # bytes of canonical text, until an engine reports its count
SCALE_PRIOR_TOKENS: Final = 200.0
SCALE_FULL_TOKENS: Final = 1_000.0  # a shorter prompt counts less than its tokens
SCALE_HALF_LIFE_TOKENS: Final = 20_000.0
MIN_UNITS: Final = 1.0
TEMPLATE_TOKENS: Final = 4096  # that a chat template may add to the text of a request, with descriptions of tools
MAX_UNITS: Final = 16.0
MAX_SCALES: Final = 1024
MAX_CLIENTS: Final = 16  # of a scale: the first one, and the latest
MAX_REPLICAS: Final = 8  # of a client: the first one, and the latest
FULL_WEIGHT: Final = 10_000.0  # tokens of a client
FULL_REPLICA_WEIGHT: Final = 1_000.0  # tokens of a client's replica; the prior counts as some
FIRST_SHARE: Final = 1.5  # the weight of the first client, and of a client's first replica

RESTORED: Final = 0  # the client in whose place another router's estimate stands
RESTORED_SHARE: Final = 0.5


class ClientScale:
    """The scale of one client. value: units per token. tokens: its evidence.

    Operations are O(MAX_REPLICAS log MAX_REPLICAS).
    """

    __slots__ = ("_last", "_replicas", "tokens", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.tokens = 0.0
        self._replicas: OrderedDict[str, Ratio] = OrderedDict()  # the first one stays the first
        self._last: tuple[str, Ratio] | None = None  # the replica of the last observation

    def learn(self, seen: float, weight: float, replica: str) -> None:
        last = self._last
        if last is None or last[0] != replica:
            self._last = last = replica, self._of(replica)
        ratio = last[1]
        ratio.learn(ratio.near(seen) * weight, weight, weight)
        if len(self._replicas) == 1:
            self.value, self.tokens = ratio.value, ratio.sums[1]
            return
        estimates = [(each.value, each.sums[1]) for each in self._replicas.values()]
        self.value = _median(estimates, FULL_REPLICA_WEIGHT)
        self.tokens = max([tokens for _, tokens in estimates])

    def _of(self, replica: str) -> Ratio:
        """The estimate from a replica, as the latest one."""
        ratio = self._replicas.get(replica)
        if ratio is None:
            ratio = self._replicas[replica] = Ratio(self.value, SCALE_PRIOR_TOKENS, SCALE_HALF_LIFE_TOKENS)
            if len(self._replicas) > MAX_REPLICAS:
                _, second, *_ = self._replicas
                del self._replicas[second]
        elif replica != next(iter(self._replicas)):
            self._replicas.move_to_end(replica)
        return ratio

    def forget(self, replica: str) -> None:
        """The replica has left. Its estimate counts no more, but the next replica begins with the present value."""
        self._replicas.pop(replica, None)
        if self._last is not None and self._last[0] == replica:
            self._last = None

    def restore(self, sums: tuple[float, float]) -> None:
        self.value, self.tokens = sums[0] / sums[1], sums[1]


class Scale:
    """The scale of one name. value: units per token. Operations are O(MAX_CLIENTS log MAX_CLIENTS)."""

    __slots__ = ("_clients", "_last", "value")

    def __init__(self) -> None:
        self.value = DEFAULT_UNITS_PER_TOKEN
        self._clients: OrderedDict[int, ClientScale] = OrderedDict()  # the first one stays the first
        self._last: tuple[int, ClientScale] | None = None  # the client of the last observation

    def learn(self, seen: float, weight: float, client: int, replica: str) -> None:
        last = self._last
        if last is None or last[0] != client:
            self._last = last = client, self._of(client)
        own = last[1]
        own.learn(seen, weight, replica)
        clients = self._clients
        if len(clients) == 1:
            self.value = own.value
        else:
            first = RESTORED_SHARE if RESTORED in clients else FIRST_SHARE
            self.value = _median([(each.value, each.tokens) for each in clients.values()], FULL_WEIGHT, first)

    def _of(self, client: int) -> ClientScale:
        """The estimate of a client, as the latest one."""
        own = self._clients.get(client)
        if own is None:
            own = self._clients[client] = ClientScale(self.value)
            if len(self._clients) > MAX_CLIENTS:
                _, second, *_ = self._clients
                del self._clients[second]
        elif client != next(iter(self._clients)):
            self._clients.move_to_end(client)
        return own

    def forget(self, replica: str) -> None:
        for own in self._clients.values():
            own.forget(replica)

    def restore(self, sums: tuple[float, float]) -> None:
        own = self._of(RESTORED)
        own.restore(sums)
        self.value = own.value

    @property
    def sums(self) -> tuple[float, float]:
        """(units, tokens) of an estimate with this value."""
        tokens = max([own.tokens for own in self._clients.values()])
        return self.value * tokens, tokens


def _median(estimates: list[tuple[float, float]], full: float, first: float = FIRST_SHARE) -> float:
    """The median of (value, tokens), weighted by tokens up to `full`. first: a factor of the first one's weight."""
    weighed, share, total = list[tuple[float, float]](), first, 0.0
    for value, tokens in estimates:
        weight = min(tokens, full) * share
        weighed.append((value, weight))
        total += weight
        share = 1.0
    weighed.sort()
    left = total / 2
    for value, weight in weighed:
        left -= weight
        if left <= 0:
            return value
    return weighed[-1][0]


class Scales:
    """The scales of at most MAX_SCALES names. All operations O(1).

    A further name replaces the least recently learned one. While there are MAX_SCALES // 2 names or fewer, only the first
    learning of a name counts for this order.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, Scale] = OrderedDict()

    def units_per_token(self, name: str) -> float:
        """The scale of a name; 1 without a name: a unit is a token."""
        if not name:
            return 1.0
        known = self._known.get(name)
        return known.value if known else DEFAULT_UNITS_PER_TOKEN

    def learn(self, name: str, units: int, tokens: int | None, client: int = 0, replica: str = "") -> None:
        """A replica's engine has counted `tokens` tokens in a client's prompt of `units` units.

        It counts by its tokens, a short prompt by their square, because the template adds most of its tokens. (Without that, 60
        prompts "hi" turned an estimate of 1,700 tokens into 6,300.) An observation is clamped to a factor of two around the
        current value: a prompt may contain an image, and an engine that truncates a prompt counts few tokens of many bytes.
        """
        if not name or not tokens or not MIN_UNITS / 2 <= units / tokens <= MAX_UNITS * 2 or tokens > units + TEMPLATE_TOKENS:
            return
        scale = self._known.get(name)
        if scale is None:
            scale = self._known[name] = Scale()
            if len(self._known) > MAX_SCALES:
                self._known.popitem(last=False)
        elif len(self._known) > MAX_SCALES // 2:
            self._known.move_to_end(name)
        weight = min(tokens * min(1.0, tokens / SCALE_FULL_TOKENS), SCALE_HALF_LIFE_TOKENS)
        plausible = min(max(units / tokens, MIN_UNITS), MAX_UNITS)
        scale.learn(plausible, weight, client, replica)

    def entries(self) -> list[tuple[str, tuple[float, float]]]:
        """(name, sums of units and tokens), for another router's `restore`. O(scales)."""
        return [(name, scale.sums) for name, scale in self._known.items()]

    def restore(self, name: str, sums: tuple[float, float]) -> None:
        """Take over the sums of another router, unless the name was learned here."""
        if name and name not in self._known and len(self._known) < MAX_SCALES:
            scale = self._known[name] = Scale()
            scale.restore(sums)

    def forget(self, replica: str) -> None:
        """A replica has left. O(names and clients)."""
        for scale in self._known.values():
            scale.forget(replica)

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"<Scales of {len(self._known)} names>"
