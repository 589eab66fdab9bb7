"""The gateway's own endpoints, its limits, and bad input of every kind."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from yarl import URL

from gateway.request.record import code_label, new_record, tenant_label
from gateway.telemetry.metrics import Metrics
from tests.gateway.conftest import BODY, Running, eventually, running
from tests.support.fakes import FakeReplica, answers, http, writes


async def test_health_and_readiness_differ() -> None:
    async with running("http://127.0.0.1:9") as run:
        assert (await run.get("/health"))[0] == 200
        code, _, body = await run.get("/ready")
        assert (code, json.loads(body)) == (503, {"ready": False, "pools_without_replica": ["default"], "draining": False})
    async with FakeReplica() as replica, running(replica) as run:
        assert (await run.get("/ready"))[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b'{"model": "\xff"}', 400, "invalid_json"),
        (b"", 400, "invalid_json"),
        ({"messages": []}, 400, "invalid_request"),
        ({"model": "m"}, 400, "invalid_request"),
        ({"model": "m", "messages": 5}, 400, "invalid_request"),
        ({**BODY, "model": "nope"}, 404, "model_not_found"),
        ({**BODY, "stream": "x"}, 400, "invalid_request"),
    ],
)
async def test_bad_input_gets_openais_error_shape_and_leaves_nothing_behind(body: Any, status: int, code: str) -> None:
    async with FakeReplica() as replica, running(replica) as run:
        answered, headers, error = await run.post(body, headers={"X-Request-Id": "mine"})
        assert (answered, error["error"]["code"]) == (status, code)
        assert set(error["error"]) == {"message", "type", "param", "code"}
        assert headers["X-Request-Id"] == "mine"
        assert not replica.requests
        assert (await run.post())[0] == 200, "and the process lives on"


async def test_token_ids_out_of_range_are_refused() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        code, _, body = await run.post({"model": "m", "prompt": [1, -5]}, path="/v1/completions")
        assert (code, body["error"]["param"]) == (400, "prompt")


async def test_token_ids_route_like_text() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one, two) as run:
        for turn in range(4):
            assert (await run.post({"model": "m", "prompt": list(range(200 + turn))}, path="/v1/completions"))[0] == 200
        assert sorted([len(one.requests), len(two.requests)]) == [0, 4]


async def test_a_cache_salt_shares_nothing() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        answers = [await run.post({**BODY, "cache_salt": salt}) for salt in ("a", "a", "b")]
        predicted = [int(headers["X-Warmroute-Cached-Tokens"]) for _, headers, _ in answers]
        assert predicted[0] == predicted[2] == 0 < predicted[1]


async def test_a_body_over_the_limit_is_a_413() -> None:
    async with FakeReplica() as replica, running(replica, limits={"body_mb": 1}) as run:
        big = io.BytesIO(json.dumps({**BODY, "messages": [{"role": "user", "content": "x" * (1 << 20)}]}).encode())
        code, _, body = await run.post(big)
        assert (code, body["error"]["code"]) == (413, "request_too_large")
        assert "limits.body_mb" in body["error"]["message"]
        bomb = gzip.compress(b" " * (8 << 20))
        code, _, body = await run.post(bomb, headers={"Content-Encoding": "gzip"})
        assert (code, body["error"]["code"]) == (413, "request_too_large")
        code, _, body = await run.post(bomb, path="/warmroute/route", headers={"Content-Encoding": "gzip"})
        assert (code, body["error"]["code"]) == (413, "request_too_large")
        assert not replica.requests
        assert (await run.metrics())[
            'warmroute_requests_total{code="413",endpoint="/v1/chat/completions",model="unknown"}'
        ] == 2


async def test_a_large_body_under_the_limit_arrives_whole() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        raw = json.dumps({**BODY, "messages": [{"role": "user", "content": "word " * (1 << 20)}]}).encode()
        assert (await run.post(io.BytesIO(raw)))[0] == 200
        assert replica.requests[0].body == raw


async def test_a_compressed_body_is_read_and_sent_plain() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        code, _, _ = await run.post(gzip.compress(json.dumps(BODY).encode()), headers={"Content-Encoding": "gzip"})
        assert code == 200
        assert replica.requests[0].json == BODY
        assert "content-encoding" not in replica.requests[0].headers


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v2/x", 404, "not_found"),
        ("POST", "/v1/v1/messages", 404, "not_found"),
        ("GET", "/v1/v1/models", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/warmroute/route", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/models", 405, "method_not_allowed"),
    ],
)
async def test_wrong_paths_and_methods(method: str, path: str, status: int, code: str) -> None:
    async with FakeReplica() as replica, running(replica) as run, run.session.request(method, run.url + path) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "/v1/v1/messages", "the client adds /v1 to its base URL, which must end without it"),
        ("POST", "/chat/completions", "the API is under /v1/"),
        ("GET", "/v1/responses", "'Upgrade: websocket'"),
    ],
)
async def test_what_a_wrong_base_url_or_a_proxy_makes_of_a_path_has_a_hint(method: str, path: str, hint: str) -> None:
    async with FakeReplica() as replica, running(replica) as run, run.session.request(method, run.url + path) as answer:
        assert hint in (await answer.json())["error"]["message"]
        assert not replica.requests


async def test_request_ids_that_could_break_a_log_are_replaced() -> None:
    def request_id(offered: str | None) -> str:
        return new_record(offered, "/", 0.0).id

    assert request_id("abc-1:2/3") == "abc-1:2/3"
    for bad in (None, "", "a b", "x\ny", "é", "x" * 200, '"'):
        assert request_id(bad).startswith("wr-")
    made = {request_id(None) for _ in range(1000)}
    assert len(made) == 1000
    assert all(request_id(one) == one for one in made), "an id of ours can stand in a log, too"
    assert tenant_label("acme corp") == "acme corp"
    assert tenant_label("") == "none"
    assert tenant_label("\udcff\n" + "x" * 100) == "??" + "x" * 62


async def test_a_header_of_any_bytes_breaks_neither_metrics_nor_log(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    prices = {"m": {"input": 1, "output": 1}}
    async with FakeReplica() as replica, running(replica, prices=prices) as run:
        assert (await raw(run, b"/v1/chat/completions", b"X-Tenant-Id: \xff\r\n")).startswith(b"HTTP/1.1 200")
        await eventually(request_lines)
        assert request_lines()[0]["tenant"] == "?"
        assert any('tenant="?"' in name for name in await run.metrics())


async def test_a_target_in_absolute_form_is_understood() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        assert (await raw(run, b"http://x/v1/chat/completions?a=1")).startswith(b"HTTP/1.1 200")
        assert replica.requests[0].path == "/v1/chat/completions?a=1"


async def raw(run: Running, target: bytes, headers: bytes = b"") -> bytes:
    """The status line of a hand-written POST of BODY."""
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(run.url).port)
    body = json.dumps(BODY).encode()
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s" % (target, headers, len(body), body))
    line = await reader.readline()
    writer.close()
    await writer.wait_closed()
    return line


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


async def test_what_is_nested_too_deeply_is_a_400() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        code, _, body = await run.post({**BODY, "tools": nested(300)})
        assert (code, body["error"]["code"]) == (400, "invalid_json")
        assert (await run.post({"model": "m", "messages": [], "tools": nested(300)}, path="/v1/x"))[0] == 200


async def test_a_broken_encoding_is_a_400() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        code, _, body = await run.post(b"not gzip at all", headers={"Content-Encoding": "gzip"})
        assert (code, body["error"]["code"]) == (400, "invalid_body")


async def test_counters_equal_what_clients_saw() -> None:
    async with FakeReplica([answers(prompt=250, completion=3, cached=20)]) as replica, running(replica) as run:
        seen = [(await run.post(BODY if index % 3 else b"{"))[0] for index in range(12)]
        samples = await run.metrics()
        assert samples['warmroute_requests_total{code="200",endpoint="/v1/chat/completions",model="m"}'] == seen.count(200)
        assert samples['warmroute_requests_total{code="400",endpoint="/v1/chat/completions",model="unknown"}'] == seen.count(
            400
        )
        labels = f'model="m",replica="{replica.name}"'
        assert samples[f"warmroute_completion_tokens_total{{{labels}}}"] == 3 * seen.count(200)
        assert samples[f'warmroute_prompt_tokens_total{{cache="hit",{labels}}}'] == 20 * seen.count(200)
        assert samples[f'warmroute_prompt_tokens_total{{cache="miss",{labels}}}'] == 230 * seen.count(200)
        assert samples[f'warmroute_replica_inflight{{replica="{replica.name}"}}'] == 0
        assert samples["warmroute_trie_blocks"] == run.gateway.router.trie.blocks > 0


async def test_a_status_code_that_no_standard_knows_is_counted_as_its_class() -> None:
    codes = [200, 418, 499, 599, 777, 778, 999]
    async with (
        FakeReplica([writes(http(code, b"{}", "application/json")) for code in codes]) as replica,
        running(replica) as run,
    ):
        for code in codes:
            status, _, _ = await run.post()
            assert status in (code, 502)
        seen = {labels[2] for labels in run.gateway.metrics.requests.values}
        assert {"200", "418", "5xx"} <= seen
        assert all(code in {"200", "418", "499", "502"} or code.endswith("xx") for code in seen), seen


def test_of_900_codes_few_are_labels() -> None:
    requests = Metrics().requests
    for code in range(100, 1000):
        requests.add(("m", "other", code_label(code)))
    assert len(requests.values) < 80
    assert sum(requests.values.values()) == 900
    assert [code_label(code) for code in (200, 404, 499, 503, 460, 599, 777)] == [
        "200",
        "404",
        "499",
        "503",
        "4xx",
        "5xx",
        "7xx",
    ]
