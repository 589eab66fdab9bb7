"""Errors as the official clients raise them, in each API, native and translated; their own retries and time-outs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest

from tests.clients.sdk.engines import UNKNOWN, engine
from tests.clients.sdk.tap import Tapped
from tests.clients.sdk.test_invoices import message, plain_response
from tests.gateway.conftest import eventually, running
from tests.support.fakes import Behaviour, FakeReplica, FakeRequest, answers, hangs, http, status, writes

HI: Any = [{"role": "user", "content": "hi"}]
WAYS = [("chat", "chat"), ("messages", "messages"), ("messages", "chat"), ("responses", "responses"), ("responses", "chat")]
IDS = [f"{name} over {behind}" for name, behind in WAYS]


TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 413: "request_too_large"}
TYPES |= {422: "invalid_request_error", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}


def error_of(behind: str, code: int, *headers: str) -> Behaviour:
    """An engine's error in the form of its API."""
    if behind != "messages":
        return status(code, "the engine's words", *headers)
    body = {"type": "error", "error": {"type": TYPES[code], "message": "the engine's words"}}
    return writes(http(code, json.dumps(body).encode(), "application/json", *headers))


async def ask(tapped: Tapped, name: str, *, stream: bool = False, model: str = "m", text: str = "hi", **options: Any) -> Any:
    """One request by the API's own client. options: of the client."""
    turns: Any = [{"role": "user", "content": text}]
    if name == "messages":
        async with tapped.anthropic(**options) as client:
            return await client.messages.create(model=model, max_tokens=9, messages=turns, stream=stream)
    async with tapped.openai(**options) as other:
        if name == "chat":
            return await other.chat.completions.create(model=model, messages=turns, stream=stream)
        return await other.responses.create(model=model, input=turns, stream=stream)


def raised(name: str, kind: str) -> type[Exception]:
    found: type[Exception] = getattr(anthropic if name == "messages" else openai, kind)
    return found


@pytest.mark.parametrize(("name", "behind"), WAYS, ids=IDS)
@pytest.mark.parametrize(
    ("code", "kind", "stream"),
    [
        (400, "BadRequestError", False),
        (400, "BadRequestError", True),
        (401, "AuthenticationError", False),
        (403, "PermissionDeniedError", False),
        (413, "APIStatusError", False),
        (422, "UnprocessableEntityError", False),
        (429, "RateLimitError", False),
        (429, "RateLimitError", True),
        (500, "InternalServerError", True),
        (503, "InternalServerError", False),
    ],
)
async def test_an_engine_s_error(name: str, behind: str, stream: bool, code: int, kind: str) -> None:
    error = error_of(behind, code)
    async with engine({behind: error, behind + "_stream": error}) as replica, running(replica) as run:
        tapped = Tapped(run.url)
        with pytest.raises(raised(name, kind), match="the engine's words") as caught:
            await ask(tapped, name, stream=stream)
        assert caught.value.status_code == code  # type: ignore[attr-defined]
        assert caught.value.request_id  # type: ignore[attr-defined]
        tapped.check()


@pytest.mark.parametrize("name", ["chat", "messages", "responses"])
async def test_the_gateway_s_own_errors(name: str) -> None:
    limits = {"drain_timeout_s": 1, "body_mb": 1}
    async with FakeReplica() as replica, running(replica, limits=limits) as run:
        tapped = Tapped(run.url)
        with pytest.raises(raised(name, "NotFoundError"), match="no-such-model"):
            await ask(tapped, name, model="no-such-model")
        with pytest.raises(raised(name, "APIStatusError")) as caught:
            await ask(tapped, name, text="x" * (2 << 20))
        assert caught.value.status_code == 413  # type: ignore[attr-defined]
        tapped.check()
        assert len(replica.requests) == 0


@pytest.mark.parametrize(
    ("name", "behind", "code"), [*((*way, 429) for way in WAYS), ("messages", "messages", 503), ("responses", "chat", 503)]
)
async def test_the_client_waits_as_long_as_it_is_told_and_tries_again(name: str, behind: str, code: int) -> None:
    """The engine refuses once: the client comes back after its Retry-After, by itself, and has an answer."""
    refused = asyncio.Event()

    async def once(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        if refused.is_set():
            return await good(name, behind)(request, writer)
        refused.set()
        return await error_of(behind, code, "Retry-After: 1")(request, writer)

    async with engine({behind: once}) as replica, running(replica) as run:
        tapped = Tapped(run.url, retries=3)
        assert await ask(tapped, name)
        assert tapped.exchanges[0].status == code
        assert tapped.exchanges[0].headers["retry-after"] == "1"
        assert tapped.exchanges[-1].status == 200
        assert code != 429 or len(tapped.exchanges) == 2, "one more attempt was enough"
        tapped.check()


def good(name: str, behind: str) -> Behaviour:
    if behind == "chat":
        return answers()
    return message(10, 0, 0, 0, 3) if name == "messages" else plain_response("completed", 10, 0, 0, 3)


@pytest.mark.parametrize(("name", "behind"), [WAYS[0], WAYS[2]])
async def test_without_any_replica_the_client_tries_again_and_gives_up(name: str, behind: str) -> None:
    async with engine({behind: good(name, behind)}) as replica, running(replica) as run:
        await replica.stop()
        tapped = Tapped(run.url, retries=1)
        with pytest.raises(raised(name, "InternalServerError")) as caught:
            await ask(tapped, name)
        assert caught.value.status_code in (502, 503)  # type: ignore[attr-defined]
        assert len(tapped.exchanges) == 2
        tapped.check()


@pytest.fixture
async def stuck() -> AsyncIterator[FakeReplica]:
    """Never answers."""
    until = asyncio.Event()
    async with FakeReplica([hangs(until)]) as replica:
        yield replica
        until.set()


@pytest.mark.parametrize("name", ["chat", "messages", "responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_s_own_time_out_frees_the_replica(stuck: FakeReplica, name: str, stream: bool) -> None:
    async with running(stuck) as run:
        with pytest.raises(raised(name, "APITimeoutError")):
            await ask(Tapped(run.url, retries=1), name, stream=stream, timeout=0.3)
        await eventually(lambda: stuck.gone == 2 and run.gateway.router.ledger.open_leases == 0)
        assert len(stuck.requests) == 2, "the client has tried again"


@pytest.mark.parametrize("name", ["chat", "messages", "responses"])
async def test_the_gateway_s_time_out_is_an_error_of_the_api(stuck: FakeReplica, name: str) -> None:
    """The replica is up: neither the gateway nor the client sends the same prompt again."""
    async with running(stuck, timeouts={"first_byte_s": 0.2}) as run:
        tapped = Tapped(run.url, retries=2)
        with pytest.raises(raised(name, "InternalServerError"), match="first_byte_s") as caught:
            await ask(tapped, name)
        assert caught.value.status_code == 504  # type: ignore[attr-defined]
        assert len(tapped.exchanges) == len(stuck.requests) == 1
        tapped.check()


@pytest.mark.parametrize("name", ["messages", "responses"])
async def test_what_no_replica_knows_is_an_error_of_the_api(name: str) -> None:
    """Neither the API nor chat."""
    async with FakeReplica([UNKNOWN]) as replica, running(replica) as run:
        tapped = Tapped(run.url)
        with pytest.raises(raised(name, "NotFoundError")):
            await ask(tapped, name)
        tapped.check()
