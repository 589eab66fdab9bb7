"""Web pages of configured origins may use the API from a browser, those of others not, and none is an operator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.admission.cors import EXPOSED, METHODS
from gateway.config.parse import ConfigError
from tests.gateway.cluster.test_reload import reload
from tests.gateway.conftest import BODY, Running, running
from tests.support.configs import load
from tests.support.fakes import FakeReplica, answers, http, streams, writes

PAGE, OTHER = "https://chat.example.org", "https://evil.example.org"
CHAT, MODELS, FILES = "/v1/chat/completions", "/v1/models", "/v1/files"
ALLOW = "Access-Control-Allow-Origin"


def asks(origin: str = PAGE, method: str = "POST", names: str = "authorization,content-type") -> dict[str, str]:
    return {"Origin": origin, "Access-Control-Request-Method": method, "Access-Control-Request-Headers": names}


async def sent(run: Running, method: str, path: str, origin: str | None, **options: Any) -> tuple[int, Any]:
    """(status, headers)."""
    headers = {"Origin": origin} if origin else {}
    async with run.session.request(method, run.url + path, headers=headers, **options) as answer:
        await answer.read()
        return answer.status, answer.headers


def reads(headers: Mapping[str, str]) -> bool:
    """Whether a browser lets a page of PAGE read the answer."""
    return headers.get(ALLOW) in (PAGE, "*")


async def check_all_ways(run: Running, replica: FakeReplica) -> None:
    """Plain requests, chunked ones, streams, errors, and what the gateway answers by itself."""
    for origin, allowed in ((PAGE, True), (OTHER, False), (None, False)):
        ways: list[tuple[int, str, str, dict[str, Any]]] = [
            (200, "POST", CHAT, {"json": BODY}),
            (200, "POST", CHAT, {"data": iter_of(json.dumps(BODY).encode())}),
            (200, "POST", CHAT, {"json": {**BODY, "stream": True}}),
            (400, "POST", CHAT, {"json": {}}),
            (404, "POST", CHAT, {"json": {**BODY, "model": "gone"}}),
            (405, "GET", CHAT, {}),
            (200, "POST", FILES, {"data": b"x"}),
            (200, "GET", MODELS, {}),
            (404, "GET", f"{MODELS}/gone", {}),
            (200, "GET", "/version", {}),
        ]
        for status, method, path, options in ways:
            replica.script = (streams("a", "b"),) if "stream" in options.get("json", {}) else (answers(),)
            code, headers = await sent(run, method, path, origin, **options)
            assert (code, reads(headers)) == (status, allowed), (method, path, origin)
            assert headers.getall(ALLOW, []) == [PAGE] * allowed
            assert "Origin" in headers["Vary"]
            assert (headers.get("Access-Control-Expose-Headers") == EXPOSED) is allowed


async def iter_of(data: bytes) -> Any:
    yield data


async def test_pages_of_the_origin_read_whatever_the_way() -> None:
    async with FakeReplica() as replica, running(replica, cors_origins=[PAGE, "tauri://localhost"]) as run:
        await check_all_ways(run, replica)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", MODELS, f"{MODELS}/m", FILES, "/tokenize", "/v1/x"])
async def test_the_gateway_answers_preflights(path: str) -> None:
    async with FakeReplica() as replica, running(replica, cors_origins=[PAGE]) as run:
        async with run.session.options(run.url + path, headers=asks()) as answer:
            assert answer.status == 204
            assert answer.headers[ALLOW] == PAGE
            assert answer.headers["Access-Control-Allow-Methods"] == METHODS
            assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
            assert int(answer.headers["Access-Control-Max-Age"]) > 0
            assert "Access-Control-Allow-Credentials" not in answer.headers
        async with run.session.options(run.url + path, headers=asks(OTHER)) as answer:
            assert answer.status == 403
            assert ALLOW not in answer.headers
            assert (await answer.json())["error"]["code"] == "origin_not_allowed"
        assert replica.requests == []


async def test_any_origin() -> None:
    async with FakeReplica() as replica, running(replica, cors_origins=["*"]) as run:
        status, headers = await sent(run, "POST", CHAT, OTHER, json=BODY)
        assert (status, headers[ALLOW], "Vary" in headers) == (200, "*", False)
        async with run.session.options(run.url + CHAT, headers=asks("null")) as answer:
            assert (answer.status, answer.headers[ALLOW]) == (204, "*")


async def test_operators_endpoints_and_status_are_for_no_page() -> None:
    async with FakeReplica() as replica, running(replica, cors_origins=["*"]) as run:
        for base in (run.url, run.admin_url):
            for path in ("/warmroute/replicas", "/metrics", "/health", "/ready"):
                for method in ("GET", "OPTIONS"):
                    async with run.session.request(method, base + path, headers=asks()) as answer:
                        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
                        assert method == "GET" or answer.status in (404, 405)


async def test_by_default_no_page_reads_anything_whatever_a_replica_allows() -> None:
    allows = writes(http(200, b"{}", "application/json", "Access-Control-Allow-Origin: *", "Access-Control-Expose-Headers: *"))
    async with FakeReplica([allows]) as replica, running(replica) as run:
        for method, path in (("POST", CHAT), ("POST", FILES), ("OPTIONS", FILES)):
            status, headers = await sent(run, method, path, PAGE, json=BODY)
            assert status in (200, 502)
            assert not [name for name in headers if name.lower().startswith("access-control")]
        async with run.session.options(run.url + CHAT, headers=asks()) as answer:
            assert (answer.status, answer.headers.get(ALLOW)) == (405, None)
        await reload(run, replica, cors_origins=[PAGE])
        _, headers = await sent(run, "POST", FILES, PAGE, json=BODY)
        assert headers.getall(ALLOW) == [PAGE], "the gateway's, once, and not the replica's"


@pytest.mark.parametrize("names", ["x" * 3000, "a, b\tc", "évil", "a;b", ""])
async def test_names_that_are_none_are_not_repeated(names: str) -> None:
    async with (
        FakeReplica() as replica,
        running(replica, cors_origins=[PAGE]) as run,
        run.session.options(run.url + CHAT, headers=asks(names=names)) as answer,
    ):
        assert answer.status == 204
        assert "Access-Control-Allow-Headers" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    [
        *("", "example.org", "https://", "https://a/", "https://a/b", "https://a b", "https://a\r\nX: y", "https://*.a"),
        *("https://é", "HTTPS://a", "https://a,https://b", "https://" + "a" * 300, "null", 5),
    ],
)
def test_what_is_no_origin_is_refused(origin: Any) -> None:
    pools = [{"replicas": ["http://127.0.0.1:9001"]}]
    with pytest.raises(ConfigError, match=r"cors_origins\[0\].*an origin such as"):
        load(None, {"pools": pools, "cors_origins": [origin]}, env={})
    with pytest.raises(ConfigError, match="at most 100 are possible, got 101"):
        load(None, {"pools": pools, "cors_origins": [f"https://a{number}" for number in range(101)]}, env={})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 403),
        ({"Content-Type": "multipart/form-data; boundary=B"}, 403),
        ({"Content-Type": "text/plain", "Origin": "null"}, 403),
        ({"Content-Type": "text/plain", "Origin": "https://good.example"}, 200),
        ({"Content-Type": "text/plain", "Sec-Fetch-Site": "same-origin"}, 200),
        ({"Content-Type": "text/plain", "Origin": "https://here", "Host": "here"}, 200),
        ({"Content-Type": "text/plain", "Origin": "https://here", "Host": "here", "Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "application/json"}, 200),
        ({"Content-Type": "application/json", "Origin": "http://evil.example:8080", "Host": "evil.example:8080"}, 403),
        ({"Content-Type": "text/plain", "Origin": "http://evil.example", "Host": "EVIL.example"}, 403),
        ({"Content-Type": "application/json", "Origin": "null", "Host": "evil.example:8080"}, 403),
        ({"Content-Type": "application/json", "Origin": "null"}, 200),
        ({"Content-Type": "application/json", "Origin": "null", "Host": "localhost:8080"}, 200),
        ({"Content-Type": "application/json", "Origin": "http://good.example", "Host": "good.example"}, 200),
        ({"Content-Type": "application/json", "Origin": "https://here", "Host": "here"}, 200),
        ({"Content-Type": "application/json", "Origin": "http://localhost:8080", "Host": "localhost:8080"}, 200),
        ({"Content-Type": "application/json", "Origin": "http://app.localhost", "Host": "app.localhost"}, 200),
        ({"Content-Type": "application/json", "Origin": "http://[::1]:8080", "Host": "[::1]:8080"}, 200),
        ({"Content-Type": "application/json", "Origin": "http://127.0.0.1", "Host": "127.0.0.1"}, 200),
    ],
    ids=str,
)
async def test_a_web_page_cannot_post_without_asking(headers: dict[str, str], status: int) -> None:
    """A browser sends text and forms for any page; for JSON it asks first."""
    allowed = ["https://good.example", "http://good.example"]
    async with FakeReplica([answers()]) as replica, running(replica, cors_origins=allowed) as run:
        sent = {"Origin": "https://evil.example", **headers}
        body = json.dumps(BODY).encode()
        assert (await run.post(body, headers=sent))[0] == status
        assert len(replica.requests) == (status == 200)
