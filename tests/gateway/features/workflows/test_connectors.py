"""Connectors: what they are sent, and every way in which they can fail."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.upstream.resolver import REFRESH_S, Resolver
from tests.gateway.conftest import running
from tests.gateway.features.workflows.test_runs import RUNS, TEXT, USER, document
from tests.gateway.upstream.test_resolver import Clock, NameServer
from tests.support.fakes import Behaviour, FakeReplica, http, status, writes
from tests.support.scripted_engine import ScriptedEngine

STEP = {"call": {"use": "rag", "with": {"query": "${inputs.messages[0].content}"}}, "yield": "found"}
LARGE = json.dumps("x" * (2 << 20)).encode()


async def run_of(script: list[Behaviour], step: dict[str, Any] = STEP, **connector: Any) -> tuple[Any, FakeReplica]:
    rag, engine = FakeReplica(script), ScriptedEngine(lambda _body: TEXT)
    async with rag, engine.replica:
        config = {"connectors": {"rag": {"url": f"{rag.url}/search?k=5", **connector}}}
        async with running(engine.replica, workflows=config) as run:
            body = {"workflow": document({"a": step}), "inputs": {"messages": [USER]}}
            return (await run.post(body, RUNS, headers={"X-Mine": "secret", "Authorization": "Bearer k"}))[2], rag


GOOD = writes(http(200, b'{"context": ["a"]}'))


async def test_a_connector_gets_its_arguments_and_no_header_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAG_KEY", "rag-secret")
    found, rag = await run_of([GOOD], key_env="RAG_KEY")
    assert (found["status"], found["outputs"]) == ("completed", {"found": {"context": ["a"]}})
    (request,) = rag.requests
    assert (request.method, request.path, request.json) == ("POST", "/search?k=5", {"query": "hello"})
    assert request.headers["idempotency-key"] == f"{found['id']}.a"
    assert request.headers["authorization"] == "Bearer rag-secret"
    assert "x-mine" not in request.headers


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        (status(500), "answered 500"),
        (status(302, "no", "Location: http://169.254.169.254/"), "answered 302"),
        (writes(http(200, b"no json")), "cannot be used"),
        (writes(http(200, b"1e999")), "cannot be used"),
        (writes(http(200, LARGE)), "more than a MiB"),
        (writes(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n200000\r\n" + LARGE), "more than a MiB"),
        (writes(b"SSH-2.0\r\n"), "failed"),
    ],
)
async def test_a_failing_connector_fails_its_step_without_another_call(behaviour: Behaviour, text: str) -> None:
    found, rag = await run_of([behaviour])
    assert (found["status"], found["error"]["code"], found["error"]["step"]) == ("failed", "connector_failed", "a")
    assert text in found["error"]["message"]
    assert len(rag.requests) == 1


async def test_one_with_retries_is_called_again_with_the_same_key() -> None:
    found, rag = await run_of([status(500), GOOD], retries=True)
    assert found["status"] == "completed"
    first, second = rag.requests
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]


async def test_a_slow_connector_is_left() -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    found, _ = await run_of([never], timeout_s=0.05)
    assert "did not answer within 0.05 s" in found["error"]["message"]


async def test_a_connector_of_another_tenant_is_none() -> None:
    found, rag = await run_of([GOOD], tenants=["acme"])
    assert (found["error"]["code"], found["error"]["param"]) == ("workflow_invalid", "steps.a.call.use")
    assert not rag.requests


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest", "http://metadata.google.internal/"])
async def test_metadata_services_are_no_connectors(url: str) -> None:
    engine = ScriptedEngine(lambda _body: TEXT)
    async with engine.replica, running(engine.replica, workflows={"connectors": {"rag": {"url": url, "timeout_s": 2}}}) as run:
        found = (await run.post({"workflow": document({"a": STEP}), "inputs": {"messages": [USER]}}, RUNS))[2]
    assert found["error"]["code"] == "connector_failed"
    assert "unreachable" in found["error"]["message"]


async def test_a_connector_whose_name_is_rebound_to_a_metadata_service_is_not_called() -> None:
    names, clock = NameServer({"rag.test": ["127.0.0.1"]}), Clock()
    resolver = Resolver(names.look_up, clock)
    rag, engine = FakeReplica([GOOD] * 3), ScriptedEngine(lambda _body: TEXT)
    async with rag, engine.replica:
        connectors = {"rag": {"url": f"http://rag.test:{rag.port}/", "timeout_s": 2}}
        async with running(engine.replica, resolver=resolver, workflows={"connectors": connectors}) as run:
            body = {"workflow": document({"a": STEP}), "inputs": {"messages": [USER]}}
            assert (await run.post(body, RUNS))[2]["status"] == "completed"
            names.answers["rag.test"] = ["169.254.169.254", "fd00:ec2::254"]
            clock.now += REFRESH_S
            assert await resolver.renewed("rag.test") == ("169.254.169.254", "fd00:ec2::254")
            found = (await run.post(body, RUNS))[2]
    assert (found["status"], found["error"]["code"]) == ("failed", "connector_failed")
    assert "unreachable" in found["error"]["message"]
    assert len(rag.requests) == 1
