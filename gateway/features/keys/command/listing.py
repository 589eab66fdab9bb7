"""Lists of `warmroute keys`: keys with their spending, one key, and the actions of operators."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gateway.commands.streams import escaped
from gateway.features.keys.command.store import database, read_store, url_of

if TYPE_CHECKING:
    from gateway.features.keys.record import Key
    from gateway.features.keys.store import KeyStore

    Spending = dict[str, tuple[int, int]]

_LISTED: Final = 1000


def list_keys(options: argparse.Namespace) -> int:
    from gateway.commands.tables import number, print_table, text
    from gateway.features.keys.record import stamp

    keys, spent = _all(url_of(options, os.environ))
    if options.json:
        print(json.dumps([_shown(key, spent) for key in keys], indent=2))
        return 0
    now = time.time()
    today = _today()

    def state(key: Key) -> str:
        if key.revoked_at:
            return f"revoked {stamp(key.revoked_at)}"
        return "expired" if 0 < key.expires_at <= now else "valid"

    def row(key: Key) -> list[str]:
        settings, limits = key.settings, key.grant().limits
        day, month = spent.get(key.id, (0, 0)) if spent is not None else (None, None)
        budgets = (
            limits.of_day(today) if limits is not None and limits.day else 0,
            limits.of_month(today) if limits is not None and limits.month else 0,
        )
        return [
            *(key.id, settings.tenant, settings.name, ", ".join(settings.models) or "all"),
            *(_of_budget(day, budgets[0]), _of_budget(month, budgets[1]), state(key)),
        ]

    names = [text(name) for name in ("id", "tenant", "name", "models")]
    print_table([*names, number("USD today"), number("USD month"), text("state")], [row(key) for key in keys])
    return 0


def list_actions(options: argparse.Namespace) -> int:
    from gateway.features.keys.record import shown_action

    found = read_store(database(options), lambda store: store.latest_actions(_LISTED))
    rows = [shown_action(action) for action in found]
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    from gateway.commands.tables import print_table, text

    names = ("at", "action", "status", "by", "client", "details")
    print_table([text(name) for name in names], [[escaped(_cell(row[name])) for name in names] for row in rows])
    return 0


def _cell(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _of_budget(spent: int | None, budget: int) -> str:
    """Picodollars. spent: None: not known. budget: with credits; 0: none."""
    from gateway.accounting.money import dollars

    amount = "-" if spent is None else f"{dollars(spent):.2f}"
    return f"{amount} of {dollars(budget):g}" if budget else amount


def _shown(key: Key, spent: Spending | None) -> dict[str, Any]:
    """The key as JSON. spent: None if it is not known."""
    from gateway.accounting.money import dollars

    day, month = spent.get(key.id, (0, 0)) if spent is not None else (None, None)
    sums = {"day": day, "month": month}
    return {**key.shown(), "spent_usd": {name: None if sum_ is None else dollars(sum_) for name, sum_ in sums.items()}}


def _all(url: str) -> tuple[list[Key], Spending | None]:
    """The keys, and the spending of each today (UTC) and this month; None if they are in a file. Raises StoreFailed,
    ConfigError.
    """
    if url.startswith("/"):
        from gateway.features.keys.file import read_keys

        return read_keys(Path(url)), None

    async def listed(store: KeyStore) -> tuple[list[Key], Spending]:
        found: list[Key] = []
        more = True
        while more:
            part, more = await store.list_page(found[-1].id if found else "", _LISTED)
            found += part
        return found, await store.spent_by_key(_today())

    return read_store(url, listed)


def _today() -> int:
    """The day (UTC) as the keys count days."""
    from gateway.features.keys.limits.calendar import Calendar

    return Calendar().moment(0.0, time.time()).day


def one_key(url: str, id_: str) -> Key:
    """Raises StoreFailed, ConfigError, KeyNotFoundError."""
    from gateway.features.keys.record import no_key

    for key in _all(url)[0]:
        if key.id == id_:
            return key
    raise no_key(id_)


def show(options: argparse.Namespace) -> int:
    from gateway.features.keys.record import no_key

    keys, spent = _all(url_of(options, os.environ))
    found = next((key for key in keys if key.id == options.id), None)
    if found is None:
        raise no_key(options.id)
    print(json.dumps(_shown(found, spent), indent=2))
    return 0
