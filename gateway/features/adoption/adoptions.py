"""Answers whose clients have left before their end, and the requests that adopt them.

    a client reads ── it leaves ──► waiting, for its grace ── the same request ──► followed ── it leaves ──► waiting, again
                                      │                                              └── its end ──► gone
                                      └── the grace is over, an error, too large, shutdown ──► cancelled, gone

A grace is `limits.adopt_s`, GRACE_SHARE of the time since the choice of the replica, and PAUSES times the longest pause after
which the client has come again (agents double their pauses), at most MAX_GRACE_S. A return after the grace counts for that of
the next generation (`interrupted.py`). An answer that ends in its grace holds no replica any more, and waits for MAX_GRACE_S
from its end on. The request goes on in its own task, with its booking, its reservation and its record, in every phase: in a
queue, before its first byte, between two replicas. So a generation has one record for any number of clients.

Equal requests of connected clients are generations of their own: an answer with a client is not adopted. Of equal requests
without a client only the oldest goes on: when the client of another one leaves, that one ends, and the grace of the oldest
begins anew.

A repetition may arrive before the end of the connection that its client has given up: with another way through proxies, or a
lost packet. So when a client leaves, a newer equal request that has been sent nothing but pulses gets the answer at once, and
its own generation ends. Until then nothing tells it from a second request for another sample.

Each process has its own. Bounds: MAX_WAITING per process, MAX_OWNED per caller, a share per address (`runs/places.py`), and the
bounds of `kept_answer.py`.

An agent may keep the part of an answer that it got, and go on from there: Claude Code and Codex do after a cut, and people
after an interruption. The answer has no reader then, so a longer prompt of the same session ends it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import islice
from typing import Final

from gateway.core import Core
from gateway.errors import REPLICA_FAILED, ClientStalled, GatewayError
from gateway.features.adoption.identity import Identity, caller_of, identity_of
from gateway.features.adoption.interrupted import InterruptedAnswers
from gateway.features.adoption.kept_answer import LEFT, MAX_KEPT, Abandonments, KeptAnswer, KeptAnswers
from gateway.features.adoption.metrics import AdoptionMetrics
from gateway.features.adoption.section import ADOPT_S
from gateway.features.runs.answer_followers import AnswerFollowers
from gateway.features.runs.detached_answer import DetachedAnswer
from gateway.features.runs.event_log import LOGS_SHARE, MAX_LOGS, Logs
from gateway.features.runs.places import RunPlaces
from gateway.request.client import ClientReply
from gateway.request.exchange import Exchange
from gateway.request.phases.scopes import prompt_of
from gateway.request.record import ADOPTED, SettledRequest
from router import Prompt

GRACE_SHARE: Final = 0.1
PAUSES: Final = 3.0
MAX_GRACE_S: Final = 60.0
MAX_WAITING: Final = 1000
MAX_OWNED: Final = 100
LOOKED_AT: Final = 1000  # newest running requests when a client leaves


class AbandonedAnswer(DetachedAnswer):
    """An answer whose client has left. record: of its request. task: serves it; None: it has ended. given_up: it is
    not for adoption any more. left_at: reading of the clock when its client left. pause_s: longest pause after which one
    has come again. timer: of its grace; None: a client follows it.
    """

    def __init__(self, kept: KeptAnswer, exchange: Exchange, task: asyncio.Task[None] | None, logs: Logs, core: Core) -> None:
        self.kept = kept
        self.record = exchange.record
        self.identity: Identity = identity_of(exchange, kept.identify())
        self.place = place_of(exchange)
        self.task = task
        self.given_up = False
        self.left_at = 0.0
        self.pause_s = kept.pause_s
        self.timer: asyncio.TimerHandle | None = None
        super().__init__(
            (self.place[0], f"{self.record.id} {id(self):x}"), logs, exchange.request.lease.account.lease(), core.clock
        )

    @property
    def adoptable(self) -> bool:
        """True if a client can get it from its beginning."""
        return not (self.given_up or self.failed or self.log.first)


def place_of(exchange: Exchange) -> tuple[str, str]:
    """(owner, address) of its place."""
    return caller_of(exchange), exchange.request.lease.account.client


def grace_s(adopt_s: float, spent_s: float, pause_s: float = 0.0) -> float:
    """Seconds that a running answer waits for a client. spent_s: since its replica was chosen. pause_s: the longest so far."""
    return max(adopt_s, min(adopt_s + GRACE_SHARE * spent_s + PAUSES * pause_s, MAX_GRACE_S))


def continues(prompt: Prompt, earlier: Prompt) -> bool:
    """True if it is a later prompt of the same agent of the same session."""
    if not earlier.keys or not earlier.session_key or prompt.session_key != earlier.session_key:
        return False
    return prompt.units > earlier.units and prompt.keys.startswith(earlier.keys)


def _require_rights(exchange: Exchange) -> None:
    """Raises GatewayError 403 or 404: the rights of the key have changed meanwhile."""
    grant = exchange.caller.grant
    if grant is not None:
        grant.require_endpoint(exchange.record.path, listed=True, metered=True)
        grant.require_models_of(exchange.api)


class Adoptions(Abandonments):
    """The abandoned answers of one process (see the module)."""

    def __init__(self, core: Core) -> None:
        most = min(MAX_LOGS, core.memory.limit // LOGS_SHARE)
        self.answers = KeptAnswers(self, most)
        self.logs = Logs(MAX_KEPT, most)
        self.places = RunPlaces(MAX_WAITING, MAX_OWNED)
        self.interrupted = InterruptedAnswers(core.router)
        self._core = core
        self._followers = AnswerFollowers(core)
        self._metrics = core.metrics.of(AdoptionMetrics)
        self._waiting: dict[Identity, AbandonedAnswer] = {}
        self._adopt_s = ADOPT_S.of(core.config)
        self._used = False

    # -- clients that leave

    def left(self, kept: KeptAnswer, task: asyncio.Task[None] | None) -> bool:
        exchange = kept.exchange
        if exchange is None or exchange.instead is not None or self._core.running.draining:
            return False
        if self._has_older(identity_of(exchange, kept.identify()), exchange.record):
            return False
        if not self._admit(place_of(exchange)):
            return False
        self._use()
        answer = AbandonedAnswer(kept, exchange, task, self.logs, self._core)
        LEFT.set(exchange.record, kept)
        kept.detach(answer)
        self._wait(answer)
        return True

    def _admit(self, place: tuple[str, str]) -> bool:
        """Takes a place; if there is none, that of an answer that has ended, of the same owner or address. O(MAX_WAITING)."""
        if self.places.admit(*place):
            return True
        at = 0 if self.places.is_full(place[0]) else 1
        ended = next(
            (answer for answer in self._waiting.values() if answer.task is None and answer.place[at] == place[at]), None
        )
        if ended is None:
            return False
        self._give_up(ended, "expired")
        return self.places.admit(*place)

    def _hand_over(self, answer: AbandonedAnswer) -> None:
        """Give it to a newer equal request whose client waits. O(LOOKED_AT)."""
        older = answer.kept.exchange
        for newer in islice(self._core.running.newest, LOOKED_AT):
            if newer.record.begun < answer.record.begun:
                return
            keeper, task = newer.request.keeper, newer.request.task
            if (
                isinstance(keeper, KeptAnswer)
                and task is not None
                and newer.instead is None
                and newer.ended_by is None
                and (older is None or older.booked or not newer.booked)  # else the newer one is further
                and keeper.awaits_equal(answer.kept)
                and identity_of(newer, keeper.identify()) == answer.identity
            ):
                del self._waiting[answer.identity]  # its grace goes on until `_take_over`
                newer.instead = partial(self._take_over, answer)
                task.cancel()
                return

    async def _take_over(self, answer: AbandonedAnswer, exchange: Exchange) -> ClientReply:
        """The answer for a request that has run itself so far. Raises GatewayError."""
        if answer.given_up:
            raise GatewayError(502, REPLICA_FAILED, "The replica failed while it answered. Send the request again.")
        if exchange.ended_by is not None or not exchange.request.attended:
            self._take(answer)
            self._wait(answer)
            raise exchange.ended_by.again() if exchange.ended_by is not None else ConnectionResetError("the client left")
        exchange.record.answer.own = True
        exchange.record.subject.generates = exchange.record.subject.metered = False
        return await self._adopt(exchange, answer)

    def _use(self) -> None:
        """A client has left: from the first one on, choices and ends of requests are looked at."""
        if not self._used:
            self._used = True
            self._core.extensions.entering.append(self._end_continued)
            self._core.extensions.chosen.append(self.interrupted.chosen)
            self._core.observers.insert(0, self.answers.settled)

    def _end_continued(self, exchange: Exchange) -> None:
        """A request begins: give up the answers from which it goes on. O(waiting answers), and once O(prompt)."""
        if not self._waiting or not exchange.api.metered:
            return
        owner = caller_of(exchange)
        owned = [answer for answer in self._waiting.values() if answer.place[0] == owner]
        if not owned:
            return
        prompt = prompt_of(self._core.live, exchange.api, exchange.caller, exchange.record.subject.label)
        for answer in owned:
            booking = answer.record.booking
            if booking is not None and continues(prompt, booking.prompt):
                self._give_up(answer, "continued")

    def _wait(self, answer: AbandonedAnswer) -> None:
        """It has no client: its grace begins, unless an older one waits for the same request."""
        answer.kept.followed = False
        answer.left_at = self._core.clock()
        if self._has_older(answer.identity, answer.record):
            self._metrics.abandoned.add(("second",))
            self._end(answer)
            return
        self._waiting[answer.identity] = answer
        self.answers.waiting += 1
        self._begin_grace(answer)
        if not answer.adoptable:
            self._give_up(answer, "too_large" if answer.log.first else "failed")
        else:
            self._hand_over(answer)

    def _has_older(self, identity: Identity, record: SettledRequest) -> bool:
        """True if an older answer waits for the same request, with a new grace then; a younger one is given up."""
        waiting = self._waiting.get(identity)
        if waiting is None:
            return False
        if waiting.record.begun <= record.begun:
            self._begin_grace(waiting)
            return True
        self._give_up(waiting, "second")
        return False

    def _begin_grace(self, answer: AbandonedAnswer) -> None:
        if answer.timer is not None:
            answer.timer.cancel()
        booking = answer.record.booking
        spent_s = self._core.clock() - booking.lease.since if booking is not None else 0.0
        delay_s = grace_s(self._adopt_s, spent_s, answer.pause_s)
        if answer.finished:
            delay_s = max(delay_s, MAX_GRACE_S)
        answer.timer = asyncio.get_running_loop().call_later(delay_s, self._give_up, answer, "expired")

    def _take(self, answer: AbandonedAnswer) -> None:
        """It waits no longer."""
        if self._waiting.get(answer.identity) is answer:
            del self._waiting[answer.identity]
        self.answers.waiting -= 1
        if answer.timer is not None:
            answer.timer.cancel()
            answer.timer = None

    def _give_up(self, answer: AbandonedAnswer, result: str) -> None:
        """Its grace is over, or it cannot be adopted. result: a label of the metric."""
        self._take(answer)
        self._metrics.abandoned.add((result,))
        self._end(answer)

    def _end(self, answer: AbandonedAnswer) -> None:
        """Ends it without a further client: cancels its request if that still runs."""
        answer.given_up = True
        if answer.task is None:
            self._forget(answer)
        elif not answer.finished:
            booking, now = answer.record.booking, self._core.clock()
            if booking is not None and not booking.lease.closed:
                lease = booking.lease
                computed_s = 0.0 if lease.decoding else now - lease.since
                self.interrupted.add(answer.identity, lease.replica, computed_s, answer.left_at, now)
            answer.task.cancel("the client left")

    def _forget(self, answer: AbandonedAnswer) -> None:
        self.logs.forget(answer.log_key)
        self.places.release(*answer.place)

    def overflowed(self, kept: KeptAnswer) -> None:
        answer = kept.detached
        assert isinstance(answer, AbandonedAnswer)
        if answer.timer is not None:
            self._give_up(answer, "too_large")

    def ended(self, kept: KeptAnswer) -> None:
        answer = kept.detached
        assert isinstance(answer, AbandonedAnswer)
        answer.task = None
        if answer.given_up:
            self._forget(answer)
        elif answer.timer is not None:
            if answer.adoptable:
                self._begin_grace(answer)
            else:
                self._give_up(answer, "failed")

    def close(self) -> None:
        """Shutdown: the graces are over. Idempotent."""
        for answer in list(self._waiting.values()):
            self._give_up(answer, "expired")

    # -- clients that come again

    async def answer(self, exchange: Exchange) -> ClientReply | None:
        """The answer that waits for this request; None: there is none. Raises GatewayError."""
        keeper = exchange.request.keeper
        assert isinstance(keeper, KeptAnswer)
        answer = self._waiting.get(identity_of(exchange, keeper.identify()))
        if answer is None:
            return None
        if not answer.adoptable:  # it had ended, and its log made room for others
            self._give_up(answer, "too_large")
            return None
        record = exchange.record
        _require_rights(exchange)
        record.answer.own = True
        record.subject.model, record.subject.label = exchange.api.model, answer.record.subject.label
        record.subject.generates = record.subject.metered = False  # the generation has a record of its own
        for preparer in self._core.extensions.preparers:
            if preparer.always and preparer.concerns(exchange):
                await preparer.prepare(exchange)
        for enter in self._core.extensions.entering:
            enter(exchange)
        return await self._adopt(exchange, answer)

    async def _adopt(self, exchange: Exchange, answer: AbandonedAnswer) -> ClientReply:
        """The answer from its beginning. Raises GatewayError."""
        request, record = exchange.request, exchange.record
        self._take(answer)
        answer.pause_s = max(answer.pause_s, self._core.clock() - answer.left_at)
        if request.keeper is not None:
            request.keeper.close()
            request.keeper = None
        exchange.api.drop()
        request.lease.drop_body()
        record.fields = {**(record.fields or {}), ADOPTED: answer.record.id}
        self._metrics.abandoned.add(("adopted",))
        return await self._follow(exchange, answer)

    async def _follow(self, exchange: Exchange, answer: AbandonedAnswer) -> ClientReply:
        answer.kept.followed = True
        try:
            reply = await self._followers.follow(exchange, answer, strip_usage=False)
        except (asyncio.CancelledError, ConnectionError) as left:
            if isinstance(left, ClientStalled) or self._core.running.draining or exchange.ended_by is not None:
                self._end(answer)
            else:
                self._wait(answer)
            raise
        except BaseException:
            self._end(answer)
            raise
        self._end(answer)
        return reply

    def __repr__(self) -> str:
        return f"<Adoptions {self.answers!r}, {self.places!r}>"
