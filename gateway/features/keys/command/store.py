"""The keys of a configuration, or of a URL, as `warmroute keys` reads and changes them. Each change is stored as an
action of an operator.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, TypeVar

from gateway.config.listen import OFF
from gateway.config.parse import ConfigError, convert
from gateway.features.keys.section import KEYS, KeysConfig
from gateway.features.table import read

if TYPE_CHECKING:
    from gateway.features.keys.store import KeyStore
    from gateway.server.actions import OperatorAction

T = TypeVar("T")


def database(options: argparse.Namespace) -> str:
    """Raises ConfigError."""
    url = url_of(options, os.environ)
    if url.startswith("/"):
        raise ConfigError(f"the keys are in a file: change {url}, which gateways read again")
    return url


def url_of(options: argparse.Namespace, env: Mapping[str, str]) -> str:
    """The URL of the database with its path, or the path of the keys file. Raises ConfigError."""
    from gateway.database.places import with_path
    from gateway.features.keys.keys import FILE, database_url

    if options.url:
        url = convert(KeysConfig, {"url": options.url}).url
        if url == "ledger":
            raise ConfigError("--url: give the URL of the ledger, or a configuration with --config FILE")
        if url == OFF:
            raise ConfigError("--url: keys are off")
        return with_path(url, FILE)
    file = str(options.config or env.get("WARMROUTE_CONFIG", ""))
    if not file:
        options.parser.error("give the keys with --config FILE or --url URL")
    config = read(Path(file), {}).config
    if KEYS.of(config).url == OFF:
        raise ConfigError("keys.url is off: this gateway has no keys")
    return KEYS.of(config).url if KEYS.of(config).url.startswith("/") else database_url(config)


def with_store(
    url: str,
    action: str,
    work: Callable[[KeyStore], Awaitable[T]],
    details: Mapping[str, object] | None = None,
    *,
    create: bool = False,
) -> T:
    """Runs work on the store, and stores it as an action of an operator. create: creates the file and the tables if missing.
    Raises StoreFailed and the exceptions of work.
    """
    if not create:
        read_store(url, _nothing)  # a typo in the URL must not create an empty database

    async def kept(store: KeyStore) -> T:
        done = await work(store)
        found = getattr(done[0] if isinstance(done, tuple) else done, "id", None)
        await store.keep_actions([(token_hex(6), _action(action, {**({"id": found} if found else {}), **(details or {})}))])
        return done

    return asyncio.run(_run_on_store(url, kept, read_only=False))


def _action(action: str, details: Mapping[str, object]) -> OperatorAction:
    """An action of this machine's user."""
    from gateway.server.actions import MAX_DETAILS, OperatorAction

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    text = json.dumps(details)[:MAX_DETAILS]
    return OperatorAction(time.time(), f"warmroute keys {action}", f"{user}@{socket.gethostname()}"[:200], details=text)


def read_store(url: str, work: Callable[[KeyStore], Awaitable[T]]) -> T:
    """Runs work on the store, read only. Raises StoreFailed, also if there is no database."""
    return asyncio.run(_run_on_store(url, work, read_only=True))


async def _run_on_store(url: str, work: Callable[[KeyStore], Awaitable[T]], *, read_only: bool) -> T:
    from gateway.features.keys.store import open_key_store

    store = await open_key_store(url, time.time, read_only=read_only)
    try:
        return await work(store)
    finally:
        await store.close()


async def _nothing(_store: KeyStore) -> None:
    pass
