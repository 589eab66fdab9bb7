"""A gateway with keys in a database of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from gateway.features.keys.keys import Keys
from tests.gateway.conftest import Running, running
from tests.support.fakes import FakeReplica

PRICES = {"m": {"input": 1.0, "output": 1.0, "cached_input": 0.1}}


@contextlib.asynccontextmanager
async def keyed(
    folder: Path, *replicas: FakeReplica | str, keys: dict[str, Any] | None = None, **config: Any
) -> AsyncIterator[Running]:
    """With a new database in this folder."""
    section = {"url": f"sqlite:///{folder}/keys.sqlite", **(keys or {})}
    async with running(*replicas, keys=section, **config) as run:
        yield run
        run.gateway[Keys].limiter.check()


async def made(run: Running, **settings: Any) -> tuple[str, str]:
    """(id, key) of a new key."""
    status, _, answer = await run.post({"tenant": "acme", **settings}, "/warmroute/keys")
    assert status == 201, answer
    return answer["id"], answer["key"]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def asked(run: Running, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """(status, parsed answer) of an operator's request."""
    async with run.session.request(method, f"{run.admin_url}{path}", json=body) as answer:
        return answer.status, await answer.json(content_type=None)
