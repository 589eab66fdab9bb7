"""The prefixes that replicas hold, for the router: from their events, with doubt.

A replica's events decide only about that replica. They are believed as long as its answers agree: if it reports far fewer
cached tokens than its events promise to most of its last clients, or far more, they are not used for DOUBT_S. (Another
tokenizer or template than the engine's, events of another process, a publisher that lies.) A client whose bodies have other
tokens at the engine than at its /tokenize is one of them. Of a replica with several ranks, which the gateway cannot address, a
prompt may get any: the mean counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from gateway.features.kv_events.ordering import LIVE
from gateway.features.kv_events.prompt_tokens import KnownTokens
from gateway.features.kv_events.stream import EventStream, Source
from router.residency import HeldPrefix, PromptTokens, Residency

WATCHED: Final = 16  # answers between two verdicts
MAX_CLIENTS: Final = 16  # the latest
KEPT: Final = 0.9  # of the earlier answers of a client, with each new one
LEAST_SHARE: Final = 0.5  # of the larger one of the tokens promised and reported to a client
DOUBT_S: Final = 120.0


class Agreement:
    """Promised and reported cached tokens of a replica's last answers, by client. doubted_until: reading of the clock.
    Operations are O(MAX_CLIENTS).
    """

    __slots__ = ("_answers", "_clients", "doubted_until")

    def __init__(self) -> None:
        self._answers = 0
        self._clients: OrderedDict[int, tuple[float, float]] = OrderedDict()  # tokens (of either, of both), the latest last
        self.doubted_until = float("-inf")

    def learn(self, client: int, promised: int, reported: int, now: float) -> bool:
        """An answer. True if the events are not believed from now on."""
        either, both = max(promised, reported), min(promised, reported)
        if not either:
            return False
        before = self._clients.pop(client, (0.0, 0.0))
        self._clients[client] = KEPT * before[0] + either, KEPT * before[1] + both
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        self._answers += 1
        if self._answers < WATCHED:
            return False
        self._answers = 0
        against = sum(both < LEAST_SHARE * either for either, both in self._clients.values())
        if 2 * against <= len(self._clients):
            return False
        self._clients.clear()
        self.doubted_until = now + DOUBT_S
        return True


class EngineResidency(Residency):
    """See the module. pool_of: the pool of a replica, "" if it has left. told: the answers about the last prompt."""

    def __init__(self, pool_of: Callable[[str], str], clock: Callable[[], float]) -> None:
        self._pool_of, self._clock = pool_of, clock
        self._streams: dict[str, list[EventStream]] = {}
        self._known: Mapping[Source, EventStream] = {}
        self._agreements: dict[str, Agreement] = {}
        self._last: PromptTokens | None = None
        self.told: dict[str, HeldPrefix] = {}

    @property
    def replicas(self) -> Mapping[str, list[EventStream]]:
        """The followed streams, by replica."""
        return self._streams

    def renew(self, streams: Mapping[Source, EventStream]) -> None:
        """Take over the present streams."""
        if streams is self._known:
            return
        self._known = streams
        found: dict[str, list[EventStream]] = {}
        for source, stream in streams.items():
            found.setdefault(source.replica, []).append(stream)
        self._streams = found
        self._agreements = {name: self._agreements.get(name) or Agreement() for name in found}

    def held(self, tokens: PromptTokens, replica: str) -> HeldPrefix | None:
        streams = self._streams.get(replica)
        if streams is None or not isinstance(tokens, KnownTokens) or tokens.pool != self._pool_of(replica):
            return None
        if self.is_doubted(replica):
            return None
        if tokens is not self._last:
            self._last, self.told = tokens, {}
        found = _of_one(streams[0], tokens) if len(streams) == 1 else _of_ranks(streams, tokens)
        if found is not None:
            self.told[replica] = found
        return found

    def is_doubted(self, replica: str) -> bool:
        """True if the replica's answers contradict its events."""
        agreement = self._agreements.get(replica)
        return agreement is not None and agreement.doubted_until > self._clock()

    def answered(self, replica: str, client: int, promised: int, reported: int) -> bool:
        """An answer of a replica. True if its events are not believed from now on."""
        agreement = self._agreements.get(replica)
        return agreement is not None and agreement.learn(client, promised, reported, self._clock())

    def __repr__(self) -> str:
        return f"<EngineResidency of {len(self._streams)} replicas>"


def _of_one(stream: EventStream, tokens: KnownTokens) -> HeldPrefix | None:
    found = stream.holdings.held(tokens)
    if found is None or stream.ordering.state == LIVE or not found.certain:
        return found
    return found._replace(certain=False)  # messages may be missing


def _of_ranks(streams: list[EventStream], tokens: KnownTokens) -> HeldPrefix | None:
    found = [_of_one(stream, tokens) for stream in streams]
    known = [each for each in found if each is not None]
    if not known:
        return None
    cached, saved = sum(each.cached for each in known) // len(streams), sum(each.saved for each in known) // len(streams)
    return HeldPrefix(cached, saved, all(each.certain for each in known) and len(known) == len(streams))
