"""Messages and Responses through a whole gateway: routed, metered, and their errors as their clients understand them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from gateway.fleet.breaker import CLOSED
from gateway.fleet.state import LACKED_S
from tests.gateway.conftest import Running, eventually, running
from tests.gateway.dialects.anthropic.test_billing import CLAUDE, LINE
from tests.gateway.dialects.events.test_named import named
from tests.support.fakes import STREAM_HEAD, Behaviour, FakeReplica, FakeRequest, chunk, dies, http, models, status, writes

MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
LONG = "You help with code. " * 200
ASKED: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


def message(**usage: int) -> Behaviour:
    counts = {"input_tokens": 11, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 89, "output_tokens": 4, **usage}
    body = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [{"type": "text", "text": "hello"}]}
    body |= {"stop_reason": "end_turn", "stop_sequence": None, "usage": counts}
    return writes(http(200, json.dumps(body).encode(), "application/json", "Request-Id: req_of_the_engine"))


def response(**more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 89, "cache_write_tokens": 0}, "output_tokens": 4}
    usage |= {"output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 104}
    content = [{"type": "output_text", "text": "hello", "annotations": []}]
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
    body = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "completed", "output": [item]}
    return {**body, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "usage": usage, **more}


def events(*parts: bytes, then: asyncio.Event | None = None, end: bytes = b"0\r\n\r\n") -> Behaviour:
    async def behave(_request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for part in parts:
            writer.write(chunk(part))
            await writer.drain()
        if then:
            await then.wait()
        writer.write(end)
        if not end:
            await writer.drain()
            writer.close()

    return behave


BEGUN = named(
    "message_start",
    message={
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 100, "output_tokens": 0},
    },
)
SAYS = named("content_block_start", index=0, content_block={"type": "text", "text": ""}) + named(
    "content_block_delta", index=0, delta={"type": "text_delta", "text": "hello"}
)
ENDS = (
    named("content_block_stop", index=0)
    + named(
        "message_delta",
        delta={"stop_reason": "end_turn", "stop_sequence": None},
        usage={"input_tokens": 11, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 89, "output_tokens": 4},
    )
    + named("message_stop")
)
CREATED = named("response.created", response=response(output=[], usage=None, status="in_progress"), sequence_number=0)
ITEM = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
PART = {"type": "output_text", "text": "", "annotations": []}
DELTA = (
    named("response.output_item.added", item=ITEM, output_index=0, sequence_number=1)
    + named("response.content_part.added", part=PART, item_id="msg_1", output_index=0, content_index=0, sequence_number=2)
    + named(
        "response.output_text.delta",
        delta="hello",
        item_id="msg_1",
        output_index=0,
        content_index=0,
        logprobs=[],
        sequence_number=3,
    )
)
COMPLETED = named("response.completed", response=response(), sequence_number=4)


def counted(metrics: dict[str, float], name: str) -> float:
    return sum(value for key, value in metrics.items() if key.startswith(f"warmroute_{name}{{"))


async def metered(run: Running) -> tuple[float, float, float]:
    """Prompt tokens that missed and that hit, and generated ones."""
    await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
    metrics = await run.metrics()

    def of(cache: str) -> float:
        name = "warmroute_prompt_tokens_total{"
        return sum(value for key, value in metrics.items() if key.startswith(name) and f'cache="{cache}"' in key)

    assert counted(metrics, "unmetered_requests_total") == 0
    return of("miss"), of("hit"), counted(metrics, "completion_tokens_total")


@pytest.mark.parametrize(
    ("path", "body", "behaviour"),
    [
        (MESSAGES, ASKED, message()),
        (MESSAGES, {**ASKED, "stream": True}, events(BEGUN + SAYS, ENDS)),
        (RESPONSES, {"model": "m", "input": "hi"}, writes(http(200, json.dumps(response()).encode()))),
        (RESPONSES, {"model": "m", "input": "hi", "stream": True}, events(CREATED, DELTA, COMPLETED)),
    ],
)
async def test_answers_are_metered(path: str, body: dict[str, Any], behaviour: Behaviour) -> None:
    async with FakeReplica([behaviour]) as replica, running(replica) as run:
        async with run.session.post(run.url + path, json=body) as answer:
            assert answer.status == 200
            await answer.read()
        assert await metered(run) == (11, 89, 4)


# -- one conversation, one replica


def conversation(turn: int, number: int) -> list[dict[str, Any]]:
    said = [{"type": "text", "text": f"reminder {number}"}, {"type": "text", "text": f"question {number}"}]
    found: list[dict[str, Any]] = [{"role": "user", "content": said}]
    for at in range(turn):
        use = {"type": "tool_use", "id": f"toolu_{number}_{at}", "name": "read", "input": {"path": f"file {at}"}}
        found.append({"role": "assistant", "content": [{"type": "text", "text": f"reading {at}"}, use]})
        result = {"type": "tool_result", "tool_use_id": f"toolu_{number}_{at}", "content": f"content {number} {at} " * 100}
        found.append({"role": "user", "content": [{**result, "cache_control": {"type": "ephemeral"}}]})
        if at < turn - 1:
            del found[-1]["content"][0]["cache_control"]
    return found


def claude_code(turn: int, number: int) -> dict[str, Any]:
    nonce = {
        "type": "text",
        "text": f"x-anthropic-billing-header: cc_version=2.1.177.{uuid.uuid4().hex[:3]}; cch={uuid.uuid4().hex[:5]};",
    }
    return {
        "model": "m",
        "messages": conversation(turn, number),
        "system": [nonce, {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "read", "description": "reads " * 50, "input_schema": {"type": "object"}}],
        "max_tokens": 32000,
    }


def codex(turn: int, number: int) -> dict[str, Any]:
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": f"q {number}"}]}
    ]
    for at in range(turn):
        call = {"type": "function_call", "call_id": f"call_{at}", "name": "shell", "arguments": f'{{"cmd": "cat {at}"}}'}
        output = {"type": "function_call_output", "call_id": f"call_{at}", "output": f"content {number} {at} " * 100}
        items += [{"type": "reasoning", "id": f"rs_{at}", "summary": [], "encrypted_content": uuid.uuid4().hex}, call, output]
    tool = {"type": "function", "name": "shell", "description": "runs " * 50, "strict": False, "parameters": {"type": "object"}}
    metadata = {uuid.uuid4().hex: 1}
    return {"model": "m", "instructions": LONG, "input": items, "tools": [tool], "store": False, "client_metadata": metadata}


@pytest.mark.parametrize(
    ("path", "body_of", "behaviour"),
    [
        (MESSAGES, claude_code, message(input_tokens=4000)),
        (RESPONSES, codex, writes(http(200, json.dumps(response(usage=None)).encode()))),
    ],
)
async def test_agents_stay_where_their_conversation_is(path: str, body_of: Any, behaviour: Behaviour) -> None:
    fleet = [FakeReplica([behaviour]) for _ in range(4)]
    async with fleet[0], fleet[1], fleet[2], fleet[3], running(*fleet) as run:
        places: dict[int, set[str]] = {}
        for turn in range(6):
            for number in range(8):
                async with run.session.post(run.url + path, json=body_of(turn, number)) as answer:
                    assert answer.status == 200
                    places.setdefault(number, set()).add(answer.headers["X-Warmroute-Replica"])
                    predicted = int(answer.headers["X-Warmroute-Cached-Tokens"])
                    assert turn == 0 or predicted > 0
    assert {len(seen) for seen in places.values()} == {1}


async def test_a_conversation_goes_on_in_another_dialect() -> None:
    question = {"role": "user", "content": "What is in a.txt?" * 50}
    spoken = [question, {"role": "assistant", "content": "A list. " * 50}, {"role": "user", "content": "And in b.txt? " * 50}]
    done = [*spoken, {"role": "assistant", "content": "Nothing. " * 50}, {"role": "user", "content": "Thanks."}]
    counts = {"prompt_tokens": 1500, "completion_tokens": 4, "input_tokens": 1500, "output_tokens": 4}
    fleet = [FakeReplica([writes(http(200, json.dumps({"id": "x", "usage": counts}).encode()))]) for _ in range(4)]
    async with fleet[0], fleet[1], fleet[2], fleet[3], running(*fleet) as run:
        steps = [
            (CHAT, {"model": "m", "messages": [{"role": "system", "content": LONG}, question]}),
            (MESSAGES, {"model": "m", "max_tokens": 9, "system": LONG, "messages": spoken}),
            (RESPONSES, {"model": "m", "instructions": LONG, "input": done}),
        ]
        cached = list[int]()
        for path, body in steps:
            async with run.session.post(run.url + path, json=body) as answer:
                cached.append(int(answer.headers["X-Warmroute-Cached-Tokens"]))
    assert sorted(len(replica.requests) for replica in fleet) == [0, 0, 0, 3]
    assert cached[0] == 0
    assert 1000 < cached[1] < cached[2]


# -- the billing line


async def test_the_billing_line_does_not_go_to_replicas() -> None:
    async with FakeReplica([message()]) as replica, running(replica) as run:
        raw = json.dumps({**CLAUDE, "model": "m"}).encode()
        for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
            async with run.session.post(run.url + path, data=raw) as answer:
                assert answer.status == 200
    block = json.dumps(CLAUDE["system"][0]).encode() + b", "  # type: ignore[index]
    assert [request.body for request in replica.requests] == [raw.replace(block, b"")] * 2


async def test_a_pool_may_want_the_billing_line() -> None:
    raw = json.dumps({**CLAUDE, "model": "m"}).encode()
    async with FakeReplica([message()]) as replica:
        pool = {"replicas": [replica.url], "strip_billing_header": False}
        async with running(pools=[pool]) as run, run.session.post(run.url + MESSAGES, data=raw) as answer:
            assert answer.status == 200
    assert replica.requests[0].body == raw
    assert LINE.encode() in raw


# -- errors


async def test_errors_have_the_shape_of_their_dialect() -> None:
    async with FakeReplica([message()]) as replica, running(replica) as run:
        code, headers, error = await run.post({"model": "m", "messages": "hi"}, MESSAGES)
        assert (code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
        assert error["request_id"] == headers["request-id"] == headers["x-request-id"]
        code, headers, error = await run.post({**ASKED, "model": "unknown"}, MESSAGES)
        assert (code, error["error"]["type"]) == (404, "not_found_error")
        code, headers, error = await run.post({"model": "m", "input": 5}, RESPONSES)
        assert (code, error["error"]["param"]) == (400, "input")
        code, headers, _ = await run.post(ASKED, MESSAGES)
        assert code == 200
        assert headers.getall("request-id") == [headers["x-request-id"]], "of the gateway, whose log has it"


async def test_a_replica_that_dies_before_its_first_token_is_not_seen() -> None:
    """`message_start` and `response.created` are no tokens: what sends no more has answered nothing."""
    for path, body, first, rest in (
        (MESSAGES, {**ASKED, "stream": True}, BEGUN, SAYS + ENDS),
        (RESPONSES, {"model": "m", "input": "hi", "stream": True}, CREATED, DELTA + COMPLETED),
    ):
        bad, good = FakeReplica([events(first, end=b"")]), FakeReplica([events(first + rest)])
        async with bad, good, running(bad, good, routing={"policy": "round_robin"}) as run:
            for _ in range(4):
                async with run.session.post(run.url + path, json=body) as answer:
                    assert await answer.read() == first + rest
        assert bad.requests


async def test_a_replica_that_dies_in_mid_stream_raises_in_the_official_clients() -> None:
    fleet = FakeReplica([events(BEGUN + SAYS, end=b""), events(CREATED + DELTA, end=b"")])
    async with fleet, running(fleet) as run:
        async with anthropic.AsyncAnthropic(base_url=run.url, api_key="k", max_retries=0) as client:
            with pytest.raises(anthropic.APIStatusError, match="failed while it answered"):
                async with client.messages.stream(**ASKED) as stream:
                    await stream.get_final_message()
        with pytest.raises(openai.APIError, match="failed while it answered"):
            async with run.client.responses.stream(model="m", input="hi") as events_:
                await events_.get_final_response()


@pytest.mark.parametrize("kind", ["response.completed", "response.incomplete"])
async def test_a_last_event_without_its_response_is_no_end(kind: str) -> None:
    async with FakeReplica([events(CREATED, DELTA, named(kind, response=None))]) as replica, running(replica) as run:
        with pytest.raises(openai.APIError, match="failed while it answered"):
            async with run.client.responses.stream(model="m", input="hi") as events_:
                await events_.get_final_response()
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        assert counted(await run.metrics(), "broken_responses_total") == 1


@pytest.mark.parametrize("less", [1, 2, 3, 20])
async def test_a_stream_that_ends_within_its_last_event_broke_off(less: int) -> None:
    """With an orderly end of the transfer, as of a proxy in front of an engine that has died."""
    for path, body, whole in (
        (MESSAGES, {**ASKED, "stream": True}, BEGUN + SAYS + ENDS),
        (RESPONSES, {"model": "m", "input": "hi", "stream": True}, CREATED + DELTA + COMPLETED),
    ):
        data = whole[:-less]
        async with FakeReplica([events(data)]) as replica, running(replica) as run:
            async with run.session.post(run.url + path, json=body) as answer:
                out = await answer.read()
            cut = less > 2  # what lacks is more than the blank line
            assert (b"event: error" in out) is cut
            assert (data[data.rindex(b"event: ") :] in out) is not cut
            assert counted(await run.metrics(), "broken_responses_total") == cut


async def test_a_last_event_that_only_the_client_can_read_is_its_matter() -> None:
    odd = b'event: response.completed\ndata: {"type": "response.completed", "response": {"id": "\\ud83d"}}\n\n'  # half a pair
    body = {"model": "m", "input": "hi", "stream": True}
    async with FakeReplica([events(CREATED, DELTA, odd)]) as replica, running(replica) as run:
        answer = await run.session.post(run.url + RESPONSES, json=body)
        assert await answer.read() == CREATED + DELTA + odd


async def test_the_official_clients_read_whole_streams() -> None:
    fleet = FakeReplica([events(BEGUN, SAYS, ENDS), message()])
    async with fleet, running(fleet) as run, anthropic.AsyncAnthropic(base_url=run.url, api_key="k", max_retries=0) as client:
        async with client.messages.stream(**ASKED) as stream:
            final = await stream.get_final_message()
        assert (final.content[0].to_dict()["text"], final.usage.cache_read_input_tokens) == ("hello", 89)
        raw = await client.messages.with_raw_response.create(**ASKED)
        assert raw.request_id == raw.headers["x-request-id"]
        with pytest.raises(anthropic.NotFoundError, match="does not exist"):
            await client.messages.create(**{**ASKED, "model": "unknown"})


async def test_an_engine_that_reports_its_failure_is_not_spoken_over() -> None:
    """Its own error event is the last: another one behind it would be a second end."""
    failed = named("error", error={"type": "api_error", "message": "out of memory"})
    async with FakeReplica([events(BEGUN + SAYS, failed)]) as replica, running(replica) as run:
        async with run.session.post(run.url + MESSAGES, json={**ASKED, "stream": True}) as answer:
            assert await answer.read() == BEGUN + SAYS + failed
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        assert counted(await run.metrics(), "broken_responses_total") == 1


async def test_a_client_that_leaves_at_the_last_event_had_everything() -> None:
    """Codex closes its connection as soon as it has `response.completed`."""
    held = asyncio.Event()
    async with FakeReplica([events(CREATED, DELTA, COMPLETED, then=held)]) as replica, running(replica) as run:
        async with aiohttp.ClientSession() as session:
            answer = await session.post(run.url + RESPONSES, json={"model": "m", "input": "hi", "stream": True})
            assert await answer.content.readexactly(len(CREATED + DELTA + COMPLETED))
            answer.close()
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        held.set()
        metrics = await run.metrics()
        assert metrics['warmroute_requests_total{code="200",endpoint="/v1/responses",model="m"}'] == 1
        assert await metered(run) == (11, 89, 4)


# -- counting of tokens


@pytest.mark.parametrize("server_tools", [[], [{"type": "web_search"}]])
async def test_what_was_computed_for_a_client_that_left_is_remembered(server_tools: list[Any]) -> None:
    """Codex offers `web_search` in every request, and leaves early when its user interrupts it."""
    held = asyncio.Event()
    body = {"model": "m", "instructions": LONG, "input": "hi", "stream": True, "tools": server_tools}
    fleet = [FakeReplica([events(CREATED, DELTA, then=held)]) for _ in range(4)]
    async with fleet[0], fleet[1], fleet[2], fleet[3], running(*fleet) as run:
        for _ in range(3):
            async with aiohttp.ClientSession() as session:
                answer = await session.post(run.url + RESPONSES, json=body)
                assert await answer.content.readexactly(len(CREATED + DELTA))
                answer.close()
            await eventually(lambda: run.gateway.router.ledger.open_leases == 0)
        held.set()
        assert sorted(len(replica.requests) for replica in fleet) == [0, 0, 0, 3]


async def test_the_first_token_of_a_batch_is_not_that_of_all_its_prompts() -> None:
    held = asyncio.Event()
    first = b'data: {"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'
    body = {"model": "m", "stream": True, "prompt": [f"{at}" + "word " * 400 for at in range(16)]}
    async with FakeReplica([events(first, then=held)]) as one, running(one) as run:
        answer = await run.session.post(f"{run.url}/v1/completions", json=body)
        assert await answer.content.readline()
        (load,) = run.gateway.router.ledger.loads.values()
        assert (load.decoding, load.booked_tokens) == (0, load.active_tokens)
        held.set()
        answer.close()
        await eventually(lambda: run.gateway.router.ledger.open_leases == 0)


async def test_counting_tokens_leaves_nothing_in_the_index() -> None:
    count = writes(http(200, b'{"input_tokens": 700}'))
    bad, good = FakeReplica([dies]), FakeReplica([count])
    async with bad, good, running(bad, good, routing={"policy": "round_robin"}) as run:
        body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
        for _ in range(4):
            code, headers, answer = await run.post(body, f"{MESSAGES}/count_tokens")
            assert (code, answer) == (200, {"input_tokens": 700})
            assert headers["X-Warmroute-Cached-Tokens"] == "0"
        assert bad.requests, "it may be sent twice"
        assert await metered(run) == (0, 0, 0)


@pytest.mark.parametrize(
    "unknown",
    [http(404, b'{"detail":"Not Found"}'), http(404, b"404 page not found", "text/plain"), http(405, b""), http(501, b"")],
)
async def test_where_no_replica_can_count_tokens_they_are_estimated(
    unknown: bytes, request_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    """Claude Code sends a generation in place of each count that is an error."""
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    async with FakeReplica([writes(unknown)]) as replica, running(replica) as run:
        async with anthropic.AsyncAnthropic(base_url=run.url, api_key="k") as client:
            count = (await client.messages.count_tokens(**body)).input_tokens
        assert len(LONG) / 4 <= count < len(LONG) / 4 + 20
        assert len(replica.requests) == 1
        code, headers, said = await run.post(body, f"{MESSAGES}/count_tokens")
        assert (code, said, headers["X-Warmroute-Estimated"]) == (200, {"input_tokens": count}, "input_tokens")
        assert len(replica.requests) == 1, "it is remembered"
        assert request_lines()[-1]["counted"] == "estimate"
        run.gateway.router.scales.learn("m", 60_000, 30_000)
        assert (await run.post(body, f"{MESSAGES}/count_tokens"))[2]["input_tokens"] > count, "as the engines count"
        metrics = await run.metrics()
        assert not any(value for name, value in metrics.items() if name.startswith("warmroute_retries_total"))


async def test_tokens_are_counted_by_a_replica_that_can(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    lacks, counts = writes(http(404, b'{"detail":"Not Found"}')), writes(http(200, b'{"input_tokens": 700}'))
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    others = [FakeReplica([lacks]) for _ in range(5)]
    async with contextlib.AsyncExitStack() as stack:
        for replica in (*others, able := FakeReplica([counts])):
            await stack.enter_async_context(replica)
        run = await stack.enter_async_context(running(*others, able, routing={"policy": "round_robin"}))
        for _ in range(12):
            code, _, answer = await run.post(body, f"{MESSAGES}/count_tokens")
            assert (code, answer) == (200, {"input_tokens": 700})
        assert [len(replica.requests) for replica in others] == [1] * 5, "each is asked once"
        assert repr(run.gateway.attempts.budget) == "<RetryBudget 100 of 100>"
        failed = [attempt["reason"] for line in request_lines() for attempt in line.get("failed_attempts", [])]
        assert failed == ["unknown_path"] * 5
        metrics = await run.metrics()
        assert metrics['warmroute_retries_total{reason="unknown_path"}'] == 5


async def test_what_a_replica_lacks_is_asked_again_after_a_while() -> None:
    lacks, counts = writes(http(404, b'{"detail":"Not Found"}')), writes(http(200, b'{"input_tokens": 700}'))
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    async with FakeReplica([lacks, counts]) as one, running(one) as run:
        (state,) = run.gateway.fleet.pools[0].replicas
        assert "X-Warmroute-Estimated" in (await run.post(body, f"{MESSAGES}/count_tokens"))[1]
        begun = state.lacks["count_tokens"]
        assert "X-Warmroute-Estimated" in (await run.post(body, f"{MESSAGES}/count_tokens"))[1]
        assert (state.lacks, len(one.requests)) == ({"count_tokens": begun}, 1), "not asked, and not renewed"
        state.lacks["count_tokens"] = begun - LACKED_S - 1  # it is the only one
        assert (await run.post(body, f"{MESSAGES}/count_tokens"))[2] == {"input_tokens": 700}


async def test_while_the_replica_that_can_count_is_down_clients_retry() -> None:
    lacks, counts = writes(http(404, b'{"detail":"Not Found"}')), writes(http(200, b'{"input_tokens": 700}'))
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    one, two = FakeReplica([lacks]), FakeReplica([counts])
    async with one, two, running(one, two) as run:
        for _ in range(4):
            assert (await run.post(body, f"{MESSAGES}/count_tokens"))[0] == 200
        await two.stop()
        await eventually(lambda: not run.gateway.fleet.named(two.name).up)  # type: ignore[union-attr]
        code, headers, answer = await run.post(body, f"{MESSAGES}/count_tokens")
        assert (code, headers["Retry-After"]) == (503, "2")
        assert "retry" in answer["error"]["message"]


async def test_an_engines_refusal_is_not_lost_to_a_replica_without_the_path() -> None:
    lacks = writes(http(404, b'{"detail":"Not Found"}'))
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    one, two = FakeReplica([lacks]), FakeReplica([status(503, "full", "Retry-After: 7")])
    async with one, two, running(one, two, routing={"policy": "round_robin"}) as run:
        for _ in range(3):
            code, _, answer = await run.post(body, f"{MESSAGES}/count_tokens")
            assert (code, answer["error"]["message"]) == (503, "full")
        assert run.gateway.fleet.named(one.name).breaker.state(0) == CLOSED  # type: ignore[union-attr]


async def test_a_missing_path_is_no_reason_for_another_pool() -> None:
    lacks, counts = writes(http(404, b'{"detail":"Not Found"}')), writes(http(200, b'{"input_tokens": 700}'))
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    one, two = FakeReplica([lacks]), FakeReplica([counts], listing=models("n"))
    async with one, two:
        fallback = {"pool": "b", "model": "n"}
        pools = [{"name": "a", "replicas": [one.url], "fallback": fallback}, {"name": "b", "replicas": [two.url]}]
        async with running(pools=pools) as run:
            assert "X-Warmroute-Estimated" in (await run.post(body, f"{MESSAGES}/count_tokens"))[1]
            assert not two.requests


async def test_a_replica_that_may_count_and_dies_is_no_404() -> None:
    lacks = writes(http(404, b'{"detail":"Not Found"}'))
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    one, two = FakeReplica([lacks]), FakeReplica([dies])
    async with one, two, running(one, two) as run:
        for _ in range(3):
            code, _, answer = await run.post(body, f"{MESSAGES}/count_tokens")
            assert (code, answer["error"]["type"]) == (502, "api_error")
        assert len(one.requests) == 1


async def test_another_error_of_counting_tokens_is_the_engines_own() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    own = b'{"type":"error","error":{"type":"not_found_error","message":"The model `m` does not exist."}}'
    async with FakeReplica([writes(http(404, own))]) as replica, running(replica) as run:
        code, _, said = await run.post(body, f"{MESSAGES}/count_tokens")
        assert (code, said["error"]["message"]) == (404, "The model `m` does not exist.")


async def test_other_paths_of_both_apis_pass_through() -> None:
    page = writes(http(200, b'{"id": "x"}'))
    async with FakeReplica([page]) as replica, running(replica) as run:
        for method, path in (("GET", f"{RESPONSES}/resp_1"), ("DELETE", f"{RESPONSES}/resp_1"), ("GET", f"{MESSAGES}/batches")):
            async with run.session.request(method, run.url + path) as answer:
                assert (answer.status, await answer.json()) == (200, {"id": "x"})
        assert (await run.get(MESSAGES))[0] == 405
        assert await metered(run) == (0, 0, 0)


async def test_what_became_of_breakpoints_is_logged_and_counted(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    asked = {**ASKED, "system": [{"type": "text", "text": "".join(f"{number}. You help. " for number in range(800))}]}
    asked["system"][0]["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    cached, none = message(cache_read_input_tokens=3000), message(cache_read_input_tokens=0, input_tokens=3011)
    created = message(cache_read_input_tokens=0, cache_creation_input_tokens=3000, input_tokens=11)
    unreported = writes(http(200, b'{"type": "message", "usage": {"input_tokens": 9, "output_tokens": 1}}'))
    script = [created, cached, none, unreported, cached]
    async with FakeReplica(script) as one, FakeReplica(script) as two, running(one, two) as run:
        for _ in range(4):
            assert (await run.post(asked, path=MESSAGES))[0] == 200
        home = one if one.requests else two
        assert len(home.requests) == 4
        await home.stop()
        assert (await run.post(asked, path=MESSAGES))[0] == 200, (
            "the other replica answers: whoever refuses connections has lost its cache"
        )
        assert (await run.post(ASKED, path=MESSAGES))[0] == 200
        lines = request_lines()
        assert [line.get("breakpoint") for line in lines] == ["new", "kept", "missed", "unreported", "lost", None]
        assert [line.get("cache_write_tokens") for line in lines][:2] == [3000, None]
        page = await run.metrics()
        counted = {name: value for name, value in page.items() if name.startswith("warmroute_breakpoints_total")}
        results = "new", "kept", "missed", "unreported", "lost"
        assert counted == {f'warmroute_breakpoints_total{{model="m",result="{result}"}}': 1 for result in results}


async def test_a_promise_is_kept_by_a_part_of_the_prompt_whatever_its_tokens_are_estimated_at(
    request_lines: Callable[[], list[dict[str, Any]]],
) -> None:
    """Short prompts are mostly what the template adds: what is learned from them makes a long one look longer."""
    system = [{"type": "text", "text": "You help. " * 800, "cache_control": {"type": "ephemeral"}}]
    short = message(input_tokens=40, cache_read_input_tokens=0)
    cold, warm = message(input_tokens=2000, cache_read_input_tokens=0), message(input_tokens=20, cache_read_input_tokens=1980)
    async with FakeReplica([*[short] * 300, cold, warm]) as replica, running(replica) as run:
        for _ in range(300):
            await run.post({**ASKED, "messages": [{"role": "user", "content": "Write a haiku, please."}]}, path=MESSAGES)
        for _ in range(2):
            await run.post({**ASKED, "system": system}, path=MESSAGES)
        lines = request_lines()
        assert [line.get("breakpoint") for line in lines[-2:]] == ["new", "kept"]
        assert lines[-2]["estimated_prompt_tokens"] < 2 * 2000 * 1.5
        assert lines[-1]["estimated_prompt_tokens"] < 2000 * 1.5, "one long prompt sets it right"


async def test_a_promise_is_kept_whatever_follows_it(request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    """Hex has fewer bytes a token than the prose before it."""
    system = [{"type": "text", "text": "You help. " * 800, "cache_control": {"type": "ephemeral"}}]
    cold, warm = message(input_tokens=2010, cache_read_input_tokens=0), message(input_tokens=8000, cache_read_input_tokens=2000)
    async with FakeReplica([cold, cold, warm]) as replica, running(replica) as run:
        for text in ("hi", "hi", "3f9a" * 4000):
            await run.post({**ASKED, "system": system, "messages": [{"role": "user", "content": text}]}, path=MESSAGES)
        assert [line.get("breakpoint") for line in request_lines()] == ["new", "missed", "kept"]


async def test_a_dry_run_shows_the_promise() -> None:
    asked = {
        **ASKED,
        "system": "".join(f"{number}. You help. " for number in range(800)),
        "cache_control": {"type": "ephemeral"},
    }
    engine = message(input_tokens=4000)
    async with FakeReplica([engine]) as one, FakeReplica([engine]) as two, running(one, two) as run:
        _, _, before = await run.post(asked, path=f"/warmroute/route?path={MESSAGES}")
        assert (before["promise"], before["promised_tokens"]) == ("", 0)
        assert (await run.post(asked, path=MESSAGES))[0] == 200
        _, _, after = await run.post(asked, path=f"/warmroute/route?path={MESSAGES}")
        assert after["promise"] == "held"
        assert after["promised_tokens"] > 1024


@pytest.mark.parametrize(
    ("method", "path", "body", "unmetered"),
    [
        ("POST", CHAT, ASKED, 1),
        ("POST", "/v1/completions", {"model": "m", "prompt": "hi"}, 1),
        ("POST", MESSAGES, ASKED, 1),
        ("POST", RESPONSES, {"model": "m", "input": "hi"}, 1),
        ("POST", "/v1/embeddings", {"model": "m", "input": ["hi"]}, 1),
        ("POST", "/v1/audio/speech", {"model": "m"}, 1),
        ("POST", "/v1/of_tomorrow", {"model": "m", "prompt": "hi"}, 1),
        ("POST", "/v1/of_tomorrow", {"model": "m"}, 0),
        ("GET", "/v1/embeddings", None, 0),
        ("POST", "/v1/files", {"model": "m", "prompt": "hi"}, 0),
        ("POST", "/v1/messages/count_tokens", ASKED, 0),
    ],
)
async def test_every_answer_of_a_model_whose_tokens_are_not_counted_is_counted(
    method: str, path: str, body: Any, unmetered: int
) -> None:
    endpoint = "other" if path == "/v1/of_tomorrow" else path
    labels = f'endpoint="{endpoint}",model="m"' if body else f'endpoint="{endpoint}",model="none"'
    answer = writes(http(200, b'{"id": "x"}'))
    async with FakeReplica([answer, status(400), status(500)]) as replica, running(replica) as run:
        for code in (200, 400, 500):
            async with run.session.request(method, run.url + path, json=body) as got:
                assert got.status == code
        metrics = await run.metrics()
        assert metrics.get(f"warmroute_unmetered_requests_total{{{labels}}}", 0) == unmetered
        for code in (200, 400, 500):
            assert metrics[f'warmroute_requests_total{{code="{code}",{labels}}}'] == 1
        assert metrics[f"warmroute_request_seconds_count{{{labels}}}"] == 3


async def test_a_stream_s_first_byte_is_timed_by_its_endpoint() -> None:
    async with FakeReplica([events(BEGUN, SAYS, ENDS)]) as replica, running(replica) as run:
        async with run.session.post(run.url + MESSAGES, json={**ASKED, "stream": True}) as answer:
            await answer.read()
        metrics = await run.metrics()
        assert metrics[f'warmroute_ttft_seconds_count{{cache="miss",endpoint="{MESSAGES}",model="m"}}'] == 1
        assert counted(metrics, "unmetered_requests_total") == 0


def keeper(name: str) -> Behaviour:
    """A replica that keeps its responses: what it has not made itself is a 404."""
    made = list[str]()

    async def behave(request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        asked = request.json if request.method == "POST" and request.body else {}
        known = asked.get("previous_response_id") or asked.get("conversation") or request.path.removeprefix(f"{RESPONSES}/")
        if known != RESPONSES and known not in made:
            writer.write(http(404, b'{"error": {"message": "Response with id x not found."}}'))
            return
        if asked.get("conversation"):
            made.append(asked["conversation"])
        made.append(f"resp_{name}{len(made)}")
        if asked.get("stream"):
            started = named("response.created", response=response(id=made[-1], status="in_progress"), sequence_number=0)
            ended = named("response.completed", response=response(id=made[-1]), sequence_number=1)
            writer.write(STREAM_HEAD + chunk(started) + chunk(ended) + b"0\r\n\r\n")
        else:
            writer.write(http(200, json.dumps(response(id=made[-1])).encode()))

    return behave


@pytest.mark.parametrize("stream", [False, True])
async def test_what_names_a_response_goes_to_the_replica_that_has_it(stream: bool) -> None:
    asked = {"model": "m", "input": "hi", "stream": stream}
    async with FakeReplica([keeper("a")] * 99) as one, FakeReplica([keeper("b")] * 99) as two, running(one, two) as run:

        async def ask(path: str = RESPONSES, **more: Any) -> str:
            async with run.session.post(run.url + path, json={**asked, **more}) as answer:
                assert answer.status == 200, await answer.text()
                return json.loads((await answer.text()).partition('"id": ')[2].partition(",")[0])

        first = await ask()
        for _ in range(6):
            last = await ask(previous_response_id=first)
            await ask(previous_response_id=last)
        for path in (f"{RESPONSES}/{first}", f"{RESPONSES}/{last}/input_items"):
            async with run.session.get(run.url + path) as answer:
                assert answer.status in (200, 404)
        assert sorted([len(one.requests), len(two.requests)]) == [0, 15]


async def test_a_response_that_is_not_stored_is_not_remembered() -> None:
    async with FakeReplica([keeper("a")] * 9) as one, running(one) as run:
        assert (await run.post({"model": "m", "input": "hi", "store": False}, path=RESPONSES))[0] == 200
        assert len(run.gateway.router.objects) == 0
        assert (await run.post({"model": "m", "input": "hi"}, path=RESPONSES))[0] == 200
        assert len(run.gateway.router.objects) == 1


async def test_with_several_pools_a_path_alone_finds_its_response() -> None:
    async with FakeReplica([keeper("a")] * 9) as one, FakeReplica([keeper("b")] * 9) as two:
        pools = [{"replicas": [one.url], "models": ["m"]}, {"replicas": [two.url], "models": ["n"]}]
        async with running(pools=pools) as run:
            _, _, made = await run.post({"model": "n", "input": "hi"}, path=RESPONSES)
            async with run.session.delete(f"{run.url}{RESPONSES}/{made['id']}") as answer:
                assert answer.status == 200
            async with run.session.get(f"{run.url}{RESPONSES}/resp_unknown") as answer:
                assert answer.status == 400
        assert (len(one.requests), len(two.requests)) == (0, 2)


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/v1/embeddings", {"input": ["a" * 4000, "b" * 4000]}, 2000),
        ("/v1/embeddings", {"input": [[1] * 300, [2] * 700]}, 1000),
        ("/v1/completions", {"prompt": ["a" * 4000] * 3}, 3000),
        ("/v1/rerank", {"query": "q" * 400, "documents": ["a" * 400] * 10}, 2000),
    ],
)
async def test_a_batch_is_booked_with_all_its_elements(path: str, body: dict[str, Any], tokens: int) -> None:
    async with FakeReplica([writes(http(200, b'{"data": []}'))]) as replica, running(replica) as run:
        _, _, dry = await run.post({"model": "m", **body}, path=f"/warmroute/route?path={path}")
        assert dry["estimated_prompt_tokens"] == tokens


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, CHAT])
@pytest.mark.parametrize(
    "error", [{"type": "error", "error": {"type": "api_error", "message": "boom"}}, {"object": "error", "message": "boom"}]
)
async def test_an_error_with_status_200_is_no_answer(path: str, error: dict[str, Any]) -> None:
    async with FakeReplica([writes(http(200, json.dumps(error).encode()))]) as broken, running(broken) as run:
        code, _, said = await run.post({**ASKED, "input": "hi"}, path=path)
    assert (code, "boom" in said["error"]["message"]) == (502, True)


async def test_a_failed_response_is_an_answer() -> None:
    failed = response(status="failed", output=[], error={"code": "server_error", "message": "boom"})
    async with FakeReplica([writes(http(200, json.dumps(failed).encode()))]) as replica, running(replica) as run:
        assert (await run.client.responses.create(model="m", input="hi")).status == "failed"


@pytest.mark.parametrize(
    ("path", "plain"), [(MESSAGES, message()), (RESPONSES, writes(http(200, json.dumps(response()).encode())))]
)
async def test_an_object_in_place_of_a_stream_passes(path: str, plain: Behaviour) -> None:
    """It was computed: its client decides what to do."""
    async with FakeReplica([plain]) as odd, running(odd) as run:
        code, _, said = await run.post({**ASKED, "input": "hi", "stream": True}, path=path)
    assert (code, "usage" in said) == (200, True)


async def test_an_error_without_a_name_is_raised_by_the_client() -> None:
    """Anthropic's client ignores it: the answer looked whole."""
    unnamed = b'data: {"type":"error","error":{"type":"api_error","message":"boom"}}\n\n'
    async with FakeReplica([events(BEGUN, SAYS, unnamed)]) as broken, running(broken) as run:
        client = anthropic.AsyncAnthropic(base_url=run.url, api_key="k", max_retries=0)
        with pytest.raises(anthropic.APIStatusError):
            async with client, client.messages.stream(**ASKED) as stream:
                await stream.get_final_message()
