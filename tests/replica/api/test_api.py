"""What a request may ask for, over real sockets: tokens, limits, endings, several answers, small packets."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from replica.api.server import ServerConfig
from replica.sim import text as sim_text
from replica.sim.cost import SimConfig
from tests.replica.api.test_server import chat, events
from tests.replica.conftest import Replica, serve
from tests.replica.fakes import WatchedEngine

CHAT = "/v1/chat/completions"
TURNS: list[dict[str, str]] = [
    {"role": role, "content": f"{word} " * 300} for word in ("one", "two", "three") for role in ("user", "assistant")
]
# Fields of vLLM's chats and completions: an answer that ignored them would be wrong.
CONSTRAINTS: dict[str, Any] = {
    "bad_words": ["a"],
    "allowed_token_ids": [1],
    "guided_json": {"type": "object"},
    "guided_choice": ["a"],
    "guided_regex": "a",
    "guided_grammar": 'start: "a"',
    "structured_outputs": {"regex": "a"},
    "response_format": {"type": "json_object"},
}


async def get(replica: Replica, path: str) -> Any:
    async with replica.http.get(replica.url + path) as response:
        assert response.status == 200
        return await response.json()


async def test_tokens_there_and_back(replica: Replica) -> None:
    status, body, _ = await replica.post("/tokenize", {"prompt": "warm cold"})
    assert status == 200
    assert body == {"count": 2, "max_model_len": 8000, "tokens": sim_text.encode("warm cold"), "token_strs": None}
    assert (await replica.post("/tokenize", {"prompt": "warm cold", "messages": None}))[1] == body
    messages = chat("Hi")["messages"]
    _, body, _ = await replica.post("/tokenize", {"messages": messages, "model": "sim", "return_token_strs": True})
    assert body["tokens"] == sim_text.encode_chat(messages, None)
    assert len(body["token_strs"]) == body["count"]  # type: ignore[arg-type]
    _, answer, _ = await replica.post(CHAT, {"messages": messages})
    assert answer["usage"]["prompt_tokens"] == body["count"]  # type: ignore[index]
    _, body, _ = await replica.post("/detokenize", {"tokens": sim_text.encode("warm path")[:1]})
    assert body == {"prompt": "warm"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "Send messages"),
        ("/tokenize", {"prompt": [1]}, "Send messages"),
        ("/tokenize", {"prompt": "a", "model": "x"}, "does not exist"),
        ("/detokenize", {}, "tokens must be a list"),
        ("/detokenize", {"tokens": ["a"]}, "tokens must be a list"),
        ("/detokenize", {"tokens": [1 << 40]}, "outside 0 to"),
        (CHAT, chat("Hi", logprobs=True), "no token scores"),
        (CHAT, chat("Hi", bad_words=["a"]), "no token scores: leave out bad_words"),
        (CHAT, chat("Hi", allowed_token_ids=[1]), "no token scores: leave out allowed_token_ids"),
        (CHAT, chat("Hi", guided_grammar='start: "a"'), "no token scores to constrain"),
        (CHAT, chat("Hi", structured_outputs={"grammar": 'start: "a"'}), "no token scores to constrain"),
        *(
            (
                path,
                {"messages": chat("Hi")["messages"], "input": "Hi", "max_tokens": 1, field: value},
                f"{field} is not a field",
            )
            for path in ("/v1/messages", "/v1/responses")
            for field, value in CONSTRAINTS.items()
        ),
        (CHAT, chat("Hi", stop_token_ids=[-1]), "stop_token_ids has token ids outside"),
        (CHAT, chat("Hi", logit_bias={str(1 << 33): 1}), "logit_bias has token ids outside"),
        (CHAT, chat("Hi", chat_template="{{ 1 }}"), "--trust-request-chat-template"),
        ("/tokenize", {"messages": chat("Hi")["messages"], "chat_template": "x"}, "--trust-request-chat-template"),
        (CHAT, chat("Hi", chat_template_kwargs={"a": 1}), "no template to change"),
    ],
)
async def test_what_is_wrong_or_cannot_be_is_an_error(replica: Replica, path: str, body: Any, message: str) -> None:
    status, answer, _ = await replica.post(path, body)
    assert status in (400, 404)
    assert message in answer["error"]["message"]  # type: ignore[index]


async def test_load_counts_the_requests_inside(frozen: Replica) -> None:
    assert frozen.clock is not None
    assert await get(frozen, "/load") == {"server_load": 0}
    asking = asyncio.create_task(frozen.post(CHAT, chat("Hi")))
    await frozen.engine.submitted.wait()
    assert await get(frozen, "/load") == {"server_load": 1}
    frozen.clock.advance(10)
    await asking
    assert await get(frozen, "/load") == {"server_load": 0}


async def test_a_stop_token_ends_the_answer_and_is_named(replica: Replica) -> None:
    async with openai.AsyncOpenAI(base_url=replica.url + "/v1", api_key="none", max_retries=0) as client:

        async def ask(**extra: Any) -> Any:
            return await client.completions.create(
                model="sim", prompt=[1, 2, 3], max_tokens=30, extra_body={"ignore_eos": True} | extra
            )

        whole = (await ask()).choices[0]
        assert (whole.finish_reason, whole.stop_reason) == ("length", None)
        tokens = sim_text.answer([1, 2, 3], 30, endless=True)[0]
        ended = await ask(stop_token_ids=[tokens[7]])
        at = tokens.index(tokens[7])
        assert ended.choices[0].text == sim_text.decode(tokens[:at])
        assert (ended.choices[0].finish_reason, ended.choices[0].stop_reason) == ("stop", tokens[7])
        assert ended.usage.completion_tokens == at + 1
        word = sim_text.decode(tokens[5:7])
        ended = (await ask(stop=[word])).choices[0]
        assert (ended.text, ended.finish_reason, ended.stop_reason) == (whole.text.partition(word)[0], "stop", word)


async def test_n_answers_have_seeds_of_their_own_and_one_prompt(replica: Replica) -> None:
    messages: Any = chat("Hi " * 100)["messages"]
    asked: Any = {"model": "sim", "messages": messages, "max_tokens": 8, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
    async with openai.AsyncOpenAI(base_url=replica.url + "/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(n=3, seed=5, **asked)
        texts = [choice.message.content for choice in whole.choices]
        single = [(await client.chat.completions.create(seed=5 + at, **asked)).choices[0].message.content for at in range(3)]
        streamed = ["", "", ""]
        stream = await client.chat.completions.create(n=3, seed=5, stream=True, stream_options={"include_usage": True}, **asked)
        chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert len(set(texts)) == 3
    assert texts == single == streamed
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(sim_text.encode_chat(messages, None)), 24)
    finished = [choice for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(choice.index for choice in finished) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_all_n(frozen: Replica, stream: bool) -> None:
    assert frozen.clock is not None
    body = chat("Hi", n=4, temperature=1.0, stream=stream, ignore_eos=True, max_tokens=500)
    asking = asyncio.create_task(frozen.http.post(frozen.url + CHAT, json=body))
    await frozen.engine.submissions.acquire()
    frozen.clock.advance(0.1)  # the first token: the others begin
    for _ in range(3):
        await frozen.engine.submissions.acquire()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    if stream:
        await frozen.http.close()
    await frozen.engine.cancelled.wait()
    assert (frozen.engine.load().running, frozen.engine.load().waiting) == (0, 0)
    frozen.engine.check()


@pytest.mark.parametrize("stream", [False, True])
async def test_truncation_drops_the_oldest_turns_and_reports_it(replica: Replica, stream: bool) -> None:
    system, last = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "And now?"}
    messages = [system, *TURNS, last]
    limit = 8000 - len(sim_text.encode_chat([system, *TURNS[4:], last], None))
    body = {"messages": messages, "max_tokens": limit}
    status, answer, _ = await replica.post(CHAT, body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")  # type: ignore[index]
    body |= {"truncation": "auto", "stream": stream, "stop": [" "]}
    async with replica.http.post(replica.url + CHAT, json=body) as response:
        assert response.status == 200
        assert response.headers["x-warmroute-dropped-messages"] == "4"
        first = (await events(response))[0] if stream else await response.json()
    assert first["truncation"] == {"dropped_messages": 4}
    _, answer, headers = await replica.post(CHAT, chat("Hi", truncation="auto"))
    assert "truncation" not in answer
    assert "x-warmroute-dropped-messages" not in headers
    status, answer, _ = await replica.post(CHAT, chat("x y " * 5000, truncation="auto"))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")  # type: ignore[index]


async def test_the_queue_is_bounded_and_a_refusal_has_a_time_to_come_again() -> None:
    engine = WatchedEngine(SimConfig(kv_tokens=8000, prefill_rate=1e5, decode_rate=2000.0, max_batch=2))
    async for replica in serve(engine, None, ServerConfig(max_queue=3)):
        answers = await asyncio.gather(*(replica.post(CHAT, chat("Hi", ignore_eos=True)) for _ in range(60)))
        full = [(body, headers) for status, body, headers in answers if status == 503]
        assert len(full) + sum(status == 200 for status, _, _ in answers) == 60
        assert len(full) > 30
        for body, headers in full:
            assert body["error"]["code"] == "queue_full"  # type: ignore[index]
            assert 1 <= int(headers["Retry-After"]) <= 60
        assert engine.load().waiting == 0
        assert (await replica.post(CHAT, chat("Hi")))[0] == 200


async def test_the_queue_is_bounded_for_bodies_that_come_together() -> None:
    """All of them have been let in when the first of their bodies comes."""
    engine = WatchedEngine(SimConfig(kv_tokens=8000, prefill_rate=1e5, decode_rate=100.0, max_batch=1))
    here, go = asyncio.Semaphore(0), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        here.release()
        await go.wait()
        yield b'{"prompt": "Hi", "max_tokens": 20, "ignore_eos": true}'

    async def one(replica: Replica) -> int:
        async with replica.http.post(replica.url + "/v1/completions", data=body(), expect100=True) as response:
            return response.status

    async for replica in serve(engine, None, ServerConfig(max_queue=2)):
        asking = [asyncio.create_task(one(replica)) for _ in range(12)]
        for _ in asking:
            await here.acquire()
        go.set()
        statuses = await asyncio.gather(*asking)
        # One runs or is in prefill, one may have followed it, two wait.
        assert 2 <= statuses.count(200) <= 4
        assert statuses.count(503) == 12 - statuses.count(200)


async def test_stats_show_what_was_done_and_where_the_time_went(replica: Replica) -> None:
    for _ in range(2):
        await replica.post(CHAT, chat("Hi " * 200, max_tokens=10, ignore_eos=True))
    stats = await get(replica, "/stats")
    while not stats["per_second"]["cached_tokens"]["now"]:  # a second counts when it is over
        stats = await get(replica, "/stats")
    assert (stats["batch"], stats["queue"], stats["max_queue"]) == (0, 0, 1024)
    assert stats["cache"]["blocks"]["total"] == 500
    for kind in ("prefill_tokens", "cached_tokens", "decode_tokens", "answers"):
        assert stats["per_second"][kind]["minute"] > 0
    assert set(stats["phases_last_minute"]) == {"tokenise", "queue", "prefill", "decode", "detokenise", "send"}


async def test_coalescing_sends_the_first_token_at_once_and_then_fewer_packets() -> None:
    counts = {}
    for coalesce_s in (0.0, 0.1):
        engine = WatchedEngine(SimConfig(kv_tokens=8000, prefill_rate=1e6, decode_rate=200.0))
        async for replica in serve(engine, None, ServerConfig(coalesce_s=coalesce_s)):
            body = {"prompt": "Hi", "max_tokens": 200, "ignore_eos": True, "stream": True}
            async with replica.http.post(replica.url + "/v1/completions", json=body) as response:
                chunks = await events(response)
        texts = [chunk["choices"][0]["text"] for chunk in chunks]
        counts[coalesce_s] = ("".join(texts), len(texts), texts[0])
    (plain, many, first), (merged, few, first_merged) = counts.values()
    assert plain == merged
    assert first_merged == first
    assert 2 * few < many


async def test_an_answer_that_is_no_stream_is_not_held_back() -> None:
    async for replica in serve(WatchedEngine(SimConfig(decode_rate=200.0)), None, ServerConfig(coalesce_s=30.0)):
        async with asyncio.timeout(10):
            status, *_ = await replica.post("/v1/completions", {"prompt": "Hi", "max_tokens": 5, "ignore_eos": True})
        assert status == 200


async def test_unknown_fields_are_named_not_refused(replica: Replica) -> None:
    _, _, headers = await replica.post(CHAT, chat("Hi", made_up=1, top_k=5, seed=3))
    assert headers["x-warmroute-ignored"] == "made_up,top_k"
