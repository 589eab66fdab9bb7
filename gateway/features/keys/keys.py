"""The keys of a gateway: from a database or a file into the ring, and what was spent into the database and out of it.

    database ── changed keys, every POLL_S ──► ring
             ◄─ own totals, every POLL_S ──── limiter ◄─ totals of other processes, every POLL_S ── database

A change holds in every process POLL_S after it, and as long as the database then takes to answer; at once where an operator
makes it at this gateway (`refresh`). While the database does not answer, the keys that are known stay valid, requests are
served, and what was spent is written later: one line in the log says that this has begun, one that it has ended. A gateway that
has not read its keys yet refuses requests that need one.

A file is read again when it changes; one that is invalid changes nothing. With a file, nothing that was spent is kept.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.cluster.topics import Topics
from gateway.config.listen import OFF
from gateway.config.parse import ConfigError
from gateway.config.schema import Config
from gateway.config.sections import processes_of
from gateway.config.source import ConfigSource
from gateway.database.failures import StoreFailed
from gateway.database.places import LEDGER_FILE, with_path
from gateway.database.steadiness import Steadiness
from gateway.errors import GatewayError
from gateway.features.keys.file import read_keys
from gateway.features.keys.limits.account import KEPT_DAYS, KeyLimits, Total, later
from gateway.features.keys.limits.calendar import Calendar
from gateway.features.keys.limits.limiter import Limiter, Moment
from gateway.features.keys.metrics import KeyMetrics
from gateway.features.keys.record import Key
from gateway.features.keys.ring import KeyRing
from gateway.features.keys.section import KEYS, LEDGER
from gateway.features.keys.spending import Spending
from gateway.features.keys.tokens.tokens import Tokens

if TYPE_CHECKING:
    from gateway.features.keys.store import KeyStore

log = logging.getLogger("warmroute.keys")

TOPIC: Final = "keys"
FILE: Final = "keys.sqlite"
POLL_S: Final = 1.0
ALL_S: Final = 60.0  # between two looks for keys that were removed from the database
REASONS: Final = ("missing", "unknown", "revoked", "expired", "ambiguous", "claims", "issuer")  # of refusals
CODES: Final = ("rate_limit_exceeded", "insufficient_quota")  # of limits
_PROCESS_BYTES: Final = 6
_NOWHERE: Final = (-1, "", "", "")  # before the first row of what was spent
_BEGUN: Final = (0, "", "", "")
RETURNED_AT_ONCE: Final = 10  # keys that were forgotten: of each, a row for each process and day of a month may be found
WRITTEN_AT_ONCE: Final = 500  # keys, in one transaction: what is written of many stays written

Opener = Callable[[str, Callable[[], float]], Awaitable["KeyStore"]]


async def open_store(url: str, now: Callable[[], float]) -> KeyStore:
    """Raises StoreFailed."""
    await asyncio.to_thread(importlib.import_module, "gateway.features.keys.store")  # it loads SQLAlchemy, which takes long
    from gateway.features.keys.store import opened

    return await opened(url, now)


def database_of(config: Config) -> str:
    """The URL of the keys' database, with a path; "": there is none."""
    url = KEYS.of(config).url
    if url == LEDGER:
        return with_path(getattr(config, LEDGER).url, LEDGER_FILE)  # the section of another feature, which is there
    return "" if url == OFF or url.startswith("/") else with_path(url, FILE)


class Keys:
    """See the top of this file. clock: monotonic seconds. wall_clock: Unix seconds."""

    def __init__(
        self,
        config: Config,
        metrics: KeyMetrics,
        wall_clock: Callable[[], float],
        clock: Callable[[], float],
        opens: Opener = open_store,
    ) -> None:
        self.ring = KeyRing()
        self.limiter = Limiter(processes_of(config), self._limits_of, written=bool(database_of(config)))
        self.process = secrets.token_hex(_PROCESS_BYTES)
        self.ready = KEYS.of(config).url == OFF  # the keys are known
        self.siblings = set[str]()  # processes that exchange with this one directly, and sooner than through the database
        self.tokens: Tokens | None = None  # of issuers, that are taken as keys are
        self.is_file = KEYS.of(config).url.startswith("/")
        self.spending: Spending | None = None  # the exchange with other workers
        self._workers = processes_of(config)
        self._url = database_of(config)
        self._file = Path(KEYS.of(config).url) if self.is_file else None
        self._metrics = metrics
        self._clock = clock
        self.wall_clock = wall_clock
        self._opens = opens
        self._calendar = Calendar()
        self._store: KeyStore | None = None
        self._one_at_a_time = asyncio.Lock()
        self._revision = -1
        self._all_at = 0.0
        self._unwritten: dict[str, Total] = {}
        self._spent_place = _NOWHERE  # up to which is known what others have spent
        self._spent_month = -1  # that it is of
        self._steadiness = Steadiness()
        self._purged = -1  # day
        self._failing = False
        self._reason = ""  # for which the first reading failed
        if KEYS.of(config).on:
            metrics.up.set((), 0)
            for reason in REASONS:
                metrics.refused.add((reason,), 0)
            for code in CODES:
                metrics.limited.add((code,), 0)

    def join(self, topics: Topics) -> None:
        """Work with the other processes of this gateway."""
        topics.executes(TOPIC, self._execute)
        if self._workers > 1:
            self.spending = Spending(self.process, self.limiter, self.siblings, topics, self._clock)

    async def _execute(self, _argument: bytes) -> None:
        """An operator has changed a key. Raises ConfigError: the keys were not read; `run` tries again."""
        if not await self.poll():
            raise ConfigError("a worker could not read the database of the keys")

    def moment(self) -> Moment:
        return self._calendar.moment(self._clock(), self.wall_clock())

    def require_ready(self) -> None:
        """Raises GatewayError 503."""
        if not self.ready:
            text = "The gateway has not read its keys yet: see its log. Retry."
            raise GatewayError(503, "keys_unavailable", text, retry_after_s=1)

    async def store(self) -> KeyStore:
        """For operators. Raises GatewayError 409 where there is none, StoreFailed."""
        if self._store is None and not self._url:
            what = "are in a file: change that" if self.is_file else "are off (keys.url)"
            raise GatewayError(409, "keys_not_kept", f"The keys of this gateway {what}.")
        async with self._one_at_a_time:
            return await self._opened()

    async def refresh(self) -> None:
        """Take in what has changed, now. Raises StoreFailed, ConfigError."""
        if self._file is not None:
            self._take(await asyncio.to_thread(read_keys, self._file), whole=True)
        elif self._url:
            async with self._one_at_a_time:
                await self._read()

    async def begin(self) -> None:
        """The first reading. What is wrong is in the log, and is tried again by `run`."""
        try:
            await self.refresh()
            await self._exchange()
        except (StoreFailed, ConfigError) as failure:
            self._reason = str(failure)
            self._failed(self._reason)
        else:
            self._metrics.up.set((), 1)

    async def run(self) -> None:
        """Until it is cancelled."""
        if self._file is not None:
            await self._watch(self._file)
        elif self._url:
            while True:
                await asyncio.sleep(POLL_S)
                await self.poll()

    async def poll(self) -> bool:
        """One round; whether the keys were read. It raises nothing."""
        read = False
        try:
            async with self._one_at_a_time:
                await self._read()
            read = True
            await self._exchange()
        except StoreFailed as failure:
            self._failed(str(failure))
        except Exception as error:  # a bug must not end the watching
            log.exception("keys were not read")
            self._failed(repr(error)[:300])
        else:
            self._metrics.up.set((), 1)
            if self._failing:
                self._failing = False
                lost, self.limiter.lost = self.limiter.lost, 0
                extra = {"lost": lost} if lost else {}  # keys whose spending of that time is not known any more
                log.warning("keys are read again", extra=extra)
        return read

    async def close(self) -> None:
        """What was spent is written."""
        if self.tokens is not None:
            await self.tokens.close()
        if self._store is not None:
            try:
                await self._exchange()
            except StoreFailed as failure:
                log.warning("what was spent at the end is not written", extra={"reason": str(failure)})
            store, self._store = self._store, None
            await store.close()

    # -- keys

    async def _opened(self) -> KeyStore:
        if self._store is None:
            self._store = await self._opens(self._url, self.wall_clock)
        return self._store

    async def _read(self) -> None:
        store = await self._opened()
        while found := await store.changed(self._revision):
            self._take(found, whole=False)
            self._revision = max(self._revision, found[-1].revision)
        if self._clock() - self._all_at >= ALL_S:
            self._all_at = self._clock()
            self.ring.keep(await store.ids())
            if await store.revision() < max(self._revision, self._spent_place[0]):
                self._revision, self._spent_place = -1, _NOWHERE
        self._begun()

    def _take(self, keys: list[Key], *, whole: bool) -> None:
        """whole: there are no others."""
        for key in keys:
            self.ring.put(key.grant(), key.digests)
        if whole:
            self.ring.keep({key.id for key in keys})
            self._begun()

    def _begun(self) -> None:
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
                self._take(await source.next(), whole=True)
                self._metrics.up.set((), 1)
                log.info("keys read", extra={"keys": len(self.ring)})
            except ConfigError as error:
                self._metrics.up.set((), 0)
                self._metrics.failures.add()
                if str(error) != self._reason:  # it is in the log
                    state = "the former ones stay" if self.ready else "requests are refused until they are"
                    log.error(f"keys not read: {state}", extra={"error": str(error)[:1000]})
                self._reason = ""

    # -- what was spent

    async def _exchange(self) -> None:
        """Write the own totals that have changed, and read those of others. Raises StoreFailed."""
        store, moment = self._store, self.moment()
        if store is None:
            return
        await self._read_spent(store, moment)
        if self._steadiness.steady(self.wall_clock(), moment.now) and moment.day != self._purged:
            self._purged = moment.day
            await store.purge_spent(moment.day - KEPT_DAYS)
        await self._read_returned(store, moment)
        for total in self.limiter.unwritten(moment.day):  # without a wait before: an account is not written before it is read
            before = self._unwritten.get(total[0])
            self._unwritten[total[0]] = total if before is None else later(before, total)
        while len(self._unwritten) > 2 * self.limiter.most:
            del self._unwritten[next(iter(self._unwritten))]
            self.limiter.lost += 1
        while self._unwritten:
            totals = list(itertools.islice(self._unwritten.values(), WRITTEN_AT_ONCE))
            await store.write_spent(self.process, totals)
            for total in totals:
                if self._unwritten.get(total[0]) is total:  # and not a later one
                    del self._unwritten[total[0]]

    async def _read_spent(self, store: KeyStore, moment: Moment) -> None:
        """In pieces: what was read stays read. Raises StoreFailed."""
        month, more = moment.day // 31, True
        if month != self._spent_month:  # or the clock has jumped: what was read is of another month
            self._spent_month, self._spent_place = month, _NOWHERE
        while more:
            begins = self._spent_place == _NOWHERE
            found, self._spent_place, more = await store.changed_spent(self.process, month * 31, self._spent_place)
            if begins:
                self._spent_place = max(self._spent_place, _BEGUN)
                self.limiter.forget_others(self.siblings)
            for process, totals in found.items():
                # Totals are since a process began, which may be weeks: the first ones of a key say nothing of this minute.
                self.limiter.merge(process, totals, moment.now, first=True, money_only=process in self.siblings)

    async def _read_returned(self, store: KeyStore, moment: Moment) -> None:
        """What is known of keys that the limiter had forgotten. Raises StoreFailed."""
        month = moment.day // 31 * 31
        while ids := self.limiter.unread(RETURNED_AT_ONCE):
            found = await store.spent_of(ids, range(month, month + 31))
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
            state = "those that are known stay valid" if self.ready else "requests are refused until they are"
            log.error(f"keys are not read: {state}", extra={"reason": reason[:1000]})

    def __repr__(self) -> str:
        return f"<Keys: {self.ring!r}>"
