"""What one client sends, or its engine's answers to it, must not cost the others what is known of their prompts."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import struct
from typing import Any

import aiohttp
import pytest

from gateway.request.client import caller_of
from tests.gateway.conftest import Running, eventually, running
from tests.support.fakes import DONE, Behaviour, FakeReplica, FakeRequest, http, status, streams, usage, writes

MANY = 12


def body(name: str, words: int = 300) -> dict[str, Any]:
    text = " ".join(f"{name}{number}" for number in range(words))
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def held(run: Running, replica: FakeReplica) -> int:
    return run.gateway.router.trie.held()[replica.name]


async def warm(run: Running) -> None:
    for number in range(MANY):
        assert (await run.post(body(f"tenant{number}-"), headers={"X-Tenant-Id": "victim"}))[0] == 200


async def predicted(run: Running) -> list[int]:
    """Cached tokens, as predicted for the prompts of others."""
    prompts = [body(f"tenant{number}-") for number in range(MANY)]
    headers = [(await run.post(prompt, headers={"X-Tenant-Id": "victim"}))[1] for prompt in prompts]
    return [int(found["X-Warmroute-Cached-Tokens"]) for found in headers]


def reports(trick: str) -> Behaviour:
    """An engine that reads a prompt with this field in another way than the gateway: nothing of it is cached."""

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        tokens = len(request.body) // 4
        counts = usage(tokens, 1, 0 if trick in request.json else tokens * 9 // 10)
        writer.write(http(200, json.dumps({"id": "x", "choices": [], "usage": counts}).encode()))

    return behave


@pytest.mark.parametrize("refusal", [400, 413, 500, 429])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_the_engine_refuses_costs_nobody_his_credit(refusal: int, stream: bool) -> None:
    async with FakeReplica(script=[reports("trick")]) as replica:
        pool = {"replicas": [{"url": replica.url, "capacity_tokens": 20_000}]}
        async with running(pools=[pool]) as run:
            await warm(run)
            before, known = await predicted(run), held(run, replica)
            replica.script = (status(refusal),)
            replica.requests.clear()
            for number in range(3):
                attack = body(f"attack{number}-", 12_000) | {"stream": stream}
                assert (await run.post(attack))[0] != 200
            replica.script = (reports("trick"),)
            replica.requests.clear()
            assert held(run, replica) == known
            assert await predicted(run) == pytest.approx(before, abs=5)
            assert min(before) > 500
            assert run.gateway.router.trie.evicted["capacity"] == 0


async def post_from(run: Running, address: str, body: dict[str, Any], tenant: str) -> None:
    """A request from another address of this machine."""
    connector = aiohttp.TCPConnector(local_addr=(address, 0))
    path, headers = "/v1/chat/completions", {"X-Tenant-Id": tenant}
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(run.url + path, json=body, headers=headers) as answer,
    ):
        await answer.read()


async def test_one_clients_misses_neither_purge_a_replica_nor_trim_what_others_share_with_it() -> None:
    """Without keys a client is an address: it may call itself any number of tenants."""
    async with FakeReplica(script=[reports("trick")]) as replica:
        pool = {"replicas": [{"url": replica.url, "capacity_tokens": 1_000_000}]}
        async with running(pools=[pool]) as run:
            await warm(run)
            before, known = await predicted(run), held(run, replica)
            for number in range(6):
                shared = body(f"tenant{number}-")  # as a shared system prompt is
                await post_from(run, "127.0.0.2", shared | {"trick": True}, f"t{number}")
            assert held(run, replica) == known
            assert await predicted(run) == pytest.approx(before, abs=5)
            assert run.gateway.router.trie.evicted["purge"] == 0


async def test_misses_of_two_clients_are_a_restart() -> None:
    async with FakeReplica(script=[reports("trick")]) as replica:
        pool = {"replicas": [{"url": replica.url, "capacity_tokens": 1_000_000}]}
        async with running(pools=[pool]) as run:
            await warm(run)
            await predicted(run)
            for number in range(3):
                address = f"127.0.0.{2 + number % 2}"
                await post_from(run, address, body(f"tenant{number}-") | {"trick": True}, "t")
            assert run.gateway.router.trie.evicted["purge"] > 0


def counts_all(request: FakeRequest) -> dict[str, Any]:
    """The usage of a completion as engines report it: the prompt tokens of all prompts together, four bytes each."""
    prompts = request.json["prompt"]
    return usage(sum(len(prompt) // 4 for prompt in (prompts if isinstance(prompts, list) else [prompts])), 1, 0)


async def completes(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    """Answers a completion, plain or as a stream."""
    answer = {"id": "x", "choices": [{"index": 0, "text": "y"}], "usage": counts_all(request)}
    if request.json.get("stream"):
        writer.write(http(200, b"data: %b\n\n%b" % (json.dumps(answer).encode(), DONE), "text/event-stream"))
    else:
        writer.write(http(200, json.dumps(answer).encode()))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_batch_does_not_change_what_is_learned(stream: bool) -> None:
    """Its count of tokens is that of all its prompts, and so is its prefill; the router knows the first one."""
    path, honest = "/v1/completions", {"model": "m", "prompt": "a b c " * 500}
    batches = [{"prompt": [honest["prompt"]] * 3}, {"prompt": ["x" * 400, "y" * 2000], "n": 2}, {"n": 3}, {"best_of": 2}]
    async with FakeReplica(script=[completes]) as replica, running(replica) as run:
        for _ in range(10):
            assert (await run.post(honest, path=path))[0] == 200
        router = run.gateway.router
        scale, rate = router.units_per_token("m"), router.ledger.of(replica.name).rate.value
        assert scale == pytest.approx(4.0)
        for _ in range(10):
            for batch in batches:
                async with run.session.post(run.url + path, json={**honest, **batch, "stream": stream}) as answer:
                    assert answer.status == 200
                    await answer.read()
        assert router.units_per_token("m") == scale
        assert router.ledger.of(replica.name).rate.value == rate
        assert router.ledger.open_leases == 0
        router.check()


def number_of(address: str = "192.0.2.1", **headers: str) -> int:
    """What the router knows of who sends a request."""
    return caller_of({name.replace("_", "-"): value for name, value in headers.items()}).number(address)


def test_clients_differ_by_key_tenant_and_address() -> None:
    one = number_of()
    assert number_of() == one
    others = [
        number_of("192.0.2.2"),
        number_of(X_Tenant_Id="tenant"),
        number_of(Authorization="Bearer a"),
        number_of(Authorization="Bearer b"),
        number_of(X_Api_Key="b"),
        number_of(Authorization="Bearer a", X_Tenant_Id="tenant"),
    ]
    assert len({one, *others}) == 7
    assert number_of("192.0.2.2", Authorization="Bearer a") == others[2], "a key is the same from anywhere"


async def test_clients_at_different_addresses_differ_though_their_heads_are_the_same() -> None:
    """What is known of a head is kept for the next request with the same head, who sends it is not."""
    async with FakeReplica(script=[reports("trick")]) as replica:
        pool = {"replicas": [{"url": replica.url, "capacity_tokens": 1_000_000}]}
        async with running(pools=[pool]) as run:
            await warm(run)
            await predicted(run)
            misses = iter(range(MANY))

            async def miss(address: str) -> int:
                """A client reports a miss on a warm prefix. Returns the blocks that were forgotten by then."""
                connector = aiohttp.TCPConnector(local_addr=(address, 0))
                request = body(f"tenant{next(misses)}-") | {"trick": True}
                async with (
                    aiohttp.ClientSession(connector=connector) as session,
                    session.post(f"{run.url}/v1/chat/completions", json=request) as answer,
                ):
                    assert answer.status == 200
                return run.gateway.router.trie.evicted["purge"]

            assert [await miss("127.0.0.2") for _ in range(6)] == [0] * 6
            assert [await miss(address) for address in ("127.0.0.2", "127.0.0.2", "127.0.0.3")][-1] > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_beyond_the_context_nothing_is_credited_before_the_engine_has_answered(stream: bool) -> None:
    entry = {"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 4000}
    listing = writes(http(200, json.dumps({"object": "list", "data": [entry]}).encode()))
    here, refuse = asyncio.Event(), asyncio.Event()

    async def thinks(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        here.set()
        await refuse.wait()
        await status(400, "too long")(request, writer)

    async with FakeReplica(listing=listing, script=[reports("trick")]) as replica, running(replica) as run:
        await warm(run)
        known = held(run, replica)
        replica.script = (thinks,)
        replica.requests.clear()
        request = asyncio.create_task(run.post(body("long-", 12_000) | {"stream": stream}))
        await here.wait()
        scale = run.gateway.router.units_per_token("m")
        assert known < held(run, replica) <= known + 4000 * scale / run.gateway.config.routing.block_bytes
        refuse.set()
        assert (await request)[0] == 400
        assert held(run, replica) == known


async def test_a_long_sweep_lets_requests_go_first() -> None:
    async with FakeReplica() as replica, running(replica) as run:
        trie = run.gateway.router.trie
        for number in range(60_000):
            trie.insert(replica.name, number.to_bytes(8, "big"), run.gateway.clock())
        run.gateway.router.restarted(replica.name)
        assert trie.held_by(replica.name) == 0 < trie.size_bytes
        full = trie.size_bytes
        await eventually(lambda: trie.size_bytes < full)
        assert (await run.post())[0] == 200
        assert trie.size_bytes > full // 10, "the sweep is not at its end"
        await eventually(lambda: trie.size_bytes < 10_000)
        run.gateway.router.check()


# -- prompts that nothing has computed


def counts_texts(request: FakeRequest) -> int:
    """The tokens of what a template prints: the texts."""
    return sum(len(message["content"]) for message in request.json["messages"]) // 4


async def prints_texts(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    """An engine whose template prints the texts of the messages, or that cuts a prompt without saying so."""
    tokens = 84 if "cut" in request.json else counts_texts(request)
    choice = {"index": 0, "message": {"role": "assistant", "content": "y"}, "finish_reason": "stop"}
    writer.write(http(200, json.dumps({"id": "x", "choices": [choice], "usage": usage(tokens, 1, 0)}).encode()))


JUNK = " ".join(f"junk{number}" for number in range(12_000))
MESSAGE = {"role": "user", "content": "x" * 400}
UNCOMPUTED: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/detokenize", {"prompt": JUNK}),
    ("GET", "/version", {"prompt": JUNK}),
    ("POST", "/v1/anything", {"messages": [{"role": "user", "content": JUNK}]}),
    ("POST", "/v1/embeddings", {"input": JUNK}),
    ("POST", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": JUNK}]}),
    ("POST", "/v1/chat/completions", {"messages": [MESSAGE], "documents": [{"text": JUNK}]}),
    ("POST", "/v1/chat/completions", {"messages": [{**MESSAGE, "anything": JUNK}]}),
    ("POST", "/v1/chat/completions", {"messages": [{**MESSAGE, "reasoning_content": JUNK}]}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": JUNK}], "cut": 1}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": JUNK}], "nothing": 1}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": JUNK}], "unreported": 1}),
]


async def answers_all(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
    known = request.json or {}
    if request.path != "/v1/chat/completions" or "nothing" in known:
        writer.write(http(200, b'{"object": "ok"}'))
    elif "unreported" in known:
        writer.write(http(200, b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "y"}}]}'))
    else:
        await prints_texts(request, writer)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(("method", "path", "sent"), UNCOMPUTED)
async def test_a_prompt_that_nothing_has_computed_displaces_nothing(
    method: str, path: str, sent: dict[str, Any], zipped: bool
) -> None:
    async with FakeReplica(script=[answers_all]) as replica:
        pool = {"replicas": [{"url": replica.url, "capacity_tokens": 20_000}]}
        async with running(pools=[pool]) as run:
            await warm(run)
            before = await predicted(run)
            for number in range(8):
                attack = json.dumps({"model": "m", **json.loads(json.dumps(sent).replace("junk", f"{number}"))}).encode()
                headers = {"Content-Type": "application/json"} | ({"Content-Encoding": "gzip"} if zipped else {})
                data = gzip.compress(attack) if zipped else attack
                async with run.session.request(method, run.url + path, data=data, headers=headers) as answer:
                    assert answer.status in (200, 404, 405)
                    await answer.read()
            assert run.gateway.router.trie.evicted["capacity"] == 0
            assert await predicted(run) == pytest.approx(before, abs=5)
            assert min(before) > 500
            run.gateway.router.check()


@pytest.mark.parametrize("image", [False, True])
async def test_the_time_of_a_prompt_with_an_image_says_nothing_about_prefill(image: bool) -> None:
    parts: list[dict[str, Any]] = [{"type": "text", "text": body("a", 3000)["messages"][0]["content"]}]
    if image:
        parts.append({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}})
    request = {"model": "m", "stream": True, "messages": [{"role": "user", "content": parts}]}
    async with FakeReplica([streams("hello", prompt=6000, cached=0)]) as replica, running(replica) as run:
        rate = f'warmroute_replica_prefill_tokens_per_second{{replica="{replica.name}"}}'
        before = (await run.metrics())[rate]
        async with run.session.post(f"{run.url}/v1/chat/completions", json=request) as answer:
            assert b"hello" in await answer.read()
        assert ((await run.metrics())[rate] == before) is image


async def test_a_prompt_with_images_that_its_engine_makes_smaller_is_known_as_a_whole() -> None:
    """By its pixels an image has 4,096 tokens; there are engines for which it has 256."""
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 4000, 4000) + bytes(16)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(head).decode()}}
    request = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "who is it?"}, image]}]}
    answer = {"id": "x", "choices": [{"index": 0, "message": {"content": "y"}}], "usage": usage(270, 1, 0)}
    async with FakeReplica([writes(http(200, json.dumps(answer).encode()))]) as replica, running(replica) as run:
        await run.post(request)
        assert int((await run.post(request))[1]["X-Warmroute-Cached-Tokens"]) > 4000
