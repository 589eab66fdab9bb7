"""Keys at every door: odd credentials, WebSockets, runs in the background."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from gateway.errors import GatewayError
from gateway.features.keys.grant import Grant
from gateway.features.keys.keys import Keys
from gateway.features.keys.ring import KeyRing
from gateway.features.keys.secret import SHAPE, digest_of, new_key
from tests.gateway.conftest import BODY, Running, eventually, running
from tests.gateway.features.keys.conftest import PRICES, bearer, keyed, made
from tests.gateway.features.responses.test_recall import kept_in
from tests.gateway.features.runs.test_runs import Slow
from tests.gateway.features.websocket.test_responses_socket import CREATE, WHOLE, exchange, handshake
from tests.gateway.features.websocket.test_tunnel import RealtimeReplica, dial, echo
from tests.support.fakes import FakeReplica, FakeRequest, answers, models, streams

RUN = {"model": "m", "input": "a", "background": True}


async def raw(run: Running, *lines: bytes) -> int:
    """The status of a chat request with these header lines."""
    body = json.dumps(BODY).encode()
    head = [b"POST /v1/chat/completions HTTP/1.1", b"Host: h", b"Content-Type: application/json", *lines]
    status, _ = await exchange(run, b"\r\n".join([*head, b"Content-Length: %d" % len(body), b"", body]))
    return status


async def test_credentials_of_any_kind_are_refused_and_do_no_harm(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        _, key = await made(run)
        good = key.encode()
        for text, expected in (
            (b"", {401}),
            (b" ", {401}),
            (b"\0", {400}),
            (good + b"\0", {400}),
            (b"\0" + good, {400}),
            (good + b"\rX-Y: z", {400}),
            (good + b"\nX-Tenant-Id: root", {400, 401}),
            (good[:20] + b" " + good[20:], {401}),
            (good + b"," + good, {401}),
            ("ｗｒ-кey".encode(), {401}),
            (b"\xff\xfe\xfd", {401}),
            (b"' OR '1'='1' --", {401}),
            (b"x'); DROP TABLE warmroute_keys; --", {401}),
            (b"<script>alert(1)</script>", {401}),
            (b"${jndi:ldap://x}", {401}),
            (b"%00%0d%0a", {401}),
            (b"k" * 8000, {401}),
            (b"k" * 65_536, {431}),
        ):
            for line in (b"Authorization: Bearer " + text, b"X-Api-Key: " + text, b"Authorization: Basic " + text):
                assert await raw(run, line) in expected, line[:80]
        for lines in (
            (b"Authorization: Bearer " + good, b"Authorization: Bearer x"),
            (b"Authorization: Bearer x", b"Authorization: Bearer " + good),
            (b"X-Api-Key: " + good, b"x-api-key: x"),
            (b"Authorization: Bearer " + good, b"X-Api-Key: wr-x"),
            (b"Authorization: Bearer wr-x", b"X-Api-Key: " + good),
        ):
            assert await raw(run, *lines) == 400
        assert replica.requests == []
        assert await raw(run, b"authorization: bEARER   " + good + b"  ") == 200
        assert await raw(run, b"X-Api-Key: " + good) == 200


async def test_a_key_in_the_url_is_none(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        _, key = await made(run)
        for name in ("key", "api_key", "access_token"):
            assert (await run.post(path=f"/v1/chat/completions?{name}={key}"))[0] == 401


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/files", "/tokenize", "/v1/unheard-of", "/v1/responses/resp_1"])
async def test_no_path_is_open(tmp_path: Path, path: str) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, state=kept_in(tmp_path)) as run:
        assert (await run.post({"model": "m", "input": "a"}, path))[0] in (401, 404)
        assert (await run.get(path))[0] in (401, 404, 405)
        assert replica.requests == []


# -- WebSockets


async def test_no_websocket_is_opened_without_a_key(tmp_path: Path) -> None:
    keys = {"url": f"sqlite:///{tmp_path}/keys.sqlite"}
    async with FakeReplica([WHOLE]) as replica, running(replica, keys=keys) as run:
        _, key = await made(run)
        assert (await exchange(run, handshake(run)))[0] == 401
        assert (await exchange(run, handshake(run, Authorization="Bearer wr-no")))[0] == 401
        assert (await exchange(run, handshake(run, Authorization=f"Bearer {key}", X_Api_Key="wr-x")))[0] == 400
        assert (await exchange(run, handshake(run, Authorization=f"Bearer {key}")))[0] == 101


async def test_a_websocket_s_messages_are_limited_and_end_with_the_key(tmp_path: Path) -> None:
    async with FakeReplica([WHOLE]) as replica, keyed(tmp_path, replica) as run:
        id_, key = await made(run, requests_per_minute=2)
        url = run.url.replace("http", "ws") + "/v1/responses"
        async with connect(url, additional_headers=bearer(key), proxy=None) as client:

            async def code() -> str:
                await client.send(json.dumps(CREATE))
                while (event := json.loads(await client.recv()))["type"] not in ("response.completed", "error"):
                    pass
                return str(event.get("error", {}).get("code", "completed"))

            assert [await code() for _ in range(3)] == ["completed", "completed", "rate_limit_exceeded"]
            with pytest.raises(InvalidStatus) as refused:
                await connect(url, additional_headers=bearer(key), proxy=None)
            assert refused.value.response.status_code == 429
            assert int(refused.value.response.headers["Retry-After"]) >= 1
            async with run.session.delete(f"{run.admin_url}/warmroute/keys/{id_}"):
                pass
            assert await code() == "invalid_api_key"
        assert len(replica.requests) == 2


async def test_tunnels_need_a_key_and_are_limited(tmp_path: Path) -> None:
    async with RealtimeReplica(echo).up() as replica:
        keys = {"url": f"sqlite:///{tmp_path}/keys.sqlite"}
        async with running(replica.url, keys=keys) as run:
            _, key = await made(run, requests_per_minute=1)
            async with dial(run, additional_headers=bearer(key)) as client:
                await client.send("hello")
                assert await client.recv() == "hello"
            for headers, status in ((None, 401), (bearer("wr-x"), 401), (bearer(key), 429)):
                with pytest.raises(InvalidStatus) as refused:
                    await dial(run, additional_headers=headers)
                assert refused.value.response.status_code == status
            assert len(replica.seen) == 1
            assert not [
                name for name, _ in replica.seen[0].headers.raw_items() if name.lower() in ("authorization", "x-api-key")
            ]


# -- the background


async def test_a_run_is_refused_at_its_beginning(tmp_path: Path) -> None:
    slow = Slow()
    async with slow.replica() as replica, keyed(tmp_path, replica, state=kept_in(tmp_path)) as run:
        _, key = await made(run, requests_per_minute=1, models=["m"])
        assert (await run.post(RUN, "/v1/responses"))[0] == 401
        for wrong in ({"model": "other"}, {"lora_path": "adapter"}):
            assert (await run.post({**RUN, **wrong}, "/v1/responses", headers=bearer(key)))[0] == 403
        status, _, begun = await run.post(RUN, "/v1/responses", headers=bearer(key))
        assert (status, begun["status"]) == (200, "queued")
        await slow.begun.wait()
        status, headers, refused = await run.post(RUN, "/v1/responses", headers=bearer(key))
        assert (status, refused["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(headers["Retry-After"]) >= 1
        slow.go.set()
        path = f"/v1/responses/{begun['id']}"
        assert (await run.get(path, headers=bearer(key)))[0] == 429, "asking for it is a request, too"
        _, free = await made(run)  # of the same tenant

        async def state() -> str:
            return str(json.loads((await run.get(path, headers=bearer(free)))[2])["status"])

        while await state() != "completed":  # noqa: ASYNC110  (there is no event)
            await asyncio.sleep(0.01)
        assert (await run.get(path))[0] == 401
        _, other = await made(run, tenant="zeta")
        assert (await run.get(path, headers=bearer(other)))[0] == 404
        assert len(replica.requests) == 1


async def test_a_run_goes_on_when_its_key_is_revoked(tmp_path: Path) -> None:
    slow = Slow()
    async with slow.replica() as replica, keyed(tmp_path, replica, state=kept_in(tmp_path)) as run:
        (id_, key), (_, other) = await made(run), await made(run)  # of one tenant
        _, _, begun = await run.post(RUN, "/v1/responses", headers=bearer(key))
        await slow.begun.wait()
        async with run.session.delete(f"{run.admin_url}/warmroute/keys/{id_}"):
            pass
        slow.go.set()
        path = f"/v1/responses/{begun['id']}"
        assert (await run.get(path, headers=bearer(key)))[0] == 401

        async def state() -> str:
            return str(json.loads((await run.get(path, headers=bearer(other)))[2])["status"])

        while await state() != "completed":  # noqa: ASYNC110  (there is no event)
            await asyncio.sleep(0.01)


# -- streams, and requests that wait


async def test_a_stream_outlives_its_key_and_is_paid_for(tmp_path: Path) -> None:
    hold = asyncio.Event()
    behaviour = streams("a", "b", hold=hold, prompt=10**6, cached=0)
    async with FakeReplica([behaviour]) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        id_, key = await made(run, budget_usd_month=10)
        film = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "https://films.example/1"}}]}]
        ask = {"model": "m", "messages": film, "stream": True, "stream_options": {"include_usage": True}}
        async with run.session.post(f"{run.url}/v1/chat/completions", json=ask, headers=bearer(key)) as answer:
            await answer.content.readany()
            async with run.session.delete(f"{run.admin_url}/warmroute/keys/{id_}"):
                pass
            assert (await run.post(headers=bearer(key)))[0] == 401
            hold.set()
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        account = run.gateway[Keys].limiter.account(id_)
        assert account is not None
        await eventually(lambda: account.open == 0)
        assert sum(account.own.days.values()) >= 10**12


async def test_a_key_that_expires_while_its_request_waits(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def slow(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        await answers()(request, writer)

    async with FakeReplica([slow], listing=models("m")) as replica:
        pools = [{"name": "p", "replicas": [replica.url], "max_inflight": 1}]
        async with keyed(tmp_path, pools=pools) as run:
            (_, long), (id_, short) = await made(run), await made(run, expires_at="2099-01-01")
            first = asyncio.create_task(run.post(headers=bearer(long)))
            await eventually(lambda: replica.requests)
            waiting = asyncio.create_task(run.post(headers=bearer(short)))
            await eventually(lambda: run.gateway.fleet.pools[0].admission.waiting == 1)
            grant = run.gateway[Keys].ring.grant(id_)
            assert grant is not None
            grant.expires_at = 1.0  # it is time that has passed
            go_on.set()
            assert (await first)[0] == 200
            status, _, answer = await waiting
            assert (status, answer["error"]["message"]) == (401, f"The key {id_} has expired.")
            assert len(replica.requests) == 1


def test_keys_and_former_secrets_end_with_the_second_that_was_said() -> None:
    grant, digest = Grant("abcdefgh", "acme", expires_at=1000.0), digest_of(new_key("abcdefgh"))
    grant.require_valid(999.9)
    with pytest.raises(GatewayError, match="has expired") as caught:
        grant.require_valid(1000.0)
    assert caught.value.status == 401
    ring = KeyRing()
    ring.put(grant, ((digest, 2000.0),))
    assert ring.find(digest, 1999.9) is grant
    assert ring.find(digest, 2000.0) is None


def test_the_ring_has_no_secret() -> None:
    """A look-up by digest has no timing that depends on which bytes of a guess are right."""
    ring, key = KeyRing(), new_key("abcdefgh")
    assert SHAPE.fullmatch(key)
    ring.put(Grant("abcdefgh", "acme"), ((digest_of(key), 0.0),))
    seen = list[object]()

    class Digest(bytes):
        """Notes what it is compared with."""

        def __eq__(self, other: object) -> bool:
            seen.append(other)
            return bytes.__eq__(self, other)

        def __hash__(self) -> int:
            return bytes.__hash__(self)

    assert ring.find(Digest(digest_of(key)), 0.0) is not None
    assert ring.find(Digest(digest_of(key[:-1])), 0.0) is None
    assert all(isinstance(each, bytes) and len(each) == 32 for each in seen)
    assert key not in repr(ring)
    ring.check()
