"""Who is an operator, and what others cannot see."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from gateway.dialects.salts import salted
from gateway.parser.parsing import INLINE_BYTES
from gateway.server.access import KEY_HEADER, fields_are_direct
from tests.gateway.conftest import BODY, Running, eventually, running
from tests.support.configs import load
from tests.support.fakes import FakeReplica, answers, dies, hangs, models, status, streams

# As a client from outside, through a proxy on this machine that forwards its address.
OUTSIDE = {"X-Forwarded-For": "203.0.113.5"}
ROUTED = {"X-Warmroute-Replica", "X-Warmroute-Cached-Tokens"}

LOCAL = {b"host": b"127.0.0.1:8000"}


@pytest.mark.parametrize(
    "fields",
    [
        {b"host": b"localhost"},
        {b"host": b"localhost:8001"},
        {b"host": b"[::1]:8001"},
        {b"host": b"127.9.9.9"},
        {**LOCAL, b"origin": b"http://127.0.0.1:8000"},
        {**LOCAL, b"sec-fetch-site": b"same-origin"},
        {**LOCAL, b"sec-fetch-site": b"none"},
        {**LOCAL, b"traceparent": b"00-0-0-00", b"user-agent": b"curl/8", b"x-request-id": b"a", b"x-tenant-id": b"t"},
    ],
)
def test_direct_requests(fields: dict[bytes, bytes]) -> None:
    assert fields_are_direct(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {b"host": b"api.example.com"},
        {b"host": b"localhost.evil.example"},
        {b"host": b"evil@localhost"},
        {b"host": b"localhost:x"},
        {b"host": b"localhost:80:80"},
        {b"host": b"127.0.0.1 evil"},
        {b"host": b"x" * 100_000},
        {**LOCAL, b"origin": b"null"},
        {**LOCAL, b"origin": b"http://evil.example"},
        {**LOCAL, b"origin": b"evil://127.0.0.1:8000"},
        {**LOCAL, b"origin": b"http://127.0.0.1:9999"},
        {**LOCAL, b"sec-fetch-site": b"cross-site"},
        {**LOCAL, b"sec-fetch-site": b"same-site"},
        *(
            {**LOCAL, name: b"1"}
            for name in b"forwarded via x-forwarded x-forwarded-for x_forwarded_for x-forwarded-port x-real-ip x-client-ip"
            b" x-cluster-client-ip true-client-ip cf-connecting-ip x-envoy-external-address x-original-host".split()
        ),
    ],
)
def test_requests_that_a_proxy_or_a_page_had_a_part_in(fields: dict[bytes, bytes]) -> None:
    assert not fields_are_direct(fields)


@given(st.dictionaries(st.binary(max_size=20), st.binary(max_size=40), max_size=6))
def test_any_fields_are_judged(fields: Mapping[bytes, bytes]) -> None:
    assert fields_are_direct(fields) in (True, False)
    assert not fields_are_direct({**fields, b"via": b"1.1 proxy"})


async def test_only_operators_get_the_replica_and_the_cached_tokens() -> None:
    """Tenant B learned from these what tenant A had sent, block by block."""
    async with FakeReplica([answers(), streams("a")]) as one, running(one) as run:
        for body in (BODY, {**BODY, "stream": True}):
            assert (await headers_of(run, body)).keys() >= ROUTED
            assert not (await headers_of(run, body, OUTSIDE)).keys() & ROUTED
            assert "X-Request-Id" in await headers_of(run, body, OUTSIDE)


async def test_refused_requests_reveal_no_more() -> None:
    async with FakeReplica([status(400)]) as one, running(one) as run:
        assert not (await headers_of(run, BODY, OUTSIDE)).keys() & ROUTED


async def test_every_client_gets_them_while_the_configuration_exposes_them_to_all() -> None:
    async with FakeReplica() as one, running(one, routing={"expose_headers": "all"}) as run:
        assert (await headers_of(run, BODY, OUTSIDE)).keys() >= ROUTED
        raw = {"listen": "127.0.0.1:0", "pools": [{"replicas": [one.url]}]}
        await run.gateway.local.reload.take(load(None, raw, env={}))
        assert not (await headers_of(run, BODY, OUTSIDE)).keys() & ROUTED


async def test_with_a_key_operators_are_those_who_show_it_wherever_they_are() -> None:
    async with FakeReplica() as one, running(one, admin_key="k-1") as run:
        assert not (await headers_of(run, BODY)).keys() & ROUTED, "a proxy on this machine looks like this"
        for wrong in ({KEY_HEADER: "k-2"}, {KEY_HEADER: ""}, {"Authorization": "Bearer k-1"}):
            assert not (await headers_of(run, BODY, wrong)).keys() & ROUTED
        for more in ({}, OUTSIDE):
            assert (await headers_of(run, BODY, {KEY_HEADER: "k-1", **more})).keys() >= ROUTED
        assert not any("k-1" in str(request.headers) for request in one.requests[-2:]), "the key is not passed on"


async def test_requests_with_unusual_heads_are_judged_the_same() -> None:
    async with FakeReplica() as one, running(one) as run:
        assert b"X-Warmroute-Replica" in await raw(run, b"HTTP/1.1", b"Host: localhost\r\nExpect: 100-continue\r\n")
        for head in (
            b"Host: localhost\r\nX-Forwarded-For: 1.2.3.4\r\nExpect: 100-continue\r\n",
            b"Host: localhost\r\nAccept: a\r\nAccept: b\r\n",  # who repeats names is not worth a guess
            b"Host: api.example.com\r\nExpect: 100-continue\r\n",
        ):
            answer = await raw(run, b"HTTP/1.1", head)
            assert b" 200 OK" in answer
            assert b"X-Warmroute" not in answer
        # nginx's shortest configuration: HTTP/1.0, the upstream's address as Host, no header of its own
        assert b"X-Warmroute" not in await raw(run, b"HTTP/1.0", b"Host: 127.0.0.1:8000\r\nConnection: close\r\n")


async def headers_of(run: Running, body: Any, headers: Mapping[str, str] | None = None) -> Mapping[str, str]:
    async with run.session.post(f"{run.url}/v1/chat/completions", json=body, headers=headers) as answer:
        await answer.read()
        return answer.headers


async def raw(run: Running, version: bytes, headers: bytes) -> bytes:
    """The whole answer to a hand-written POST of BODY."""
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(run.url).port)
    body = json.dumps(BODY).encode()
    length = b"Content-Length: %d\r\n" % len(body)
    writer.write(b"POST /v1/chat/completions %s\r\n%s%s\r\n%s" % (version, headers, length, body))
    answer = b""
    while b'"usage"' not in answer:
        part = await reader.read(65536)
        assert part
        answer += part
    writer.close()
    return answer


# -- errors


async def test_errors_name_replicas_to_operators_only() -> None:
    async with FakeReplica([dies]) as one, running(one) as run:
        inside = (await run.post(headers={"X-Request-Id": "r-1"}))[2]["error"]["message"]
        assert one.name in inside
        code, _, outside = await run.post(headers={**OUTSIDE, "X-Request-Id": "r-2"})
        assert (code, outside["error"]["code"]) == (502, "replica_failed")
        assert "127.0.0.1" not in outside["error"]["message"]
        assert "r-2" in outside["error"]["message"], "the log has the details by this"


async def test_errors_of_a_fleet_that_is_down_name_nobody() -> None:
    async with running("http://127.0.0.1:9", "http://localhost:9") as run:
        code, headers, error = await run.post(headers=OUTSIDE)
        assert (code, headers["Retry-After"]) == (503, "2")
        assert "not known yet" in error["error"]["message"]
        assert ":9" not in error["error"]["message"]
        assert "127.0.0.1:9" in (await run.post())[2]["error"]["message"]
    async with running("http://127.0.0.1:9", pools=[{"models": ["m"], "replicas": ["http://127.0.0.1:9"]}]) as run:
        error = (await run.post(headers=OUTSIDE))[2]["error"]
        assert error["code"] == "no_replica_available"
        assert "127.0.0.1" not in error["message"]
        assert "127.0.0.1:9" in (await run.post())[2]["error"]["message"]


async def test_an_error_within_a_stream_names_nobody() -> None:
    async with FakeReplica([streams("a", die=True)]) as one, running(one) as run:
        async with run.session.post(
            f"{run.url}/v1/chat/completions", json={**BODY, "stream": True}, headers={**OUTSIDE, "X-Request-Id": "r-3"}
        ) as answer:
            text = await answer.text()
        assert "replica_failed" in text
        assert "r-3" in text
        assert one.name not in text
        async with run.session.post(f"{run.url}/v1/chat/completions", json={**BODY, "stream": True}) as answer:
            assert one.name in await answer.text()


# -- metrics, readiness


async def test_metrics_on_the_clients_port_are_for_operators() -> None:
    async with FakeReplica() as one, running(one) as run:
        await run.post(headers={"X-Tenant-Id": "acme"})
        code, _, page = await run.get("/metrics", headers=OUTSIDE)
        assert code == 403
        assert b"metrics_listen" in page
        assert one.name.encode() not in page
        assert one.name.encode() in (await run.get("/metrics"))[2]
    async with FakeReplica() as one, running(one, admin_key="k-1") as run:
        for path in ("/metrics", "/warmroute/replicas"):
            for wrong in ({}, {KEY_HEADER: "k-2"}, {"Authorization": "Bearer k-2"}):
                code, _, page = await run.get(path, headers=wrong)
                assert (code, json.loads(page)["error"]["code"]) == (401, "invalid_admin_key")
                assert b"Send the admin key as" in page
        for key in ({KEY_HEADER: "k-1"}, {"Authorization": "Bearer k-1"}):
            assert (await run.get("/metrics", headers={**OUTSIDE, **key}))[0] == 200


async def test_readiness_gives_others_only_yes_or_no() -> None:
    async with running("http://127.0.0.1:9") as run:
        code, _, body = await run.get("/ready", headers=OUTSIDE)
        assert (code, json.loads(body)) == (503, {"ready": False, "draining": False})


# -- tenants


async def predicted(run: Running, tenant: str | None, **body: Any) -> int:
    headers = {} if tenant is None else {"X-Tenant-Id": tenant}
    return int((await run.post({**BODY, **body}, headers=headers))[1]["X-Warmroute-Cached-Tokens"])


@pytest.mark.parametrize("isolation", ["none", "tenant"])
async def test_tenants_share_prefixes_or_do_not(isolation: str) -> None:
    async with FakeReplica() as one, running(one, routing={"isolation": isolation}) as run:
        assert await predicted(run, "a") == 0
        assert await predicted(run, "a") > 0
        others = [await predicted(run, tenant) for tenant in ("b", None, "a" * 64 + "1", "a" * 64 + "2")]
        assert all(others) if isolation == "none" else not any(others)
        dry = await run.post(path="/warmroute/route", headers={"X-Tenant-Id": "a"})
        assert dry[2]["candidates"][0]["matched_tokens"] > 0, "an operator asks as that tenant"


async def test_a_tenants_salt_is_its_own() -> None:
    async with FakeReplica() as one, running(one, routing={"isolation": "tenant"}) as run:
        assert await predicted(run, "a", cache_salt="s") == 0
        assert await predicted(run, "b", cache_salt="s") == 0
        assert await predicted(run, "a", cache_salt="s") > 0


async def test_isolation_begins_with_a_reload() -> None:
    async with FakeReplica() as one, running(one) as run:
        assert await predicted(run, "a") == 0 < await predicted(run, "b")
        raw = {"listen": "127.0.0.1:0", "pools": [{"replicas": [one.url]}], "routing": {"isolation": "tenant"}}
        await run.gateway.local.reload.take(load(None, raw, env={}))
        assert await predicted(run, "a") == 0
        assert await predicted(run, "b") == 0


async def test_engines_that_know_salts_keep_tenants_apart_too() -> None:
    async def sent(run: Running, replica: FakeReplica, tenant: str, path: str = "/v1/chat/completions", **body: Any) -> Any:
        await run.post({**BODY, **body}, path=path, headers={"X-Tenant-Id": tenant})
        return replica.requests[-1].json.get("cache_salt")

    vllm = FakeReplica(listing=models("m", owner="vllm"))
    async with vllm, running(vllm, routing={"isolation": "tenant"}) as run:
        salts = [await sent(run, vllm, *case) for case in (("a",), ("b",), ("",))]
        salts += [await sent(run, vllm, tenant, cache_salt=own) for tenant, own in (("a", "s"), ("b", "s"), ("a", salts[1]))]
        assert len(set(salts)) == len(salts), "a tenant cannot ask for another one's"
        assert all(len(salt) == 32 for salt in salts)
        assert salts[0] == await sent(run, vllm, "a"), "and its own stays the same"
        assert await sent(run, vllm, "a", "/v1/responses", input="x") == salts[0]
        await run.session.post(f"{run.url}/v1/files", data=b"no JSON")
        assert vllm.requests[-1].body == b"no JSON"
    for owner, isolation in (("sglang", "tenant"), ("vllm", "none")):
        other = FakeReplica(listing=models("m", owner=owner))
        async with other, running(other, routing={"isolation": isolation}) as run:
            assert await sent(run, other, "a") is None


async def test_an_upload_that_gets_no_salt_is_charged_once() -> None:
    """There is no copy of it."""
    size, over = 7_500_000, asyncio.Event()
    vllm = FakeReplica([hangs(over)], listing=models("m", owner="vllm"))
    async with vllm, running(vllm, routing={"isolation": "tenant"}) as run:
        asked = asyncio.create_task(run.session.post(f"{run.url}/v1/files", data=io.BytesIO(b"x" * size)))
        await eventually(lambda: vllm.requests)
        assert size <= run.gateway.served.memory.held < 1.5 * size
        over.set()
        (await asked).release()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/chat/completions"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32-le"])
async def test_isolated_tenants_cannot_send_json_that_gets_no_salt(path: str, encoding: str) -> None:
    raw = json.dumps({**BODY, "input": "é"}).encode(encoding)
    vllm = FakeReplica(listing=models("m", owner="vllm"))
    async with vllm, running(vllm, routing={"isolation": "tenant"}) as run:
        for headers in ({"Content-Type": "application/json"}, {"Content-Type": "text/plain", "X-Tenant-Id": "a"}):
            async with run.session.post(run.url + path, data=raw, headers=headers) as answer:
                error = (await answer.json())["error"]
            assert (answer.status, error["type"]) == (400, "invalid_request_error")
            assert path == "/v1/messages" or error["code"] == "invalid_json"  # Anthropic's errors have no code
            assert "UTF-8" in error["message"]
        assert not vllm.requests


async def test_a_form_and_a_get_need_no_salt() -> None:
    vllm = FakeReplica(listing=models("m", owner="vllm"))
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    async with vllm, running(vllm, routing={"isolation": "tenant"}) as run:
        for method, data in (("POST", b"--b\r\n\r\n{}\r\n--b--"), ("GET", None)):
            async with run.session.request(method, f"{run.url}/v1/files", data=data, headers=form) as answer:
                assert answer.status == 200
            assert vllm.requests[-1].body == (data or b"")


async def test_own_salts_of_large_bodies_count_wherever_they_begin() -> None:
    async with FakeReplica() as one, running(one, routing={"isolation": "tenant"}) as run:
        for own in (b"a", b"b"):
            raw = b" " * 3000 + b'{"model":"m","cache_salt":"%b","input":"%b"}' % (own, b"x" * INLINE_BYTES)
            assert (await run.post(io.BytesIO(raw), path="/v1/responses"))[0] == 200
        assert len({request.json["cache_salt"] for request in one.requests}) == 2


@given(
    st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.integers()), min_size=1),
    st.sampled_from(["", " ", "\r\n\t"]),
)
def test_a_salt_changes_no_other_byte(body: dict[str, Any], space: str) -> None:
    raw = (json.dumps(body) + space).encode()
    out = salted(raw, b"0123")
    assert out.startswith(raw.rstrip()[:-1])
    assert json.loads(out) == {**body, "cache_salt": "0123"}
