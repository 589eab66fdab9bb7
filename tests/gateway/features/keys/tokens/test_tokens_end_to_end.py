"""Tokens of real issuers on a real socket: who gets in, as whom, and what happens when an issuer is away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from gateway.app import compose
from gateway.core import Surroundings
from gateway.features.keys.keys import Keys
from gateway.features.keys.tokens.issuer import LOOK_UP_S, Issuer
from gateway.server.endpoints import clients_runner
from tests.gateway.conftest import BODY, LOGGED, Running, config_over, eventually, longest_pause, running, serving_runner
from tests.gateway.features.keys.conftest import PRICES, bearer, keyed, made
from tests.gateway.features.workers.conftest import star
from tests.gateway.upstream.certificates import Authority
from tests.support.fakes import FakeReplica, FakeRequest, answers, models, streams
from tests.support.issuer import AUDIENCE, FakeIssuer, encoded, public_jwk

KINDS = ["RS256", "RS512", "PS256", "ES256", "ES384", "ES512", "EdDSA"]


class Clock:
    """Ahead of the real one."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


def section(issuer: FakeIssuer, /, **changed: Any) -> dict[str, Any]:
    return {"issuer": issuer.url, "audience": AUDIENCE, "tenant_claim": "tenant", "name": "idp", **changed}


@contextlib.asynccontextmanager
async def trusting(
    issuer: FakeIssuer,
    *replicas: FakeReplica,
    oidc: dict[str, Any] | None = None,
    wall_clock: Callable[[], float] = time.time,
    **config: Any,
) -> AsyncIterator[Running]:
    """A gateway without keys of its own."""
    keys = {"oidc": [section(issuer, **(oidc or {}))]}
    gateway = compose(config_over(*replicas, keys=keys, **config), LOGGED, Surroundings(wall_clock=wall_clock))
    async with serving_runner(gateway, clients_runner(gateway.served)) as run:
        yield run
        run.gateway[Keys].limiter.check()


def first_of(run: Running) -> Issuer:
    assert run.gateway[Keys].tokens is not None
    return run.gateway[Keys].tokens.issuers[0]


def held(until: asyncio.Event) -> Any:
    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        await until.wait()
        await answers()(request, writer)

    return behave


async def code_of(run: Running, token: str) -> tuple[int, str]:
    """(status, message)"""
    status, _, answer = await run.post(headers=bearer(token))
    return status, answer["error"]["message"] if "error" in answer else ""


@pytest.mark.parametrize("algorithm", KINDS)
async def test_a_token_lets_in_and_its_tenant_counts(
    algorithm: str, request_lines: Callable[[], list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    issuer = FakeIssuer()
    issuer.keys = {"k1": (algorithm, 0)}
    async with FakeReplica([answers()]) as replica, issuer.serving(), trusting(issuer, replica) as run:
        token = issuer.token()
        for headers in (bearer(token), {"X-Api-Key": token}):
            assert (await run.post(headers={**headers, "X-Tenant-Id": "other"}))[0] == 200
        sent = {name.lower(): value for name, value in replica.requests[-1].headers.items()}
        assert not sent.keys() & {"authorization", "x-api-key", "x-tenant-id"}
        line = request_lines()[-1]
        assert (line["tenant"], line["key"]) == ("acme", "idp:acme")
        shown = [json.dumps(request_lines()), caplog.text, str(await run.metrics()), repr(run.gateway[Keys])]
        assert not any(part in text for part in token.split(".")[1:] for text in shown)
        assert len(run.gateway[Keys].tokens or ()) == 1  # verified once


async def test_official_clients_take_tokens() -> None:
    issuer = FakeIssuer()
    async with FakeReplica([answers()], listing=models("m")) as replica, issuer.serving(), trusting(issuer, replica) as run:
        ask: Any = {"messages": [{"role": "user", "content": "hi"}]}
        async with (
            openai.AsyncOpenAI(base_url=f"{run.url}/v1", api_key=issuer.token(), max_retries=0) as good,
            openai.AsyncOpenAI(base_url=f"{run.url}/v1", api_key=issuer.unsigned(), max_retries=0) as bad,
            anthropic.AsyncAnthropic(base_url=run.url, auth_token=issuer.token(), max_retries=0) as claude,
        ):
            assert (await good.chat.completions.create(model="m", **ask)).choices
            assert [each.id async for each in good.models.list()] == ["m"]
            assert (await claude.messages.create(model="m", max_tokens=5, **ask)).id == "c"
            with pytest.raises(openai.AuthenticationError):
                await bad.chat.completions.create(model="m", **ask)


async def test_forged_tokens_read_as_any_wrong_key() -> None:
    issuer, other = FakeIssuer(), FakeIssuer()
    other.keys = {"k1": ("RS256", 1)}
    async with (
        FakeReplica([answers()]) as replica,
        issuer.serving(),
        other.serving(),
        trusting(issuer, replica) as run,
    ):
        good = issuer.token()
        head, body, signature = good.split(".")
        nested = encoded(b'{"a":' + b"[" * 4000)
        changed = encoded({**issuer.claims(), "tenant": "root"})
        forged = [
            issuer.unsigned(),
            issuer.unsigned() + signature,
            issuer.signed_by_public_key(),
            other.token(iss=issuer.url),  # another's key of the same name
            other.token(),  # of an issuer that is not ours
            f"{head}.{changed}.{signature}",
            f"{head}.{body}.{signature[:-4]}AAAA",
            f"{encoded({'alg': 'ES256', 'kid': 'k1'})}.{body}.{signature}",
            f"{encoded({'alg': ['RS256'], 'kid': 'k1'})}.{body}.{signature}",
            f"{encoded({'alg': 'RS256', 'kid': {'a': 1}})}.{body}.{signature}",
            f"{encoded({'alg': 'RS256', 'kid': 'k1', 'jwk': public_jwk('RS256', 'k1', 1)})}.{body}.{signature}",
            f"{encoded({'alg': 'RS256', 'kid': 'k1', 'jku': other.url})}.{body}.{signature}",
            issuer.token(headers={"crit": ["exp"], "exp": 1}),
            f"{nested}.{body}.{signature}",
            f"{head}.{encoded(b'[' * 4000)}.{signature}",
            f"{head}.{body}",
            f"{good}.{signature}.x",
            "eyJ",
            "eyJ..",
            "eyJ" + "A" * 8000,
        ]
        texts = set[str]()
        for token in forged:
            status, _, answer = await run.post(headers=bearer(token))
            assert status == 401, token[:80]
            texts.add(json.dumps(answer))
        texts.add(json.dumps((await run.post(headers=bearer("sk-wrong")))[2]))
        assert len(texts) == 1
        assert replica.requests == []
        assert (await run.post(headers=bearer(good)))[0] == 200
        assert other.requests == []  # no token leads the gateway anywhere


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"aud": "other"}, "aud"),
        ({"aud": None}, "aud"),
        ({"aud": ["x", "y"]}, "aud"),
        ({"aud": {"a": 1}}, ""),
        ({"exp": 1}, "expired"),
        ({"exp": None}, "exp"),
        ({"exp": "soon"}, "numbers"),
        ({"exp": 10**400}, ""),
        ({"exp": float("nan")}, ""),
        ({"exp": True}, "numbers"),
        ({"nbf": 10**11}, "not valid yet"),
        ({"iat": 10**11}, "not valid yet"),
        ({"tenant": None}, "'tenant'"),
        ({"tenant": 7}, "'tenant'"),
        ({"tenant": ["acme"]}, "'tenant'"),
        ({"tenant": ""}, "'tenant'"),
        ({"tenant": "none"}, "'tenant'"),
        ({"tenant": "x" * 65}, "'tenant'"),
        ({"tenant": "x" * 5000}, "'tenant'"),
        ({"tenant": "a\r\nX: y"}, "'tenant'"),
        ({"tenant": "<b>\"'"}, "'tenant'"),
        ({"tenant": "ａcme"}, "'tenant'"),
        ({"tenant": "acme\0"}, "'tenant'"),
    ],
)
async def test_good_signatures_of_claims_that_do_not_fit(changed: dict[str, Any], expected: str) -> None:
    issuer = FakeIssuer()
    issuer.keys = {"k1": ("EdDSA", 0)}
    async with FakeReplica([answers()]) as replica, issuer.serving(), trusting(issuer, replica) as run:
        status, message = await code_of(run, issuer.token(**changed))
        assert status == 401
        assert expected in message
        assert "x" * 65 not in message
        assert replica.requests == []


async def test_a_claim_of_64_kilobytes_does_not_get_in() -> None:
    """No head is as long."""
    issuer = FakeIssuer()
    async with FakeReplica([answers()]) as replica, issuer.serving(), trusting(issuer, replica) as run:
        assert (await run.post(headers=bearer(issuer.token(tenant="x" * 65_536))))[0] == 431
        assert (await run.post(headers=bearer(issuer.token())))[0] == 200


async def test_clocks_may_differ_by_half_a_minute() -> None:
    issuer, now = FakeIssuer(), time.time()
    async with FakeReplica([answers()]) as replica, issuer.serving(), trusting(issuer, replica) as run:
        for name, value, status in (("exp", now - 10, 200), ("nbf", now + 10, 200), ("exp", now - 40, 401)):
            claims: Any = {name: value}
            assert (await run.post(headers=bearer(issuer.token(**claims))))[0] == status


async def test_what_an_issuer_may_grant() -> None:
    issuer = FakeIssuer()
    oidc = {"tenant_claim": "/kubernetes.io/namespace", "tenants": ["team-*", "ops"], "models": ["a-*"]}
    async with (
        FakeReplica([answers()], listing=models("a-1", "b")) as replica,
        issuer.serving(),
        trusting(issuer, replica, oidc=oidc) as run,
    ):

        def of(namespace: Any) -> dict[str, str]:
            claims: Any = {"kubernetes.io": {"namespace": namespace}}
            return bearer(issuer.token(**claims))

        body = {**BODY, "model": "a-1"}
        statuses = [(await run.post(body, headers=of(each)))[0] for each in ("team-1", "ops", "ops2", "other", {"a": 1})]
        assert statuses == [200, 200, 401, 401, 401]
        assert (await run.post({**BODY, "model": "b"}, headers=of("ops")))[0] == 403
        listed = json.loads((await run.get("/v1/models", headers=of("ops")))[2])
        assert [each["id"] for each in listed["data"]] == ["a-1"]
        assert (await run.get("/v1/models"))[0] == 401


async def test_keys_and_two_issuers_side_by_side(tmp_path: Path) -> None:
    """Tenants of one name have the same objects; their limits are those of whoever let them in."""
    one, two = FakeIssuer(), FakeIssuer()
    two.keys = {"k1": ("ES256", 0)}
    async with FakeReplica([answers()]) as replica, one.serving(), two.serving():
        oidc = [section(one, name="one", requests_per_minute=2), section(two, name="two", audience=["x", "y"])]
        async with keyed(tmp_path, replica, keys={"oidc": oidc}) as run:
            _, key = await made(run)
            assert (await run.post(headers=bearer(key)))[0] == 200
            first = [(await run.post(headers=bearer(one.token(sub=str(number)))))[0] for number in range(3)]
            assert first == [200, 200, 429]  # by tenant, whatever the token
            assert (await run.post(headers=bearer(one.token(tenant="other"))))[0] == 200
            assert [(await run.post(headers=bearer(two.token(aud=["z", "y"]))))[0] for _ in range(3)] == [200] * 3
            assert (await run.post(headers=bearer(two.token())))[0] == 401  # the other one's audience
            assert (await run.post(headers=bearer(one.token(iss=two.url, aud="x"))))[0] == 401
            status, _, answer = await run.post(headers={**bearer(key), "X-Api-Key": one.token()})
            assert (status, answer["error"]["code"]) == (400, "ambiguous_api_key")


async def test_budgets_of_tenants_outlive_a_restart(tmp_path: Path) -> None:
    issuer = FakeIssuer()
    async with FakeReplica([answers(completion=10**6)]) as replica, issuer.serving():
        for expected in ([200, 429], [429, 429]):
            oidc = [section(issuer, budget_usd_month=0.5)]
            async with keyed(tmp_path, replica, prices=PRICES, keys={"oidc": oidc}) as run:
                assert [(await run.post(headers=bearer(issuer.token())))[0] for _ in range(2)] == expected


async def test_where_keys_are_not_required() -> None:
    issuer, other = FakeIssuer(), FakeIssuer()
    async with FakeReplica([answers()]) as replica, issuer.serving(), other.serving():
        keys = {"required": False, "oidc": [section(issuer)]}
        async with running(replica, keys=keys) as run:
            for headers, status in (
                (None, 200),
                (bearer("EMPTY"), 200),
                (bearer(issuer.token()), 200),
                (bearer(issuer.unsigned() + "x"), 401),  # it says that it is one of ours
                (bearer(issuer.token(exp=1)), 401),
                (bearer(other.token()), 200),  # nobody's
            ):
                assert (await run.post(headers=headers))[0] == status


# -- issuers


async def test_a_new_key_is_looked_up_and_a_withdrawn_one_ends() -> None:
    issuer = FakeIssuer()
    async with FakeReplica([answers()]) as replica, issuer.serving(), trusting(issuer, replica) as run:
        before = issuer.token()
        assert (await run.post(headers=bearer(before)))[0] == 200
        issuer.keys = {"k2": ("ES256", 7)}
        mine = first_of(run)
        assert mine.retry_s > 0
        assert (await run.post(headers=bearer(issuer.token("k2"))))[0] == 401  # the keys were read just now
        mine.next_at = 0.0
        assert (await run.post(headers=bearer(issuer.token("k2"))))[0] == 200
        assert (await run.post(headers=bearer(before)))[0] == 401  # known, and verified, before


async def test_a_flood_of_unknown_keys_is_one_question() -> None:
    issuer = FakeIssuer()
    async with FakeReplica([answers()]) as replica, issuer.serving(), trusting(issuer, replica) as run:
        assert (await run.post(headers=bearer(issuer.token())))[0] == 200
        asked = len(issuer.requests)
        tokens = [issuer.token(f"x{number}") for number in range(300)]
        limit = asyncio.Semaphore(50)

        async def one(token: str) -> int:
            async with limit:
                return (await run.post(headers=bearer(token)))[0]

        assert set(await asyncio.gather(*map(one, tokens))) == {401}
        assert len(issuer.requests) <= asked + 2
        assert len(run.gateway[Keys].tokens or ()) == 1


async def test_an_issuer_that_is_down_from_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    issuer = FakeIssuer()
    async with issuer.serving():
        pass
    port = int(issuer.url.rpartition(":")[2])
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, keys={"oidc": [section(issuer)]}) as run:
        _, key = await made(run)
        status, headers, answer = await run.post(headers=bearer(issuer.token()))
        assert (status, answer["error"]["code"]) == (503, "issuer_unavailable")
        assert int(headers["Retry-After"]) >= 1
        assert (await run.post(headers=bearer(key)))[0] == 200
        assert (await run.metrics())['warmroute_keys_refused_total{reason="issuer"}'] == 1
        assert (await run.metrics())["warmroute_keys_failures_total"] >= 1
        async with issuer.serving(port=port):
            await eventually(lambda: not first_of(run).failing)
            assert (await run.post(headers=bearer(issuer.token())))[0] == 200
    lines = [record.message for record in caplog.records if record.name == "warmroute.keys"]
    assert lines == ["keys of an issuer are not read: no key is known", "keys of an issuer are read again"]


async def test_an_issuer_that_goes_away_is_not_missed() -> None:
    issuer = FakeIssuer()
    async with FakeReplica([answers()]) as replica, contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(issuer.serving())
        run = await stack.enter_async_context(trusting(issuer, replica))
        assert (await run.post(headers=bearer(issuer.token())))[0] == 200
        issuer.answers["/keys"] = (500, {}, b"no")
        mine = first_of(run)
        mine.next_at = 0.0
        assert (await run.post(headers=bearer(issuer.token("k9"))))[0] == 503
        assert mine.failing
        assert (await run.post(headers=bearer(issuer.token(sub="new"))))[0] == 200


async def test_a_slow_issuer_holds_up_nobody_else(tmp_path: Path) -> None:
    issuer = FakeIssuer()
    issuer.hold.clear()
    async with (
        FakeReplica([answers()]) as replica,
        issuer.serving(),
        keyed(tmp_path, replica, keys={"oidc": [section(issuer)]}) as run,
    ):
        _, key = await made(run)
        waiting = [asyncio.create_task(run.post(headers=bearer(issuer.token(sub=str(number))))) for number in range(20)]
        await eventually(lambda: issuer.requests)
        assert (await run.post(headers=bearer(key)))[0] == 200
        assert not any(task.done() for task in waiting)
        issuer.hold.set()
        assert {(await task)[0] for task in waiting} == {200}
        assert len(issuer.requests) == 2


async def test_an_issuer_that_never_answers_costs_a_503() -> None:
    issuer = FakeIssuer()
    issuer.hold.clear()
    async with FakeReplica([answers()]) as replica, issuer.serving(), trusting(issuer, replica) as run:
        begun = time.monotonic()
        assert (await run.post(headers=bearer(issuer.token())))[0] == 503
        assert time.monotonic() - begun >= LOOK_UP_S * 0.9


BAD_DOCUMENTS = [
    ("/keys", (200, {}, json.dumps({"keys": [{"kty": "RSA", "n": "A" * 600_000, "e": "AQAB"}]}).encode())),
    ("/keys", (200, {}, b'{"keys":[' + b"[" * 200_000)),
    ("/keys", (200, {}, b"\xff\xfe")),
    ("/keys", (200, {}, b"{}")),
    ("/keys", (200, {}, b'{"keys":[]}')),
    ("/keys", (200, {}, json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "k1", "alg": "HS256"}]}).encode())),
    ("/keys", (302, {"Location": "/elsewhere"}, b"")),
    ("/keys", (404, {}, b"no")),
    ("/.well-known/openid-configuration", (302, {"Location": "/elsewhere"}, b"")),
    ("/.well-known/openid-configuration", (200, {}, b"[]")),
    ("/.well-known/openid-configuration", (200, {}, b'{"issuer": "https://evil.example"}')),
]


@pytest.mark.parametrize(("path", "answer"), BAD_DOCUMENTS)
async def test_documents_that_are_refused(
    path: str, answer: tuple[int, dict[str, str], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    issuer = FakeIssuer()
    issuer.answers[path] = answer
    async with FakeReplica([answers()]) as replica, issuer.serving(), trusting(issuer, replica) as run:
        assert (await run.post(headers=bearer(issuer.token())))[0] == 503
        assert not any("elsewhere" in path for path in issuer.requests)
        (record,) = [record for record in caplog.records if record.name == "warmroute.keys"]
        assert issuer.url in record.__dict__["reason"]
        assert len(record.__dict__["reason"]) <= 1000


@pytest.mark.parametrize(
    "address",
    ["http://169.254.169.254/keys", "https://169.254.169.254/keys", "http://example.org/keys", "file:///etc/passwd", 7, ""],
)
async def test_a_discovery_document_leads_to_no_address_that_anybody_can_stand_in_for(address: Any) -> None:
    issuer = FakeIssuer()
    issuer.discovery = {"jwks_uri": address}
    async with FakeReplica([answers()]) as replica, issuer.serving(), trusting(issuer, replica) as run:
        assert (await run.post(headers=bearer(issuer.token())))[0] == 503


async def test_keys_of_a_url_that_is_configured() -> None:
    issuer = FakeIssuer()
    async with FakeReplica([answers()]) as replica, issuer.serving():
        oidc = {"issuer": "https://login.invalid/", "jwks_url": f"{issuer.url}/certs?p=1"}
        async with trusting(issuer, replica, oidc=oidc) as run:
            assert (await run.post(headers=bearer(issuer.token(iss="https://login.invalid/"))))[0] == 200
            assert issuer.requests == ["/certs"]


async def test_an_issuer_with_a_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    certificate = authority.certificate("idp", san="IP:127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    issuer = FakeIssuer()
    async with FakeReplica([answers()]) as replica, issuer.serving(context):
        for ca_file, status in ((str(authority.ca), 200), ("", 503)):
            async with trusting(issuer, replica, oidc={"ca_file": ca_file}) as run:
                assert (await run.post(headers=bearer(issuer.token())))[0] == status


async def test_a_token_that_expires_while_its_request_waits() -> None:
    go_on = asyncio.Event()
    issuer = FakeIssuer()
    async with FakeReplica([held(go_on), answers()]) as replica, issuer.serving():
        pools = [{"name": "p", "replicas": [replica.url], "max_inflight": 1}]
        clock = Clock()
        async with trusting(issuer, pools=pools, wall_clock=clock) as run:
            first = asyncio.create_task(run.post({**BODY, "n": 1}, headers=bearer(issuer.token())))
            await eventually(lambda: replica.requests)
            waiting = asyncio.create_task(run.post(headers=bearer(issuer.token(exp=time.time() + 60))))
            await eventually(lambda: run.gateway.fleet.pools[0].admission.waiting == 1)
            clock.ahead_s = 120.0
            go_on.set()
            assert (await first)[0] == 200
            status, _, answer = await waiting
            assert (status, answer["error"]["message"]) == (401, "The key idp:acme has expired.")


async def test_reading_a_hundred_keys_leaves_the_loop_alone() -> None:
    issuer = FakeIssuer()
    listed = [public_jwk("RS256", f"k{number}") for number in range(500)]
    issuer.answers["/keys"] = (200, {}, json.dumps({"keys": listed}).encode())
    async with FakeReplica([answers()]) as replica, issuer.serving(), trusting(issuer, replica) as run:
        mine = first_of(run)
        await eventually(lambda: mine.key("k99", "RS256"))
        assert mine.key("k100", "RS256") is None  # beyond the bound
        mine.next_at = 0.0
        assert await longest_pause(mine.look_up) < 0.05


async def test_a_stream_outlives_its_token() -> None:
    hold = asyncio.Event()
    issuer, clock = FakeIssuer(), Clock()
    async with (
        FakeReplica([streams("a", "b", hold=hold)]) as replica,
        issuer.serving(),
        trusting(issuer, replica, wall_clock=clock) as run,
    ):
        token = issuer.token(exp=time.time() + 60)
        async with run.session.post(
            f"{run.url}/v1/chat/completions", json={**BODY, "stream": True}, headers=bearer(token)
        ) as answer:
            assert answer.status == 200
            await answer.content.readany()
            clock.ahead_s = 120.0
            assert (await run.post(headers=bearer(token)))[0] == 401
            hold.set()
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_limits_of_tenants_hold_across_workers() -> None:
    """Also at a worker that has not seen the tenant yet."""
    issuer = FakeIssuer()
    async with FakeReplica([answers(prompt=400, completion=500, cached=0)]) as replica, issuer.serving():
        keys = {"oidc": [section(issuer, budget_usd_day=0.0005)]}
        async with star(replica, keys=keys, prices=PRICES) as (_, workers):
            one, two = workers[0].run, workers[1].run
            assert [(await one.post(headers=bearer(issuer.token())))[0] for _ in range(2)] == [200, 429]
            limiter = two.gateway[Keys].limiter
            await eventually(lambda: (account := limiter.account("idp:acme")) and account.by_process)
            assert (await two.post(headers=bearer(issuer.token())))[0] == 429
            assert (await two.post(headers=bearer(issuer.token(tenant="other"))))[0] == 200
