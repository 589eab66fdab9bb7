"""Requirements of a valid configuration that are missing on this machine: variables, files, libraries.

They may exist on the gateway's machine, so these are notes, neither errors nor warnings. Exceptions are libraries without which
it does not start, and an invalid file of keys on this machine, with which all requests would be refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from msgspec import Struct, structs

from gateway.commands.advice import advisers
from gateway.config.hints import DATABASE, extra_of
from gateway.config.parse import Key, Problem, values_of
from gateway.config.schema import Config, KeyConfig, TlsConfig
from gateway.config.source import LoadedConfig
from gateway.database.failures import StoreFailed
from gateway.errors import ReplicaFailure
from gateway.upstream.access.credentials import TlsContexts, load


def require_libraries(config: Config) -> None:
    """Raises ConfigError if a library is missing without which the gateway does not start."""
    for feature in advisers():
        feature.require(config)


def notes_of(loaded: LoadedConfig, env: Mapping[str, str] = os.environ) -> list[Problem]:
    """All notes, with file and line. Raises ConfigError for an invalid file of keys."""
    contexts = TlsContexts()
    found = (
        problem
        for key, value in values_of(loaded.config)
        for problem in (_missing(key, value, contexts, env) if isinstance(value, KeyConfig | TlsConfig) else ())
    )
    others = (problem for feature in advisers() for problem in feature.notes(loaded, env))
    return sorted(map(loaded.at, (*found, *_databases(loaded.config), *others)), key=lambda each: each.line)


def _missing(key: Key, value: KeyConfig | TlsConfig, contexts: TlsContexts, env: Mapping[str, str]) -> Iterator[Problem]:
    try:
        if isinstance(value, TlsConfig):
            contexts.of(value)
        else:
            load(value, None, None, env)
    except ReplicaFailure as failure:
        yield Problem(key, f"not on this machine: {failure.message}")


def _databases(config: Config) -> Iterator[Problem]:
    """Drivers that the databases in the sections need."""
    for key, value in structs.asdict(config).items():
        for field in structs.fields(value) if isinstance(value, Struct) else ():
            url = getattr(value, field.name)
            if DATABASE in extra_of(field.type) and url.startswith("postgres"):
                from gateway.database.urls import parsed  # SQLAlchemy: imported only with a database

                try:
                    parsed(url, f"{key}.{field.name}")
                except StoreFailed as failure:
                    yield Problem((key, field.name), f"not on this machine: {failure}")
