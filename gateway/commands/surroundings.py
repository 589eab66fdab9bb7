"""What a valid configuration needs beside itself, and does not find on this machine: variables, files, libraries.

They may well be there where the gateway runs: so these are notes, neither errors nor warnings. But for libraries without which
it does not start, and a file of keys that is here and invalid: with it, all requests would be refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from gateway.config.listen import OFF
from gateway.config.parse import ConfigError, Key, Problem, values_of
from gateway.config.schema import Config, DiscoveryConfig, KeyConfig, TlsConfig
from gateway.config.source import LoadedConfig
from gateway.database.failures import StoreFailed
from gateway.errors import ReplicaFailure
from gateway.features.discovery.file import LOGGED, listed
from gateway.features.keys.file import read_keys
from gateway.features.sharing.server.client import require_library
from gateway.features.sharing.server.failures import tls_context
from gateway.upstream.access.credentials import TlsContexts, load


def require_libraries(config: Config) -> None:
    """Raises ConfigError if one is not installed that the gateway does not start without."""
    if config.sharing.url != OFF:
        require_library()
    if config.tracing.endpoint != OFF:
        from gateway.features.tracing.otlp import LIBRARY, is_installed

        if not is_installed():
            raise ConfigError(f"tracing.endpoint needs a library that is not installed here: pip install '{LIBRARY}'")
    if config.keys.oidc:
        from gateway.features.keys.tokens import jwks

        if not jwks.is_installed():
            raise ConfigError(f"keys.oidc needs a library that is not installed here: pip install '{jwks.LIBRARY}'")


def notes_of(loaded: LoadedConfig, env: Mapping[str, str] = os.environ) -> list[Problem]:
    """All of them, with file and line. Raises ConfigError for a file of keys that is invalid."""
    contexts = TlsContexts()
    found = (
        problem
        for key, value in values_of(loaded.config)
        for problem in (_missing(key, value, contexts, env) if isinstance(value, KeyConfig | TlsConfig) else ())
    )
    others = (*_of_the_lists(loaded), *_of_the_store(loaded), *_of_the_databases(loaded), *_of_the_keys(loaded))
    return sorted(map(loaded.at, (*found, *others)), key=lambda each: each.line)


def _missing(key: Key, value: KeyConfig | TlsConfig, contexts: TlsContexts, env: Mapping[str, str]) -> Iterator[Problem]:
    try:
        if isinstance(value, TlsConfig):
            contexts.of(value)
        else:
            load(value, None, None, env)
    except ReplicaFailure as failure:
        yield Problem(key, f"not on this machine: {failure.message}")


def _of_the_lists(loaded: LoadedConfig) -> Iterator[Problem]:
    """Lists of replicas: discovery[].file. One that is here and invalid is named, too."""
    for key, value in values_of(loaded.config):
        if isinstance(value, DiscoveryConfig) and value.file:
            try:
                listed(value)
            except ConfigError as error:
                yield Problem((*key, "file"), f"not read on this machine: {'; '.join(map(str, error.problems[:LOGGED]))}")


def _of_the_store(loaded: LoadedConfig) -> Iterator[Problem]:
    try:
        tls_context(loaded.config.sharing)
    except ReplicaFailure as failure:
        yield Problem(("sharing",), f"not on this machine: {failure.message}")


def _of_the_keys(loaded: LoadedConfig) -> Iterator[Problem]:
    """Raises ConfigError for a file of keys that can be read, and is invalid."""
    url = loaded.config.keys.url
    if not url.startswith("/"):
        return
    path = Path(url)
    if path.exists() and not path.is_file():  # to open a pipe would wait for whoever writes into it
        yield Problem(("keys", "url"), f"not on this machine: {url} is not a regular file")
        return
    try:
        keys = read_keys(path)
    except ConfigError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        yield Problem(("keys", "url"), f"not on this machine: {error}")
        return
    limited = [key for key in keys if key.settings.budget_usd_day is not None or key.settings.budget_usd_month is not None]
    if limited and not loaded.config.prices:
        text = f"{len(limited)} of its keys have a budget, which is never reached without prices: nothing costs anything"
        yield Problem(("keys", "url"), text)


def _of_the_databases(loaded: LoadedConfig) -> Iterator[Problem]:
    for section, url in ((name, getattr(loaded.config, name).url) for name in ("state", "ledger", "keys")):
        if url.startswith("postgres"):
            from gateway.database.urls import parsed  # SQLAlchemy: not for whoever has no database

            try:
                parsed(url, f"{section}.url")
            except StoreFailed as failure:
                yield Problem((section, "url"), f"not on this machine: {failure}")
