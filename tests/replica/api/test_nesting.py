"""JSON that is nested deeply is the client's mistake, wherever it is, at every path of both engines."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from replica.sim.cost import SimConfig
from tests.replica.conftest import serve
from tests.replica.fakes import WatchedEngine
from tests.support.tiers import gate

HI = b'"messages":[{"role":"user","content":"Hi"}],"max_tokens":1'
# Each path, and the fields of a good body.
PATHS = {
    "/v1/chat/completions": HI,
    "/v1/completions": b'"prompt":"Hi","max_tokens":1',
    "/v1/messages": HI,
    "/v1/messages/count_tokens": HI,
    "/v1/responses": b'"input":"Hi","max_output_tokens":1',
    "/v1/responses/input_tokens": b'"input":"Hi"',
    "/tokenize": b'"prompt":"Hi"',
    "/detokenize": b'"tokens":[]',
}
PLACES = [
    *(
        b'"%s":DEEP' % name
        for name in (b"unknown", b"model", b"messages", b"tools", b"logit_bias", b"input", b"prompt", b"tokens")
    ),
    *(b'"%s":DEEP' % name for name in (b"metadata", b"guided_json", b"chat_template_kwargs", b"system", b"tool_choice")),
    b'"messages":[{"role":"user","content":"Hi","unknown":DEEP}]',
    b'"messages":[{"role":"user","content":DEEP}]',
    b'"messages":[{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"f","arguments":DEEP}}]}]',
    b'"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":DEEP}]}]',
    b'"input":[{"type":"message","role":"user","content":"Hi","unknown":DEEP}]',
    b'"tools":[{"type":"function","function":{"name":"f","parameters":DEEP}}]',
    b'"tools":[{"type":"function","name":"f","parameters":DEEP,"input_schema":DEEP}]',
    b'"response_format":{"type":"json_schema","json_schema":{"schema":DEEP}}',
    b'"structured_outputs":{"json":DEEP}',
    b'"text":{"format":{"type":"json_schema","schema":DEEP}}',
    b'"output_config":{"format":{"type":"json_schema","schema":DEEP}}',
]
# As JSON in a text, which is parsed too; if it is too deep for that, it stays a text.
TEXTS = [
    ("/v1/chat/completions", b'"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":DEEP}}]}]'),
    ("/v1/chat/completions", b'"guided_json":DEEP'),
    ("/v1/responses", b'"input":[{"type":"function_call","call_id":"c","name":"f","arguments":DEEP}]'),
]


def deep(levels: int, opening: bytes = b'{"a":', closing: bytes = b"}") -> bytes:
    return opening * levels + b"1" + closing * levels


def bodies(levels: int) -> Iterator[tuple[str, bytes]]:
    for (path, good), place in itertools.product(PATHS.items(), PLACES):
        for value in (deep(levels), deep(levels, b"[", b"]")):
            yield path, b"{" + good + b"," + place.replace(b"DEEP", value) + b"}"
    for path, place in TEXTS if levels < 1000 else []:
        yield path, b"{" + PATHS[path] + b"," + place.replace(b"DEEP", json.dumps(deep(levels).decode()).encode()) + b"}"


@pytest.fixture(params=["sim", pytest.param("transformers", marks=pytest.mark.model)])
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if request.param == "sim":
        async for replica in serve(WatchedEngine(SimConfig(decode_rate=2000.0)), None):
            yield replica.url
        return
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.replica.tiny import serving, spoken_model

    async with serving(spoken_model(tmp_path), chat_template="{% for m in messages %}{{ m | tojson }}{% endfor %}") as client:
        yield str(client.base_url).removesuffix("/v1/")


async def ask(http: aiohttp.ClientSession, url: str, body: bytes) -> tuple[int, str, bool]:
    """The status, the message, and whether the error has the shape of its API."""
    async with http.post(url, data=body) as response:
        answer = await response.json()
        error = answer.get("error") or {}
        shape = {"type", "message"} if "/v1/messages" in url else {"message", "type", "param", "code"}
        return response.status, str(error.get("message", answer)), set(error) == shape


@pytest.mark.parametrize("levels", [260, 900, 5_000, 8_000])
@gate("sim-*", "transformers-8000", reason="each depth, each engine")
async def test_deep_nesting_is_a_400_everywhere_and_a_flood_of_it_hurts_nobody(url: str, levels: int) -> None:
    async with aiohttp.ClientSession() as http:
        flood = list(bodies(levels))
        flood = flood if levels < 5_000 else flood[:: len(flood) // 20]
        answers = await asyncio.gather(*(ask(http, url + path, body) for path, body in flood))
        for (path, body), (status, message, shaped) in zip(flood, answers, strict=True):
            assert (status, shaped) == (400, True), (path, body[:150], status, message)
            assert "nested too deeply" in message, (path, body[:150], message)
            assert len(message) < 400
        async with http.get(url + "/health") as health:
            assert health.status == 200


async def test_what_is_nested_less_deeply_is_served(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        for path, good in PATHS.items():
            body = b"{" + good + b',"unknown":' + deep(240) + b"}"
            status, message, _ = await ask(http, url + path, body)
            assert status == 200, message


@pytest.mark.parametrize(("levels", "status"), [(248, 200), (252, 400)])
async def test_what_a_response_repeats_of_its_request_is_served_or_refused(url: str, levels: int, status: int) -> None:
    """It is deeper inside there."""
    schema = b'{"type":"function","name":"f","parameters":' + deep(levels - 2) + b"}"
    async with aiohttp.ClientSession() as http:
        for field in (b'"metadata":' + deep(levels), b'"tools":[' + schema + b"]"):
            for stream in (b"", b',"stream":true'):
                body = b'{"input":"Hi","max_output_tokens":1,' + field + stream + b"}"
                async with http.post(url + "/v1/responses", data=body) as response:
                    answer = await response.text()
                    assert response.status == status, answer[:300]
                    assert "response.failed" not in answer
