"""`warmroute keys`: make, list, show, rotate and revoke API keys, in the database that the configuration names.

It works beside running gateways, which look at the database every second, and without any. A new key is the only thing on
stdout, so that it can go into a secret's file (`warmroute keys create ... > key`); what there is to say about it is on stderr.
A key is never an argument: other users of a machine read those.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from gateway.commands.streams import OutputError, escaped, messages_lost
from gateway.config.kinds import unix_time
from gateway.config.listen import OFF
from gateway.config.parse import ConfigError, convert
from gateway.database.failures import StoreFailed
from gateway.features.keys.section import KEYS, KeysConfig
from gateway.features.table import read

if TYPE_CHECKING:
    from gateway.features.keys.record import Key
    from gateway.features.keys.store import KeyStore

DESCRIPTION: Final = (
    "Make, list, show, rotate and revoke API keys, in the database of the configuration's `keys.url`. Running gateways follow"
    " within a second or two. With a file of keys, `create` prints the entry that is to be added to it."
)
_GRACE: Final = "24h"
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_LISTED: Final = 1000

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION", dest="action")

    def add(name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        where = action.add_mutually_exclusive_group()
        where.add_argument(
            "--config", metavar="FILE", type=Path, help="configuration that names it (default: $WARMROUTE_CONFIG)"
        )
        where.add_argument("--url", metavar="URL", help="of the keys: as keys.url has it, a database or the path of a file")
        action.set_defaults(act=run, parser=action)
        return action

    _add_settings(add("create", "make a key, and print it to stdout, once", _create))
    listing = add("list", "list the keys", _list)
    listing.add_argument("--json", action="store_true", help="print a JSON array")
    for name, text, run in (
        ("show", "show what a key may do, as JSON", _show),
        ("rotate", "make another secret for a key, and print it to stdout, once", _rotate),
        ("revoke", "refuse a key from now on; requests that run finish", _revoke),
    ):
        one = add(name, text, run)
        one.add_argument("id", metavar="ID", help="of the key, the 8 characters behind `wr-`")
        if name == "rotate":
            grace = (
                "how long the former secret goes on, such as 30m, 24h or 7d, at most 30d; 0s: not at all (default: %(default)s)"
            )
            one.add_argument("--grace", metavar="TIME", type=_seconds, default=_GRACE, help=grace)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", required=True, help="whose it is")
    parser.add_argument("--name", help="what lists show of it")
    parser.add_argument("--models", metavar="NAME[,NAME...]", help="that it may use; a name may end with a star (default: all)")
    parser.add_argument("--pools", metavar="NAME[,NAME...]", help="that it may use (default: all)")
    parser.add_argument("--budget-usd-day", metavar="USD", type=float, help="that it may spend on a day (UTC)")
    parser.add_argument("--budget-usd-month", metavar="USD", type=float, help="that it may spend in a month (UTC)")
    parser.add_argument("--requests-per-minute", metavar="N", type=int, help="that it may send")
    parser.add_argument("--uncached-tokens-per-minute", metavar="N", type=int, help="of prompts, without cached ones")
    parser.add_argument("--priority", metavar="N", type=int, help="the highest that its requests may have (default: 0)")
    parser.add_argument("--expires", metavar="TIME", dest="expires_at", help="a date, or a date and time (default: never)")


def run(options: argparse.Namespace) -> int:
    """Returns the exit status. Raises ConfigError."""
    from gateway.features.keys.record import KeyNotFoundError, KeyRefusedError

    try:
        status: int = options.act(options)
    except (StoreFailed, KeyNotFoundError, KeyRefusedError) as failure:
        print(f"warmroute: {escaped(str(failure))}", file=sys.stderr)
        return 1
    return status


def _create(options: argparse.Namespace) -> int:
    from gateway.features.keys.record import Settings
    from gateway.features.keys.secret import digest_of, new_id, new_key

    raw = {name: value for name in Settings.__struct_fields__ if (value := getattr(options, name)) is not None}
    for name in ("models", "pools"):
        if name in raw:
            raw[name] = [each.strip() for each in raw[name].split(",") if each.strip()]
            if not raw[name]:  # a variable that is not set: not the list that allows everything
                raise ConfigError(f"--{name}: at least one name is expected; leave it out to allow all")
    if raw.get("expires_at") == "":
        raise ConfigError("--expires: a time is expected; leave it out for a key that does not expire")
    settings, url = convert(Settings, raw), _url(options, os.environ)
    if settings.expires_at and unix_time(settings.expires_at) <= time.time():
        raise ConfigError(f"--expires: {options.expires_at} is past: nobody could use the key")
    if url.startswith("/"):
        id_ = new_id()
        secret = new_key(id_)
        print(f"warmroute: add this to `keys` in {escaped(url)}:", file=sys.stderr)
        print(f"- {json.dumps({'id': id_, 'sha256': digest_of(secret).hex(), **raw})}", file=sys.stderr)
        if messages_lost():
            return 1  # nobody could add it
    else:
        key, secret = _with_store(url, lambda store: store.create(settings), makes=True)
        id_ = key.id
        print(f"warmroute: the key {id_} of {settings.tenant}; it is not shown again:", file=sys.stderr)
    try:
        _print_secret(secret)
    except OutputError:
        if url.startswith("/"):
            print(f"warmroute: nobody has the key {id_}: do not add it", file=sys.stderr)
        else:
            _undo(f"nobody has the key {id_}", "it is revoked", url, lambda store: store.revoke(id_))
        raise
    return 0


def _list(options: argparse.Namespace) -> int:
    keys = _all(_url(options, os.environ))
    if options.json:
        print(json.dumps([key.shown() for key in keys], indent=2))
        return 0
    from gateway.commands.tables import print_table, text
    from gateway.features.keys.record import stamp

    now = time.time()

    def state(key: Key) -> str:
        if key.revoked_at:
            return f"revoked {stamp(key.revoked_at)}"
        return "expired" if 0 < key.expires_at <= now else "valid"

    columns = [text(name) for name in ("id", "tenant", "name", "models", "state")]
    print_table(
        columns,
        [[key.id, key.settings.tenant, key.settings.name, ", ".join(key.settings.models) or "all", state(key)] for key in keys],
    )
    return 0


def _all(url: str) -> list[Key]:
    """Raises StoreFailed, ConfigError."""
    if url.startswith("/"):
        from gateway.features.keys.file import read_keys

        return read_keys(Path(url))

    async def listed(store: KeyStore) -> list[Key]:
        found: list[Key] = []
        more = True
        while more:
            part, more = await store.listed(found[-1].id if found else "", _LISTED)
            found += part
        return found

    return _read_store(url, listed)


def _show(options: argparse.Namespace) -> int:
    from gateway.features.keys.record import no_key

    keys = {key.id: key for key in _all(_url(options, os.environ))}
    if options.id not in keys:
        raise no_key(options.id)
    print(json.dumps(keys[options.id].shown(), indent=2))
    return 0


def _rotate(options: argparse.Namespace) -> int:
    async def rotated(store: KeyStore) -> tuple[Key, Key, str]:
        before = await store.find(options.id)
        return before, *(await store.rotate(options.id, options.grace))

    url = _database(options)
    before, key, secret = _with_store(url, rotated)
    print(f"warmroute: another secret for the key {key.id}; it is not shown again:", file=sys.stderr)
    try:
        _print_secret(secret)
    except OutputError:
        done = "the rotation is undone, and the former one goes on"
        what = f"nobody has the new secret of the key {key.id}"
        _undo(what, done, url, lambda store: store.take_back(key.id, secret, before))
        raise
    return 0


def _print_secret(secret: str) -> None:
    """Raises OutputError if it did not get out."""
    try:
        print(secret, flush=True)
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {error.strerror or error}") from error


def _undo(what: str, done: str, url: str, work: Callable[[KeyStore], Awaitable[object]]) -> None:
    """What was made for a secret that could not be printed. Raises StoreFailed, KeyNotFoundError, KeyRefusedError."""
    print(f"warmroute: {what}, for it could not be printed", file=sys.stderr)
    _with_store(url, work)
    print(f"warmroute: {done}", file=sys.stderr)


def _revoke(options: argparse.Namespace) -> int:
    key = _with_store(_database(options), lambda store: store.revoke(options.id))
    print(f"warmroute: the key {key.id} of {key.settings.tenant} is revoked", file=sys.stderr)
    return 0


def _database(options: argparse.Namespace) -> str:
    """Raises ConfigError."""
    url = _url(options, os.environ)
    if url.startswith("/"):
        raise ConfigError(f"the keys are in a file: change {url}, which gateways read again")
    return url


def _url(options: argparse.Namespace, env: Mapping[str, str]) -> str:
    """Of the database, with a path, or the path of a file. Raises ConfigError."""
    from gateway.database.places import with_path
    from gateway.features.keys.keys import FILE, database_of

    if options.url:
        url = convert(KeysConfig, {"url": options.url}).url
        if url == "ledger":
            raise ConfigError("--url: which ledger? Name its URL, or a configuration: --config FILE")
        if url == OFF:
            raise ConfigError("--url: off: there are no keys")
        return with_path(url, FILE)
    file = str(options.config or env.get("WARMROUTE_CONFIG", ""))
    if not file:
        options.parser.error("which keys? Name them: --config FILE, or --url URL")
    config = read(Path(file), {}).config
    if KEYS.of(config).url == OFF:
        raise ConfigError("keys.url is off: there are no keys")
    return KEYS.of(config).url if KEYS.of(config).url.startswith("/") else database_of(config)


def _with_store(url: str, work: Callable[[KeyStore], Awaitable[T]], *, makes: bool = False) -> T:
    """makes: the file and the tables, where there are none. Raises StoreFailed, and what the work raises."""
    if not makes:
        _read_store(url, _nothing)  # a mistake in a URL must not look like a database without keys
    return asyncio.run(_done(url, work, read_only=False))


def _read_store(url: str, work: Callable[[KeyStore], Awaitable[T]]) -> T:
    """Raises StoreFailed, also where there is no such database."""
    return asyncio.run(_done(url, work, read_only=True))


async def _done(url: str, work: Callable[[KeyStore], Awaitable[T]], *, read_only: bool) -> T:
    from gateway.features.keys.store import opened

    store = await opened(url, time.time, read_only=read_only)
    try:
        return await work(store)
    finally:
        await store.close()


async def _nothing(_store: KeyStore) -> None:
    pass


def _seconds(text: str) -> float:
    from gateway.features.keys.record import MAX_GRACE_S

    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isascii() or not number.isdigit() or len(number) > 9:
        raise argparse.ArgumentTypeError(f"a time such as 30m, 24h or 7d is expected, got {text[:40]!r}")
    if (seconds := int(number) * _UNITS[unit]) > MAX_GRACE_S:
        raise argparse.ArgumentTypeError(f"{text} is too long: at most {MAX_GRACE_S / _UNITS['d']:.0f}d")
    return seconds
