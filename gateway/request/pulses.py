"""Signs of life (pulses) for clients that wait for a stream, so that neither they nor the proxies between give up.

    a stream's request ──► watch ──► `limits.keepalive_s` without a byte ──► the head (200), unless it is sent ──► a pulse
                                          ▲                                                                          │
                                          └──────────────────────────────────────────────────────────────────────────┘
    its end ──► forget

A pulse is a comment with the cause of the wait, or a ping, by its dialect (`Dialect.pulse`). The bytes of the replica's
stream count as well, its own keep-alives included, and restart the time. Until the answer's first event everything else goes on
as without pulses: the queue, attempts, fallback pools. Only its form differs: an error becomes an event (`replies.py`), and an
answer that is no stream becomes one (`delivery.py`).

A request that waits in a queue gets no head if its slot is expected only after the end of its wait: it gets its 429 now, with
Retry-After, because official clients repeat a request after a status, and not after an event. If the estimate was too low, it
is an event.

Clients in `EVENT_COUNTERS` leave a while after the last event, and comments are none: they get no head before the replica's
first byte, and events as pulses, though the replica may send comments before its first token.

Not while written bytes wait in the gateway, because the client does not read them, and not within an event.

One timer serves all clients of a process. It looks at all of them when the first of them may be due, and at most STEPS times in
`keepalive_s`, so a pulse is late by at most that part of it. If many are due, they get their pulses in turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from gateway.config.live import Live
from gateway.request.client import Audience, ClientReply, ClientRequest
from gateway.request.exchange import Exchange
from gateway.request.phases.replies import Replies

log = logging.getLogger("warmroute.gateway")

STEPS: Final = 16
AT_ONCE: Final = 100  # pulses in one turn of the event loop

# Clients that count events, by the headers that show them: name -> beginning of the value.
# Codex waits for a head without limit, but once it has one, it leaves 300 s after the last event. It ignores unknown events.
EVENT_COUNTERS: Final[Mapping[str, Mapping[str, str]]] = {
    "Codex": {"Originator": "codex", "User-Agent": "codex", "X-Codex-Window-Id": "", "X-Codex-Turn-Metadata": ""},
}


class Pulses:
    """Watches the clients of streams (see the module). clock: monotonic seconds."""

    def __init__(self, live: Live, replies: Replies, audience: Audience, clock: Callable[[], float]) -> None:
        self._live = live
        self._replies = replies
        self._audience = audience
        self._clock = clock
        self._clients: dict[Exchange, StreamClient] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._every_s = 0.0  # `limits.keepalive_s` when the timer was set

    def watch(self, exchange: Exchange) -> None:
        """A request begins to wait: if it is for a stream, `forget` must follow."""
        every_s = self._live.keepalive_s
        if is_pulsed(exchange, every_s):
            self._clients[exchange] = StreamClient(exchange, self._replies, self._audience)
            if self._timer is None:
                self._arm(every_s)
            elif every_s < self._every_s:  # the configuration has changed
                self._timer.cancel()
                self._arm(0.0)

    def forget(self, exchange: Exchange) -> None:
        """The request is over. Idempotent."""
        if self._clients:
            self._clients.pop(exchange, None)

    @property
    def clients(self) -> list[StreamClient]:
        """The watched ones."""
        return list(self._clients.values())

    def _arm(self, delay_s: float) -> None:
        self._every_s = self._live.keepalive_s
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._check)

    def _check(self) -> None:
        """Send the pulses that are due. O(clients)."""
        self._timer = None
        every_s, now = self._live.keepalive_s, self._clock()
        if not (self._clients and every_s):
            return
        soonest, sent = every_s, 0
        for exchange, client in list(self._clients.items()):
            left = client.served_at() + every_s - now
            if left <= 0 and self._pulse(client, now):
                left, sent = every_s, sent + 1
                self._clients[exchange] = self._clients.pop(exchange)  # the next time it comes after all others
                if sent == AT_ONCE:  # others in the next turn
                    self._arm(0.0)
                    return
            soonest = min(soonest, left)
        self._arm(max(soonest, every_s / STEPS))

    def _pulse(self, client: StreamClient, now: float) -> bool:
        try:
            return client.pulse(now)
        except ConnectionError:  # it has just left: its request is cancelled
            return True
        except Exception:  # the outermost handler: a bug must cost only its own pulse
            log.exception("pulse failed")
            return True

    def __repr__(self) -> str:
        return f"<Pulses for {len(self._clients)} clients>"


class StreamClient:
    """The client of a request for a stream. Pulses follow the bytes of the stream, or begin it. begun: reading of the clock."""

    __slots__ = ("_audience", "_counts_events", "_exchange", "_pulsed_at", "_replies", "begun")

    def __init__(self, exchange: Exchange, replies: Replies, audience: Audience) -> None:
        self._exchange = exchange
        self._replies = replies
        self._audience = audience
        self._counts_events: bool | None = None  # read when it is first needed: most requests are over before
        self.begun = self._pulsed_at = exchange.record.begun

    @property
    def pulses(self) -> int:
        """The number of pulses so far."""
        return self._exchange.record.answer.pulses

    @property
    def reads(self) -> bool:
        """False while bytes wait in the gateway for the client to read."""
        reply = self._exchange.delivered.reply
        return reply is None or reply.flows

    @property
    def counts_events(self) -> bool:
        """True for clients of EVENT_COUNTERS."""
        if self._counts_events is None:
            self._counts_events = counts_events(self._exchange.request)
        return self._counts_events

    def served_at(self) -> float:
        """Reading of the clock when it got bytes that it counts, or its request began."""
        delivered = self._exchange.delivered
        if delivered.first_token is None and self.counts_events:  # bytes of the replica may be comments
            return self._pulsed_at
        return max(delivered.sent_at, self._pulsed_at)

    def pulse(self, now: float) -> bool:
        """Send a pulse, if one may follow the bytes sent so far. False: not now; ask again soon. Raises ConnectionError if the
        client has left.
        """
        exchange = self._exchange
        reply = exchange.delivered.reply
        if reply is None:
            if self.counts_events:
                self._pulsed_at = now
                return True
            if exchange.place is not None and exchange.place.refuse_if_hopeless():
                return False
            reply = self._replies.begin_early(exchange)
        elif not (self.reads and self._may_follow(reply)):
            return False
        words = words_of(exchange, now, open_=self._audience.sees_headers(exchange.request))
        reply.write(exchange.dialect.pulse(words, event=self.counts_events))
        exchange.record.answer.pulses += 1
        self._pulsed_at = now
        return True

    def _may_follow(self, reply: ClientReply) -> bool:
        """True if a pulse may follow the bytes sent so far."""
        delivered = self._exchange.delivered
        reader = delivered.reader
        if reader is None:
            return delivered.early
        ended = (reader.done and not reader.holds) or reader.reported is not None
        return reply.begun and not (ended or reader.within_event)

    def __repr__(self) -> str:
        return f"<StreamClient, {self.pulses} pulses>"


def is_pulsed(exchange: Exchange, every_s: float) -> bool:
    """True if the client gets signs of life. every_s: `limits.keepalive_s`."""
    return exchange.api.stream and every_s > 0 and exchange.request.pulses and exchange.dialect.pulsed


def counts_events(request: ClientRequest) -> bool:
    """True for clients of EVENT_COUNTERS."""
    headers = request.headers
    for marks in EVENT_COUNTERS.values():
        for name, begin in marks.items():
            value = headers.get(name)
            if value is not None and value.lower().startswith(begin):
                return True
    return False


def words_of(exchange: Exchange, now: float, *, open_: bool) -> str:
    """The cause of a request's wait, as far as it is known. open_: the client may know how much of its prompt is cached."""
    if exchange.delivered.first_token is not None:
        return "generating"
    if (place := exchange.place) is not None and (found := place.found()):
        number, left_s = found
        return f"queued {ordinal(number) if number else 'behind others'}{_about(left_s)}"
    if not exchange.booked or exchange.booking.lease.closed or exchange.booking.lead is not None:
        return "waiting"
    lease, chosen = exchange.booking.lease, exchange.booking.chosen
    tokens = f"{lease.uncached_tokens:,} tokens" if open_ else f"a prompt of {lease.prompt_tokens:,} tokens"
    left_s = None
    if lease.load.rate.pool.known and chosen.replica == lease.replica:
        left_s = lease.since + chosen.cost.first_token_s - now
    return f"computing {tokens}{_about(left_s)}"


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"


def _about(left_s: float | None) -> str:
    """The expected time, if it is known and not over."""
    if left_s is None or left_s < 1:
        return ""
    return f", about {left_s:.0f} s" if left_s < 90 else f", about {left_s / 60:.0f} min"
