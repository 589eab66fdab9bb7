"""`warmroute keys`: creates, lists, shows, updates, rotates, credits and revokes API keys in the configured database.

Running gateways follow within a second or two; none has to run. stdout has only the new key, so that it can be redirected into
a secret's file (`warmroute keys create ... > key`); messages go to stderr. A key is never an argument, because other users of
the machine can read arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import to_builtins

from gateway.commands.streams import OutputError, escaped, messages_lost
from gateway.config.kinds import unix_time
from gateway.config.parse import ConfigError, convert
from gateway.database.failures import StoreFailed
from gateway.features.keys.command.listing import list_actions, list_keys, one_key, show
from gateway.features.keys.command.store import database, url_of, with_store

if TYPE_CHECKING:
    from gateway.features.keys.record import Key, KeySettings
    from gateway.features.keys.store import KeyStore

    Spending = dict[str, tuple[int, int]]

DESCRIPTION: Final = (
    "Create, list, show, update, rotate, credit and revoke API keys in the database of the configuration's `keys.url`. Running"
    " gateways follow within a second or two. With a file of keys, `create` and `update` print the entry for it."
)
_GRACE: Final = "24h"
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_NONE: Final = "none"  # removes a setting

T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION", dest="action")

    def add(name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        where = action.add_mutually_exclusive_group()
        where.add_argument(
            "--config", metavar="FILE", type=Path, help="configuration with `keys.url` (default: $WARMROUTE_CONFIG)"
        )
        where.add_argument("--url", metavar="URL", help="value of keys.url: a database, or the path of a keys file")
        action.set_defaults(act=run, parser=action)
        return action

    _add_settings(add("create", "create a key and print it to stdout, once", _create))
    listing = add("list", "list the keys", list_keys)
    actions_ = add("actions", "list what operators have changed, the latest first", list_actions)
    for each in (listing, actions_):
        each.add_argument("--json", action="store_true", help="print a JSON array")
    for name, text, run in (
        ("show", "show what a key may do, as JSON", show),
        ("update", "change the models, limits, budgets, priority or expiry of a key", _update),
        ("rotate", "make a new secret for a key and print it to stdout, once", _rotate),
        ("credit", "raise today's budget of a key (UTC), and so that of the month", _credit),
        ("revoke", "refuse a key from now on; running requests finish", _revoke),
    ):
        one = add(name, text, run)
        one.add_argument("id", metavar="ID", help="id of the key: the 8 characters after `wr-`")
        if name == "update":
            _add_changes(one)
        if name == "credit":
            one.add_argument("usd", metavar="USD", type=float, help="amount")
        if name == "rotate":
            grace = "validity of the old secret, such as 30m, 24h or 7d, at most 30d; 0s: none (default: %(default)s)"
            one.add_argument("--grace", metavar="TIME", type=_seconds, default=_GRACE, help=grace)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", required=True, help="tenant that owns the key")
    _add_changeable(parser, lambda kind: kind)


def _add_changes(parser: argparse.ArgumentParser) -> None:
    """The settings that an update may change; omitted ones stay."""
    parser.epilog = f"Settings that are left out stay. '{_NONE}' removes a limit, a list, a name or the expiry."

    def or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
        def read(text: str) -> Any:
            return _NONE if text == _NONE else kind(text)

        read.__name__ = kind.__name__  # argparse has it in its errors
        return read

    _add_changeable(parser, or_none)


def _add_changeable(parser: argparse.ArgumentParser, read: Callable[[Callable[[str], Any]], Callable[[str], Any]]) -> None:
    """read: makes the reader of an argument from that of its value."""
    amount, number = read(float), read(int)
    parser.add_argument("--name", help="name to show in lists")
    parser.add_argument(
        "--models", metavar="NAME[,NAME...]", help="models that the key may use; a name may end with a star (default: all)"
    )
    parser.add_argument("--pools", metavar="NAME[,NAME...]", help="pools that the key may use (default: all)")
    parser.add_argument("--budget-usd-day", metavar="USD", type=amount, help="budget per day (UTC)")
    parser.add_argument("--budget-usd-month", metavar="USD", type=amount, help="budget per month (UTC)")
    parser.add_argument("--requests-per-minute", metavar="N", type=number, help="limit of requests per minute")
    parser.add_argument(
        "--uncached-tokens-per-minute",
        metavar="N",
        type=number,
        help="limit of prompt tokens per minute, without cached tokens",
    )
    parser.add_argument("--priority", metavar="N", type=number, help="highest priority of its requests (default: 0)")
    parser.add_argument(
        "--expires", metavar="TIME", dest="expires_at", help="expiry: a date, or a date and time (default: never)"
    )


def run(options: argparse.Namespace) -> int:
    """Returns the exit status. Raises ConfigError."""
    from gateway.features.keys.record import KeyNotFoundError, KeyRefusedError

    try:
        status: int = options.act(options)
    except (StoreFailed, KeyNotFoundError, KeyRefusedError) as failure:
        print(f"warmroute: {escaped(str(failure))}", file=sys.stderr)
        return 1
    return status


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that are given. Raises ConfigError."""
    from gateway.features.keys.record import KeySettings

    named = {name: getattr(options, name, None) for name in KeySettings.__struct_fields__}
    raw = {name: value for name, value in named.items() if value is not None}
    for name in ("models", "pools"):
        if name in raw and raw[name] != _NONE:
            raw[name] = [each.strip() for each in raw[name].split(",") if each.strip()]
            if not raw[name]:  # probably an unset shell variable: an empty list must not allow everything
                raise ConfigError(f"--{name}: at least one name is expected; leave it out to allow all")
    if raw.get("expires_at") == "":
        raise ConfigError("--expires: a time is expected; leave it out for a key that does not expire")
    return raw


def _require_future(options: argparse.Namespace, settings: KeySettings) -> None:
    """Raises ConfigError."""
    if settings.expires_at and unix_time(settings.expires_at) <= time.time():
        raise ConfigError(f"--expires: {options.expires_at} is in the past")


def _create(options: argparse.Namespace) -> int:
    from gateway.features.keys.record import KeySettings
    from gateway.features.keys.secret import digest_of, new_id, new_key

    raw = _settings(options)
    settings, url = convert(KeySettings, raw), url_of(options, os.environ)
    _require_future(options, settings)
    if url.startswith("/"):
        id_ = new_id()
        secret = new_key(id_)
        print(f"warmroute: add this to `keys` in {escaped(url)}:", file=sys.stderr)
        print(f"- {json.dumps({'id': id_, 'sha256': digest_of(secret).hex(), **raw})}", file=sys.stderr)
        if messages_lost():
            return 1  # the entry was not printed, so the key would be useless
    else:
        key, secret = with_store(url, "create", lambda store: store.create(settings), raw, create=True)
        id_ = key.id
        print(f"warmroute: new key {id_} for tenant {settings.tenant}; it is not shown again:", file=sys.stderr)
    try:
        _print_secret(secret)
    except OutputError:
        if url.startswith("/"):
            print(f"warmroute: the key {id_} was lost: do not add its entry", file=sys.stderr)
        else:
            _undo(f"the key {id_} was lost", "it is revoked", url, lambda store: store.revoke(id_))
        raise
    return 0


def _update(options: argparse.Namespace) -> int:
    from gateway.features.keys.record import KeySettings, changed

    changes = {name: None if value == _NONE else value for name, value in _settings(options).items()}
    if not changes:
        raise ConfigError("at least one setting is expected, such as --budget-usd-day 20: see `warmroute keys update --help`")
    if changes.get("expires_at"):
        _require_future(options, convert(KeySettings, {"tenant": "-", "expires_at": changes["expires_at"]}))
    url = url_of(options, os.environ)
    if url.startswith("/"):
        settings = to_builtins(changed(one_key(url, options.id), changes).settings)
        (digest, _), *_ = one_key(url, options.id).digests
        print(f"warmroute: put this in the place of the entry {options.id} in {escaped(url)}:", file=sys.stderr)
        print(f"- {json.dumps({'id': options.id, 'sha256': digest.hex(), **settings})}", file=sys.stderr)
        return 0
    key = with_store(url, "update", lambda store: store.update(options.id, changes), changes)
    print(f"warmroute: the key {key.id} of {key.settings.tenant} is changed: {', '.join(changes)}", file=sys.stderr)
    return 0


def _rotate(options: argparse.Namespace) -> int:
    async def rotated(store: KeyStore) -> tuple[Key, Key, str]:
        before = await store.find(options.id)
        return before, *(await store.rotate(options.id, options.grace))

    url = database(options)
    before, key, secret = with_store(url, "rotate", rotated, {"grace_s": options.grace})
    print(f"warmroute: new secret for the key {key.id}; it is not shown again:", file=sys.stderr)
    try:
        _print_secret(secret)
    except OutputError:
        done = "the rotation is undone; the old secret stays valid"
        what = f"the new secret of the key {key.id} was lost"
        _undo(what, done, url, lambda store: store.undo_rotation(key.id, secret, before))
        raise
    return 0


def _print_secret(secret: str) -> None:
    """Raises OutputError if the output failed."""
    try:
        print(secret, flush=True)
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {error.strerror or error}") from error


def _undo(what: str, done: str, url: str, work: Callable[[KeyStore], Awaitable[object]]) -> None:
    """Undoes the creation of a secret that could not be printed. Raises StoreFailed, KeyNotFoundError, KeyRefusedError."""
    print(f"warmroute: {what}, because it could not be printed", file=sys.stderr)
    with_store(url, "undo", work, {"reason": what})
    print(f"warmroute: {done}", file=sys.stderr)


def _revoke(options: argparse.Namespace) -> int:
    key = with_store(database(options), "revoke", lambda store: store.revoke(options.id))
    print(f"warmroute: the key {key.id} of {key.settings.tenant} is revoked", file=sys.stderr)
    return 0


def _credit(options: argparse.Namespace) -> int:
    from gateway.features.keys.record import Credit

    usd, day = convert(Credit, {"usd": options.usd}).usd, time.strftime("%Y-%m-%d", time.gmtime())
    key = with_store(database(options), "credit", lambda store: store.credit(options.id, day, usd), {"usd": usd})
    print(f"warmroute: the budget of the key {key.id} for {day} is raised by {usd:g} USD", file=sys.stderr)
    return 0


def _seconds(text: str) -> float:
    from gateway.features.keys.record import MAX_GRACE_S

    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isascii() or not number.isdigit() or len(number) > 9:
        raise argparse.ArgumentTypeError(f"a time such as 30m, 24h or 7d is expected, got {text[:40]!r}")
    if (seconds := int(number) * _UNITS[unit]) > MAX_GRACE_S:
        raise argparse.ArgumentTypeError(f"{text} is too long: at most {MAX_GRACE_S / _UNITS['d']:.0f}d")
    return seconds
