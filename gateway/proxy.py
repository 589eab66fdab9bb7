"""One request's life: choose, send, fail over, pass the answer on, close the lease, meter, log.

    read -> parse -> choose ──► attempt ──► first byte ──► bytes to the client ──► close, meter, log
                        ▲          │ fails before its first byte
                        └── move ◄─┘ to the best of the others

Nothing goes to the client before the first byte of the replica's answer is here (the whole answer, if it is not a stream),
so an attempt that fails until then is invisible: the lease moves on. After that an error can only be told inside the stream.
The lease is closed in one `finally`, whatever happens, the client's leaving included (its handler is cancelled).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import orjson
from aiohttp import web

from gateway.api import openai
from gateway.config import RoutingConfig
from gateway.drain import Drain
from gateway.errors import GatewayError, ReplicaFailure, shutting_down
from gateway.metering import Meter, Usage, parse_usage
from gateway.metrics import Metrics
from gateway.record import Record
from gateway.relay import Attempt, Call, Headers, Relay, answer_headers, request_headers
from gateway.replicas import Fleet, Target
from gateway.reply import Reply
from gateway.tap import StreamTap
from router import Booking, Candidate, Outcome, Prompt, Router, seed, text_keys, token_keys

# Attempts that reached a replica. A prompt that kills its engine must not walk through the whole fleet; refused
# connections do not count, they cannot be the prompt's fault.
MAX_REACHED = 3

MAX_PLAIN_ANSWER = 256 << 20  # bytes; a plain answer is read whole before it goes on

_OVERLOADED = 429
_EVENT_STREAM = "text/event-stream"


@dataclass(slots=True)
class Exchange:
    """What one request carries along: its parsed form, where it may go, its booking and the record of what happened."""

    request: web.Request
    api: openai.ApiRequest
    target: Target
    booking: Booking
    record: Record
    reply: Reply | None = None
    body: bytes = b""  # of a plain answer, read whole
    complete: bool = False  # the answer was good and went out whole


@dataclass(slots=True, eq=False, kw_only=True)
class Proxy:
    """Forwards requests. `clock` is monotonic seconds, the same for the router and for all durations."""

    routing: RoutingConfig
    fleet: Fleet
    router: Router
    relay: Relay
    meter: Meter
    metrics: Metrics
    drain: Drain
    patience_s: float  # how long a client may leave an answer unread
    clock: Callable[[], float]

    def prompt(self, api: openai.ApiRequest, headers: Mapping[str, str]) -> Prompt:
        """A request's prompt for the router, seeded so that models and cache salts never match each other."""
        routing, name, session = self.routing, seed(api.model, api.salt), _session(headers)
        if api.prompt is None:
            return Prompt(b"", 0, routing.block_bytes, api.model, session)
        if isinstance(api.prompt, bytes):
            keys = text_keys(api.prompt, routing.block_bytes, name)
            return Prompt(keys, len(api.prompt), routing.block_bytes, api.model, session)
        keys = token_keys(api.prompt, routing.block_tokens, name)
        return Prompt(keys, len(api.prompt), routing.block_tokens, "", session)

    async def forward(self, request: web.Request, api: openai.ApiRequest, record: Record) -> Reply:
        """Answer a parsed request from a replica. Raises GatewayError when none could answer."""
        record.model = api.model
        target = self.fleet.target(api.model)
        record.label = target.label
        target.require()
        exchange = Exchange(request, api, target, self._choose(request, api, target, record), record)
        ok = False
        try:
            attempt = await self._first_answer(exchange)
            try:
                answer = await self._pass_on(exchange, attempt)
            finally:
                attempt.close()
            ok = exchange.complete = attempt.status < 400 and not record.error
            return answer
        except (asyncio.CancelledError, ConnectionError):
            # The client left. What the replica has prefilled by then it does hold.
            ok = exchange.booking.lease.decoding
            raise
        finally:
            self._close(exchange, ok)

    def _choose(self, request: web.Request, api: openai.ApiRequest, target: Target, record: Record) -> Booking:
        begun = self.clock()
        prompt = self.prompt(api, request.headers)
        booking = self.router.choose(prompt, target.replicas, begun, silent=not (api.metered and api.stream))
        decision = booking.decision
        self.metrics.routing_seconds.observe(self.clock() - begun)
        self.metrics.routing.labels(self.router.policy_name, decision.reason).inc()
        record.reason = decision.reason
        record.estimated_prompt_tokens = decision.prompt_tokens
        return booking

    # -- until the first byte

    async def _first_answer(self, exchange: Exchange) -> Attempt:
        """The first attempt that gives an answer, on the best candidate, then on the next. Raises GatewayError if none does."""
        call = Call(
            exchange.request.method,
            _path(exchange.request),
            request_headers(exchange.request.raw_headers, exchange.record.id),
            exchange.api.body,
            exchange.api.repeatable or exchange.request.method != "POST",
        )
        reached, refusal = 0, None
        for candidate in self._candidates(exchange):
            if refusal:
                refusal.close()
                refusal = None
            try:
                attempt = await self._try(exchange, candidate, call)
            except ReplicaFailure as failure:
                self.fleet.failed(candidate.replica, failure)
                reached += failure.reached
                exchange.record.attempt_failed(candidate.replica, failure.reason, failure.message)
            else:
                if attempt.status < 500 and attempt.status != _OVERLOADED:
                    return attempt
                refusal = attempt
                reached += 1
                exchange.record.attempt_failed(candidate.replica, "status", f"answered {attempt.status}")
            if reached >= (MAX_REACHED if call.repeatable else 1):
                break
        if refusal:
            return refusal  # every replica refused: the client hears the last one's own words
        failures = "; ".join(f"{attempt['replica']}: {attempt['error']}" for attempt in exchange.record.failed_attempts)
        raise GatewayError(502, "replica_failed", f"No replica could answer ({failures}). Retry; see /warmroute/replicas.")

    def _candidates(self, exchange: Exchange) -> Iterator[Candidate]:
        """The chosen replica, then the best of the others that are up, each once; taking the next one moves the lease to it."""
        booking, untried = exchange.booking, dict(exchange.target.replicas)
        while True:
            exchange.record.chose(booking.chosen)
            yield booking.chosen
            del untried[booking.chosen.replica]
            live = [name for name, state in untried.items() if state.up]
            if not live:
                return
            self.metrics.retries.labels(exchange.record.failed_attempts[-1]["reason"]).inc()
            booking.move(live, self.clock())

    async def _try(self, exchange: Exchange, candidate: Candidate, call: Call) -> Attempt:
        """One attempt on one replica, up to its first byte (its whole body, if it is a plain answer to a generation)."""
        api = exchange.api
        attempt = await self.relay.open(exchange.target.replicas[candidate.replica].config.url, call)
        if not api.metered or attempt.status != 200:
            return attempt
        try:
            if attempt.content_type == _EVENT_STREAM and api.stream:
                if attempt.empty:
                    raise ReplicaFailure("garbage", "the stream is empty")
                return attempt
            exchange.body = await attempt.read(MAX_PLAIN_ANSWER)
            exchange.record.usage = _usage_of(exchange.body)
        except BaseException:
            attempt.close()
            raise
        return attempt

    # -- from the first byte on

    async def _pass_on(self, exchange: Exchange, attempt: Attempt) -> Reply:
        record = exchange.record
        headers = answer_headers(attempt.head)
        headers += (
            (b"X-Request-Id", record.id.encode("ascii")),
            (b"X-Warmroute-Replica", exchange.booking.chosen.replica.encode("ascii")),
            (b"X-Warmroute-Cached-Tokens", b"%d" % exchange.booking.chosen.matched_tokens),
        )
        record.status = attempt.status
        exchange.reply = reply = Reply(exchange.request, keep_alive=not self.drain.draining, patience_s=self.patience_s)
        if attempt.content_type == _EVENT_STREAM:
            await self._stream(exchange, attempt, reply, headers)
        elif exchange.body:
            reply.begin(attempt.status, headers, length=len(exchange.body), first=exchange.body)
            record.last_byte = self.clock()
        else:
            await self._copy(exchange, attempt, reply, headers)
        return reply

    async def _stream(self, exchange: Exchange, attempt: Attempt, reply: Reply, headers: Headers) -> None:
        """The events to the client as they come."""
        record, clock = exchange.record, self.clock
        tap = StreamTap(exchange.api.strip_usage)
        if not any(name == b"cache-control" for name, _ in headers):
            headers.append((b"Cache-Control", b"no-cache"))
        headers.append((b"X-Accel-Buffering", b"no"))  # nginx in front must not hold chunks back
        record.last_byte = clock()
        if exchange.api.metered and attempt.status == 200:
            record.first_byte = record.last_byte
            exchange.booking.first_token(record.last_byte)

        def sink(data: bytes) -> None:
            reply.write(tap.feed(data))
            record.last_byte = clock()

        try:
            reply.begin(attempt.status, headers, length=None, first=tap.feed(attempt.take()))
            reply.feed_from(attempt)
            await attempt.pump(sink)
            if exchange.api.metered and attempt.status == 200 and not tap.done:
                raise ReplicaFailure("reset", "the stream ended without [DONE]")
            reply.end(tap.finish())
        except ReplicaFailure as failure:
            self._cut(exchange, reply, self._broke_off(exchange, failure), events=True)
        except asyncio.CancelledError:
            if not self.drain.over:
                raise  # the client left
            self._cut(exchange, reply, shutting_down(), events=True)
        finally:
            reply.feed_from(None)
            if tap.usage:  # also when the client leaves before the very end
                record.usage = tap.usage

    async def _copy(self, exchange: Exchange, attempt: Attempt, reply: Reply, headers: Headers) -> None:
        """An answer that is neither a stream of events nor a plain one of a generation, as it comes."""
        record = exchange.record

        def sink(data: bytes) -> None:
            reply.write(data)
            record.last_byte = self.clock()

        try:
            reply.begin(attempt.status, headers, length=_length(attempt, exchange.request.method), first=attempt.take())
            reply.feed_from(attempt)
            await attempt.pump(sink)
            reply.end()
        except ReplicaFailure as failure:
            self._cut(exchange, reply, self._broke_off(exchange, failure), events=False)
        except asyncio.CancelledError:
            if not self.drain.over:
                raise  # the client left
            self._cut(exchange, reply, shutting_down(), events=False)
        finally:
            reply.feed_from(None)

    def _cut(self, exchange: Exchange, reply: Reply, error: GatewayError, *, events: bool) -> None:
        """End an answer that cannot be completed: say so where the dialect has words for it, else cut the connection."""
        exchange.record.error = error.message
        if events:
            reply.end(openai.stream_error(error))
        else:
            reply.cut()

    def _broke_off(self, exchange: Exchange, failure: ReplicaFailure) -> GatewayError:
        replica = exchange.booking.chosen.replica
        self.metrics.broken.labels(exchange.record.label, replica).inc()
        self.fleet.failed(replica, failure)
        text = f"The replica {replica} failed while it answered ({failure.message}). Retry the request."
        return GatewayError(502, "replica_failed", text)

    def _close(self, exchange: Exchange, ok: bool) -> None:
        usage, booking, record = exchange.record.usage, exchange.booking, exchange.record
        outcome = Outcome(ok, usage.prompt if usage else None, usage.cached if usage else None)
        replica, predicted = booking.chosen.replica, booking.chosen.matched_tokens
        if booking.close(outcome, self.clock()):
            self.fleet.zero_hits(replica)
        if not exchange.api.metered or record.status != 200:
            return
        self.metrics.predicted_cached.labels(record.label, replica).inc(predicted)
        self.metrics.available_cached.labels(record.label).inc(booking.decision.available_tokens)
        if usage:
            self.fleet.metered(replica, predicted, usage.cached)
            bill = self.meter.bill(record.model, usage)
            self.meter.count(usage, bill, model=record.label, replica=replica, tenant=record.tenant)
            record.bill = bill
        elif exchange.complete:
            self.metrics.unmetered.labels(record.label).inc()


def _path(request: web.Request) -> str:
    """The path with its query, as it came where that is plain."""
    raw = request.raw_path
    return raw if raw.startswith("/") and raw.isascii() and "#" not in raw else request.rel_url.raw_path_qs


def _length(attempt: Attempt, method: str) -> int | None:
    """What the client is told of the body's length."""
    if method != "HEAD":
        return attempt.head.length
    told = attempt.head.get(b"content-length")
    return int(told) if told.isdigit() else None


def _session(headers: Mapping[str, str]) -> str:
    """The conversation that the client names, if it does; no header is worth a long name."""
    return (headers.get("X-Session-Id") or headers.get("X-Correlation-Id") or "")[:256]


def _usage_of(body: bytes) -> Usage | None:
    """The usage of a plain answer. Raises ReplicaFailure if the answer is no JSON object: no engine says such a thing."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ReplicaFailure("garbage", "the answer is not JSON") from error
    if not isinstance(answer, dict):
        raise ReplicaFailure("garbage", "the answer is no JSON object")
    return parse_usage(answer)
