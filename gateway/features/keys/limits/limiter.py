"""What each key has used and reserved, against its limits. Pure: time is an argument.

    enter ──► expect ──► settle         in this order; expect again with each attempt, settle always
      │         │           └─ what was reserved is released, what was used is counted
      │         └─ the request is booked: its uncached tokens and its price are known as far as they can be, and are reserved
      └─ before the queue: one request is taken; nobody waits who could not be served

Invariants: what is reserved is the sum over the open reservations of this process, and 0 without any; what was spent never
falls. A day is UTC's, and each has a sum of its own: a clock that jumps to another day and back finds what was spent there.

Accounts beyond MAX_ACCOUNTS are forgotten. Where a database has their sums, one that comes back begins with what was spent
since, and is among `unread` until whoever has the database adds what it finds there (`restore`, `merge`); it is not to be
written before. Without a database it begins anew. What is to be sent or written waits for twice as many.

Several processes serve one key. Each counts what it does itself; totals of the others are merged as they come, by process, so
that one that is lost, late or double does no harm. Within GUARDED exchanges a process admits at most its share of what is left
of a budget. So all together do not admit more than there is, if what one has admitted is known to the others within that time,
less one exchange for it to be sent. Rates have no shares: a burst at all processes at once takes more, which is a debt that all
of them pay off.

How far money can be exceeded: by what a request costs beyond what was reserved for it, for those that ran when the budget was
reached, and by one request (of each process), which is admitted to what is left while it knows of no other that runs.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from typing import Final

from gateway.errors import GatewayError
from gateway.features.keys.limits.account import Day, KeyAccount, KeyLimits, SpentTotals, Total

DAY_S: Final = 86_400
MAX_ACCOUNTS: Final = 200_000  # keys with limits; those that were used longest ago are forgotten first
MAX_RETRY_S: Final = DAY_S
LEAST_OUTPUT: Final = 1024  # tokens of an answer that are reserved at least
_FADES: Final = 0.9  # of the largest recent answer, at each answer


class Moment:
    """now: monotonic seconds. day: today. to_day_s, to_month_s: seconds until both end."""

    __slots__ = ("day", "now", "to_day_s", "to_month_s")

    def __init__(self, now: float, day: Day, to_day_s: float, to_month_s: float) -> None:
        self.now = now
        self.day = day
        self.to_day_s = to_day_s
        self.to_month_s = to_month_s


class Reservation:
    """One request's. tokens, money: that are reserved."""

    __slots__ = ("_limiter", "account", "money", "open", "tokens")

    def __init__(self, limiter: Limiter, account: KeyAccount) -> None:
        self._limiter = limiter
        self.account = account
        self.tokens = 0
        self.money = 0
        self.open = True

    @property
    def output(self) -> int:
        """Tokens of its answer that are to be reserved."""
        return max(LEAST_OUTPUT, int(self.account.output))

    @property
    def priced(self) -> bool:
        """Whether its price matters."""
        return bool(self.account.limits.day or self.account.limits.month)

    def expect(self, tokens: int, money: int, moment: Moment) -> None:
        """Reserve this, in the place of what was. tokens: uncached. Raises GatewayError 429."""
        self._limiter.expect(self, max(0, tokens), max(0, money), moment)

    def settle(self, tokens: int, output: int, money: int, moment: Moment, *, served: bool = True) -> None:
        """What it has used: uncached tokens, those of its answer, picodollars. served: else it was refused, and does not count
        as a request. Idempotent.
        """
        if self.open:
            self.open = False
            self._limiter.settle(self, max(0, tokens), output, max(0, money), moment)
            if not served:
                self._limiter.give_back(self.account, moment.now)


class Limiter:
    """See the top of this file. share: the processes that serve together; 1: nobody calls `changes`. known: the limits of a key
    that was not used here. written: somebody calls `unwritten`, and reads what is `unread`. most: accounts.
    """

    def __init__(
        self,
        share: int = 1,
        known: Callable[[str], KeyLimits | None] = lambda _id: None,
        *,
        written: bool = True,
        most: int = MAX_ACCOUNTS,
    ) -> None:
        self._share = share
        self._written = written
        self._known = known
        self._recent: list[KeyAccount] = []  # that have admitted something within the last two exchanges
        self._accounts: OrderedDict[str, KeyAccount] = OrderedDict()
        self._changed: dict[str, KeyAccount] = {}
        self._unwritten: dict[str, KeyAccount] = {}
        self.most = most
        self.lost = 0  # keys of which what they have spent was forgotten before it was written
        self._partial = False  # there are keys that have spent something, and no account here
        self._unread: dict[str, None] = {}  # keys whose account lacks what it had before it was forgotten

    def __len__(self) -> int:
        return len(self._accounts)

    def account(self, id_: str) -> KeyAccount | None:
        return self._accounts.get(id_)

    def require(self, id_: str, limits: KeyLimits, moment: Moment) -> KeyAccount:
        """Whether `enter` would let a request in now. Raises GatewayError 429; takes nothing."""
        account, now = self._account(id_, limits), moment.now
        if account.tokens is not None and (wait := account.tokens.wait(1, now)):
            raise _too_fast(f"{account.limits.tokens} uncached tokens", account, wait)
        self._require_budget(account, 0, moment)
        if account.requests is not None and (wait := account.requests.wait(1, now)):
            raise _too_fast(f"{account.limits.requests} requests", account, wait)
        return account

    def enter(self, id_: str, limits: KeyLimits, moment: Moment) -> Reservation:
        """One request more. Raises GatewayError 429, and then takes nothing."""
        account = self.require(id_, limits, moment)
        if account.requests is not None:
            account.requests.take(1, moment.now)
        account.own.requests += 1
        account.open += 1
        self._note(account)
        return Reservation(self, account)

    def expect(self, reservation: Reservation, tokens: int, money: int, moment: Moment) -> None:
        """See Reservation."""
        account, now = reservation.account, moment.now
        if reservation.tokens or reservation.money:  # of an earlier attempt
            self._reserve(reservation, 0, 0, now)
        if account.tokens is not None and (wait := account.tokens.wait(tokens, now)):
            raise _too_fast(f"{account.limits.tokens} uncached tokens", account, wait)
        self._require_budget(account, money, moment)
        self._reserve(reservation, tokens, money, now)
        if self._share > 1 and money:
            if not any(account.admitted):
                self._recent.append(account)
            account.admitted[0] += money

    def settle(self, reservation: Reservation, tokens: int, output: int, money: int, moment: Moment) -> None:
        """See Reservation."""
        account = reservation.account
        self._reserve(reservation, tokens, 0, moment.now)
        account.spend(moment.day, money)
        account.open -= 1
        account.output = max(float(output), account.output * _FADES)

    def give_back(self, account: KeyAccount, now: float) -> None:
        """The request that `enter` took."""
        account.own.requests -= 1
        if account.requests is not None:
            account.requests.take(-1, now)

    def _reserve(self, reservation: Reservation, tokens: int, money: int, now: float) -> None:
        account = reservation.account
        if account.tokens is not None:
            account.tokens.take(tokens - reservation.tokens, now)
        account.own.tokens += tokens - reservation.tokens
        account.own.reserved += money - reservation.money
        reservation.tokens, reservation.money = tokens, money
        self._note(account)

    def _note(self, account: KeyAccount) -> None:
        """It has changed."""
        if self._share > 1:
            self._changed[account.id] = account
            if len(self._changed) > 2 * self.most:  # nobody takes them: a later total has all of an earlier one
                del self._changed[next(iter(self._changed))]
        if self._written:
            self._unwritten[account.id] = account
            if len(self._unwritten) > 2 * self.most:
                self._drop_unwritten()

    def _drop_unwritten(self) -> None:
        """The database is away, and meanwhile more keys were used than are remembered."""
        id_ = next(iter(self._unwritten))
        del self._unwritten[id_]
        if id_ not in self._accounts:
            self.lost += 1

    def _require_budget(self, account: KeyAccount, money: int, moment: Moment) -> None:
        """money: to be reserved; 0: is anything left? Raises GatewayError 429."""
        limits = account.limits
        if limits.day:
            self._require(account, limits.day - account.spent(moment.day), money, "day", moment.to_day_s)
        if limits.month:
            self._require(account, limits.month - account.spent_in_month(moment.day), money, "month", moment.to_month_s)

    def _require(self, account: KeyAccount, left: int, money: int, period: str, ends_s: float) -> None:
        """left: of the budget. One request alone is admitted to what is left, however little that is."""
        if left <= 0:
            text = (
                f"The budget of the key {account.id} for this {period} is spent. It begins again with the next {period} (UTC)."
            )
            raise GatewayError(429, "insufficient_quota", text, retry_after_s=_whole(min(ends_s, MAX_RETRY_S)))
        reserved = account.reserved
        admitted = sum(account.admitted) if self._share > 1 else 0
        if not money or not (reserved or admitted):
            return
        beyond = self._share > 1 and admitted + money > (left - reserved + admitted) // self._share
        if beyond or reserved + money > left:
            text = (
                f"What is left of the budget of the key {account.id} for this {period} is reserved by requests that run. Retry."
            )
            raise GatewayError(429, "rate_limit_exceeded", text, retry_after_s=1)

    def _account(self, id_: str, limits: KeyLimits) -> KeyAccount:
        account = self._accounts.get(id_) or self._remembered(id_)
        if account is None:
            account = self._add(KeyAccount(id_, limits))
        else:
            self._accounts.move_to_end(id_)
            if account.limits is not limits:
                account.retune(limits)
        return account

    def _remembered(self, id_: str) -> KeyAccount | None:
        """One that was forgotten, and is still to be sent or written: it lacks nothing."""
        account = self._unwritten.get(id_) or self._changed.get(id_)
        return None if account is None else self._put(account)

    def _add(self, account: KeyAccount) -> KeyAccount:
        """A new one."""
        if self._partial:
            self._unread[account.id] = None
        return self._put(account)

    def _put(self, account: KeyAccount) -> KeyAccount:
        """Those that were used longest ago are forgotten; those with open reservations stay. O(1) mostly."""
        self._accounts[account.id] = account
        while len(self._accounts) > self.most:
            id_, oldest = next(iter(self._accounts.items()))
            if oldest.open:
                self._accounts.move_to_end(id_)
                break
            del self._accounts[id_]
            self._unread.pop(id_, None)
            self._partial = self._written
        return account

    # -- other processes

    def changes(self) -> list[Total]:
        """The totals that have changed since the last call: an exchange. O(those)."""
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
        """Those that have changed since the last call, each with the days that have, and with today. O(those)."""
        changed, self._unwritten = self._unwritten, {}
        totals = list[Total]()
        for account in changed.values():
            days, account.unwritten = account.unwritten, set[Day]()
            days.add(today)
            totals.append(_total(account, days))
        return totals

    def totals(self) -> list[Total]:
        """All. O(accounts)."""
        return [
            _total(account, account.own.days) for account in self._accounts.values() if account.own.requests or account.own.days
        ]

    def merge(
        self, process: str, totals: Iterable[Total], now: float, *, first: bool = False, money_only: bool = False
    ) -> None:
        """Another process's totals. first: rates do not count what it did before it was known here. money_only: what it has
        spent, for the rest is known from elsewhere, and newer. Where a database has them, totals of a key that was not used
        here make nobody else's forgotten: they are read when the key is used. O(totals).
        """
        for id_, requests, tokens, reserved, days in totals:
            account = self._accounts.get(id_) or self._remembered(id_)
            if account is None:
                if self._written and len(self._accounts) >= self.most:
                    self._partial = True
                    continue
                account = self._add(KeyAccount(id_, self._known(id_) or KeyLimits()))
            counts = process in account.others or not (first or self._partial)
            seen = account.other(process)
            if not money_only:
                self._merge_rates(account, seen, requests, tokens, now if counts else None)
                account.reserve_elsewhere(seen, max(0, reserved))
            for day, amount in days:
                account.spend_elsewhere(seen, day, amount)

    def _merge_rates(self, account: KeyAccount, seen: SpentTotals, requests: int, tokens: int, now: float | None) -> None:
        """now: None: they do not count."""
        if now is not None and account.requests is not None:
            account.requests.take(requests - seen.requests, now)
        if now is not None and account.tokens is not None:
            account.tokens.take(tokens - seen.tokens, now)
        seen.requests, seen.tokens = requests, tokens

    def unread(self, most: int) -> list[str]:
        """Keys that were forgotten and are used again, of which the database knows more. O(most)."""
        return list(itertools.islice(self._unread, most))

    def restore(self, id_: str, days: Iterable[tuple[Day, int]]) -> None:
        """What this process had spent for a key before it was forgotten. Once, as long as the key is `unread`. O(days)."""
        account = self._accounts.get(id_)
        if account is not None and id_ in self._unread:
            for day, amount in days:
                account.spend(day, max(0, amount))
            self._note(account)
        self._unread.pop(id_, None)

    def ended(self, process: str) -> None:
        """It has reserved nothing any more; what it has spent stays spent. O(accounts)."""
        for account in self._accounts.values():
            if (seen := account.others.get(process)) is not None:
                account.reserve_elsewhere(seen, 0)

    def forget_others(self, but: Container[str] = ()) -> None:
        """What other processes have spent, but these, is to be merged anew. O(accounts and processes)."""
        for account in self._accounts.values():
            account.forget_others(but)

    def check(self) -> None:
        """With no reservation open."""
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


def _too_fast(what: str, account: KeyAccount, wait_s: float) -> GatewayError:
    text = f"The key {account.id} has a limit of {what} per minute. Retry after the time that Retry-After says."
    return GatewayError(429, "rate_limit_exceeded", text, retry_after_s=_whole(wait_s))


def _whole(seconds: float) -> int:
    return max(1, int(seconds + 0.999))
