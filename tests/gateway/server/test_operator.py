from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from yarl import URL

from gateway.config.schema import MAX_REPLICAS
from gateway.dialects.anthropic.sessions import user_session
from gateway.errors import ReplicaFailure
from gateway.request.client import SESSION_HEADERS, WEAK_SESSION_HEADER
from gateway.server.endpoints import side_runner
from gateway.upstream.client import ReplicaCall
from gateway.upstream.resolver import Resolver
from tests.gateway.conftest import BODY, Running, eventually, listening, running
from tests.gateway.upstream.test_resolver import NameServer
from tests.support.configs import load
from tests.support.fakes import FakeReplica, FakeRequest, answers, http, models, streams, writes

FOREIGN = {"X-Forwarded-For": "203.0.113.5"}  # came through a proxy: not a local client, wherever the proxy runs


async def test_a_dry_run_lists_every_candidate_and_books_nothing() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one, two) as run:
        warm = (await run.post())[1]["X-Warmroute-Replica"]
        before = repr(run.gateway.router)
        code, _, decision = await run.post(path="/warmroute/route")
        assert (code, decision["replica"], decision["reason"], decision["policy"]) == (200, warm, "warm", "cost")
        assert {candidate["replica"] for candidate in decision["candidates"]} == {one.name, two.name}
        best, other = decision["candidates"]
        assert best["matched_tokens"] > 0 == other["matched_tokens"]
        assert best["cost"]["total_s"] < other["cost"]["total_s"]
        assert sum(value for name, value in other["cost"].items() if name != "total_s") == pytest.approx(
            other["cost"]["total_s"]
        )
        assert repr(run.gateway.router) == before
        assert (await run.post({"model": "m", "prompt": "x"}, path="/warmroute/route"))[2]["reason"] == "blind"
        assert (await run.post({"model": "nope", "prompt": "x"}, path="/warmroute/route"))[0] == 404


async def test_the_replica_list_has_state_and_load() -> None:
    async with FakeReplica() as one, running(one, "http://127.0.0.1:9") as run:
        await run.post()
        rows = json.loads((await run.get("/warmroute/replicas"))[2])["replicas"]
        assert [(row["name"], row["up"]) for row in rows] == [(one.name, True), ("127.0.0.1:9", False)]
        assert rows[0]["models"] == ["m"]
        assert rows[0]["inflight"] == 0
        assert (rows[0]["held_blocks"], rows[0]["held_tokens"]) == (4, 84), "the blocks have 84 of 100 counted tokens"
        assert rows[0]["learned_capacity_tokens"] is None
        assert "connect" in rows[1]["error"].lower()


# Every operator endpoint, with a body that it would take.
ENDPOINTS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "/warmroute/replicas", {}),
    ("POST", "/warmroute/replicas", {"url": "http://127.0.0.1:9"}),
    ("DELETE", "/warmroute/replicas/x", None),
    ("POST", "/warmroute/drain", {"name": "x"}),
    ("POST", "/warmroute/undrain", {"name": "x"}),
    ("POST", "/warmroute/route", BODY),
    ("GET", "/warmroute/recording", {}),
]


async def asked(run: Running, base: str, method: str, path: str, body: Any, headers: Any = None) -> tuple[int, str]:
    """(status, error code)."""
    async with run.session.request(method, base + path, json=body, headers=headers) as answer:
        payload = await answer.json()
        return answer.status, payload.get("error", {}).get("code", "")


@pytest.mark.parametrize(("method", "path", "body"), ENDPOINTS)
async def test_without_a_key_nothing_is_on_the_clients_port(method: str, path: str, body: Any) -> None:
    """A proxy in front of it may look like a client on this machine."""
    async with FakeReplica() as one, running(one) as run:
        assert await asked(run, run.url, method, path, body) == (403, "forbidden")
        assert (await asked(run, run.admin_url, method, path, body))[0] in (200, 201, 404)


@pytest.mark.parametrize(("method", "path", "body"), ENDPOINTS)
async def test_with_a_key_everybody_is_asked_for_it_on_both_listeners(method: str, path: str, body: Any) -> None:
    async with FakeReplica() as one, running(one, admin_key="k-1") as run:
        for base in (run.url, run.admin_url):
            for wrong in ({}, {"Authorization": "Bearer k-2"}, {"Authorization": "Bearer é"}, {"Authorization": "k-1"}):
                assert await asked(run, base, method, path, body, wrong) == (401, "invalid_admin_key")
            for right in ({"Authorization": "Bearer k-1"}, {"authorization": "bearer k-1"}, {"X-Warmroute-Admin-Key": "k-1"}):
                answered, _ = await asked(run, base, method, path, body, {**FOREIGN, **right})
                assert answered in (200, 201, 404, 409)


async def test_a_replica_whose_operator_leaves_before_its_first_probe_is_added_and_its_removal_leaves_nothing_behind() -> None:
    asked, never = asyncio.Event(), asyncio.Event()

    async def silent(_request: FakeRequest, _writer: asyncio.StreamWriter) -> None:
        asked.set()
        await never.wait()

    async with FakeReplica() as one, FakeReplica(listing=silent) as other, running(one) as run:
        adding = asyncio.create_task(run.post({"url": other.url, "name": "x"}, path="/warmroute/replicas"))
        await asked.wait()
        adding.cancel()
        async with run.session.delete(f"{run.admin_url}/warmroute/replicas/x") as answer:
            assert answer.status == 200
        await eventually(
            lambda: other.url not in run.gateway.upstream._upstreams | dict.fromkeys(run.gateway.upstream._guarded)
        )
        never.set()


@pytest.mark.parametrize(
    "headers",
    [
        {"Via": "1.1 proxy"},
        {"X-Forwarded-Proto": "https"},
        {"Host": "evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
async def test_proxies_and_web_pages_are_kept_out_of_the_admin_listener(headers: dict[str, str]) -> None:
    async with FakeReplica() as one, running(one) as run:
        for path in ("/warmroute/replicas", "/metrics"):
            assert (await asked(run, run.admin_url, "GET", path, None, headers))[0] == 403
        assert (await run.get("/warmroute/replicas", headers={"Host": "localhost:1"}))[0] == 200
        assert (await run.post(BODY, headers=headers))[0] == 200, "the API is open to them"


async def test_the_admin_listener_has_the_pages_of_state_and_not_the_api() -> None:
    async with FakeReplica() as one, running(one) as run:
        for path in ("/health", "/ready", "/metrics"):
            assert (await asked_for_text(run, path))[0] == 200
        assert one.name in (await asked_for_text(run, "/metrics"))[1]
        assert await asked(run, run.admin_url, "POST", "/v1/chat/completions", BODY) == (404, "not_found")
        assert await asked(run, run.admin_url, "GET", "/v1/models", None) == (404, "not_found")
        assert "admin listener (admin_listen) serves /warmroute/..., /m" in (await asked_for_text(run, "/v1/models"))[1]
        assert not one.requests


async def test_the_error_of_the_listener_for_prometheus_names_what_it_serves() -> None:
    async with FakeReplica() as one, running(one) as run, listening(side_runner(run.gateway.served, "metrics")) as url:
        async with run.session.get(f"{url}/warmroute/replicas") as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (404, "not_found")
        assert "metrics listener (metrics_listen) serves /metrics, /health and /ready" in error["message"]
        async with run.session.get(f"{url}/metrics") as answer:
            assert answer.status == 200


async def test_metrics_on_the_admin_listener_ask_for_the_key_as_operator_endpoints_do() -> None:
    async with FakeReplica() as one, running(one, admin_key="k-1") as run:
        for headers in ({}, {"Authorization": "Bearer k-2"}, {"X-Warmroute-Admin-Key": "k-2"}):
            async with run.session.get(f"{run.admin_url}/metrics", headers=headers) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (401, "invalid_admin_key")
        async with run.session.get(f"{run.admin_url}/metrics", headers={"Authorization": "Bearer k-1"}) as answer:
            assert answer.status == 200
        assert (await run.get("/metrics"))[0] == 401, "on the clients' port"
    async with FakeReplica() as one, running(one) as run:
        async with run.session.get(f"{run.admin_url}/metrics", headers={"X-Forwarded-For": "203.0.113.5"}) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, "direct clients on this machine" in error["message"]) == (403, True)


async def test_a_model_whose_replicas_all_drain_is_not_called_down() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one, two) as run:
        for replica in (one, two):
            assert (await run.post({"name": replica.name}, "/warmroute/drain"))[0] == 200
        code, _, body = await run.post()
        assert (code, body["error"]["code"]) == (503, "no_replica_available")
        assert "takes new requests: the replicas that are up are draining" in body["error"]["message"]
        assert f"{one.name} (draining)" in body["error"]["message"]
        _, _, body = await run.post(headers={"X-Forwarded-For": "203.0.113.5"})
        assert "draining or asleep. Retry." in body["error"]["message"]
        assert one.name not in body["error"]["message"]


async def asked_for_text(run: Running, path: str) -> tuple[int, str]:
    async with run.session.get(run.admin_url + path) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254",
        "http://[fe80::1]:8000",
        "http://[::ffff:169.254.169.254]",
        "http://0xa9fea9fe",
        "http://[fd00:ec2::254]",
        "http://[fd00:ec2::254%251]",
        "http://[fd00:ec2::254%1]",
        "http://[64:ff9b:1::a9fe:a9fe]",
        "http://metadata.google.internal/computeMetadata",
    ],
)
async def test_a_replica_at_a_metadata_service_is_not_added(url: str) -> None:
    async with FakeReplica() as one, running(one) as run:
        code, _, error = await run.post({"url": url}, path="/warmroute/replicas")
        assert (code, error["error"]["code"]) == (403, "forbidden_url")
        assert "only the configuration may name it" in error["error"]["message"]
        assert list(await listed(run)) == [one.name]


async def test_an_added_name_does_not_lead_to_a_metadata_service() -> None:
    """Whatever it resolved to when it was added; a replica in the configuration may be anywhere."""
    names = NameServer({"rebound.test": ["169.254.169.254"], "mixed.test": ["169.254.169.254", "127.0.0.1"]})
    async with FakeReplica() as one, running(one, resolver=Resolver(names.look_up)) as run:
        for host, up in (("rebound.test", False), ("mixed.test", True)):
            added = await run.post({"url": f"http://{host}:{one.port}"}, path="/warmroute/replicas")
            assert (added[0], added[2]["replica"]["up"]) == (201, up)
            assert up or "169.254.169.254 is link-local" in added[2]["replica"]["error"]
        with pytest.raises(ReplicaFailure, match="is link-local"):
            await run.gateway.upstream.open(f"http://rebound.test:{one.port}", ReplicaCall("GET", "/", b"", b""), 0.1)
        pools = [{"replicas": [one.url, f"http://rebound.test:{one.port}"]}]
        configured = load(None, {"listen": "127.0.0.1:0", "pools": pools}, env={})
        await run.gateway.local.reload.take(configured)
        with pytest.raises(ReplicaFailure) as caught:
            await run.gateway.upstream.open(f"http://rebound.test:{one.port}", ReplicaCall("GET", "/", b"", b""), 0.1)
        assert "is link-local" not in caught.value.message


@pytest.mark.parametrize("header", [*SESSION_HEADERS, WEAK_SESSION_HEADER])
async def test_the_cost_knows_the_session_that_the_client_names(header: str) -> None:
    """Its prompts share no block: a session is expected where it was answered last, and the dry run shows it."""
    script = [answers(prompt=1300)]
    async with FakeReplica(script) as one, FakeReplica(script) as two, running(one, two) as run:
        bodies = [{**BODY, "messages": [{"role": "user", "content": f"{number} " * 2000}]} for number in range(40)]
        homes = set()
        for number, body in enumerate(bodies[:20]):
            home = (await run.post(body, headers={header: f"s{number}"}))[1]["X-Warmroute-Replica"]
            dry = await run.post(bodies[20 + number], path="/warmroute/route", headers={header: f"s{number}"})
            assert (dry[2]["replica"], dry[2]["reason"]) == (home, "session")
            assert dry[2]["candidates"][0]["cost"]["session_s"] < 0
            stranger = {header: f"s{number}", "X-Tenant-Id": "another"}
            dry = await run.post(bodies[20 + number], path="/warmroute/route", headers=stranger)
            assert dry[2]["reason"] == "cold", "a tenant knows nothing of another's sessions"
            homes.add(home)
        assert homes == {one.name, two.name}


async def test_sticky_ignores_ids_that_may_change_with_every_request() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one, two, routing={"policy": "sticky"}) as run:
        taken = [
            (await run.post(headers={WEAK_SESSION_HEADER: f"r{number}"}))[1]["X-Warmroute-Replica"] for number in range(20)
        ]
        assert len(set(taken)) == 1, "it goes by the prompt's head"


@pytest.mark.parametrize("header", ["X-Claude-Code-Session-Id", "session-id", "session_id", *SESSION_HEADERS[3:]])
async def test_sticky_follows_the_session_that_the_client_names(header: str) -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one, two, routing={"policy": "sticky"}) as run:
        homes = set()
        for session in range(20):
            taken = {(await run.post(headers={header: f"s{session}"}))[1]["X-Warmroute-Replica"] for _ in range(3)}
            dry = await run.post(path="/warmroute/route", headers={header: f"s{session}"})
            assert taken == {dry[2]["replica"]}
            homes |= taken
        assert homes == {one.name, two.name}, "the prompt is the same: only the header distinguishes the sessions"


@pytest.mark.parametrize(
    ("path", "body_of"),
    [
        ("/v1/messages", lambda id_: {**BODY, "metadata": {"user_id": json.dumps({"device_id": "d", "session_id": id_})}}),
        ("/v1/messages", lambda id_: {**BODY, "metadata": {"user_id": f"user_5c_account__session_{id_}"}}),
        ("/v1/responses", lambda id_: {"model": "m", "input": "x" * 1000, "prompt_cache_key": id_}),
        ("/v1/responses", lambda id_: {"model": "m", "input": "x" * 1000, "conversation": {"id": id_}}),
        ("/v1/chat/completions", lambda id_: {**BODY, "prompt_cache_key": id_}),
        ("/v1/chat/completions", lambda id_: {**BODY, "session_params": {"session_id": id_}}),
    ],
)
async def test_sticky_follows_the_session_that_the_body_names(path: str, body_of: Callable[[str], dict[str, Any]]) -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one, two, routing={"policy": "sticky"}) as run:
        homes = set()
        for session in range(20):
            body = body_of(f"s{session}")
            taken = {(await run.post(body, path=path))[1]["X-Warmroute-Replica"] for _ in range(3)}
            dry = await run.post(body, path=f"/warmroute/route?path={path}")
            assert taken == {dry[2]["replica"]}
            homes |= taken
        assert len(homes) == 2


@pytest.mark.parametrize("user", ["u_1", "{", '{"session_id": 5}', "[1]", "{" * 5000, "user_session_", "_session_a b", 5])
async def test_a_user_is_no_session(user: Any) -> None:
    assert user_session({"user_id": user}) == ""
    assert user_session(user) == ""


async def test_a_dry_run_of_another_api_reads_its_body_as_that() -> None:
    body = {"model": "m", "system": "s" * 1000, "messages": [{"role": "user", "content": "x" * 1000}]}
    said = {
        "type": "message",
        "content": [{"type": "text", "text": "a"}],
        "usage": {"input_tokens": 500, "output_tokens": 1},
    }
    script = [writes(http(200, json.dumps(said).encode()))]
    async with FakeReplica(script) as one, FakeReplica(script) as two, running(one, two) as run:
        home = (await run.post(body, path="/v1/messages"))[1]["X-Warmroute-Replica"]
        _, _, dry = await run.post(body, path="/warmroute/route?path=/v1/messages")
        assert (dry["replica"], dry["reason"]) == (home, "warm")
        code, _, error = await run.post({"model": "m", "input": 5}, path="/warmroute/route?path=/v1/responses")
        assert (code, error["error"]["param"]) == (400, "input")


async def test_a_dry_run_of_an_unknown_path_is_refused_with_those_that_there_are() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 1000}]}
    async with FakeReplica() as one, running(one) as run:
        await run.post(body)
        for path in ("/v1/chat/completion", "chat", "", "/v1/messages_/x", "/" + "x" * 4000):
            code, _, error = await run.post(body, path=f"/warmroute/route?path={path}")
            assert (code, error["error"]["param"]) == (400, "path")
            message = error["error"]["message"]
            assert message.startswith("'path' must be one of /v1/chat/completions, /v1/completions, /v1/messages, ")
            assert message.endswith(f"got {path[:100]!r}.")
            assert len(message) < 1000
        for path in ("/v1/chat/completions", "/v1/chat/completions%3Fbeta=true"):
            assert (await run.post(body, path=f"/warmroute/route?path={path}"))[2]["reason"] == "warm"
        for path in ("/v1/embeddings", "/v1/files", "/v1/messages/batches", "/tokenize", "/v1/responses/x/input_items"):
            assert (await run.post(body, path=f"/warmroute/route?path={path}"))[0] == 200


async def listed(run: Running) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads((await run.get("/warmroute/replicas"))[2])["replicas"]}


async def test_a_replica_that_drains_gets_nothing_new_and_finishes_what_it_has() -> None:
    go_on = asyncio.Event()
    one, two = FakeReplica([streams("a", "b", hold=go_on), answers()]), FakeReplica()
    async with one, two, running(one) as run:
        parts = aiter(await run.client.chat.completions.create(**BODY, stream=True))
        await anext(parts)
        assert (await run.post({"url": two.url}, path="/warmroute/replicas"))[0] == 201
        code, _, result = await run.post({"name": one.name}, path="/warmroute/drain")
        assert (code, result) == (200, {"name": one.name, "draining": True, "inflight": 1})
        for _ in range(4):
            assert (await run.post())[1]["X-Warmroute-Replica"] == two.name, "though the other one has the prefix"
        row = (await listed(run))[one.name]
        assert (row["draining"], row["up"], row["inflight"]) == (True, True, 1)
        assert (await run.get("/ready"))[0] == 200
        go_on.set()
        assert [part.choices[0].delta.content async for part in parts] == ["b"]
        assert (await listed(run))[one.name]["inflight"] == 0
        assert len(one.requests) == 1
        await run.post({"name": two.name}, path="/warmroute/drain")
        assert (await run.get("/ready"))[0] == 503
        code, _, error = await run.post()
        assert (code, error["error"]["code"]) == (503, "no_replica_available")
        assert f"{one.name} (draining), {two.name} (draining)" in error["error"]["message"]
        assert json.loads((await run.get("/v1/models"))[2])["data"] == []
        assert (await run.post({"name": one.name}, path="/warmroute/undrain"))[2]["draining"] is False
        assert (await run.post())[1]["X-Warmroute-Replica"] == one.name


async def test_a_replica_that_drains_is_probed_and_drains_on_after_a_reload() -> None:
    raw = {"listen": "127.0.0.1:0", "health": {"interval_s": 0.01}}
    async with FakeReplica() as one, FakeReplica() as two, running(one, two, **raw) as run:
        await run.post({"name": one.name}, path="/warmroute/drain")
        one.listing = models("m", "new")
        state = run.gateway.fleet.named(one.name)
        assert state
        await eventually(lambda: "new" in state.models)
        await run.gateway.local.reload.take(load(None, {**raw, "pools": [{"replicas": [one.url]}]}, env={}))
        assert (await listed(run))[one.name]["draining"] is True
        assert not run.gateway.fleet.pools[0].ready


async def removed(run: Running, name: str) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of removing a replica."""
    async with run.session.delete(URL(f"{run.admin_url}/warmroute/replicas/{quote(name, safe='')}", encoded=True)) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("name", ["r2", "http://[::1]:8000/a?b#c%2F"])
async def test_a_replica_is_added_until_it_is_removed(name: str) -> None:
    go_on = asyncio.Event()
    two = FakeReplica([answers(), answers(), streams("a", "b", hold=go_on)], listing=models("new"))
    raw = {"listen": "127.0.0.1:0", "health": {"interval_s": 0.05}}
    async with FakeReplica() as one, two, running(one, **raw) as run:
        body = {"url": f"{two.url}/v1", "name": name, "capacity_tokens": 5000, "weight": 40}
        code, _, added = await run.post(body, path="/warmroute/replicas")
        assert code == 201
        assert "it is removed" in added["until"]
        row = added["replica"]
        assert (row["name"], row["url"], row["pool"], row["up"]) == (name, two.url, "default", True)
        assert (row["capacity_tokens"], row["weight"], row["source"]) == (5000, 40, "operators")
        wanted = {**BODY, "model": "new"}
        assert (await run.post(wanted))[1]["X-Warmroute-Replica"] == name
        await run.gateway.local.reload.take(load(None, {**raw, "pools": [{"replicas": [one.url], "queue_s": 5}]}, env={}))
        assert (await run.post(wanted))[1]["X-Warmroute-Replica"] == name, "a reload leaves it alone"
        parts = aiter(await run.client.chat.completions.create(**wanted, stream=True))
        await anext(parts)
        assert await removed(run, name) == (200, {"name": name, "leaving": True, "inflight": 1})
        assert (await run.post(wanted))[0] == 404
        row = (await listed(run))[name]
        assert (row["leaving"], row["pool"], row["source"]) == (True, None, None)
        assert await removed(run, name) == (200, {"name": name, "leaving": True, "inflight": 1}), "again"
        go_on.set()
        assert [part.choices[0].delta.content async for part in parts] == ["b"]
        await eventually(lambda: set(run.gateway.router.replicas) == {one.name})
        assert (await removed(run, name))[0] == 404
        await eventually(lambda: two.url not in repr(run.gateway.upstream))


async def test_only_what_was_added_is_removed() -> None:
    async with FakeReplica() as one, running(one) as run:
        status, answer = await removed(run, one.name)
        assert (status, answer["error"]["code"]) == (409, "replica_not_added")
        assert "is in the configuration: remove it there, or drain it here" in answer["error"]["message"]
        assert (await listed(run))[one.name]["source"] == "configuration"
        status, answer = await removed(run, "nobody")
        assert (status, answer["error"]["code"]) == (404, "replica_not_found")


async def test_an_added_replica_that_the_configuration_names_later_is_the_configurations() -> None:
    async with FakeReplica() as one, FakeReplica() as two, running(one) as run:
        assert (await run.post({"url": two.url}, path="/warmroute/replicas"))[0] == 201
        state = run.gateway.fleet.named(two.name)
        before = run.gateway.config
        raw = {"listen": "127.0.0.1:0"}
        await run.gateway.local.reload.take(load(None, {**raw, "pools": [{"replicas": [two.url, one.url]}]}, env={}))
        assert (await listed(run))[two.name]["source"] == "configuration"
        assert run.gateway.fleet.named(two.name) is state, "it keeps all that was learned of it"
        await run.gateway.local.reload.take(before)
        await eventually(lambda: set(run.gateway.router.replicas) == {one.name})


async def test_a_replica_that_is_the_gateway_itself_is_not_added() -> None:
    async with FakeReplica() as one, running(one, listen="127.0.0.1:8999") as run:
        code, _, error = await run.post({"url": "http://localhost:8999", "name": "self"}, path="/warmroute/replicas")
        assert (code, error["error"]["code"]) == (400, "invalid_request")
        assert "is this gateway itself (listen: 127.0.0.1:8999)" in error["error"]["message"]


async def test_operators_cannot_add_more_replicas_than_a_gateway_may_have() -> None:
    async with FakeReplica() as one:
        listed = [{"url": f"{one.url}/{number}", "name": f"r{number}"} for number in range(MAX_REPLICAS)]
        async with running(pools=[{"replicas": listed}]) as run:
            code, _, error = await run.post({"url": f"{one.url}/more", "name": "more"}, path="/warmroute/replicas")
            _, _, unknown = await run.post({"name": "more"}, path="/warmroute/drain")
            assert unknown["error"]["message"].endswith(f"r18, r19 and {MAX_REPLICAS - 20} more.")
        assert (code, error["error"]["code"]) == (400, "invalid_request")
        assert f"at most {MAX_REPLICAS} replicas" in error["error"]["message"]


async def test_the_error_names_what_cannot_be_added_or_drained() -> None:
    async with FakeReplica() as one, running(one) as run:
        for body, status, code, text in [
            ({}, 400, "invalid_request", "url: missing"),
            ({"url": "ftp://x"}, 400, "invalid_request", "is not a base URL"),
            ({"url": "http://x", "nmae": "y"}, 400, "invalid_request", "did you mean 'name'"),
            (
                {"url": "http://x", "zzz": 1},
                400,
                "invalid_request",
                "capacity_tokens, engine, weight, ranks, pool",
            ),
            ({"url": "http://x", "pol": 0}, 400, "invalid_request", "did you mean 'pool'"),
            ({"url": "http://x", "pool": 1}, 400, "invalid_request", "is no pool's name: it must be the name of a pool"),
            ({"url": "http://x", "pool": True}, 400, "invalid_request", "'pool' is no pool's name"),
            ({"url": one.url}, 409, "replica_exists", one.name),
            ({"url": "http://x/" + "a" * 5000}, 400, "invalid_request", "more than 4,096 characters"),
            ({"url": "http://x/" + "a" * 900_000}, 400, "invalid_request", "more than 4,096 characters"),
            ({"url": "http://x", "name": ".."}, 400, "invalid_request", "'.' or '..'"),
            ({"url": "http://x", "name": "a/./b"}, 400, "invalid_request", "'.' or '..'"),
            (b"[]", 400, "invalid_request", "a JSON object"),
            (b"{", 400, "invalid_json", "not valid JSON"),
        ]:
            answered, _, error = await run.post(body, path="/warmroute/replicas")
            assert (answered, error["error"]["code"]) == (status, code), body
            assert text in error["error"]["message"]
        assert (await run.post({"name": "nobody"}, path="/warmroute/drain"))[0] == 404
        assert (await run.post({}, path="/warmroute/undrain"))[0] == 400
        assert list(await listed(run)) == [one.name]


@pytest.mark.parametrize("path", ["/warmroute/drain", "/warmroute/undrain", "/warmroute/replicas"])
async def test_pages_and_strangers_change_nothing(path: str) -> None:
    async with FakeReplica() as one, running(one) as run:
        for headers in (FOREIGN, {"Origin": "https://evil.example"}, {"Origin": "null"}):
            assert (await run.post({"name": one.name, "url": "http://x"}, path=path, headers=headers))[0] == 403
        assert (await run.post({"name": one.name}, path="/warmroute/drain", headers={"Origin": run.admin_url}))[0] == 200
