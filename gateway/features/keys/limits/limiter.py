"""The use and reservations of all keys, checked against their limits. Pure: time is an argument.

    enter ──► reserve ──► settle         in this order; reserve again for each attempt, always settle
      │         │  └─ count ┴─ release the reservation, count the actual use; `count`: of one answer in a session
      │         └─ a replica is booked: reserve the uncached tokens and the price, as estimated
      └─ before the queue: count one request; refuse it at once if a limit is exhausted

Invariants: the reserved amount is the sum over the open reservations of this process. The spent amount never falls. Each day
(UTC) has its own sum, so a clock that jumps to another day and back finds the earlier sum.

Accounts beyond MAX_ACCOUNTS are evicted. With a database, an evicted account that is used again starts from its spending since
then, and is listed in `unread` until its stored total has been loaded (`restore`, `merge`). It must not be written before.
Without a database it starts from zero. Totals to be sent or written are kept for twice as many accounts.

Several processes serve one key. Each counts its own use and merges the totals of the others, by process, so that lost, late or
duplicate totals do no harm. Within GUARDED_EXCHANGES exchanges, a process admits at most its share of the remaining budget. So
all processes together do not exceed the budget, provided that an admission is known to the others within that time, less one
exchange for sending. Rates have no shares: simultaneous bursts at all processes exceed the rate, and the excess delays later
requests at all of them.

Money can exceed a budget in two ways. Requests that run when the budget is reached may cost more than was reserved for them.
And each process admits one request to a remaining budget smaller than its price, if it knows of no other running request.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from typing import Final, NamedTuple

from gateway.errors import INSUFFICIENT_QUOTA, GatewayError
from gateway.features.keys.limits.account import Day, KeyAccount, KeyLimits, SpentTotals, Total

DAY_S: Final = 86_400
MAX_ACCOUNTS: Final = 200_000  # keys with limits; the least recently used are evicted
MAX_RETRY_S: Final = DAY_S
MIN_OUTPUT: Final = 1024  # tokens reserved for an answer, at least
WARNED_SHARE: Final = 0.8  # of a budget
UNLIMITED: Final = KeyLimits()
_OUTPUT_DECAY: Final = 0.9  # factor on the length of the longest recent answer, per answer


class Moment:
    """A time for the limits. now: monotonic seconds. day: today. to_day_s, to_month_s: seconds until the end of the day and of
    the month.
    """

    __slots__ = ("day", "now", "to_day_s", "to_month_s")

    def __init__(self, now: float, day: Day, to_day_s: float, to_month_s: float) -> None:
        self.now = now
        self.day = day
        self.to_day_s = to_day_s
        self.to_month_s = to_month_s


class Reservation:
    """The reservation of one request. tokens, money: the reserved amounts. answers: counted ones of a session."""

    __slots__ = ("_limiter", "account", "answers", "money", "open", "tokens")

    def __init__(self, limiter: Limiter, account: KeyAccount) -> None:
        self._limiter = limiter
        self.account = account
        self.tokens = 0
        self.money = 0
        self.answers = 0
        self.open = True

    def output(self, answers: int = 1, limit: int = 0) -> int:
        """Tokens to reserve for this number of answers. limit: the most tokens of each; 0: without a limit."""
        usual = max(MIN_OUTPUT * answers, int(self.account.output))
        return min(usual, limit * answers) if limit else usual

    @property
    def priced(self) -> bool:
        """True if the key has a budget, so that a price is needed."""
        return bool(self.account.limits.day or self.account.limits.month)

    def reserve(self, tokens: int, money: int, moment: Moment) -> None:
        """Replaces the reserved amounts. tokens: uncached. Raises GatewayError 429."""
        self._limiter.reserve(self, max(0, tokens), max(0, money), moment)

    def count(self, tokens: int, output: int, money: int, moment: Moment) -> None:
        """Counts an answer in a session, each but the first as a request, and reserves its price again, for the next one.
        Raises GatewayError 429 if there may be no next one.
        """
        self._limiter.count(self, max(0, tokens), output, max(0, money), moment)

    def settle(self, tokens: int, output: int, money: int, moment: Moment, *, served: bool = True) -> None:
        """Ends the reservation and counts the use: uncached tokens, tokens of the answer, picodollars. served: False if the
        request was refused; then it does not count as a request. Idempotent.
        """
        if self.open:
            self.open = False
            self._limiter.settle(self, max(0, tokens), output, max(0, money), moment)
            if not served:
                self._limiter.uncount_request(self.account, moment.now)


class NearBudget(NamedTuple):
    """A key that has spent most of a budget. period: "day" or "month". spent, budget: picodollars."""

    id: str
    period: str
    spent: int
    budget: int


class Limiter:
    """The limiter of one process. processes: number of processes that share the budgets; 1: `changes` is not called. limits_of:
    the limits of a key that was not used here. persistent: a database stores the totals, by `unwritten` and `unread`.
    max_accounts: more are evicted.
    """

    def __init__(
        self,
        processes: int = 1,
        limits_of: Callable[[str], KeyLimits | None] = lambda _id: None,
        *,
        persistent: bool = True,
        max_accounts: int = MAX_ACCOUNTS,
    ) -> None:
        self._processes = processes
        self._persistent = persistent
        self._limits_of = limits_of
        self._recent: list[KeyAccount] = []  # accounts with a nonzero `admitted`
        self._accounts: OrderedDict[str, KeyAccount] = OrderedDict()
        self._spending: dict[str, KeyAccount] = {}  # accounts with a budget that have spent since the last look at them
        self._changed: dict[str, KeyAccount] = {}
        self._unwritten: dict[str, KeyAccount] = {}
        self.max_accounts = max_accounts
        self.dropped = 0  # keys whose spending was dropped before it was written
        self._evicted = False  # some keys have spending but no account here
        self._unread: dict[str, None] = {}  # keys whose account lacks the total from before its eviction

    def __len__(self) -> int:
        return len(self._accounts)

    def account(self, id_: str) -> KeyAccount | None:
        return self._accounts.get(id_)

    def require(self, id_: str, limits: KeyLimits, moment: Moment) -> KeyAccount:
        """Raises GatewayError 429 if `enter` would. Counts nothing."""
        account, now = self._account(id_, limits), moment.now
        if account.tokens is not None and (wait := account.tokens.wait(1, now)):
            raise _too_fast(f"{account.limits.tokens} uncached tokens", account, wait)
        self._require_budget(account, 0, moment)
        _require_rate(account, now)
        return account

    def enter(self, id_: str, limits: KeyLimits, moment: Moment) -> Reservation:
        """Counts one request. Raises GatewayError 429, and then counts nothing."""
        account = self.require(id_, limits, moment)
        account.open += 1
        self._count_request(account, moment)
        return Reservation(self, account)

    def count_free(self, id_: str, limits: KeyLimits, moment: Moment) -> None:
        """Counts one request that costs nothing, so that a spent budget does not refuse it. Raises GatewayError 429, and then
        counts nothing.
        """
        account = self._account(id_, limits)
        _require_rate(account, moment.now)
        self._count_request(account, moment)

    def _count_request(self, account: KeyAccount, moment: Moment) -> None:
        if account.requests is not None:
            account.requests.take(1, moment.now)
        account.own.requests += 1
        self._mark_changed(account)

    def reserve(self, reservation: Reservation, tokens: int, money: int, moment: Moment) -> None:
        """See Reservation."""
        account, now = reservation.account, moment.now
        if reservation.tokens or reservation.money:  # the reservation of an earlier attempt
            self._set_reserved(reservation, 0, 0, now)
        if account.tokens is not None and (wait := account.tokens.wait(tokens, now)):
            raise _too_fast(f"{account.limits.tokens} uncached tokens", account, wait)
        self._require_budget(account, money, moment)
        self._set_reserved(reservation, tokens, money, now)
        if self._processes > 1 and money:
            if not any(account.admitted):
                self._recent.append(account)
            account.admitted[0] += money

    def count(self, reservation: Reservation, tokens: int, output: int, money: int, moment: Moment) -> None:
        """See Reservation."""
        account = reservation.account
        self._spend(reservation, tokens, output, money, moment)
        reservation.tokens = 0  # they are used
        if reservation.answers:
            account.own.requests += 1
            if account.requests is not None:
                account.requests.take(1, moment.now)
        reservation.answers += 1
        self.require(account.id, account.limits, moment)
        self._set_reserved(reservation, 0, money, moment.now)

    def settle(self, reservation: Reservation, tokens: int, output: int, money: int, moment: Moment) -> None:
        """See Reservation."""
        self._spend(reservation, tokens, output, money, moment)
        reservation.account.open -= 1

    def _spend(self, reservation: Reservation, tokens: int, output: int, money: int, moment: Moment) -> None:
        account = reservation.account
        self._set_reserved(reservation, tokens, 0, moment.now)
        account.spend(moment.day, money)
        self._watch(account)
        account.output = max(float(output), account.output * _OUTPUT_DECAY)

    def spend(self, id_: str, money: int, moment: Moment) -> None:
        """Counts the spending of a key without limits. O(1)."""
        account = self._accounts.get(id_) or self._pending_account(id_) or self._insert_new(KeyAccount(id_, UNLIMITED))
        self._accounts.move_to_end(id_)
        account.spend(moment.day, money)
        self._mark_changed(account)

    def near_budgets(self, moment: Moment) -> list[NearBudget]:
        """The keys that have spent WARNED_SHARE of a budget, each once per day and once per month. O(accounts that have spent
        since the last call).
        """
        spending, self._spending = self._spending, {}
        found = list[NearBudget]()
        for account in spending.values():
            limits, day, month = self._limits_of(account.id) or UNLIMITED, moment.day, moment.day // 31
            if limits.day and account.warned_day != day and account.spent(day) >= WARNED_SHARE * limits.of_day(day):
                account.warned_day = day
                found.append(NearBudget(account.id, "day", account.spent(day), limits.of_day(day)))
            spent, budget = account.spent_in_month(day), limits.of_month(day)
            if limits.month and account.warned_month != month and spent >= WARNED_SHARE * budget:
                account.warned_month = month
                found.append(NearBudget(account.id, "month", spent, budget))
        return found

    def uncount_request(self, account: KeyAccount, now: float) -> None:
        """Reverts the request counted by `enter`."""
        account.own.requests -= 1
        if account.requests is not None:
            account.requests.take(-1, now)

    def _set_reserved(self, reservation: Reservation, tokens: int, money: int, now: float) -> None:
        account = reservation.account
        if account.tokens is not None:
            account.tokens.take(tokens - reservation.tokens, now)
        account.own.tokens += tokens - reservation.tokens
        account.own.reserved += money - reservation.money
        reservation.tokens, reservation.money = tokens, money
        self._mark_changed(account)

    def _watch(self, account: KeyAccount) -> None:
        """Has `near_budgets` look at the account."""
        if account.limits.day or account.limits.month:
            self._spending[account.id] = account

    def _mark_changed(self, account: KeyAccount) -> None:
        """Queues the totals of the account for the other processes and the database."""
        if self._processes > 1:
            self._changed[account.id] = account
            if len(self._changed) > 2 * self.max_accounts:  # not collected: later totals include earlier ones
                del self._changed[next(iter(self._changed))]
        if self._persistent:
            self._unwritten[account.id] = account
            if len(self._unwritten) > 2 * self.max_accounts:
                self._drop_unwritten()

    def _drop_unwritten(self) -> None:
        """Drops the oldest total: the database is unavailable, and too many keys were used in the meantime."""
        id_ = next(iter(self._unwritten))
        del self._unwritten[id_]
        if id_ not in self._accounts:
            self.dropped += 1

    def _require_budget(self, account: KeyAccount, money: int, moment: Moment) -> None:
        """money: to be reserved; 0: only check that some budget remains. Raises GatewayError 429."""
        limits = account.limits
        if limits.day:
            self._require(account, limits.of_day(moment.day) - account.spent(moment.day), money, "day", moment.to_day_s)
        if limits.month:
            remaining = limits.of_month(moment.day) - account.spent_in_month(moment.day)
            self._require(account, remaining, money, "month", moment.to_month_s)

    def _require(self, account: KeyAccount, remaining: int, money: int, period: str, ends_s: float) -> None:
        """remaining: of the budget. A single request is admitted to any remaining budget, however small."""
        if remaining <= 0:
            text = (
                f"The budget of the key {account.id} for this {period} is spent. The next {period} (UTC) starts a new budget."
            )
            raise GatewayError(429, INSUFFICIENT_QUOTA, text, retry_after_s=_ceil(min(ends_s, MAX_RETRY_S)))
        reserved = account.reserved
        admitted = sum(account.admitted) if self._processes > 1 else 0
        if not money or not (reserved or admitted):
            return
        beyond = self._processes > 1 and admitted + money > (remaining - reserved + admitted) // self._processes
        if beyond or reserved + money > remaining:
            text = f"The rest of the budget of the key {account.id} for this {period} is reserved by running requests. Retry."
            raise GatewayError(429, "rate_limit_exceeded", text, retry_after_s=1)

    def _account(self, id_: str, limits: KeyLimits) -> KeyAccount:
        account = self._accounts.get(id_) or self._pending_account(id_)
        if account is None:
            account = self._insert_new(KeyAccount(id_, limits))
        else:
            self._accounts.move_to_end(id_)
            if account.limits is not limits:
                account.set_limits(limits)
        return account

    def _pending_account(self, id_: str) -> KeyAccount | None:
        """An evicted account that waits to be sent or written. It is complete, so it needs no stored total."""
        account = self._unwritten.get(id_) or self._changed.get(id_)
        return None if account is None else self._insert(account)

    def _insert_new(self, account: KeyAccount) -> KeyAccount:
        """Inserts an account that was not used here, or was evicted."""
        if self._evicted:
            self._unread[account.id] = None
        return self._insert(account)

    def _insert(self, account: KeyAccount) -> KeyAccount:
        """Inserts an account and evicts the least recently used ones. Accounts with open reservations stay. O(1) mostly."""
        self._accounts[account.id] = account
        while len(self._accounts) > self.max_accounts:
            id_, oldest = next(iter(self._accounts.items()))
            if oldest.open:
                self._accounts.move_to_end(id_)
                break
            del self._accounts[id_]
            self._unread.pop(id_, None)
            self._evicted = self._persistent
        return account

    # -- other processes

    def changes(self) -> list[Total]:
        """One exchange: the totals that changed since the last call. O(changed accounts)."""
        changed, self._changed = self._changed, {}
        for account in self._recent:
            account.admitted = [0, *account.admitted[:-1]]
        self._recent = [account for account in self._recent if any(account.admitted)]
        totals = list[Total]()
        for account in changed.values():
            days, account.unsent = account.unsent, set[Day]()
            totals.append(_total(account, days))
        return totals

    def unwritten(self, today: Day) -> list[Total]:
        """The totals that changed since the last call, each with its changed days and today. O(changed accounts)."""
        changed, self._unwritten = self._unwritten, {}
        totals = list[Total]()
        for account in changed.values():
            days, account.unwritten = account.unwritten, set[Day]()
            days.add(today)
            totals.append(_total(account, days))
        return totals

    def totals(self) -> list[Total]:
        """All totals. O(accounts)."""
        return [
            _total(account, account.own.days) for account in self._accounts.values() if account.own.requests or account.own.days
        ]

    def merge(
        self, process: str, totals: Iterable[Total], now: float, *, first: bool = False, money_only: bool = False
    ) -> None:
        """Merges the totals of another process. first: the totals are the first of this process, so they are not counted in the
        rates. money_only: only spending is merged, because messages bring the rest earlier. With a database, totals of a key
        without an account evict no other account: they are read when the key is used. O(totals).
        """
        for id_, requests, tokens, reserved, days in totals:
            account = self._accounts.get(id_) or self._pending_account(id_)
            if account is None:
                if self._persistent and len(self._accounts) >= self.max_accounts:
                    self._evicted = True
                    continue
                account = self._insert_new(KeyAccount(id_, self._limits_of(id_) or KeyLimits()))
            counts = process in account.by_process or not (first or self._evicted)
            known = account.process_totals(process)
            if not money_only:
                self._merge_rates(account, known, requests, tokens, now if counts else None)
                account.set_process_reserved(known, max(0, reserved))
            for day, amount in days:
                account.add_process_spending(known, day, amount)
            self._watch(account)

    def _merge_rates(self, account: KeyAccount, known: SpentTotals, requests: int, tokens: int, now: float | None) -> None:
        """now: None: the difference is not counted in the rates."""
        if now is not None and account.requests is not None:
            account.requests.take(requests - known.requests, now)
        if now is not None and account.tokens is not None:
            account.tokens.take(tokens - known.tokens, now)
        known.requests, known.tokens = requests, tokens

    def unread(self, limit: int) -> list[str]:
        """Evicted keys that are used again, and whose stored totals are to be loaded. O(limit)."""
        return list(itertools.islice(self._unread, limit))

    def restore(self, id_: str, days: Iterable[tuple[Day, int]]) -> None:
        """Adds the stored spending of this process to a key in `unread`, once. O(days)."""
        account = self._accounts.get(id_)
        if account is not None and id_ in self._unread:
            for day, amount in days:
                account.spend(day, max(0, amount))
            self._mark_changed(account)
        self._unread.pop(id_, None)

    def release_process(self, process: str) -> None:
        """A process has ended: its reservations end, its spending stays. O(accounts)."""
        for account in self._accounts.values():
            if (known := account.by_process.get(process)) is not None:
                account.set_process_reserved(known, 0)

    def forget_spending_of_others(self, except_: Container[str] = ()) -> None:
        """Forgets the spending of other processes except these; it will be merged again. O(accounts and processes)."""
        for account in self._accounts.values():
            account.forget_spending_of_others(except_)

    def check(self) -> None:
        """Valid while no reservation is open."""
        for account in self._accounts.values():
            account.check()
            assert account.open == 0, account
            assert account.own.reserved == 0, account

    def __repr__(self) -> str:
        return f"<Limiter of {len(self._accounts)} keys>"


def _total(account: KeyAccount, days: Iterable[Day]) -> Total:
    """O(these days)."""
    own = account.own
    return account.id, own.requests, own.tokens, own.reserved, tuple([(day, own.days.get(day, 0)) for day in days])


def _require_rate(account: KeyAccount, now: float) -> None:
    if account.requests is not None and (wait := account.requests.wait(1, now)):
        raise _too_fast(f"{account.limits.requests} requests", account, wait)


def _too_fast(limit: str, account: KeyAccount, wait_s: float) -> GatewayError:
    text = f"The key {account.id} has a limit of {limit} per minute. Retry after the time in Retry-After."
    return GatewayError(429, "rate_limit_exceeded", text, retry_after_s=_ceil(wait_s))


def _ceil(seconds: float) -> int:
    return max(1, int(seconds + 0.999))
