"""The server over real sockets, with the simulated engine behind it."""

import asyncio
from typing import Any

import aiohttp
import openai
import orjson
import pytest

from replica.sim import text as sim_text
from tests.replica.conftest import Replica

LONG = "Tell me about the prefix cache of a replica, at some length and with patience. " * 20


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": "sim", "messages": [{"role": "user", "content": content}], "max_tokens": 20} | fields


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    """The frames of a stream, each JSON or b'[DONE]'."""
    frames = (await response.read()).split(b"\n\n")
    assert frames.pop() == b""
    data = [frame.removeprefix(b"data: ") for frame in frames]
    assert data.pop() == b"[DONE]"
    return [orjson.loads(frame) for frame in data]


async def test_openais_client_chats(replica: Replica) -> None:
    async with openai.AsyncOpenAI(base_url=replica.url + "/v1", api_key="none", max_retries=0) as client:
        models = [model.id async for model in client.models.list()]
        named = await client.models.retrieve("sim")
        with pytest.raises(openai.NotFoundError, match="The model 'a/b' does not exist; this replica serves 'sim'"):
            await client.models.retrieve("a/b")
        messages: Any = [{"role": "user", "content": LONG}]
        whole = await client.chat.completions.create(model="sim", messages=messages, max_tokens=12)
        stream = await client.chat.completions.create(
            model="sim", messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = await client.completions.create(model="sim", prompt=[1, 2, 3], max_tokens=5)
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="nope", messages=messages)
    assert models == [named.id] == ["sim"]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert text.usage is not None
    assert (text.usage.prompt_tokens, text.usage.completion_tokens) == (3, 5)


async def test_the_second_time_the_prompt_is_cached_and_the_metrics_agree(replica: Replica) -> None:
    usages: list[Any] = []
    for content in (LONG, LONG, LONG + "And then?"):
        _, body, _ = await replica.post("/v1/chat/completions", chat(content))
        usages.append(body["usage"])
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0
    assert cached[1] == (usages[1]["prompt_tokens"] - 1) // 16 * 16
    assert 0 < cached[2] < usages[2]["prompt_tokens"]
    assert await replica.metric("prefix_cache_hits_total") == sum(cached)
    total = sum(usage["prompt_tokens"] for usage in usages)
    assert await replica.metric("prefix_cache_queries_total") == total
    assert await replica.metric("prompt_tokens_total") == total
    assert await replica.metric("generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    assert await replica.metric("time_to_first_token_seconds_count") == 3
    assert await replica.metric("e2e_request_latency_seconds_count") == 3


async def test_the_first_bytes_come_with_the_first_token_and_each_token_at_once(frozen: Replica) -> None:
    assert frozen.clock is not None
    body = {"prompt": [1] * 100, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    asking = asyncio.create_task(frozen.http.post(frozen.url + "/v1/completions", json=body))
    await frozen.engine.submitted.wait()
    assert not asking.done()
    frozen.clock.advance(0.1)
    async with await asking as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        for last in (False, False, True):
            chunk = orjson.loads((await response.content.readuntil(b"\n\n")).removeprefix(b"data: "))
            assert chunk["choices"][0]["text"]
            assert chunk["choices"][0]["finish_reason"] == ("length" if last else None)
            frozen.clock.advance(0.01)
        usage, end = (await response.content.read()).split(b"\n\n", 1)
    assert orjson.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] == 3
    assert end == b"data: [DONE]\n\n"


async def test_a_stream_without_usage_has_none(replica: Replica) -> None:
    async with replica.http.post(replica.url + "/v1/chat/completions", json=chat("Hi", stream=True)) as response:
        chunks = await events(response)
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] in {"stop", "length"}


async def test_a_stop_string_ends_the_answer_and_the_work(replica: Replica) -> None:
    _, body, _ = await replica.post("/v1/chat/completions", chat("Hi", max_tokens=16, ignore_eos=True))
    words: list[str] = body["choices"][0]["message"]["content"].split(" ")  # type: ignore[index]
    _, body, _ = await replica.post("/v1/chat/completions", chat("Hi", max_tokens=7000, ignore_eos=True, stop=" " + words[5]))
    choice = body["choices"][0]  # type: ignore[index]
    assert choice["finish_reason"] == "stop"
    assert " ".join(words).startswith(choice["message"]["content"])
    assert len(choice["message"]["content"].split(" ")) <= 5
    await replica.engine.cancelled.wait()
    assert replica.engine.load().running == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_goes_on_from_where_it_was_cut(replica: Replica, stream: bool) -> None:
    async def answer_to(path: str, body: dict[str, Any]) -> tuple[str, int]:
        if not stream:
            _, answer, _ = await replica.post(path, body)
            parts: list[Any] = [answer]
        else:
            asked = body | {"stream": True, "stream_options": {"include_usage": True}}
            async with replica.http.post(replica.url + path, json=asked) as response:
                parts = await events(response)
        choices = [choice for part in parts for choice in part["choices"]]
        texts = [
            choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            for choice in choices
        ]
        return "".join(texts), parts[-1]["usage"]["prompt_tokens"]

    begun = chat("Hi", max_tokens=12, ignore_eos=True)
    whole, size = await answer_to("/v1/chat/completions", begun)
    for at in range(1, 12):
        head = " ".join(whole.split(" ")[:at])
        message = {"role": "assistant", "content": head}
        rest = begun | {"messages": [*begun["messages"], message], "continue_final_message": True, "max_tokens": 12 - at}
        assert await answer_to("/v1/chat/completions", rest) == (whole.removeprefix(head), size + at)
    text = {"prompt": "Hi", "max_tokens": 8, "ignore_eos": True}
    whole, size = await answer_to("/v1/completions", text)
    head = " " + whole.split(" ")[1]
    rest = text | {"prompt": "Hi" + head, "max_tokens": 7}
    assert await answer_to("/v1/completions", rest) == (whole.removeprefix(head), size + 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("answered", [False, True])
async def test_a_client_that_leaves_cancels_the_sequence(frozen: Replica, stream: bool, answered: bool) -> None:
    assert frozen.clock is not None
    body = chat("Hi", stream=stream, ignore_eos=True)
    asking = asyncio.create_task(frozen.http.post(frozen.url + "/v1/chat/completions", json=body))
    await frozen.engine.submitted.wait()
    if answered:
        frozen.clock.advance(0.1)
    if stream and answered:
        (await asking).close()
    asking.cancel()
    await frozen.engine.cancelled.wait()
    frozen.engine.check()
    assert frozen.engine.load().running == 0
    assert await frozen.metric('request_success_total{engine="0",finished_reason="abort"') == 1


async def test_many_streams_at_once(replica: Replica) -> None:
    async def one(number: int) -> list[Any]:
        body = chat(f"{number} {LONG}", stream=True, ignore_eos=True, stream_options={"include_usage": True})
        async with replica.http.post(replica.url + "/v1/chat/completions", json=body) as response:
            return await events(response)

    answers = await asyncio.gather(*(one(number) for number in range(50)))
    assert {answer[-1]["usage"]["completion_tokens"] for answer in answers} == {20}
    replica.engine.check()
    assert replica.engine.load().running == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/chat/completions", chat("Hi", model="nope"), 404, "does not exist"),
        ("/v1/chat/completions", chat("Hi", max_tokens=0), 400, "at least 1"),
        ("/v1/chat/completions", chat("Hi", max_tokens=8000), 400, "ask for at most"),
        ("/v1/chat/completions", chat("x y " * 5000), 400, "Shorten it"),
        ("/v1/chat/completions", chat("Hi", messages=[{"role": "A B", "content": ""}]), 400, "chat template"),
        ("/v1/completions", {"prompt": [-1]}, 400, "token ids outside"),
        ("/v1/completions", {"prompt": [1 << 40]}, 400, "token ids outside"),
        ("/v1/completions", {"prompt": "x" * 200_000}, 413, "A body may have 100,000 bytes at most. Send a smaller body."),
        ("/v1/nothing", {}, 404, "Unknown path /v1/nothing"),
        ("/health", {}, 405, "use GET, HEAD"),
    ],
)
async def test_mistakes_are_answered_in_openais_shape(
    replica: Replica, path: str, body: Any, status: int, message: str
) -> None:
    got, answer, _ = await replica.post(path, body)
    error: Any = answer["error"]
    assert got == status
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert (await replica.post("/v1/chat/completions", chat("Hi")))[0] == 200


async def test_health_models_and_what_was_ignored(replica: Replica) -> None:
    async with replica.http.get(replica.url + "/health") as response:
        assert (response.status, await response.read()) == (200, b"")
    async with replica.http.get(replica.url + "/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert (model["id"], model["owned_by"], model["max_model_len"]) == ("sim", "warmroute", 8000)
    _, _, headers = await replica.post("/v1/chat/completions", chat("Hi", presence_penalty=1))
    assert headers["x-warmroute-ignored"] == "presence_penalty"


async def test_the_request_id_becomes_the_answers_id(replica: Replica) -> None:
    for asked, good in (("gw-0001", True), ("no such id", False)):
        headers = {"X-Request-Id": asked}
        async with replica.http.post(replica.url + "/v1/chat/completions", json=chat("Hi"), headers=headers) as response:
            assert ((await response.json())["id"] == f"chatcmpl-{asked}") == good


async def test_a_dead_engine_is_unhealthy_and_gives_the_reason(replica: Replica) -> None:
    replica.engine.broken = "out of memory"
    async with replica.http.get(replica.url + "/health") as response:
        assert response.status == 503
        assert "out of memory" in (await response.json())["error"]["message"]
    status, body, _ = await replica.post("/v1/chat/completions", chat("Hi"))
    error: Any = body["error"]
    assert (status, error["type"], error["code"]) == (503, "server_error", "engine_dead")


@pytest.mark.parametrize("begun", [False, True])
async def test_an_engine_that_gives_up_is_an_error_before_and_in_a_stream(frozen: Replica, begun: bool) -> None:
    assert frozen.clock is not None
    asking = asyncio.create_task(frozen.http.post(frozen.url + "/v1/chat/completions", json=chat("Hi", stream=True)))
    await frozen.engine.submitted.wait()
    if begun:
        frozen.clock.advance(0.1)
        await asking
    await frozen.engine.close()
    async with await asking as response:
        assert response.status == (200 if begun else 500)
        error = (await events(response))[-1] if begun else await response.json()
    assert "shutting down" in error["error"]["message"]
    assert await frozen.metric('request_success_total{engine="0",finished_reason="error"') == 1


async def test_reset_forgets_the_cache_of_an_idle_engine_only(frozen: Replica) -> None:
    assert frozen.clock is not None
    asking = asyncio.create_task(frozen.post("/v1/chat/completions", chat(LONG)))
    await frozen.engine.submitted.wait()
    assert (await frozen.post("/reset_prefix_cache", None))[:2] == (200, {"success": False})
    frozen.clock.advance(10)
    assert (await asking)[0] == 200
    prompt = sim_text.encode_chat(chat(LONG)["messages"], None)
    assert (await frozen.post("/reset_prefix_cache", None))[:2] == (200, {"success": True})
    frozen.engine.submitted.clear()
    asking = asyncio.create_task(frozen.post("/v1/completions", {"prompt": prompt}))
    await frozen.engine.submitted.wait()
    frozen.clock.advance(10)
    usage: Any = (await asking)[1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_tenants_do_not_share_and_a_wish_to_keep_is_honoured(replica: Replica) -> None:
    async def cached(**fields: Any) -> int:
        status, body, _ = await replica.post("/v1/chat/completions", chat(LONG, max_tokens=1, **fields))
        assert status == 200, body
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[index, no-any-return]

    assert [await cached(cache_salt=salt) for salt in ("a", "b", None)] == [0, 0, 0]
    assert await cached(cache_salt="a", cache_retention="5m") > 400
    for number in range(30):  # twice what fits
        await replica.post("/v1/completions", {"prompt": [number] * 600, "max_tokens": 1})
    assert await cached(cache_salt="b") == 0
    assert await cached(cache_salt="a") > 400
    hits = await replica.metric("prefix_cache_hits_total")
    async with replica.http.get(replica.url + "/metrics") as response:
        samples = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line.startswith("warmroute"))
    counts = {name.partition("{")[0]: float(value) for name, value in samples.items()}
    assert counts["warmroute_cache_hit_blocks_total"] * 16 == hits
    assert counts["warmroute_cache_missed_blocks_total"] > 30 * 36
    assert counts["warmroute_cache_evicted_blocks_total"] > 500
    assert counts["warmroute_cache_evicted_kept_blocks_total"] == 0
    assert sum(float(value) for name, value in samples.items() if "state=" in name) == 500


async def test_where_kv_events_come_from(replica: Replica) -> None:
    async with replica.http.get(replica.url + "/kv_event_sources") as response:
        assert await response.json() == {}


async def test_gauges_show_what_runs_now(frozen: Replica) -> None:
    assert frozen.clock is not None
    asking = asyncio.create_task(frozen.post("/v1/completions", {"prompt": [1] * 800, "max_tokens": 16}))
    await frozen.engine.submitted.wait()
    assert await frozen.metric("num_requests_running{") == 1
    assert await frozen.metric("kv_cache_usage_perc{") == pytest.approx(0.102)
    frozen.clock.advance(10)
    await asking
    assert await frozen.metric("num_requests_running{") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("good", [0, 3])
async def test_an_error_that_nobody_has_foreseen_has_the_apis_shape(
    frozen: Replica, stream: bool, good: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine cannot spell its tokens, from the first on or after some: this request fails, and the next one does not."""
    assert frozen.clock is not None
    body = {"prompt": [1] * 100, "max_tokens": 8, "ignore_eos": True, "stream": stream}
    asking = asyncio.create_task(frozen.http.post(frozen.url + "/v1/completions", json=body))
    await frozen.engine.submitted.wait()
    broken = ZeroDivisionError("no such token")
    if good == 0 or not stream:
        frozen.engine.spelling_error = broken
    frozen.clock.advance(0.1 + 0.01 * good)
    async with await asking as response:
        if stream and good:
            await response.content.readuntil(b"\n\n")
            frozen.engine.spelling_error = broken
            frozen.clock.advance(0.01)
            error = (await events(response))[-1]["error"]
        else:
            assert response.status == 500
            error = (await response.json())["error"]
    expected = "This replica failed on this request; see its log."
    assert error == {"message": expected, "type": "server_error", "param": None, "code": "internal_error"}
    assert "ZeroDivisionError: no such token" in caplog.text
    await frozen.engine.cancelled.wait()
    assert frozen.engine.load().running == 0
    frozen.engine.spelling_error = None
    asking = asyncio.create_task(frozen.http.post(frozen.url + "/v1/completions", json=body | {"stream": False}))
    frozen.engine.submitted.clear()
    await frozen.engine.submitted.wait()
    frozen.clock.advance(1.0)
    async with await asking as response:
        assert response.status == 200
