"""Keys on a real socket: who gets in, as whom, and what a replica, a log and a metric see of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from yarl import URL

from gateway.features.keys.keys import Keys
from gateway.features.keys.metrics import KeyMetrics
from tests.gateway.conftest import BODY, Running, eventually
from tests.gateway.features.keys.conftest import PRICES, bearer, keyed, made
from tests.support.fakes import FakeReplica, answers, dies, hangs, http, models, writes
from tests.support.fakes import status as refuses

MESSAGES = "/v1/messages"
RESPONSE = {"id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "model": "m", "output": []}
MESSAGE = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


async def cancelled(posts: list[asyncio.Task[tuple[int, Any, Any]]], run: Running, id_: str) -> None:
    """The clients of these requests leave; waits until nothing is reserved for the key."""
    for post in posts:
        post.cancel()
    await asyncio.gather(*posts, return_exceptions=True)
    account = run.gateway[Keys].limiter.account(id_)
    assert account
    await eventually(lambda: account.open == 0)


@pytest.mark.parametrize("header", ["Authorization", "X-Api-Key"])
async def test_a_key_lets_in_and_its_tenant_counts(
    tmp_path: Path, header: str, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        id_, key = await made(run)
        headers = {header: f"Bearer {key}" if header == "Authorization" else key, "X-Tenant-Id": "other"}
        status, _, _ = await run.post(headers=headers)
        assert status == 200
        sent = {name.lower(): value for name, value in replica.requests[-1].headers.items()}
        assert not sent.keys() & {"authorization", "x-api-key", "x-tenant-id"}
        line = request_lines()[-1]
        assert (line["tenant"], line["key"]) == ("acme", id_)
        assert key not in json.dumps(request_lines())
        assert key not in str(await run.metrics())
        assert key.encode() not in (await run.get("/warmroute/keys"))[2]
        assert key.split("-", 2)[2].encode() not in (tmp_path / "keys.sqlite").read_bytes()


async def test_the_log_has_the_address_of_whoever_was_refused_even_if_it_has_no_others(
    tmp_path: Path, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, prices=PRICES, log_clients=False) as run:
        key = (await made(run, requests_per_minute=1))[1]
        other = (await made(run, models=["other"]))[1]
        statuses = [(await run.post(headers=bearer(each)))[0] for each in (key, key, other, "wr-guess")]
        assert statuses == [200, 429, 403, 401]
        clients = [line.get("client") for line in request_lines()]
        assert clients == [None, "127.0.0.1", "127.0.0.1", "127.0.0.1"]
        assert (await run.post(b"{", headers=bearer(other)))[0] == 400
        assert "client" not in request_lines()[-1]


async def test_all_refusals_read_the_same(tmp_path: Path) -> None:
    """1,000 guesses, some near to a key."""
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        _, key = await made(run)
        guesses = [key[:-1], key + "x", key.upper(), key[:12], "wr-", "sk-1", "' OR 1=1 --", "<script>", "é" * 20, "a" * 4000]
        guesses += [f"{key[:20]}{number:032d}" for number in range(990)]
        texts = set()
        for guess in guesses:
            status, headers, answer = await run.post(headers=bearer(guess))
            assert status == 401, guess
            assert headers["WWW-Authenticate"] == "Bearer"
            texts.add(json.dumps(answer))
        assert len(texts) == 1
        assert "invalid_api_key" in texts.pop()
        assert replica.requests == []
        assert (await run.metrics())['warmroute_keys_refused_total{reason="unknown"}'] == 1000
        assert (await run.post())[0] == 401
        assert (await run.get("/v1/models"))[0] == 401


async def test_two_keys_are_refused(tmp_path: Path) -> None:
    """What one program reads first, another may read last."""
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        (_, one), (_, other) = await made(run), await made(run)
        status, _, answer = await run.post(headers={**bearer(one), "X-Api-Key": other})
        assert (status, answer["error"]["code"]) == (400, "ambiguous_api_key")
        twice = [("Authorization", f"Bearer {one}"), ("Authorization", f"Bearer {other}")]
        assert (await run.post(headers=twice))[0] == 400
        assert (await run.post(headers={**bearer(one), "X-Api-Key": one}))[0] == 200
        assert len(replica.requests) == 1


@pytest.mark.parametrize("own", ["Authorization", "X-Api-Key"])
async def test_a_login_at_the_vendor_beside_our_key_is_no_second_key(tmp_path: Path, own: str) -> None:
    """Desktop clients send both, and only one of them can be ours; no replica sees either."""
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        _, key = await made(run)
        login = "sk-ant-oat01-abc"
        pair = {"Authorization": f"Bearer {key}", "X-Api-Key": login}
        if own == "X-Api-Key":
            pair = {"Authorization": f"Bearer {login}", "X-Api-Key": key}
        assert (await run.post(headers=pair))[0] == 200
        assert login not in str(replica.requests[-1].headers)
        wrong = {name: value.replace(key, key[:-1] + "x") for name, value in pair.items()}
        status, _, answer = await run.post(headers=wrong)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        both = {"Authorization": f"Bearer {login}", "X-Api-Key": "sk-ant-api03-abc"}
        assert (await run.post(headers=both))[0] == 401


async def test_a_repetition_is_declined_where_it_is_useless(tmp_path: Path) -> None:
    """Claude Code repeats a plain 401 for minutes; a limit per minute is worth a repetition, a spent budget is not."""
    async with FakeReplica([answers(prompt=10**6, cached=0)]) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        limited, spent = [(await made(run, **each))[1] for each in ({"requests_per_minute": 1}, {"budget_usd_day": 0.000001})]
        other = (await made(run, models=["other"]))[1]
        await run.post(headers=bearer(limited))
        await run.post(headers=bearer(spent))
        found = [
            await run.post(headers=bearer("wr-guess")),
            await run.post(headers=bearer(other)),
            await run.post({**BODY, "messages": 1}, headers=bearer(other)),
            await run.post(headers=bearer(spent)),
            await run.post(headers=bearer(limited)),
        ]
        assert [(status, headers.get("x-should-retry")) for status, headers, _ in found] == [
            (401, "false"),
            (403, "false"),
            (400, "false"),
            (429, "false"),
            (429, None),
        ]
        assert found[3][2]["error"]["code"] == "insufficient_quota"
        assert (await run.get("/v1/models"))[1]["x-should-retry"] == "false"


async def test_official_clients_read_the_errors(tmp_path: Path) -> None:
    async with FakeReplica([answers()], listing=models("m")) as replica, keyed(tmp_path, replica) as run:
        _, key = await made(run, requests_per_minute=1, models=["m"])
        async with (
            openai.AsyncOpenAI(base_url=f"{run.url}/v1", api_key="wr-no", max_retries=0) as wrong,
            openai.AsyncOpenAI(base_url=f"{run.url}/v1", api_key=key, max_retries=0) as right,
            anthropic.AsyncAnthropic(base_url=run.url, api_key="wr-no", max_retries=0) as claude,
            anthropic.AsyncAnthropic(base_url=run.url, api_key=key, max_retries=0) as known,
        ):
            ask: Any = {"messages": [{"role": "user", "content": "hi"}]}
            with pytest.raises(openai.AuthenticationError):
                await wrong.chat.completions.create(model="m", **ask)
            with pytest.raises(anthropic.AuthenticationError):
                await claude.messages.create(model="m", max_tokens=5, **ask)
            with pytest.raises(openai.PermissionDeniedError, match="may use: m"):
                await right.chat.completions.create(model="n", **ask)
            with pytest.raises(anthropic.PermissionDeniedError):
                await known.messages.create(model="n", max_tokens=5, **ask)
            assert (await right.chat.completions.create(model="m", **ask)).choices
            with pytest.raises(openai.RateLimitError) as limited:
                await right.chat.completions.create(model="m", **ask)
            assert 1 <= int(limited.value.response.headers["Retry-After"]) <= 60
            with pytest.raises(anthropic.RateLimitError):
                await known.messages.create(model="m", max_tokens=5, **ask)
        assert len(replica.requests) == 1


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m"])
async def test_lists_of_models_count_for_the_rate_of_a_key(tmp_path: Path, path: str) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        (id_, key), (_, free) = await made(run, requests_per_minute=3), await made(run)
        found = [await run.get(path, headers=bearer(key)) for _ in range(5)]
        assert [status for status, _, _ in found] == [200, 200, 200, 429, 429]
        assert json.loads(found[-1][2])["error"]["code"] == "rate_limit_exceeded"
        assert int(found[-1][1]["Retry-After"]) > 0
        assert (await run.post(headers=bearer(key)))[0] == 429, "they share the rate of other requests"
        account = run.gateway[Keys].limiter.account(id_)
        assert account is not None
        assert (account.open, account.reserved) == (0, 0)
        assert [(await run.get(path, headers=bearer(free)))[0] for _ in range(9)] == [200] * 9


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m"])
async def test_a_key_whose_budget_is_spent_lists_models(tmp_path: Path, path: str) -> None:
    prices = {"m": {"input": 1e6, "output": 1e6}}
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, prices=prices) as run:
        _, key = await made(run, budget_usd_day=1.0)
        assert [(await run.post(headers=bearer(key)))[0] for _ in range(2)] == [200, 429]
        assert (await run.get(path, headers=bearer(key)))[0] == 200


async def test_models_that_are_not_allowed_are_not_listed(tmp_path: Path) -> None:
    async with FakeReplica([answers()], listing=models("a-1", "a-2", "b")) as replica, keyed(tmp_path, replica) as run:
        _, key = await made(run, models=["a-*"])
        listed = json.loads((await run.get("/v1/models", headers=bearer(key)))[2])
        assert [each["id"] for each in listed["data"]] == ["a-1", "a-2"]
        assert (await run.get("/v1/models/b", headers=bearer(key)))[0] == 403
        assert (await run.get("/v1/models/a-1", headers=bearer(key)))[0] == 200
        status, _, answer = await run.post({**BODY, "model": "nothing"}, headers=bearer(key))
        assert (status, answer["error"]["code"]) == (403, "model_not_allowed")  # whether it exists or not


@pytest.mark.parametrize("api", ["chat/completions", "embeddings"])
@pytest.mark.parametrize(("path", "expected"), [("ad-1", 200), (None, 200), ("b", 403), (["ad-1"], 403)])
async def test_an_adapter_that_a_body_names_has_to_be_allowed(
    tmp_path: Path, path: str | list[str] | None, expected: int, api: str
) -> None:
    """SGLang computes a request with the adapter of its `lora_path`, whatever the model is."""
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        _, key = await made(run, models=["m", "m:ad-*"])
        assert (await run.post({**BODY, "lora_path": path}, f"/v1/{api}", headers=bearer(key)))[0] == expected


async def test_models_in_forms_and_queries_have_to_be_allowed_too(tmp_path: Path) -> None:
    """An alias is refused there, whatever it stands for."""
    async with FakeReplica([answers()], listing=models("a", "b")) as replica:
        async with keyed(tmp_path, replica, model_aliases={"c": "b"}) as run:
            headers = bearer((await made(run, models=["a", "c"]))[1])
            for model, expected in (("a", 200), ("b", 403), ("c", 400)):
                form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--b--\r\n' % model.encode()
                in_form = {**headers, "Content-Type": "multipart/form-data; boundary=b"}
                assert (await run.post(form, "/v1/audio/transcriptions", headers=in_form))[0] == expected, model
                assert (await run.post(b"", f"/v1/audio/transcriptions?model={model}", headers=headers))[0] == expected, model
        assert len(replica.requests) == 2


async def test_a_pool_that_is_not_allowed(tmp_path: Path) -> None:
    async with FakeReplica([answers()], listing=models("a")) as one, FakeReplica([answers()], listing=models("b")) as other:
        pools = [{"name": "p", "replicas": [one.url], "models": ["a"]}, {"name": "q", "replicas": [other.url], "models": ["b"]}]
        async with keyed(tmp_path, pools=pools) as run:
            _, key = await made(run, pools=["p"])
            assert (await run.post({**BODY, "model": "a"}, headers=bearer(key)))[0] == 200
            status, _, answer = await run.post({**BODY, "model": "b"}, headers=bearer(key))
            assert (status, answer["error"]["code"]) == (403, "pool_not_allowed")


async def test_no_fallback_leads_to_a_pool_that_is_not_allowed(tmp_path: Path) -> None:
    async with FakeReplica([answers()], listing=models("b")) as other:
        pools = [
            {"name": "p", "replicas": ["http://127.0.0.1:9"], "models": ["a"], "fallback": {"pool": "q", "model": "b"}},
            {"name": "q", "replicas": [other.url], "models": ["b"]},
        ]
        async with keyed(tmp_path, pools=pools) as run:
            (_, some), (_, all_) = await made(run, pools=["p"]), await made(run)
            assert (await run.post({**BODY, "model": "a"}, headers=bearer(some)))[0] == 503
            assert (await run.post({**BODY, "model": "a"}, headers=bearer(all_)))[0] == 200


async def test_rotation_and_revocation(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        id_, former = await made(run)
        status, _, answer = await run.post({"grace_s": 3600}, f"/warmroute/keys/{id_}/rotate")
        assert status == 200
        for key in (former, answer["key"]):
            assert (await run.post(headers=bearer(key)))[0] == 200
        _, _, newest = await run.post({"grace_s": 0}, f"/warmroute/keys/{id_}/rotate")
        assert [(await run.post(headers=bearer(key)))[0] for key in (former, answer["key"], newest["key"])] == [401, 401, 200]
        async with run.session.delete(f"{run.admin_url}/warmroute/keys/{id_}") as revoked:
            assert revoked.status == 200
        status, _, refused = await run.post(headers=bearer(newest["key"]))
        assert (status, refused["error"]["message"]) == (401, f"The key {id_} was revoked.")
        assert (await run.post({}, f"/warmroute/keys/{id_}/rotate"))[0] == 409
        assert (await run.post({}, "/warmroute/keys/nothing/rotate"))[0] == 404


async def test_a_change_that_a_worker_could_not_read_is_not_said_to_hold(tmp_path: Path) -> None:
    """The database has a key that cannot be read, so that nothing behind it is."""
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        id_, key = await made(run)
        with contextlib.closing(sqlite3.connect(tmp_path / "keys.sqlite")) as database, database:
            database.execute("INSERT INTO warmroute_keys (id, revision, digests, body) VALUES ('broken', 100, '', '?')")
            database.execute("UPDATE warmroute_keys_revision SET revision = 100")
        url = f"{run.admin_url}/warmroute/keys/{id_}"
        status, _, rotated = await run.post({"grace_s": 0}, f"/warmroute/keys/{id_}/rotate")
        assert (status, "not all workers have read it" in rotated["warning"]) == (200, True)
        async with run.session.delete(url) as revoked:
            answer = await revoked.json()
        assert (revoked.status, answer["error"]["code"], revoked.headers["Retry-After"]) == (503, "keys_unavailable", "1")
        assert f"The key {id_} is revoked in the database" in answer["error"]["message"]
        assert (await run.post(headers=bearer(key)))[0] == 200, "so it is"
        with contextlib.closing(sqlite3.connect(tmp_path / "keys.sqlite")) as database, database:
            database.execute("DELETE FROM warmroute_keys WHERE id = 'broken'")
        async with run.session.delete(url) as again:
            assert again.status == 200
        assert (await run.post(headers=bearer(key)))[0] == 401


async def test_a_stream_that_runs_goes_on_after_the_revocation(tmp_path: Path) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request: Any, writer: asyncio.StreamWriter) -> None:
        begun.set()
        await go_on.wait()
        await answers()(request, writer)

    async with FakeReplica([slow]) as replica, keyed(tmp_path, replica) as run:
        id_, key = await made(run, requests_per_minute=100)
        asked = asyncio.create_task(run.post(headers=bearer(key)))
        await begun.wait()
        async with run.session.delete(f"{run.admin_url}/warmroute/keys/{id_}"):
            pass
        assert (await run.post(headers=bearer(key)))[0] == 401
        go_on.set()
        assert (await asked)[0] == 200


async def test_a_request_that_waits_is_refused_if_its_key_was_revoked(tmp_path: Path) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(request: Any, writer: asyncio.StreamWriter) -> None:
        begun.set()
        await go_on.wait()
        await answers()(request, writer)

    async with FakeReplica([slow]) as replica:
        pools = [{"name": "p", "replicas": [replica.url], "max_inflight": 1}]
        async with keyed(tmp_path, pools=pools) as run:
            id_, key = await made(run)
            first = asyncio.create_task(run.post(headers=bearer(key)))
            await begun.wait()
            waiting = asyncio.create_task(run.post(headers=bearer(key)))
            await eventually(lambda: run.gateway.fleet.pools[0].admission.waiting == 1)
            async with run.session.delete(f"{run.admin_url}/warmroute/keys/{id_}"):
                pass
            go_on.set()
            assert ((await first)[0], (await waiting)[0]) == (200, 401)
            assert len(replica.requests) == 1


async def test_expired_keys(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        id_, key = await made(run, expires_at="2020-01-01")
        _, _, answer = await run.post(headers=bearer(key))
        assert answer["error"]["message"] == f"The key {id_} has expired."


async def test_keys_that_are_not_required(tmp_path: Path) -> None:
    """What SDKs send for a key is nobody's; what looks like one of ours has to be one."""
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, keys={"required": False}) as run:
        _, key = await made(run)
        for headers, expected in ((None, 200), (bearer("EMPTY"), 200), (bearer(key), 200), (bearer(key[:-2] + "xx"), 401)):
            assert (await run.post(headers=headers))[0] == expected
        assert not any(name.lower() == "authorization" for request in replica.requests for name in request.headers)


@pytest.mark.parametrize(
    "settings",
    [
        {"tenant": "none"},
        {"tenant": ""},
        {"tenant": "a\0b"},
        {"tenant": "<b>'\""},
        {"tenant": "x" * 65},
        {"models": ["m"] * 101},
        {"models": ["m" * 257]},
        {"priority": 101},
        {"budget_usd_day": -1},
        {"requests_per_minute": 10**11},
        {"expires_at": "soon"},
        {"name": "\r\nX: y"},
        {"sha256": "0" * 64},
    ],
)
async def test_settings_that_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        status, _, answer = await run.post({"tenant": "acme", **settings}, "/warmroute/keys")
        assert (status, next(iter(settings)) in answer["error"]["message"]) == (400, True)


async def test_a_file_of_keys_is_read_again(tmp_path: Path) -> None:
    from gateway.features.keys.secret import digest_of, new_key

    one, other = new_key("abcdefgh"), new_key("abcdefgi")
    file = tmp_path / "keys.yaml"
    file.write_text(f"keys:\n- {{id: abcdefgh, sha256: {digest_of(one).hex()}, tenant: acme}}\n")
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, keys={"url": str(file)}) as run:
        assert [(await run.post(headers=bearer(key)))[0] for key in (one, other)] == [200, 401]
        assert (await run.post({"tenant": "t"}, "/warmroute/keys"))[0] == 409
        file.write_text("keys:\n- {id: abcdefgh, sha256: nonsense, tenant: acme}\n")
        failures = run.gateway.metrics.of(KeyMetrics).failures
        await eventually(lambda: failures.values[()] > 0)
        assert run.gateway.metrics.of(KeyMetrics).up.values[()] == 0
        assert (await run.post(headers=bearer(one)))[0] == 200  # nothing has changed
        file.write_text(f"keys:\n- {{id: abcdefgi, sha256: {digest_of(other).hex()}, tenant: acme}}\n")
        ring = run.gateway[Keys].ring
        await eventually(lambda: ring and ring.find(digest_of(other), 0))
        assert run.gateway.metrics.of(KeyMetrics).up.values[()] == 1
        assert [(await run.post(headers=bearer(key)))[0] for key in (one, other)] == [401, 200]


async def test_a_thousand_requests_race_for_a_budget(tmp_path: Path) -> None:
    """Each costs 0.00102 USD at most, and 1.02 USD would be all of them: what is spent stays below the budget of 0.1 USD, for
    no answer is longer than what is reserved for it.
    """
    async with (
        FakeReplica([answers(prompt=400, completion=500, cached=0)]) as replica,
        keyed(tmp_path, replica, prices=PRICES) as run,
    ):
        _, key = await made(run, budget_usd_day=0.1)
        limit = asyncio.Semaphore(100)

        async def one() -> int:
            async with limit:
                return (await run.post(headers=bearer(key)))[0]

        statuses = await asyncio.gather(*(one() for _ in range(1000)))
        spent = sum(value for name, value in (await run.metrics()).items() if name.startswith("warmroute_cost_usd_total"))
        assert set(statuses) == {200, 429}
        assert 0.09 < spent <= 0.1 + 0.0009  # and one alone
        status, headers, answer = await run.post(headers=bearer(key))
        assert (status, answer["error"]["code"]) == (429, "insufficient_quota")
        assert 0 < int(headers["Retry-After"]) <= 86_400


async def test_no_more_is_reserved_than_a_request_allows(tmp_path: Path) -> None:
    """Each costs 0.0005 USD at most: 20 fit, where answers of 1,024 tokens would be two."""
    prices = {"m": {"input": 0.0, "output": 5.0}}
    go = asyncio.Event()
    async with FakeReplica([hangs(go)]) as replica, keyed(tmp_path, replica, prices=prices) as run:
        id_, key = await made(run, budget_usd_day=0.01)
        body = {**BODY, "max_tokens": 50, "n": 2}
        posts = [asyncio.create_task(run.post(body, headers=bearer(key))) for _ in range(30)]
        await eventually(lambda: len(replica.requests) + sum(post.done() for post in posts) == 30)
        assert len(replica.requests) == 20
        assert {post.result()[0] for post in posts if post.done()} == {429}
        await cancelled(posts, run, id_)


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 1, "max_completion_tokens": 30_000.0},
        {"max_tokens": 1, "max_completion_tokens": "30000"},
        {"max_tokens": 1, "n_predict": [1]},
        {"max_tokens": 300, "n": 100.0},
        {"max_tokens": 300, "n": "100"},
    ],
)
async def test_a_limit_in_another_form_makes_no_count_impossible(tmp_path: Path, more: dict[str, Any]) -> None:
    """Engines read such numbers, too. The tokens are hidden reasoning, so nothing else shows them."""
    async with FakeReplica([answers(prompt=10, completion=20_000)]) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        _, key = await made(run, budget_usd_day=100.0)
        assert (await run.post({**BODY, **more}, headers=bearer(key)))[0] == 200
        name = replica.url.removeprefix("http://")
        assert (await run.metrics())[f'warmroute_completion_tokens_total{{model="m",replica="{name}"}}'] == 20_000


async def test_an_absurd_usage_does_not_take_the_budget(tmp_path: Path) -> None:
    absurd = answers(prompt=10**9 - 1, completion=10**9 - 1)
    async with FakeReplica([absurd]) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        _, key = await made(run, budget_usd_month=1.0)
        assert [(await run.post(headers=bearer(key)))[0] for _ in range(3)] == [200] * 3


@pytest.mark.parametrize(
    ("query", "field", "more", "status"),
    [
        ("", b'name="model"', b"", 200),
        ("?model=m", b'name="purpose"', b"", 200),
        ("", b'name= "model"', b"", 403),
        ("", b'name="model"', b'--B\r\nContent-Disposition: form-data; name= "model"\r\n\r\nother\r\n', 403),
        ("?model=other&model=m", b'name="purpose"', b"", 403),
        ("?model=m", b'name="model"; x=1', b"", 403),
    ],
)
async def test_an_unclear_model_is_none_that_a_restricted_key_may_use(
    tmp_path: Path, query: str, field: bytes, more: bytes, status: int
) -> None:
    body = b"--B\r\nContent-Disposition: form-data; %b\r\n\r\nm\r\n%b--B--\r\n" % (field, more)
    path, kind = f"/v1/audio/transcriptions{query}", {"Content-Type": "multipart/form-data; boundary=B"}
    async with FakeReplica([answers()], listing=models("m", "other")) as replica, keyed(tmp_path, replica) as run:
        (_, listed), (_, free) = await made(run, models=["m"]), await made(run)
        assert (await run.post(body, path, headers={**bearer(listed), **kind}))[0] == status
        assert (await run.post(body, path, headers={**bearer(free), **kind}))[0] in (200, 400)


@pytest.mark.parametrize(
    ("query", "kind", "body", "status"),
    [
        ("", "application/json", b'{"model":"m","input":"x"}', 200),
        ("?model=m", "audio/wav", b"RIFF" * 9, 200),
        ("?model=m", "application/json", json.dumps({"model": "other"}).encode("utf-16"), 403),
        ("?model=m", "application/json", b'{"model":"other","x":NaN}', 403),
        ("?model=m", "text/plain", b" " * 2000 + b'{"model":"other","x":"\\ud800"}', 403),
        ("?model=m", "application/json", b'{"input":"x"}', 403),
        ("", "application/x-www-form-urlencoded", b'{"model":"m","x":"&model=other&"}', 403),
    ],
    ids=["an object", "no object", "UTF-16", "NaN", "spaces", "no model", "a form"],
)
async def test_a_restricted_key_names_no_other_model_in_a_body_that_only_engines_read(
    tmp_path: Path, query: str, kind: str, body: bytes, status: int
) -> None:
    async with FakeReplica([answers()], listing=models("m", "other")) as replica, keyed(tmp_path, replica) as run:
        (_, listed), (_, free) = await made(run, models=["m"]), await made(run)
        path, kinds = f"/v1/embeddings{query}", {"Content-Type": kind}
        assert (await run.post(body, path, headers={**bearer(listed), **kinds}))[0] == status
        assert (await run.post(body, path, headers={**bearer(free), **kinds}))[0] == 200


async def test_a_model_without_a_price_is_not_for_a_budget(tmp_path: Path) -> None:
    listing = models("m", "free")
    async with FakeReplica([answers()], listing=listing) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        (_, poor), (_, rich) = await made(run, budget_usd_day=1.0), await made(run)
        statuses = [
            (await run.post({**BODY, "model": model}, headers=bearer(key)))[0]
            for key in (poor, rich)
            for model in ("m", "free")
        ]
        assert statuses == [200, 403, 200, 200]
        assert len(replica.requests) == 3


async def test_a_restart_does_not_forget_what_was_spent(tmp_path: Path) -> None:
    async with FakeReplica([answers(prompt=2000, cached=0)]) as replica:
        async with keyed(tmp_path, replica, prices=PRICES) as run:
            _, key = await made(run, budget_usd_month=0.001)
            assert [(await run.post(headers=bearer(key)))[0] for _ in range(2)] == [200, 429]
        async with keyed(tmp_path, replica, prices=PRICES) as run:
            assert (await run.post(headers=bearer(key)))[0] == 429


async def test_cached_tokens_do_not_count(tmp_path: Path) -> None:
    """A conversation whose prompt is larger than the limit goes on, for nearly all of it is cached."""
    long = {"model": "m", "messages": [{"role": "user", "content": "hello " * 4000}]}
    async with FakeReplica([answers(prompt=6000, cached=5990)]) as replica, keyed(tmp_path, replica) as run:
        _, key = await made(run, uncached_tokens_per_minute=7000)
        statuses = [(await run.post(long, headers=bearer(key)))[0] for _ in range(20)]
        assert statuses == [200] * 20
        other = {"model": "m", "messages": [{"role": "user", "content": "other " * 8000}]}
        status, _, answer = await run.post(other, headers=bearer(key))
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert len(replica.requests) == 20


async def test_what_others_have_sent_is_not_reserved_as_cached_where_the_engine_reports_nothing(tmp_path: Path) -> None:
    bodies = [{"model": "m", "messages": [{"role": "user", "content": f"{number} hello " * 2000}]} for number in range(6)]
    go, warm = asyncio.Event(), [answers(prompt=5000)] * len(bodies)
    async with FakeReplica([*warm, hangs(go)]) as replica, keyed(tmp_path, replica) as run:
        _, other = await made(run)
        id_, key = await made(run, tenant="else", uncached_tokens_per_minute=12_000)
        assert [(await run.post(body, headers=bearer(other)))[0] for body in bodies] == [200] * len(bodies)
        posts = [asyncio.create_task(run.post(body, headers=bearer(key))) for body in bodies]
        await eventually(lambda: len(replica.requests) + sum(post.done() for post in posts) == 2 * len(bodies))
        assert len(replica.requests) == len(bodies) + 2
        await cancelled(posts, run, id_)


async def test_keys_of_one_tenant_are_one_witness_of_a_restart(tmp_path: Path) -> None:
    """Whoever has two keys reports the same prompts as missing, which nobody else has found missing."""
    bodies = [{"model": "m", "messages": [{"role": "user", "content": f"{number} hello " * 400}]} for number in range(10)]
    async with FakeReplica([answers(prompt=1000, cached=900)]) as replica, keyed(tmp_path, replica) as run:
        keys = [(await made(run, tenant=tenant))[1] for tenant in ("one", "one", "two", "three")]
        for _ in range(2):
            for body in bodies:
                assert (await run.post(body, headers=bearer(keys[3])))[0] == 200
        replica.script = (answers(prompt=1000, cached=0),)
        for number, body in enumerate(bodies[:6]):
            await run.post(body, headers=bearer(keys[number % 2]))
        assert run.gateway.router.trie.evicted["purge"] == 0
        for number, body in enumerate(bodies[6:9]):
            await run.post(body, headers=bearer(keys[number % 2 * 2]))
        assert run.gateway.router.trie.evicted["purge"] > 0, "two tenants are believed"


async def test_a_prefix_is_cheaper_for_the_tenant_that_paid_for_it_where_the_engine_reports_nothing(
    tmp_path: Path, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    """With any of its keys; another tenant pays for all of it once more."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hello " * 1000}]}
    async with FakeReplica([answers(prompt=2000, completion=0)]) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        for tenant in ("acme", "else", "else"):
            _, key = await made(run, tenant=tenant)
            assert (await run.post(body, headers=bearer(key)))[0] == 200
        first, other, again = [line["cost_usd"] for line in request_lines() if "cost_usd" in line]
        assert first == other == 0.002
        assert again < first / 2


@pytest.mark.parametrize("settings", [{"models": ["m"]}, {"budget_usd_day": 1.0}, {"uncached_tokens_per_minute": 1000}])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/batch", "/v1//chat/completions", "/v1/x/y", "/v1/batches", "/v1/messages/batches"]
)
async def test_lists_and_limits_hold_at_paths_that_nobody_knows(tmp_path: Path, settings: dict[str, Any], path: str) -> None:
    """An engine may generate there, or because of it, for any model, and nothing would be counted."""
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        _, key = await made(run, **settings)
        status, _, answer = await run.post(BODY, path, headers=bearer(key))
        assert (status, f"may not use {path}" in answer["error"]["message"]) == (403, True)
        _, free = await made(run)
        assert (await run.post(BODY, path, headers=bearer(free)))[0] == 200
        assert len(replica.requests) == 1


@pytest.mark.parametrize("limit", ["budget_usd_day", "budget_usd_month", "uncached_tokens_per_minute"])
async def test_budgets_hold_at_endpoints_that_are_not_metered(tmp_path: Path, limit: str) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        _, key = await made(run, **{limit: 1000})
        status, _, answer = await run.post({"model": "m", "input": "x"}, "/v1/embeddings", headers=bearer(key))
        assert (status, answer["error"]["code"]) == (403, "endpoint_not_allowed")
        _, other = await made(run, models=["m"], requests_per_minute=10)
        assert (await run.post({"model": "m", "input": "x"}, "/v1/embeddings", headers=bearer(other)))[0] == 200


async def test_no_key_changes_what_a_replica_serves(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        _, key = await made(run)
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert (await run.post({"model": "m", "lora_name": "x"}, path, headers=bearer(key)))[0] == 403
        assert replica.requests == []


async def test_models_of_others_are_not_named(tmp_path: Path) -> None:
    async with FakeReplica([answers()], models("secret-7")) as replica, keyed(tmp_path, replica) as run:
        _, key = await made(run, models=["gpt-*"])
        status, _, answer = await run.post({**BODY, "model": "gpt-9"}, headers=bearer(key))
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "secret-7" not in json.dumps(answer)
        _, free = await made(run)
        assert "secret-7" in json.dumps((await run.post({**BODY, "model": "gpt-9"}, headers=bearer(free)))[2])


async def test_requests_that_are_refused_do_not_count(tmp_path: Path) -> None:
    """For what is left of a budget is reserved, or there is no replica."""
    async with FakeReplica([refuses(400), answers()]) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        _, key = await made(run, requests_per_minute=2, models=["m", "none"])
        for _ in range(4):
            assert (await run.post({**BODY, "model": "none"}, headers=bearer(key)))[0] == 404
        assert [(await run.post(headers=bearer(key)))[0] for _ in range(3)] == [400, 200, 429]


async def test_budgets_hold_for_what_replicas_run_in_the_background(tmp_path: Path) -> None:
    """Without a database of responses it is the replica's, and its usage comes in an answer that is not metered."""
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, prices=PRICES, state={"url": "off"}) as run:
        body = {"model": "m", "input": "x", "background": True}
        _, key = await made(run, budget_usd_day=1.0)
        status, _, answer = await run.post(body, "/v1/responses", headers=bearer(key))
        assert (status, answer["error"]["code"]) == (403, "endpoint_not_allowed")
        assert not replica.requests
        _, free = await made(run, models=["m"], requests_per_minute=10)
        await run.post(body, "/v1/responses", headers=bearer(free))
        assert len(replica.requests) == 1


@pytest.mark.parametrize("settings", [{"models": []}, {"pools": []}, {"expires_at": ""}])
async def test_a_bound_that_is_empty_is_a_mistake(tmp_path: Path, settings: dict[str, Any]) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        status, _, answer = await run.post({"tenant": "acme", **settings}, "/warmroute/keys")
        assert (status, answer["error"]["code"]) == (400, "invalid_request")
        assert next(iter(settings)) in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat/completions"])
async def test_requests_whose_clients_leave_count(tmp_path: Path, path: str) -> None:
    """Else a client could make replicas work without end, by leaving before each answer."""
    never = asyncio.Event()
    async with FakeReplica([hangs(never)]) as replica, keyed(tmp_path, replica) as run:
        _, key = await made(run, requests_per_minute=2)
        for number in (1, 2):
            post = asyncio.create_task(run.post({**BODY, "user": str(number)}, path, headers=bearer(key)))
            await eventually(lambda number=number: len(replica.requests) == number)
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)
            await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        assert (await run.post(path=path, headers=bearer(key)))[0] == 429
        assert len(replica.requests) == 2
        never.set()


async def test_requests_that_break_replicas_count(tmp_path: Path) -> None:
    async with FakeReplica([dies]) as replica, keyed(tmp_path, replica) as run:
        _, key = await made(run, requests_per_minute=2)
        statuses = [(await run.post(path="/v1/embeddings", headers=bearer(key)))[0] for _ in range(3)]
        assert statuses[2] == 429
        assert statuses[0] >= 500


async def test_what_is_not_known_of_a_rotation_is_refused(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica) as run:
        id_, key = await made(run)
        assert (await run.post({"grace": 0}, f"/warmroute/keys/{id_}/rotate"))[0] == 400
        assert (await run.post(headers=bearer(key)))[0] == 200


async def test_a_time_long_ago_is_not_never(tmp_path: Path) -> None:
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        _, key = await made(run, expires_at="1970-01-01")
        assert (await run.post(headers=bearer(key)))[0] == 401
        _, poor = await made(run, budget_usd_day=1e-14)
        assert (await run.post(headers=bearer(poor)))[0] == 200


async def test_what_the_gateway_answers_itself_counts(tmp_path: Path) -> None:
    """Stored objects: those that are there, and those that are not."""
    state = {"url": f"sqlite:///{tmp_path}/state.sqlite"}
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, state=state) as run:
        _, key = await made(run, requests_per_minute=3)
        paths = ["/v1/conversations", "/v1/conversations/conv_x", "/v1/conversations", "/v1/conversations"]
        statuses = [(await run.post({}, path, headers=bearer(key)))[0] for path in paths]
        assert statuses == [200, 404, 200, 429]
        assert (await run.post(headers=bearer(key)))[0] == 429


async def test_an_estimated_count_of_tokens_counts(tmp_path: Path) -> None:
    """From the second one on no replica is asked."""
    unknown = writes(http(404, b'{"detail":"Not Found"}'))
    async with FakeReplica([unknown]) as replica, keyed(tmp_path, replica) as run:
        _, key = await made(run, requests_per_minute=2)
        statuses = [(await run.post(BODY, "/v1/messages/count_tokens", headers=bearer(key)))[0] for _ in range(3)]
        assert (statuses, len(replica.requests)) == ([200, 200, 429], 1)


async def test_stored_objects_have_a_bound(tmp_path: Path) -> None:
    """The owner gets an error; an answer that cannot be stored says so."""
    state = {"url": f"sqlite:///{tmp_path}/state.sqlite", "max_mb": 1, "owner_mb": 0}
    items = [{"type": "message", "role": "user", "content": "x" * 200_000}]
    whole = writes(http(200, json.dumps(RESPONSE).encode()))
    async with FakeReplica([whole]) as replica, keyed(tmp_path, replica, state=state) as run:
        (_, one), (_, other) = await made(run), await made(run, tenant="other")
        created = [await run.post({"items": items}, "/v1/conversations", headers=bearer(one)) for _ in range(3)]
        assert [status for status, _, _ in created] == [200, 413, 413]
        assert created[1][2]["error"]["code"] == "too_many_stored"
        ask = {"model": "m", "input": "x" * 100_000}
        answered = [(await run.post(ask, "/v1/responses", headers=bearer(key)))[2] for key in (one, other)]
        assert [answer["store"] for answer in answered] == [False, True]


async def test_all_stored_objects_have_a_maximum(tmp_path: Path) -> None:
    """Whoever comes later is told that it is not the caller's share."""
    state = {"url": f"sqlite:///{tmp_path}/state.sqlite", "max_mb": 1, "owner_mb": 0}
    items = [{"type": "message", "role": "user", "content": "x" * 200_000}]
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, state=state) as run:
        created = list[tuple[int, str]]()
        for number in range(7):
            _, key = await made(run, tenant=f"t{number}")
            status, _, answer = await run.post({"items": items}, "/v1/conversations", headers=bearer(key))
            created.append((status, answer.get("error", {}).get("code", "")))
        assert created[0] == (200, "")
        assert created[-1] == (507, "storage_full")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/embeddings"),
        ("PUT", "/v1/rerank"),
        ("GET", "/pooling"),
        ("GET", "/v1/realtime"),
        ("POST", "/v1/files/%252e%252e%252fchat%252fcompletions"),
    ],
)
async def test_a_budget_holds_for_any_method_and_spelling(tmp_path: Path, method: str, path: str) -> None:
    """An engine may compute what its gateway does not count."""
    async with FakeReplica([answers()]) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        (_, poor), (_, free) = await made(run, budget_usd_day=1.0), await made(run)
        statuses = list[int]()
        for key in (poor, free):
            url = URL(run.url + path, encoded=True)
            async with run.session.request(method, url, json=BODY, headers=bearer(key)) as answer:
                statuses.append(answer.status)
        assert statuses == [403, 200]
        assert len(replica.requests) == 1


async def test_an_operator_credits_a_key(tmp_path: Path) -> None:
    long = {**BODY, "messages": [{"role": "user", "content": "word " * 40_000}]}
    async with FakeReplica([answers(prompt=100_000, cached=0)]) as replica, keyed(tmp_path, replica, prices=PRICES) as run:
        (id_, key), (free, _) = await made(run, budget_usd_day=0.05, budget_usd_month=0.05), await made(run)
        assert [(await run.post(long, headers=bearer(key)))[0] for _ in range(2)] == [200, 429]
        for _ in range(2):
            status, _, shown = await run.post({"usd": 0.05}, f"/warmroute/keys/{id_}/credit")
        assert (status, list(shown["credits_usd"].values())) == (200, [0.1])
        assert [(await run.post(long, headers=bearer(key)))[0] for _ in range(2)] == [200, 429]
        assert (await run.post({"usd": 1}, f"/warmroute/keys/{free}/credit"))[0] == 409, "it has no budget"
        assert (await run.post({"usd": -1}, f"/warmroute/keys/{id_}/credit"))[0] == 400
        assert (await run.post({"usd": 1}, "/warmroute/keys/aaaaaaaa/credit"))[0] == 404
