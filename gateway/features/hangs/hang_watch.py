"""Finds replicas that hang: they answer probes, and generate nothing.

    works ── silent for longer than its work explains (`progress.py`) ──► a check is sent (`check.py`)
      ▲                                                                     │ no token within CHECK_S, and no other sign
      │                                                                     ▼
      └── a check is answered, a stream has a token, it goes down ──────── hangs: no new requests while another replica is
                                                                           left; requests without a first token move

A verdict needs requests of clients, their silence, and the silence of a check: a request that never gets a token by its own
nature leaves a check that is answered. So no client can make a replica look hung, and no replica another one. Without metrics
of the engine a check may only wait behind other work in an engine that computes one request at a time. So there is no verdict
then while such work may be there: an answer that is not streamed, a stream with tokens (a parser of calls may hold them back),
a stream whose client does not read, requests of other gateways; and a stream with tools, unless the engine is known to compute
many requests at once: a parser may hold back a call of thousands of tokens from its first one on. Of requests of other workers
that is known as long as these tell: each tells the others every second that none of its requests at a silent replica is such
work, and their number.

A replica without requests of clients is not judged. A hung replica is checked until it answers, also without requests.

The verdict goes to the other workers. Each of them checks by itself; the first answer ends the verdict in all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Final

import msgspec

from gateway.cluster.messages import decode
from gateway.core import Core
from gateway.features.hangs.check import ANSWERED, ENDS, REFUSED, CheckForm, check
from gateway.features.hangs.metrics import HangMetrics
from gateway.features.hangs.moving import MovingRequests, running_at
from gateway.features.hangs.progress import FLOOR_S, LOOKED_AT, ReplicaProgress, explained_s
from gateway.fleet.engines import UNKNOWN
from gateway.fleet.state import ReplicaState
from gateway.request.exchange import Exchange
from gateway.upstream.connection import Connection
from router.load import Lease, ReplicaLoad

log = logging.getLogger("warmroute.replicas")

TOPIC: Final = "hangs"
SILENCE: Final = "hangs.silence"
FRESH_S: Final = 3.0  # for a message about silence
CHECK_S: Final = 5.0  # for the answer to a check
AGAIN_S: Final = 2.0  # from the end of a check of a replica that hangs to the next one
UNCLEAR: Final = 4.0  # factor of the patience after a check that shows nothing

_SILENCE_MESSAGE: Final = msgspec.msgpack.Decoder(tuple[str, int])  # its name, the number of requests there
_MESSAGE: Final = msgspec.msgpack.Decoder(tuple[str, bool, str, bool])  # its name, whether it hangs, the form of its check


class WatchedReplica:
    """The state of one watched replica. hung_since: time of the verdict, None: it does not hang. check: the running one, begun
    at checked_at. form: of the last one. told: by other workers: when they told of their requests, and their number.
    """

    __slots__ = ("check", "checked_at", "ended_at", "form", "hung_since", "progress", "told")

    def __init__(self, now: float) -> None:
        self.progress = ReplicaProgress(now)
        self.hung_since: float | None = None
        self.check: asyncio.Task[str] | None = None
        self.form = CheckForm("", stream=False)
        self.checked_at = self.ended_at = float("-inf")
        self.told: dict[int, tuple[float, int]] = {}

    def silent_elsewhere(self, now: float) -> int:
        """The number of other workers' requests that explain no silence."""
        return sum(count for at, count in self.told.values() if now - at <= FRESH_S)

    def end(self) -> None:
        """Stop watching."""
        if self.check is not None:
            self.check.cancel()

    def __repr__(self) -> str:
        return f"<WatchedReplica, hung since {self.hung_since}, {self.progress!r}>"


class SeenRequests:
    """The first LOOKED_AT generations that run at a replica. waiting: those without a first token. tokens: of the
    streams with tokens, so far. any: there is one whose client reads. unseen: the progress of one is not seen. form: of a
    check, as of the first waiting one.
    """

    __slots__ = ("any", "form", "tokens", "unseen", "waiting")

    def __init__(self, calls: Iterable[tuple[Connection, object]]) -> None:
        self.waiting = list[Exchange]()
        self.tokens = dict[object, int]()
        self.any = self.unseen = False
        self.form = CheckForm("", stream=False)
        for connection, exchange in islice(calls, LOOKED_AT):
            if not isinstance(exchange, Exchange) or not exchange.api.metered or exchange.request.upgrades:
                continue
            if connection.held_back:
                self.unseen = True
                continue
            self.any = True
            if not self.waiting:
                self.form = CheckForm(exchange.api.model, exchange.api.stream)
            if connection.awaits_token:
                self.waiting.append(exchange)
                self.unseen = self.unseen or not exchange.api.stream
            elif (reader := exchange.delivered.reader) is not None:
                self.tokens[exchange] = exchange.delivered.passed + reader.passed

    @property
    def have_tools(self) -> bool:
        """True if one without a first token may be answered with a call. O(bodies)."""
        return any(b'"tools"' in exchange.api.body for exchange in self.waiting)

    def __repr__(self) -> str:
        return f"<SeenRequests {len(self.waiting)} waiting, {len(self.tokens)} streams>"


class HangWatch:
    """The watch of one process (see the module)."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._fleet = core.fleet
        self._upstream = core.upstream
        self._metrics = core.metrics.of(HangMetrics)
        self._moving = MovingRequests(core)
        self._watched: dict[ReplicaState, WatchedReplica] = {}  # with requests, or hung

    def sweep(self, now: float) -> None:
        """Look at all replicas; to be called every second. O(replicas with requests)."""
        loads = self._core.router.ledger.loads
        for name, load in loads.items():
            state = self._fleet.named(name) if load.own_inflight else None
            if state is not None and state not in self._watched and state.engine.fragile is None:
                self._watched[state] = WatchedReplica(now)
        for state, watched in list(self._watched.items()):
            self._visit(state, loads.get(state.name), watched, now)

    def _visit(self, state: ReplicaState, load: ReplicaLoad | None, watched: WatchedReplica, now: float) -> None:
        if self._fleet.named(state.name) is not state or not state.up:
            self._forget(state, watched, now)
        elif watched.hung_since is not None:
            self._look_at_hung(state, load, watched, now)
        elif load is None or not load.own_inflight:
            self._forget(state, watched, now)
        else:
            self._look(state, load, watched, now)

    async def close(self) -> None:
        """End all checks."""
        checks = [watched.check for watched in self._watched.values() if watched.check is not None]
        for watched in self._watched.values():
            watched.end()
        await asyncio.gather(*checks, return_exceptions=True)

    def receive(self, _sender: int, message: bytes) -> None:
        """Another worker has found that a replica hangs, or no longer does. Raises MessageError."""
        name, hung, *form = decode(_MESSAGE, message)
        state = self._fleet.named(name)
        if state is None or state.hung == hung:
            return
        now = self._core.clock()
        if hung and state.up:
            watched = self._watched.setdefault(state, WatchedReplica(now))
            watched.form = CheckForm(*form)
            self._set_hung(state, watched, now)
        elif not hung:
            self._set_well(state, self._watched[state], now)

    def receive_silence(self, sender: int, message: bytes) -> None:
        """Another worker's requests explain no silence. Raises MessageError."""
        name, count = decode(_SILENCE_MESSAGE, message)
        state = self._fleet.named(name)
        if state is not None and state in self._watched:
            self._watched[state].told[sender] = self._core.clock(), count

    # -- looking

    def _look(self, state: ReplicaState, load: ReplicaLoad, watched: WatchedReplica, now: float) -> None:
        progress = watched.progress
        progress.sign(load.computed_at)
        progress.page(state.facts, now)
        if now - progress.since < FLOOR_S:
            return  # nearly always
        seen = SeenRequests(running_at(self._upstream, state))
        progress.tokens(seen.tokens, now)
        if watched.check is not None:
            if now - watched.checked_at >= CHECK_S and progress.since < watched.checked_at and seen.any:
                self._found(state, load, watched, now)
            return
        if not seen.any:
            return
        health = self._core.config.health
        counts = progress.counts(now, 2 * (health.interval_s + health.timeout_s))
        if not counts and (seen.unseen or seen.tokens):
            return
        if not counts and load.remote_inflight:
            if _may_hold_back(state, seen):
                return
            self._core.control.publish(SILENCE, msgspec.msgpack.encode((state.name, load.own_inflight)))
            if watched.silent_elsewhere(now) < load.remote_inflight:
                return
        leases = [*(exchange.booking.lease for exchange in seen.waiting), *_remote(load)]
        first = load.computed_at <= state.up_since
        if now - progress.since >= progress.patience * explained_s(load, leases, first=first, counts=counts):
            if not counts and _may_hold_back(state, seen):
                return
            self._check(state, watched, seen.form, now)

    def _look_at_hung(self, state: ReplicaState, load: ReplicaLoad | None, watched: WatchedReplica, now: float) -> None:
        """Notice its recovery, and move requests for which another replica has come up."""
        if load is not None and load.computed_at > (watched.hung_since or 0.0):
            self._works_again(state, watched, now)
            return
        seen = SeenRequests(running_at(self._upstream, state))
        before = watched.progress.since
        watched.progress.tokens(seen.tokens, now)
        if watched.progress.since > before:
            self._works_again(state, watched, now)
            return
        if watched.check is None and now - watched.ended_at >= AGAIN_S:
            form = watched.form  # which has found the hang
            if state.models and form.model not in state.models:  # it has another one by now
                form = form._replace(model=next(iter(state.models)))
            self._check(state, watched, form, now)
        self._moving.move(state, now)

    def _forget(self, state: ReplicaState, watched: WatchedReplica, now: float) -> None:
        """It has no requests, is down, or has left."""
        watched.end()
        del self._watched[state]
        if watched.hung_since is not None:
            state.hung = False

    # -- checks

    def _check(self, state: ReplicaState, watched: WatchedReplica, form: CheckForm, now: float) -> None:
        for end in ENDS:
            self._metrics.checks.add((state.name, end), 0)
        watched.checked_at, watched.form = now, form
        watched.check = task = asyncio.get_running_loop().create_task(check(self._upstream, state.url, form, state.member.rank))
        task.add_done_callback(partial(self._checked, state, watched))

    def _checked(self, state: ReplicaState, watched: WatchedReplica, task: asyncio.Task[str]) -> None:
        """A check has ended."""
        watched.check = None
        if task.cancelled() or self._watched.get(state) is not watched:
            return
        now = watched.ended_at = self._core.clock()
        if (error := task.exception()) is not None:
            log.error("check of a replica failed", exc_info=error, extra={"replica": state.name})
            return
        end = task.result()
        self._metrics.checks.add((state.name, end))
        if watched.hung_since is None:
            watched.progress.checked(now, factor=UNCLEAR if end == REFUSED else 2.0)
        elif end == ANSWERED:
            self._works_again(state, watched, now)

    # -- verdicts

    def _found(self, state: ReplicaState, load: ReplicaLoad, watched: WatchedReplica, now: float) -> None:
        silent_s = now - watched.progress.since
        self._set_hung(state, watched, now)
        others = any(each.live and not each.hung for each in self._siblings(state))
        about = {"replica": state.name, "silent_s": round(silent_s, 1), "inflight": load.inflight, "others": others}
        log.warning("replica hangs: it answers probes, and generates nothing", extra=about)
        self._publish(state, watched, hung=True)
        self._core.router.failing(state.name)

    def _set_hung(self, state: ReplicaState, watched: WatchedReplica, now: float) -> None:
        state.hung, watched.hung_since = True, now
        self._fleet.suspect(state)
        self._moving.move(state, now)

    def _works_again(self, state: ReplicaState, watched: WatchedReplica, now: float) -> None:
        hung_s = now - (watched.hung_since or now)
        self._set_well(state, watched, now)
        log.info("replica generates again", extra={"replica": state.name, "hung_s": round(hung_s, 1)})
        self._publish(state, watched, hung=False)

    def _set_well(self, state: ReplicaState, watched: WatchedReplica, now: float) -> None:
        state.hung, watched.hung_since = False, None
        watched.end()
        watched.progress = ReplicaProgress(now)

    def _publish(self, state: ReplicaState, watched: WatchedReplica, *, hung: bool) -> None:
        self._core.control.publish(TOPIC, msgspec.msgpack.encode((state.name, hung, *watched.form)))

    def set_gauges(self) -> None:
        """One series for each replica, from its first moment on."""
        self._metrics.hung.values.clear()
        for state in self._fleet.replicas:
            self._metrics.hung.set((state.name,), state.hung)

    def _siblings(self, state: ReplicaState) -> list[ReplicaState]:
        named = [self._fleet.named(name) for name in self._fleet.siblings(state.name)]
        return [each for each in named if each is not None and each is not state]

    def __repr__(self) -> str:
        return f"<HangWatch {self._watched}>"


def _may_hold_back(state: ReplicaState, seen: SeenRequests) -> bool:
    """True if the engine may be computing a call of a tool, for one request at a time. O(bodies)."""
    return bool(state.engine.slots or state.engine is UNKNOWN) and seen.have_tools


def _remote(load: ReplicaLoad) -> Iterator[Lease]:
    """The requests of other workers and gateways without a first token, as far as LOOKED_AT of the queue."""
    lease, left = load.first, LOOKED_AT
    while lease is not None and left:
        if lease.remote:
            yield lease
        lease, left = lease.behind, left - 1
