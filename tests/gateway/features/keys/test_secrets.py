"""Where keys and tokens must not be: a gateway of two workers with all that writes, sends or shows something."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.measure.cpu import tree
from bench.measure.ports import free_port
from gateway.features.keys.secret import SHAPE
from tests.chaos.stage import Child, until
from tests.gateway.conftest import BODY
from tests.gateway.features.keys.conftest import PRICES, bearer
from tests.support.collector import Collector
from tests.support.fakes import FakeReplica, FakeRequest, answers, dies, status
from tests.support.issuer import AUDIENCE, FakeIssuer

PAGES = ("replicas", "keys", "sharing", "recording", "doctor")
PART = 16  # characters of a secret that must be nowhere


@contextlib.asynccontextmanager
async def gateway(folder: Path, collector: Collector, config: dict[str, Any]) -> AsyncIterator[tuple[str, str, Child]]:
    """(API, operators' listener, process)"""
    port, admin = free_port(), free_port()
    config = {
        "listen": f"127.0.0.1:{port}",
        "admin_listen": f"127.0.0.1:{admin}",
        "log_level": "debug",
        "workers": 2,
        "prices": PRICES,
        "tracing": collector.tracing(),
        "snapshot": {"file": str(folder / "snapshot")},
        "ledger": {"url": f"sqlite:///{folder}/ledger.sqlite"},
        "state": {"url": f"sqlite:///{folder}/state.sqlite"},
        "limits": {"drain_accept_s": 0, "drain_timeout_s": 5},
        **config,
    }
    file = folder / "warmroute.yaml"
    file.write_text(json.dumps(config))
    with contextlib.ExitStack() as ends:
        child = Child(folder / "gateway.log", ends, "-m", "gateway.commands.cli", "serve", "--config", str(file))

        async def ready() -> bool:
            assert child.process.poll() is None, child.lines
            with contextlib.suppress(aiohttp.ClientError):
                async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/ready") as answer:
                    return answer.status == 200
            return False

        await until(ready, lambda: child.lines)
        yield f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}", child
        child.signal(signal.SIGTERM)
        assert await child.exit_status() == 0, child.lines


def command(folder: Path, *arguments: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "keys", *arguments, "--config", str(folder / "warmroute.yaml")],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip(), done.stderr


def parts_of(secret: str) -> set[bytes]:
    return {secret[at : at + PART].encode() for at in range(0, len(secret) - PART + 1, PART)}


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def by_prompt(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    """All that may go wrong is in logs, metrics and traces too."""
    behaviour = dies if b"dies" in request.body else status(400) if b"refused" in request.body else answers(cached=10)
    await behaviour(request, writer)


async def traffic(url: str, secrets: list[str]) -> None:
    chat, kept = "/v1/chat/completions", "/v1/responses"
    async with aiohttp.ClientSession() as session:

        async def ask(path: str, body: Any, headers: dict[str, str]) -> None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(url + path, json=body, headers=headers) as answer:
                    text = await answer.read()
                    assert not any(part in text for secret in secrets for part in parts_of(secret)), (path, answer.status)

        for secret in secrets:
            for headers in (bearer(secret), {"X-Api-Key": secret}, {**bearer(secret), "X-Api-Key": "other"}):
                for text in ("hi", "dies", "refused"):
                    await ask(chat, {**BODY, "messages": [{"role": "user", "content": text}]}, headers)
                await ask(chat, {**BODY, "model": "nobody's"}, headers)
                await ask(chat, {**BODY, "stream": True}, headers)
                await ask(kept, {"model": "m", "input": "a", "background": True}, headers)
                await ask("/v1/embeddings", {"model": "m", "input": "a"}, headers)
            await ask(chat, BODY, bearer(secret + "x"))


async def pages(admin: str, key: str) -> list[bytes]:
    found = []
    async with aiohttp.ClientSession() as session:
        for path in ["/metrics", "/ready", *(f"/warmroute/{page}" for page in PAGES)]:
            async with session.get(admin + path) as answer:
                found.append(await answer.read())
        async with session.post(f"{admin}/warmroute/route", json=BODY, headers={"X-Api-Key": key}) as answer:
            found.append(await answer.read())
    return found


@pytest.mark.timeout(180)
async def test_secrets_are_nowhere(tmp_path: Path) -> None:
    issuer = FakeIssuer()
    async with Collector() as collector, issuer.serving(), FakeReplica([by_prompt]) as replica:
        oidc = {"issuer": issuer.url, "audience": AUDIENCE, "tenant_claim": "tenant", "requests_per_minute": 20}
        config = {
            "pools": [{"replicas": [replica.url]}],
            "keys": {"url": f"sqlite:///{tmp_path}/keys.sqlite", "oidc": [oidc]},
        }
        async with gateway(tmp_path, collector, config) as (url, admin, child):
            key, told = command(tmp_path, "create", "--tenant", "acme", "--budget-usd-day", "0.001")
            rotated, _ = command(tmp_path, "rotate", key.split("-")[1], "--grace", "1h")
            assert SHAPE.fullmatch(key)
            token = issuer.token()
            secrets = [key[12:], rotated[12:], *token.split(".")[1:]]
            whole = [key, rotated, token]
            async with aiohttp.ClientSession() as session:

                async def known() -> bool:
                    async with session.get(f"{url}/v1/models", headers=bearer(rotated)) as answer:
                        return answer.status == 200

                await until(known, lambda: child.lines)
            await traffic(url, whole)
            shown = await pages(admin, key)
            listed = command(tmp_path, "list", "--json")
            processes = [
                (Path(f"/proc/{pid}") / name).read_bytes() for pid in tree(child.process.pid) for name in ("cmdline", "environ")
            ]
            assert len(processes) >= 6
        sent = b"".join([json.dumps([request.headers, request.path]).encode() + request.body for request in replica.requests])
        assert len(replica.requests) > 10
        assert not re.search(rb"(?i)\"(authorization|x-api-key|api-key|cookie)\"", sent)
        traced = repr(collector.spans).encode() + b"".join(collector.bodies)
        assert len(collector.spans) > 10
        files = files_in(tmp_path)
        assert {"gateway.log", "ledger.sqlite", "keys.sqlite", "snapshot", "state.sqlite"} <= files.keys()
        assert b'"key":"' in files["gateway.log"]
        others = [*shown, *processes, sent, traced, told.encode(), *(text.encode() for text in listed)]
        for part in set[bytes]().union(*map(parts_of, secrets)):
            assert [name for name, data in files.items() if part in data] == []
            assert not any(part in each for each in others)
