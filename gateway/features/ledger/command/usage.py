"""`warmroute usage`: reports usage and cost from the ledger, also while gateways write to it."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gateway.commands.streams import escaped
from gateway.config.kinds import database_url
from gateway.config.listen import OFF
from gateway.config.parse import ConfigError
from gateway.database.failures import StoreFailed
from gateway.features.ledger.command.output import as_json, print_usage, write_csv
from gateway.features.ledger.command.period import EXPECTED, PeriodBound, PeriodError, parse_bound, period
from gateway.features.ledger.section import LEDGER
from gateway.features.ledger.sums import GROUP, ROW_GROUP, Period, UsageReport
from gateway.features.table import read

DESCRIPTION: Final = (
    "Show usage and cost by tenant, model and the like, from the ledger (`ledger.url`). Whole days come from daily sums,"
    f" incomplete days at both ends, and all days by {', '.join(ROW_GROUP[:-1])} or {ROW_GROUP[-1]}, from the rows of requests,"
    " as long as these are stored."
    " Days are UTC days."
)
NAMES: Final = (*GROUP, *ROW_GROUP)
_READ_S: Final = 600.0  # an incomplete day may have millions of rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--config", metavar="FILE", type=Path, help="configuration with `ledger.url` (default: $WARMROUTE_CONFIG)"
    )
    where.add_argument("--url", metavar="URL", help="the ledger: sqlite, sqlite:///PATH or postgresql://USER@HOST/NAME")
    groups = f"columns to group by, one or more of {', '.join(NAMES)} (default: tenant)"
    parser.add_argument("--by", metavar="NAME[,NAME...]", type=_groups, default=("tenant",), help=groups)
    parser.add_argument("--since", metavar="WHEN", type=_bound, default="7d", help=f"{EXPECTED} (default: %(default)s)")
    parser.add_argument("--until", metavar="WHEN", type=_bound, help="exclusive end (default: the end of today, UTC)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV, with all columns")
    form.add_argument("--json", action="store_true", help="print a JSON object")


def run(options: argparse.Namespace) -> int:
    """Returns the exit status. Raises ConfigError."""
    url = _url(options, os.environ)
    try:
        within = period(options.since, options.until, time.time())
    except PeriodError as error:
        options.parser.error(str(error))
    try:
        found = asyncio.run(_read(url, options.by, within))
    except StoreFailed as failure:
        print(f"warmroute: {escaped(str(failure))}", file=sys.stderr)
        return 1
    if options.json:
        print(as_json(found, options.by, within))
    elif options.csv:
        write_csv(found, options.by, sys.stdout)
    else:
        print_usage(found, options.by)
    _print_notes(found)
    return 0


def _url(options: argparse.Namespace, env: Mapping[str, str]) -> str:
    """Raises ConfigError."""
    if options.url:
        try:
            url = database_url(options.url)
        except ValueError as error:
            options.parser.error(f"argument --url: {error}")
    else:
        file = str(options.config or env.get("WARMROUTE_CONFIG", ""))
        if not file:
            options.parser.error("give the ledger with --config FILE or --url URL")
        url = LEDGER.of(read(Path(file), {}).config).url
    if url == OFF:
        raise ConfigError("ledger.url is off: this gateway has no ledger")
    return url


async def _read(url: str, by: Sequence[str], within: Period) -> UsageReport:
    """Raises StoreFailed."""
    from gateway.database.database import Database
    from gateway.database.places import LEDGER_FILE, with_path
    from gateway.features.ledger.queries import usage
    from gateway.features.ledger.tables import TABLES

    database = Database(with_path(url, LEDGER_FILE), TABLES, _READ_S, read_only=True)
    await database.open()
    try:
        return await database.read(lambda connection: usage(connection, by, within))
    finally:
        await database.close()


def _print_notes(found: UsageReport) -> None:
    for day, rows, requests in found.incomplete:
        stored = f"{rows:,} of its {requests:,} requests have rows (ledger.retention_d)"
        print(
            f"warmroute: note: {day} is counted in part, and some rows of that part may be missing: {stored}", file=sys.stderr
        )
    if found.further:
        print(f"warmroute: note: {found.further:,} further groups, the cheapest, are in 'other'", file=sys.stderr)
    if unpriced := sum(group["unpriced"] for group in found.groups):
        print(f"warmroute: note: {unpriced:,} requests of models without a price are counted at no cost", file=sys.stderr)


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if wrong := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"one or more of {', '.join(NAMES)} are expected, got {wrong[0][:40]!r}")
    return names


def _bound(text: str) -> PeriodBound:
    try:
        return parse_bound(text)
    except PeriodError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
