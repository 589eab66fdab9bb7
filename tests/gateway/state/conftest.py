"""Stores on a file of their own, with a clock that tests set."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from gateway.state.database import Database
from gateway.state.records import StoredResponse
from gateway.state.store import Store

TTL_S = 1000.0


class Clock:
    """Unix seconds."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def opened(path: Path, clock: Clock | None = None) -> AsyncIterator[Store]:
    database = Database(f"sqlite:///{path}")
    await database.open()
    store = Store(database, TTL_S, clock or Clock())
    try:
        yield store
    finally:
        await store.close()


def response(id_: str, parent: str = "", owner: str = "o", *, size: int = 5, conversation: str = "") -> StoredResponse:
    """Its content says whose it is."""
    name = f"{owner}/{id_}".encode()
    return StoredResponse(
        owner=owner,
        id=id_,
        parent=parent,
        conversation=conversation,
        created_at=5.0,
        status="completed",
        input=b'"' + b"i" * size + name + b'"',
        output=b'"o' + name + b'"',
        response=b'{"id":"' + name + b'"}',
    )
