"""Synchronizes the keys and their spending with a database, or reads the keys from a file.

    database ── changed keys, every POLL_S ──► ring
             ◄─ own totals, every POLL_S ──── limiter ◄─ totals of other processes, every POLL_S ── database

A change takes effect in every process within POLL_S plus the response time of the database, and at once in the gateway whose
operator API made it (`refresh`). While the database does not answer, known keys stay valid, requests are served, and spending
is written merged. The log has one line when an outage begins and one when it ends. Until the keys have been read once, requests
that need a key are refused.

A keys file is read again when it changes; an invalid file changes nothing. With a file, spending is not stored.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gateway.accounting.money import dollars
from gateway.cluster.topics import Topics
from gateway.config.listen import OFF
from gateway.config.parse import ConfigError
from gateway.config.schema import Config
from gateway.config.sections import processes_of
from gateway.config.source import ConfigSource
from gateway.database.failures import StoreFailed
from gateway.database.places import LEDGER_FILE, with_path
from gateway.database.steadiness import Steadiness
from gateway.errors import INSUFFICIENT_QUOTA, GatewayError
from gateway.features.keys.file import read_keys
from gateway.features.keys.limits.account import RETAINED_DAYS, KeyLimits, Total, merged
from gateway.features.keys.limits.calendar import Calendar, day_text
from gateway.features.keys.limits.limiter import Limiter, Moment, NearBudget
from gateway.features.keys.metrics import KeyMetrics
from gateway.features.keys.record import Key
from gateway.features.keys.ring import KeyRing
from gateway.features.keys.section import KEYS, LEDGER
from gateway.features.keys.tokens.tokens import Tokens
from gateway.features.keys.totals_exchange import TotalsExchange
from gateway.server.actions import OperatorAction
from gateway.telemetry.logs import first_of

if TYPE_CHECKING:
    from gateway.features.keys.store import KeyStore

log = logging.getLogger("warmroute.keys")

TOPIC: Final = "keys"
FILE: Final = "keys.sqlite"
POLL_S: Final = 1.0
ALL_S: Final = 60.0  # between two checks for keys deleted from the database
REASONS: Final = ("missing", "unknown", "revoked", "expired", "ambiguous", "claims", "issuer")  # why a key or token is refused
CODES: Final = ("rate_limit_exceeded", INSUFFICIENT_QUOTA)  # error codes of exceeded limits
PERIODS: Final = ("day", "month")  # of budgets
_PROCESS_BYTES: Final = 6
_BEFORE_ALL: Final = (-1, "", "", "")  # cursor before the first spending row; nothing has been read
_NOTHING_FOUND: Final = (0, "", "", "")  # cursor after a complete read of an empty table
KEYS_PER_QUERY: Final = 10  # evicted keys per query; each has up to one row per process and day of the month
KEYS_PER_TRANSACTION: Final = 500  # keys per transaction, so that a failure loses only the current batch

MAX_ACTIONS: Final = 10_000
ACTIONS_PER_TRANSACTION: Final = 100
NOTED_CHANGES: Final = 20  # names of changed keys that are kept of a reload

Opener = Callable[[str, Callable[[], float]], Awaitable["KeyStore"]]


async def open_store(url: str, now: Callable[[], float]) -> KeyStore:
    """Opens the database of the keys in a worker thread. now: Unix seconds. Raises StoreFailed."""
    await asyncio.to_thread(importlib.import_module, "gateway.features.keys.store")  # imports SQLAlchemy, which is slow
    from gateway.features.keys.store import open_key_store

    return await open_key_store(url, now)


def database_url(config: Config) -> str:
    """The URL of the keys' database, including its path; "" if the keys are off or in a file."""
    url = KEYS.of(config).url
    if url == LEDGER:
        return with_path(getattr(config, LEDGER).url, LEDGER_FILE)  # the section of another feature, which is there
    return "" if url == OFF or url.startswith("/") else with_path(url, FILE)


class Keys:
    """The keys of one gateway process. clock: monotonic seconds. wall_clock: Unix seconds. opener: opens the database."""

    def __init__(
        self,
        config: Config,
        metrics: KeyMetrics,
        wall_clock: Callable[[], float],
        clock: Callable[[], float],
        opener: Opener = open_store,
    ) -> None:
        self.ring = KeyRing()
        self.limiter = Limiter(processes_of(config), self._limits_of, persistent=bool(database_url(config)))
        self.process = secrets.token_hex(_PROCESS_BYTES)
        self.ready = KEYS.of(config).url == OFF  # the keys have been read at least once
        self.siblings = set[str]()  # processes whose totals arrive by message, earlier than through the database
        self.tokens: Tokens | None = None  # accepts tokens of OIDC issuers in place of keys
        self.is_file = KEYS.of(config).url.startswith("/")
        self.totals_exchange: TotalsExchange | None = None  # with the other workers
        self._workers = processes_of(config)
        self._url = database_url(config)
        self._file = Path(KEYS.of(config).url) if self.is_file else None
        self._metrics = metrics
        self._clock = clock
        self.wall_clock = wall_clock
        self._open_store = opener
        self._calendar = Calendar()
        self._store: KeyStore | None = None
        self._database_lock = asyncio.Lock()
        self._revision = -1
        self._ids_read_at = 0.0
        self._unwritten: dict[str, Total] = {}
        self._spending_cursor = _BEFORE_ALL  # spending of other processes has been read up to this row
        self._cursor_month = -1  # the month of the cursor
        self._steadiness = Steadiness()
        self._actions = deque[tuple[str, OperatorAction]](maxlen=MAX_ACTIONS)  # of operators, to be written
        self._purge_day = -1  # the last day on which old spending was purged
        self._failing = False
        self._reason = ""  # error of the first read, already logged
        if KEYS.of(config).on:
            metrics.up.set((), 0)
            for reason in REASONS:
                metrics.refused.add((reason,), 0)
            for code in CODES:
                metrics.limited.add((code,), 0)
            for period in PERIODS:
                metrics.near_budget.add((period,), 0)

    def join(self, topics: Topics) -> None:
        """Connects to the other processes of this gateway."""
        topics.executes(TOPIC, self._execute)
        if self._workers > 1:
            self.totals_exchange = TotalsExchange(self.process, self.limiter, self.siblings, topics, self._clock)

    async def _execute(self, _argument: bytes) -> None:
        """Reads a change that an operator has made. Raises ConfigError if the keys could not be read; `run` retries."""
        if not await self.poll():
            raise ConfigError("a worker could not read the keys from their database")

    def moment(self) -> Moment:
        return self._calendar.moment(self._clock(), self.wall_clock())

    def require_ready(self) -> None:
        """Raises GatewayError 503 until the keys have been read."""
        if not self.ready:
            text = "The gateway has not read its keys yet: see its log. Retry."
            raise GatewayError(503, "keys_unavailable", text, retry_after_s=1)

    async def store(self) -> KeyStore:
        """The open database, for operators. Raises StoreFailed, or GatewayError 409 if the keys are off or in a file."""
        if self._store is None and not self._url:
            state = "are in a file: change the file" if self.is_file else "are off (keys.url)"
            raise GatewayError(409, "keys_not_kept", f"The keys of this gateway {state}.")
        async with self._database_lock:
            return await self._opened()

    async def refresh(self) -> None:
        """Reads all changes now. Raises StoreFailed, ConfigError."""
        if self._file is not None:
            self._put(await asyncio.to_thread(read_keys, self._file), complete=True)
        elif self._url:
            async with self._database_lock:
                await self._read()

    async def begin(self) -> None:
        """Reads the keys at start. A failure is logged, and `run` retries."""
        try:
            await self.refresh()
            await self._exchange()
        except (StoreFailed, ConfigError) as failure:
            self._reason = str(failure)
            self._failed(self._reason)
        else:
            self._metrics.up.set((), 1)

    async def run(self) -> None:
        """Follows changes until cancelled."""
        if self._file is not None:
            await self._watch(self._file)
        elif self._url:
            while True:
                await asyncio.sleep(POLL_S)
                await self.poll()

    async def poll(self) -> bool:
        """Reads changed keys and exchanges spending once. Returns True if the keys were read, raises nothing."""
        read = False
        try:
            async with self._database_lock:
                await self._read()
            read = True
            await self._exchange()
        except StoreFailed as failure:
            self._failed(str(failure))
        except Exception as error:  # a bug must not stop the polling
            log.exception("keys were not read")
            self._failed(repr(error)[:300])
        else:
            self._metrics.up.set((), 1)
            if self._failing:
                self._failing = False
                dropped, self.limiter.dropped = self.limiter.dropped, 0
                extra = {"lost": dropped} if dropped else {}  # keys whose spending during the outage was dropped
                log.warning("keys are read again", extra=extra)
        return read

    async def watch_budgets(self) -> None:
        """Warns of budgets that are nearly spent, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.warn_of_budgets()

    async def warn_of_budgets(self) -> None:
        """Warns once per key and period: the process that is the first one to say so in the database; without a database, or
        while it does not answer, the one of the workers whose process id comes first.
        """
        moment = self.moment()
        for near in self.limiter.near_budgets(moment):
            if await self._warns(near, day_text(moment.day)[: 10 if near.period == "day" else 7]):
                self._metrics.near_budget.add((near.period,))
                log.warning("a key has nearly spent its budget", extra=self._near_fields(near))

    async def _warns(self, near: NearBudget, period: str) -> bool:
        if self._store is not None:
            try:
                return await self._store.claim_warning(near.id, period, self.process)
            except StoreFailed:
                pass  # `poll` has logged why
        return all(self.process < other for other in self.siblings)

    def _near_fields(self, near: NearBudget) -> dict[str, Any]:
        grant = self.ring.grant(near.id)
        tenant = grant.tenant if grant is not None else near.id.partition(":")[2]  # the id of an issuer's tenant: NAME:TENANT
        spent, budget = dollars(near.spent), dollars(near.budget)
        return {"key": near.id, "tenant": tenant, "period": near.period, "spent_usd": spent, "budget_usd": budget}

    async def close(self) -> None:
        """Writes the remaining spending and closes the database."""
        if self.tokens is not None:
            await self.tokens.close()
        if self._store is not None:
            try:
                await self._exchange()
            except StoreFailed as failure:
                log.warning("final spending of keys was not written", extra={"reason": str(failure)})
            store, self._store = self._store, None
            await store.close()

    def keep_action(self, action: OperatorAction) -> None:
        """Stores the action of an operator, if there is a database, within POLL_S. While it does not answer, the latest
        MAX_ACTIONS wait.
        """
        if self._url:
            self._actions.append((secrets.token_hex(_PROCESS_BYTES), action))

    def note_reload(self, changed: Sequence[str]) -> None:
        """Stores that the configuration was read again, and which of its keys differ: of several workers, the one whose
        process id comes first.
        """
        if all(self.process < other for other in self.siblings):
            details = json.dumps(first_of("changed", changed, NOTED_CHANGES))
            by = "SIGHUP, or a changed file"
            self.keep_action(OperatorAction(self.wall_clock(), "configuration read again", by, details=details))

    async def _write_actions(self) -> None:
        """Raises StoreFailed."""
        while self._actions and self._store is not None:
            kept = list(itertools.islice(self._actions, ACTIONS_PER_TRANSACTION))
            await self._store.keep_actions(kept)
            while self._actions and kept and self._actions[0] is kept[0]:
                self._actions.popleft()
                kept.pop(0)

    # -- keys

    async def _opened(self) -> KeyStore:
        if self._store is None:
            self._store = await self._open_store(self._url, self.wall_clock)
        return self._store

    async def _read(self) -> None:
        store = await self._opened()
        while found := await store.changed_keys(self._revision):
            self._put(found, complete=False)
            self._revision = max(self._revision, found[-1].revision)
        if self._clock() - self._ids_read_at >= ALL_S:
            self._ids_read_at = self._clock()
            self.ring.retain(await store.ids())
            if await store.revision() < max(self._revision, self._spending_cursor[0]):
                self._revision, self._spending_cursor = -1, _BEFORE_ALL
        self._keys_read()

    def _put(self, keys: list[Key], *, complete: bool) -> None:
        """complete: all keys; keys that are missing from the list are revoked."""
        for key in keys:
            self.ring.put(key.grant(), key.digests)
        if complete:
            self.ring.retain({key.id for key in keys})
            self._keys_read()

    def _keys_read(self) -> None:
        self.ready = True
        self._metrics.known.set((), len(self.ring))

    def _limits_of(self, id_: str) -> KeyLimits | None:
        grant = self.ring.grant(id_)
        if grant is None and self.tokens is not None:
            return self.tokens.limits_of(id_)
        return grant.limits if grant else None

    async def _watch(self, file: Path) -> None:
        source = ConfigSource(file, lambda: read_keys(file), poll_s=POLL_S)
        if not self.ready:
            source.asked.set()
        while True:
            try:
                self._put(await source.next(), complete=True)
                self._metrics.up.set((), 1)
                log.info("keys read", extra={"keys": len(self.ring)})
            except ConfigError as error:
                self._metrics.up.set((), 0)
                self._metrics.failures.add()
                if str(error) != self._reason:  # not logged already
                    state = "the former keys stay valid" if self.ready else "requests are refused until a valid file is read"
                    log.error(f"keys not read: {state}", extra={"error": str(error)[:1000]})
                self._reason = ""

    # -- spending

    async def _exchange(self) -> None:
        """Writes the changed totals of this process and reads the totals of others. Raises StoreFailed."""
        store, moment = self._store, self.moment()
        if store is None:
            return
        await self._write_actions()
        await self._read_spending(store, moment)
        if self._steadiness.steady(self.wall_clock(), moment.now) and moment.day != self._purge_day:
            self._purge_day = moment.day
            await store.purge_spending(moment.day - RETAINED_DAYS)
        await self._restore_evicted(store, moment)
        # No await since the last read, because an evicted account must be restored before it is written.
        for total in self.limiter.unwritten(moment.day):
            before = self._unwritten.get(total[0])
            self._unwritten[total[0]] = total if before is None else merged(before, total)
        while len(self._unwritten) > 2 * self.limiter.max_accounts:
            del self._unwritten[next(iter(self._unwritten))]
            self.limiter.dropped += 1
        while self._unwritten:
            totals = list(itertools.islice(self._unwritten.values(), KEYS_PER_TRANSACTION))
            await store.write_spending(self.process, totals)
            for total in totals:
                if self._unwritten.get(total[0]) is total:  # unless a merged total has replaced it
                    del self._unwritten[total[0]]

    async def _read_spending(self, store: KeyStore, moment: Moment) -> None:
        """Reads in batches, so that a failure keeps the finished batches. Raises StoreFailed."""
        month, more = moment.day // 31, True
        if month != self._cursor_month:  # a new month, or the clock has jumped: the cursor belongs to the other month
            self._cursor_month, self._spending_cursor = month, _BEFORE_ALL
        while more:
            begins = self._spending_cursor == _BEFORE_ALL
            found, self._spending_cursor, more = await store.spending_since(self.process, month * 31, self._spending_cursor)
            if begins:
                self._spending_cursor = max(self._spending_cursor, _NOTHING_FOUND)
                self.limiter.forget_spending_of_others(self.siblings)
            for process, totals in found.items():
                # A total counts from the start of its process, maybe weeks ago: a first total says nothing about this minute.
                self.limiter.merge(process, totals, moment.now, first=True, money_only=process in self.siblings)

    async def _restore_evicted(self, store: KeyStore, moment: Moment) -> None:
        """Loads the stored totals of keys that were evicted from the limiter and are used again. Raises StoreFailed."""
        month = moment.day // 31 * 31
        while ids := self.limiter.unread(KEYS_PER_QUERY):
            found = await store.spending_of(ids, range(month, month + 31))
            own = {id_: dict(self._unwritten[id_][4]) if id_ in self._unwritten else {} for id_ in ids}
            for id_, _, _, _, days in found.pop(self.process, []):
                for day, amount in days:
                    own[id_][day] = max(own[id_].get(day, 0), amount)
            for process, totals in found.items():
                self.limiter.merge(process, totals, moment.now, first=True, money_only=process in self.siblings)
            for id_, sums in own.items():
                self.limiter.restore(id_, sums.items())

    def _failed(self, reason: str) -> None:
        self._metrics.up.set((), 0)
        self._metrics.failures.add()
        if not self._failing:
            self._failing = True
            state = "known keys stay valid" if self.ready else "requests are refused until they are"
            log.error(f"keys are not read: {state}", extra={"reason": reason[:1000]})

    def __repr__(self) -> str:
        return f"<Keys: {self.ring!r}>"
