"""What a front sends a second time, and what it never does: replicas play the gateways here. They answer /ready, and do what
no gateway does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.deploy.fronts.stage import FRONTS, front
from tests.support.fakes import Behaviour, FakeReplica, answers, dies, http

pytestmark = [pytest.mark.tools, pytest.mark.parametrize("name", FRONTS)]

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


@contextlib.asynccontextmanager
async def client_of(name: str, gateways: Sequence[int], folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        front(name, gateways, folder) as (url, tls),
        httpx2.AsyncClient(http2=True, verify=tls.trusted(), timeout=60, base_url=url) as client,
    ):
        yield client


def playing(behaviour: Behaviour) -> FakeReplica:
    async def play(request: Any, writer: asyncio.StreamWriter) -> None:
        if request.path == "/ready":
            writer.write(http(200, b"{}"))
        else:
            await behaviour(request, writer)

    return FakeReplica(script=[play])


def sent(*gateways: FakeReplica) -> int:
    return sum(request.method == "POST" for gateway in gateways for request in gateway.requests)


async def test_a_request_that_a_gateway_may_have_read_is_not_sent_again(name: str, tmp_path: Path) -> None:
    async with playing(dies) as one, playing(dies) as two, client_of(name, [one.port, two.port], tmp_path) as client:
        for number in range(1, 4):
            try:
                answer = await client.post("/v1/chat/completions", json=CHAT, headers={"X-Session-Id": f"s{number}"})
                assert answer.status_code in (502, 503)
            except httpx2.RemoteProtocolError:  # haproxy resets the stream
                assert name == "haproxy"
            assert sent(one, two) == number


async def test_a_gateway_that_refuses_connections_is_passed_over(name: str, tmp_path: Path) -> None:
    async with (
        playing(answers("here")) as one,
        playing(answers("here")) as two,
        client_of(name, [one.port, two.port], tmp_path) as client,
    ):
        await two.stop()
        for number in range(1, 33):
            answer = await client.post("/v1/chat/completions", json=CHAT, headers={"X-Session-Id": f"s{number}"})
            assert answer.status_code == 200
        assert sent(one) == 32


async def test_without_any_gateway_the_error_is_one_that_clients_read(name: str, tmp_path: Path) -> None:
    async with playing(answers()) as gone:
        port = gone.port
    async with client_of(name, [port, port], tmp_path) as transport:
        client = openai.AsyncOpenAI(base_url=transport.base_url.join("/v1"), api_key="k", max_retries=0, http_client=transport)
        with pytest.raises(openai.InternalServerError) as raised:
            await client.chat.completions.create(**CHAT)
        assert raised.value.status_code in (502, 503)
        if name != "haproxy":  # its own errors are HTML
            assert isinstance(raised.value.body, dict)
            assert raised.value.body["message"]
