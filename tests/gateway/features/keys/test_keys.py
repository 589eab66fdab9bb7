"""What several gateways know of each other through one database, whatever their clocks say."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from gateway.database.database import Database, T, Work
from gateway.database.steadiness import STEADY_S
from gateway.errors import GatewayError
from gateway.features.keys.keys import Keys
from gateway.features.keys.limits.account import Total
from gateway.features.keys.limits.calendar import day_text
from gateway.features.keys.limits.limiter import Limiter
from gateway.features.keys.metrics import KeyMetrics
from gateway.features.keys.record import MAX_GRACE_S, KeyRefusedError, KeySettings, stamp
from gateway.features.keys.secret import digest_of
from gateway.features.keys.section import KeysConfig
from gateway.features.keys.store import MAX_OLD_SECRETS, SPENDING_ROWS_PER_READ, KeyStore
from gateway.features.keys.tables import TABLES
from gateway.features.keys.tables import spent as spent_table
from gateway.features.table import WholeConfig, new_metrics

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
NOON = 1_790_000_000.0 // 86_400 * 86_400 + 43_200.0
SETTINGS = KeySettings("acme", budget_usd_day=10.0)


class Clock:
    """Monotonic seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def gateway(file: Path, wall: float = NOON) -> tuple[Keys, Clock]:
    """Its keys, and its monotonic clock."""
    clock = Clock()
    config = WholeConfig(pools=(), keys=KeysConfig(f"sqlite:///{file}"))
    return Keys(config, new_metrics().of(KeyMetrics), lambda: wall + clock(), clock), clock


def use(keys: Keys, id_: str, pico: int) -> None:
    grant = keys.ring.grant(id_)
    assert grant is not None
    assert grant.limits is not None
    keys.limiter.enter(id_, grant.limits, keys.moment()).settle(1, 1, pico, keys.moment())


async def spend(keys: Keys, id_: str, pico: int) -> None:
    use(keys, id_, pico)
    await keys.poll()


def spent(keys: Keys, id_: str) -> int:
    account = keys.limiter.account(id_)
    return account.spent(keys.moment().day) if account else 0


async def test_clocks_that_differ(tmp_path: Path) -> None:
    """By an hour: what one has spent, the other knows after its next look, in both directions."""
    (one, _), (other, _) = gateway(tmp_path / "keys.sqlite"), gateway(tmp_path / "keys.sqlite", NOON + HOUR_S)
    await one.begin()
    key, _ = await (await one.store()).create(SETTINGS)
    for keys in (one, other):
        await keys.begin()
    await spend(one, key.id, 5)
    await other.poll()
    assert spent(other, key.id) == 5
    await spend(other, key.id, 7)
    await one.poll()
    assert (spent(one, key.id), spent(other, key.id)) == (12, 12)
    for keys in (one, other):
        await keys.close()


async def test_a_database_from_a_backup(tmp_path: Path) -> None:
    """It has earlier revisions: keys made since are read, and those that it lacks are forgotten."""
    (keys, clock), (other, _) = gateway(tmp_path / "keys.sqlite"), gateway(tmp_path / "keys.sqlite")
    await keys.begin()
    first, *later = [(await (await keys.store()).create(SETTINGS))[0] for _ in range(5)]
    await keys.poll()
    assert len(keys.ring) == 5

    with contextlib.closing(sqlite3.connect(tmp_path / "keys.sqlite")) as database, database:
        database.execute("DELETE FROM warmroute_keys WHERE revision > 1")
        database.execute("UPDATE warmroute_keys_revision SET revision = 1")
    made, _ = await (await other.store()).create(SETTINGS)

    for _ in range(2):
        clock.now += 61.0
        await keys.poll()
    assert keys.ring.grant(first.id) is not None
    assert keys.ring.grant(made.id) is not None
    assert all(keys.ring.grant(key.id) is None for key in later)
    for each in (keys, other):
        await each.close()


async def test_a_clock_that_is_ahead_forgets_nothing(tmp_path: Path) -> None:
    """At its start, and when it is put right: only a clock that was steady for long removes what is old."""
    file = tmp_path / "keys.sqlite"
    one, _ = gateway(file)
    await one.begin()
    key, _ = await (await one.store()).create(SETTINGS)
    await one.poll()
    await spend(one, key.id, 5)
    ahead, ahead_clock = gateway(file, NOON + 100 * 24 * HOUR_S)
    await ahead.begin()
    await ahead.poll()
    assert spent(ahead, key.id) == 0, "of that day"
    again, _ = gateway(file)
    await again.begin()
    assert spent(again, key.id) == 5

    ahead_clock.now -= 100 * 24 * HOUR_S  # put right
    await ahead.poll()
    assert spent(ahead, key.id) == 5
    for each in (one, ahead, again):
        await each.close()

    late, late_clock = gateway(file, NOON + 100 * 24 * HOUR_S)
    await late.begin()
    late_clock.now += STEADY_S
    await late.poll()
    await late.close()
    after, _ = gateway(file)
    await after.begin()
    assert spent(after, key.id) == 0, "two months are over"
    await after.close()


async def test_what_was_spent_this_month_is_known_on_its_last_day(tmp_path: Path) -> None:
    """After a restart, though a gateway whose clock is steady has removed what is old."""
    file, first, last = tmp_path / "keys.sqlite", NOON - 20 * DAY_S, NOON + 9 * DAY_S
    keys, clock = gateway(file, first)
    await keys.begin()
    key, _ = await (await keys.store()).create(KeySettings("acme", budget_usd_month=10.0))
    await keys.poll()
    await spend(keys, key.id, 5)
    day = keys.moment().day
    clock.now = last - first
    await keys.poll()
    await keys.close()
    late, _ = gateway(file, last)
    await late.begin()
    account = late.limiter.account(key.id)
    assert account is not None
    assert (day_text(day)[-2:], day_text(late.moment().day)[-2:]) == ("01", "30")
    assert (account.spent_in_month(late.moment().day), account.spent(day)) == (5, 5)
    await late.close()


async def test_what_was_spent_is_removed_up_to_a_day_and_not_of_it(tmp_path: Path) -> None:
    keys, _ = gateway(tmp_path / "keys.sqlite")
    await keys.begin()
    store, day = await keys.store(), keys.moment().day
    await store.write_spending("p", [("k", 1, 1, 0, ((day - 1, 3), (day, 5)))])
    await store.purge_spending(day)
    assert await store.spending_of(["k"], [day - 1, day]) == {"p": [("k", 1, 1, 0, ((day, 5),))]}
    await keys.close()


async def test_a_clock_that_is_put_back_into_a_month_finds_what_was_spent_then(tmp_path: Path) -> None:
    """It was written before what was spent in the month that the clock had, and that was read."""
    file = tmp_path / "keys.sqlite"
    (one, _), (other, _) = gateway(file), gateway(file, NOON + 31 * DAY_S)
    await one.begin()
    key, _ = await (await one.store()).create(SETTINGS)
    for keys in (one, other):
        await keys.begin()
        await keys.poll()
    await spend(one, key.id, 5)
    await spend(other, key.id, 7)
    ahead, clock = gateway(file, NOON + 31 * DAY_S)
    await ahead.begin()
    assert spent(ahead, key.id) == 7
    clock.now -= 31 * DAY_S
    await ahead.poll()
    assert spent(ahead, key.id) == 5
    for keys in (one, other, ahead):
        await keys.close()


async def test_what_many_processes_have_spent_is_read_in_pieces(tmp_path: Path) -> None:
    """Of one revision, more rows than are read at once, and some of later ones."""
    keys, _ = gateway(tmp_path / "keys.sqlite")
    await keys.begin()
    key, _ = await (await keys.store()).create(SETTINGS)
    day = day_text(keys.moment().day)
    rows = [
        (day, key.id, f"p{number}", 1 + number // (3 * SPENDING_ROWS_PER_READ), 1, 1, 2)
        for number in range(3 * SPENDING_ROWS_PER_READ + 7)
    ]
    with contextlib.closing(sqlite3.connect(tmp_path / "keys.sqlite")) as database, database:
        database.executemany(
            "INSERT INTO warmroute_keys_spent (day, key, process, revision, requests, tokens, pico)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            rows,
        )
        database.execute("UPDATE warmroute_keys_revision SET revision = 10")
    late, _ = gateway(tmp_path / "keys.sqlite")
    await late.begin()
    assert spent(late, key.id) == 2 * len(rows)
    await keys.poll()
    await spend(keys, key.id, 5)
    await late.poll()
    assert spent(late, key.id) == 2 * len(rows) + 5
    for each in (keys, late):
        await each.close()


async def test_what_a_forgotten_key_had_spent_is_neither_lost_nor_overwritten(tmp_path: Path) -> None:
    """This gateway remembers one key; what it and another one have spent for others is in the database."""
    keys, _ = gateway(tmp_path / "keys.sqlite")
    other, _ = gateway(tmp_path / "keys.sqlite")
    keys.limiter = Limiter(max_accounts=1)
    await keys.begin()
    made = [(await (await keys.store()).create(SETTINGS))[0].id for _ in range(3)]
    await other.begin()
    for each in (keys, other):
        await each.poll()
    for id_ in made:
        await spend(keys, id_, 5)
        await spend(other, id_, 20)
    for number, id_ in enumerate(made, 1):
        await spend(keys, id_, 100)
        assert len(keys.limiter) == 1
        assert spent(keys, id_) == 125, number
    await other.poll()
    assert [spent(other, id_) for id_ in made] == [125] * 3
    for each in (keys, other):
        await each.close()
    late, _ = gateway(tmp_path / "keys.sqlite")
    await late.begin()
    assert [spent(late, id_) for id_ in made] == [125] * 3
    await late.close()


async def test_a_sum_in_the_database_never_falls(tmp_path: Path) -> None:
    keys, _ = gateway(tmp_path / "keys.sqlite")
    await keys.begin()
    store, day = await keys.store(), keys.moment().day
    for amount in (5, 3):
        await store.write_spending("p", [("k", 1, 1, 0, ((day, amount),))])
    assert (await store.spending_of(["k"], [day]))["p"] == [("k", 1, 1, 0, ((day, 5),))]
    await keys.close()


async def test_totals_of_many_keys_and_days_are_written_whole(tmp_path: Path) -> None:
    """More than SQLite takes parameters in a statement."""
    keys, _ = gateway(tmp_path / "keys.sqlite")
    await keys.begin()
    store, first = await keys.store(), keys.moment().day // 31 * 31
    days = tuple((first + number, number + 1) for number in range(31))
    totals = [(f"key-{number}", number, 2 * number, 0, days) for number in range(1200)]
    assert len(totals) * len(days) * len(spent_table.columns) > 250_000
    await store.write_spending("p", totals)
    found, place, more = list[Total](), (0, "", "", ""), True
    while more:
        some, place, more = await store.spending_since("another", first, place)
        found += some.get("p", [])
    assert sorted(found) == sorted((*total[:4], (day,)) for total in totals for day in days)
    await keys.close()


async def test_what_is_spent_while_the_database_is_away_is_written_later(tmp_path: Path) -> None:
    """Also of a key that is not used again."""
    keys, _ = gateway(tmp_path / "keys.sqlite")
    await keys.begin()
    key, _ = await (await keys.store()).create(SETTINGS)
    await keys.poll()
    with contextlib.closing(sqlite3.connect(tmp_path / "keys.sqlite")) as database, database:
        database.execute("CREATE TRIGGER away BEFORE INSERT ON warmroute_keys_spent BEGIN SELECT RAISE(ABORT, 'away'); END")
    await spend(keys, key.id, 5)
    late, _ = gateway(tmp_path / "keys.sqlite")
    await late.begin()
    assert spent(late, key.id) == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "keys.sqlite")) as database, database:
        database.execute("DROP TRIGGER away")
    await keys.poll()
    await late.poll()
    assert spent(late, key.id) == 5
    for each in (keys, late):
        await each.close()


async def test_what_a_sibling_says_itself_is_newer_than_its_rows(tmp_path: Path) -> None:
    (one, _), (sibling, _) = gateway(tmp_path / "keys.sqlite"), gateway(tmp_path / "keys.sqlite")
    await one.begin()
    key, _ = await (await one.store()).create(SETTINGS)
    for keys in (one, sibling):
        await keys.begin()
    await spend(sibling, key.id, 5)
    one.siblings.add(sibling.process)
    one.limiter.merge(sibling.process, [(key.id, 3, 30, 700, ())], 0.0)
    await one.poll()
    account = one.limiter.account(key.id)
    assert account is not None
    assert (account.reserved, spent(one, key.id)) == (700, 5)
    for keys in (one, sibling):
        await keys.close()


async def test_what_a_sibling_says_itself_is_newer_than_its_rows_of_a_key_that_was_forgotten(tmp_path: Path) -> None:
    (one, _), (sibling, _) = gateway(tmp_path / "keys.sqlite"), gateway(tmp_path / "keys.sqlite")
    one.limiter = Limiter(2, max_accounts=1)
    one.siblings.add(sibling.process)
    await one.begin()
    key, another = [(await (await one.store()).create(SETTINGS))[0].id for _ in range(2)]
    for keys in (one, sibling):
        await keys.begin()
        await keys.poll()
    await spend(sibling, key, 5)
    for id_ in (key, another):
        await spend(one, id_, 10)
    assert one.limiter.account(key) is None
    one.limiter.changes()  # as an exchange with the sibling takes them
    use(one, key, 100)
    one.limiter.merge(sibling.process, [(key, 3, 30, 700, ())], 0.0)
    await one.poll()
    account = one.limiter.account(key)
    assert account is not None
    assert (account.reserved, spent(one, key)) == (700, 115)
    for keys in (one, sibling):
        await keys.close()


async def test_what_was_used_long_ago_is_no_debt_of_this_minute(tmp_path: Path) -> None:
    """At the turn of a month, all that others have spent is read anew, with totals of requests since they began. Likewise where
    the other one's first row of a key comes after this one has begun.
    """
    month_s = 31 * 24 * HOUR_S
    (one, clock), (other, others) = gateway(tmp_path / "keys.sqlite"), gateway(tmp_path / "keys.sqlite")
    await one.begin()
    key, _ = await (await one.store()).create(KeySettings("acme", requests_per_minute=60))
    await one.poll()
    await other.begin()

    async def use(times: int) -> None:
        for _ in range(times):
            await spend(other, key.id, 1)
            others.now += 2.0
        clock.now = others.now
        await one.poll()

    await use(150)
    await spend(one, key.id, 1)  # it is not refused
    clock.now = others.now = month_s
    await one.poll()
    await use(1)
    await spend(one, key.id, 1)
    late, late_clock = gateway(tmp_path / "keys.sqlite")
    clock.now = others.now = late_clock.now = 2 * month_s
    await late.begin()
    await use(1)
    await late.poll()
    await spend(late, key.id, 1)
    for _ in range(50):
        await spend(other, key.id, 1)
    await late.poll()
    grant = late.ring.grant(key.id)
    assert grant is not None
    assert grant.limits is not None
    for _ in range(15):
        with contextlib.suppress(GatewayError):
            late.limiter.enter(key.id, grant.limits, late.moment())
    with pytest.raises(GatewayError):  # what is used since then counts
        late.limiter.enter(key.id, grant.limits, late.moment())
    for keys in (one, other, late):
        await keys.close()


async def test_a_former_secret_goes_on_for_a_bounded_time(tmp_path: Path) -> None:
    keys, _ = gateway(tmp_path / "keys.sqlite")
    await keys.begin()
    store = await keys.store()
    key, _ = await store.create(SETTINGS)
    for grace_s, expected in ((1e12, MAX_GRACE_S), (-5.0, 0.0), (60.0, 60.0)):
        rotated, _ = await store.rotate(key.id, grace_s)
        assert max(until for _, until in rotated.digests) == NOON + expected
    await keys.close()


class Doubtful(Database):
    """Each work is done twice, as where the answer to a commit was lost."""

    async def write(self, work: Work[T]) -> T:
        await super().write(work)
        return await super().write(work)


async def test_a_rotation_that_is_done_twice_keeps_the_former_secret(tmp_path: Path) -> None:
    database = Doubtful(f"sqlite:///{tmp_path / 'keys.sqlite'}", TABLES, 40.0)
    await database.open()
    store = KeyStore(database, lambda: NOON)
    key, former = await store.create(SETTINGS)
    rotated, secret = await store.rotate(key.id, 60.0)
    assert rotated.digests == ((digest_of(secret), 0.0), (digest_of(former), NOON + 60.0))
    again, third = await store.rotate(key.id, 60.0)
    assert again.digests == ((digest_of(third), 0.0), (digest_of(secret), NOON + 60.0), (digest_of(former), NOON + 60.0))
    await database.close()


async def test_former_secrets_go_on_for_what_is_left_of_their_time(tmp_path: Path) -> None:
    """As after a rotation whose answer was lost, so that it is done once more. Without a grace, all of them end."""
    keys, clock = gateway(tmp_path / "keys.sqlite")
    await keys.begin()
    store = await keys.store()
    key, first = await store.create(SETTINGS)
    _, lost = await store.rotate(key.id, 3600.0)
    clock.now = 60.0
    again, third = await store.rotate(key.id, 7200.0)
    ends = {first: NOON + 3600.0, lost: NOON + 7260.0, third: 0.0}
    assert dict(again.digests) == {digest_of(secret): until for secret, until in ends.items()}
    taken, _ = await store.rotate(key.id, 600.0)
    assert {until for _, until in taken.digests} == {0.0, NOON + 660.0}, "none goes on for longer than what was said last"
    for _ in range(3):
        before = await store.find(key.id)
        many, newest = await store.rotate(key.id, 30.0)
    assert len(many.digests) == len(before.digests) == 1 + MAX_OLD_SECRETS
    back = await store.undo_rotation(key.id, newest, before)
    assert back.digests == before.digests, "also those whose time was cut short, or that had no room any more"
    await store.rotate(key.id, 30.0)
    ended, _ = await store.rotate(key.id, 0.0)
    await keys.poll()
    assert [keys.ring.find(digest, keys.wall_clock()) is not None for digest, _ in ended.digests] == [True] + [False] * 3
    await keys.close()


async def test_a_rotation_after_which_there_was_another_is_not_taken_back(tmp_path: Path) -> None:
    """Nobody may lose the secret that the later one has made."""
    keys, _ = gateway(tmp_path / "keys.sqlite")
    await keys.begin()
    store = await keys.store()
    key, first = await store.create(SETTINGS)
    rotated, unprinted = await store.rotate(key.id, 60.0)
    again, newest = await store.rotate(key.id, 60.0)
    assert await store.undo_rotation(key.id, unprinted, key) == await store.find(key.id) == again
    assert again.digests[0] == (digest_of(newest), 0.0)
    back = await store.undo_rotation(key.id, newest, rotated)
    assert back.digests == ((digest_of(unprinted), 0.0), (digest_of(first), NOON + 60.0))
    assert (await store.undo_rotation(key.id, newest, rotated)).digests == back.digests, "it was taken back already"
    await keys.close()


async def test_a_full_database_makes_room_of_what_was_of_no_use_for_90_days(tmp_path: Path) -> None:
    """100,000 keys are possible. Until then, those that were revoked or have expired stay, so that their holders read why."""
    clock = Clock()
    database = Database(f"sqlite:///{tmp_path / 'keys.sqlite'}", TABLES, 40.0)
    await database.open()
    store = KeyStore(database, lambda: NOON + clock())
    revoked, expired, lives, revoked_later = [
        (await store.create(settings))[0].id
        for settings in (SETTINGS, KeySettings("acme", expires_at=stamp(NOON) or ""), SETTINGS, SETTINGS)
    ]
    await store.revoke(revoked)
    clock.now = 2 * HOUR_S
    await store.revoke(revoked_later)
    with contextlib.closing(sqlite3.connect(tmp_path / "keys.sqlite")) as others, others:
        ((body,),) = others.execute("SELECT body FROM warmroute_keys WHERE id = ?", (lives,))
        rows = [(id_, body.replace(lives, id_)) for id_ in (f"{number:08d}" for number in range(100_000 - 5))]
        others.executemany("INSERT INTO warmroute_keys (id, revision, digests, body) VALUES (?, 1, '', ?)", rows)
    last, _ = await store.create(SETTINGS)
    known = await store.ids()
    assert len(known) == 100_000

    clock.now = 90 * DAY_S - 1.0
    with pytest.raises(KeyRefusedError, match="100,000 keys"):
        await store.create(SETTINGS)
    assert await store.ids() == known
    clock.now = 90 * DAY_S + 1.0
    made, _ = await store.create(SETTINGS)
    assert await store.ids() == known - {revoked, expired} | {made.id}
    assert {lives, revoked_later, last.id} < known
    await database.close()


@pytest.mark.parametrize("written", [0, 20])
async def test_what_a_forgotten_key_has_spent_waits_for_the_database(tmp_path: Path, written: int) -> None:
    """It was taken to be written, and could not be, when the key is forgotten and is used again. An earlier sum of the day may
    have been written, which it has in it.
    """
    keys, _ = gateway(tmp_path / "keys.sqlite")
    keys.limiter = Limiter(max_accounts=1)
    await keys.begin()
    one, other = [(await (await keys.store()).create(SETTINGS))[0].id for _ in range(2)]
    await keys.poll()
    if written:
        await spend(keys, one, written)
    with contextlib.closing(sqlite3.connect(tmp_path / "keys.sqlite")) as database, database:
        database.execute("CREATE TRIGGER away BEFORE INSERT ON warmroute_keys_spent BEGIN SELECT RAISE(ABORT, 'away'); END")
    for id_, pico in ((one, 5), (other, 5), (one, 7)):
        await spend(keys, id_, pico)
    assert spent(keys, one) == written + 12
    with contextlib.closing(sqlite3.connect(tmp_path / "keys.sqlite")) as database, database:
        database.execute("DROP TRIGGER away")
    await keys.poll()
    late, _ = gateway(tmp_path / "keys.sqlite")
    await late.begin()
    assert (spent(late, one), spent(late, other)) == (written + 12, 5)
    for each in (keys, late):
        await each.close()


async def test_what_waits_for_the_database_is_bounded_and_what_is_lost_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, _ = gateway(tmp_path / "keys.sqlite")
    keys.limiter = Limiter(max_accounts=1)
    await keys.begin()
    made = [(await (await keys.store()).create(SETTINGS))[0].id for _ in range(4)]
    await keys.poll()
    with contextlib.closing(sqlite3.connect(tmp_path / "keys.sqlite")) as database, database:
        database.execute("CREATE TRIGGER away BEFORE INSERT ON warmroute_keys_spent BEGIN SELECT RAISE(ABORT, 'away'); END")
    for id_ in made:
        await spend(keys, id_, 5)
    with contextlib.closing(sqlite3.connect(tmp_path / "keys.sqlite")) as database, database:
        database.execute("DROP TRIGGER away")
    await keys.poll()
    assert [record.__dict__["lost"] for record in caplog.records if record.message == "keys are read again"] == [2]
    late, _ = gateway(tmp_path / "keys.sqlite")
    await late.begin()
    assert [spent(late, id_) for id_ in made] == [0, 0, 5, 5]
    for each in (keys, late):
        await each.close()
