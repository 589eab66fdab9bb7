"""A workflow as a model: clients of chat, Messages and Responses that know nothing of workflows."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.conftest import Running, eventually, running
from tests.gateway.features.workflows.test_runs import CHAT, USER, document
from tests.gateway.request.test_pulses import once
from tests.support.fakes import FakeReplica, status, streams
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine

ANSWER = "A text of the model that is longer than one piece of the stream, by far."
CRITIC = {
    "chat": {"from": "answer", "append": [{"role": "system", "content": "ok?"}], "choices": ["Yes", "No"]},
    "yield": "critic",
}
SUPPORT = document({"answer": {**CHAT, "yield": "answer"}, "critic": CRITIC}, name="support", primary="answer")
GUESS = document(
    {
        "guess": {**CHAT, "yield": "guess"},
        "judge": {"chat": {"append": [{"role": "user", "content": "judge"}]}},
        "taken": {
            "switch": [
                {"when": "${judge.text == 'No'}", "kill": ["guess"], "value": "${judge.text}"},
                {"else": True, "value": "${guess.text}"},
            ],
            "yield": "taken",
        },
    },
    name="guess",
    primary="guess",
)


def script(body: dict[str, Any]) -> ScriptedAnswer:
    last = body["messages"][-1]["content"]
    return ScriptedAnswer("No" if last in ("ok?", "judge") else ANSWER)


@asynccontextmanager
async def served(
    path: Path, *documents: dict[str, Any], engine: ScriptedEngine | None = None, **config: Any
) -> AsyncIterator[tuple[ScriptedEngine, Running]]:
    for each in documents or (SUPPORT,):
        (path / f"{each['name']}.yaml").write_text(json.dumps(each))
    scripted = engine or ScriptedEngine(script)
    async with scripted.replica, running(scripted.replica, workflows={"directory": str(path)}, **config) as run:
        yield scripted, run


def chat(model: str = "workflow:support", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [USER], **more}


async def test_the_openai_client_gets_the_primary_output_and_the_others_beside_it(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, run):
        answer = await run.client.chat.completions.create(**chat())
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
        more: Any = answer.model_extra
        assert more["workflow"]["outputs"] == {"critic": "No"}
        assert answer.usage
        assert answer.usage.prompt_tokens == more["workflow"]["usage"]["prompt_tokens"] > 0
        assert answer.model == "workflow:support"

        chunks = [
            each
            async for each in await run.client.chat.completions.create(
                **chat(stream=True, stream_options={"include_usage": True})
            )
        ]
        texts = [each.choices[0].delta.content or "" for each in chunks if each.choices]
        assert "".join(texts) == ANSWER
        assert chunks[0].choices[0].delta.role == "assistant"
        (last,) = [each for each in chunks if each.choices and each.choices[0].finish_reason]
        extra: Any = last.model_extra
        assert extra["workflow"]["outputs"] == {"critic": "No"}
        assert chunks[-1].usage
        assert all(each.usage is None for each in chunks[:-1])


async def test_the_text_passes_as_it_comes(tmp_path: Path) -> None:
    engine = ScriptedEngine(script, holds=True)
    async with served(tmp_path, engine=engine) as (_, run):
        chunks = aiter(await run.client.chat.completions.create(**chat(stream=True)))
        first = (await anext(chunks)).choices[0].delta.content
        assert len(engine.held) == 1
        assert first == ANSWER[: len(first or "")] != ANSWER
        engine.release()
        await eventually(engine.release)  # the critic
        rest = [each.choices[0].delta.content or "" async for each in chunks]
    assert f"{first}{''.join(rest)}" == ANSWER


REST = {"chat": {"append": [{"role": "user", "content": "rest"}]}}
JUDGE = {"chat": {"append": [{"role": "user", "content": "judge"}]}}
WAYS: dict[str, dict[str, Any]] = {
    "a let": document({"a": CHAT, "o": {"let": "${a.text}", "yield": "o"}}, name="way", primary="o"),
    "a value of yield": document({"a": {**CHAT, "yield": {"as": "o", "value": "${a.value}"}}}, name="way", primary="o"),
    "outputs": document({"a": CHAT}, name="way", primary="o", outputs={"o": "${a.text}", "p": 1}),
    "a let of a let": document({"a": CHAT, "b": {"let": "${a.text}"}, "o": {"let": "${b.value}", "yield": "o"}}, name="way"),
    "a step of an arm": document(
        {"o": {"switch": [{"else": True, "steps": {"a": CHAT}, "value": "${a.text}"}], "yield": "o"}}, name="way"
    ),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_primary_output_that_is_the_text_of_a_step_passes_as_it_comes(tmp_path: Path, way: str) -> None:
    engine = ScriptedEngine(script, holds=True)
    async with served(tmp_path, WAYS[way], engine=engine) as (_, run):
        chunks = aiter(await run.client.chat.completions.create(**chat("workflow:way", stream=True)))
        first = (await anext(chunks)).choices[0].delta.content
        assert len(engine.held) == 1
        engine.release()
        rest = [each.choices[0].delta.content or "" async for each in chunks]
        assert f"{first}{''.join(rest)}" == ANSWER != first
        whole = asyncio.create_task(run.client.chat.completions.create(**chat("workflow:way")))
        await eventually(engine.release)
        assert (await whole).choices[0].message.content == ANSWER


@pytest.mark.parametrize(("verdict", "expected"), [("Yes", ANSWER), ("No", "It was refused.")])
async def test_the_text_of_a_switch_passes_once_it_is_decided(tmp_path: Path, verdict: str, expected: str) -> None:
    def answer(body: dict[str, Any]) -> ScriptedAnswer:
        judging = body["messages"][-1]["content"] == "judge"
        return ScriptedAnswer(verdict, 1) if judging else ScriptedAnswer(ANSWER, 2)

    arms = [
        {"when": "${judge.text == 'No'}", "kill": ["guess"], "value": "It was refused."},
        {"else": True, "value": "${guess.text}"},
    ]
    steps = {"guess": CHAT, "judge": JUDGE, "o": {"switch": arms, "yield": "o"}}
    engine = ScriptedEngine(answer, holds=True)
    async with served(tmp_path, document(steps, name="way"), engine=engine) as (_, run):
        asked = asyncio.create_task(run.client.chat.completions.create(**chat("workflow:way", stream=True)))
        await eventually(lambda: len(engine.held) == 2)
        assert not asked.done()
        engine.release()
        chunks = aiter(await asked)
        text = (await anext(chunks)).choices[0].delta.content or ""
        if verdict == "Yes":
            assert ANSWER.startswith(text)
            assert text != ANSWER
            assert len(engine.held) == 1, "the other text passes while it is written"
            engine.release()
        async for each in chunks:
            text += each.choices[0].delta.content or ""
    assert text == expected


async def test_the_anthropic_client_and_the_responses_api(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, run):
        http = anthropic.DefaultAsyncHttpxClient(verify=False)
        async with anthropic.AsyncAnthropic(base_url=run.url, api_key="k", max_retries=0, http_client=http) as client:
            body: Any = {"model": "workflow:support", "messages": [USER], "max_tokens": 100}
            message = await client.messages.create(**body)
            assert message.content[0].text == ANSWER
            assert message.stop_reason == "end_turn"
            async with client.messages.stream(**body) as stream:
                assert "".join([text async for text in stream.text_stream]) == ANSWER
        response = await run.client.responses.create(model="workflow:support", input="hello", store=False)
        assert response.output_text == ANSWER
        events = [
            each
            async for each in await run.client.responses.create(
                model="workflow:support", input="hello", store=False, stream=True
            )
        ]
        assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == ANSWER
        assert events[-1].type == "response.completed"


async def test_an_alias_moves_a_client_over(tmp_path: Path) -> None:
    async with served(tmp_path, model_aliases={"gpt-5-support": "workflow:support"}) as (_, run):
        answer = await run.client.chat.completions.create(**chat("gpt-5-support"))
    assert (answer.choices[0].message.content, answer.model) == (ANSWER, "gpt-5-support")


@pytest.mark.parametrize(
    ("more", "code", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "workflow_door", "tools"),
        ({"response_format": {"type": "json_object"}}, "workflow_door", "response_format"),
        ({"n": 2}, "workflow_door", "n"),
        ({"logprobs": True}, "workflow_door", "logprobs"),
        ({"workflow_inputs": {"x": 1}}, "inputs_invalid", "inputs.x"),
        ({"workflow_inputs": 1}, "invalid_request", "workflow_inputs"),
    ],
)
async def test_members_that_a_workflow_cannot_fulfil(tmp_path: Path, more: dict[str, Any], code: str, param: str) -> None:
    async with served(tmp_path) as (scripted, run):
        got, _, found = await run.post(chat(**more))
    assert (got, found["error"]["code"], found["error"]["param"]) == (400, code, param)
    assert scripted.cache.calls == 0


async def test_sampling_is_ignored_and_named(tmp_path: Path) -> None:
    async with served(tmp_path) as (scripted, run):
        got, headers, _ = await run.post(chat(temperature=0.1, max_tokens=3))
    assert (got, headers["X-Warmroute-Ignored"]) == (200, "temperature, max_tokens")
    assert "temperature" not in scripted.replica.requests[0].json


@pytest.mark.parametrize(
    ("path", "body", "ignored"),
    [
        (
            "messages",
            {"messages": [USER], "max_tokens": 9, "temperature": 0.1, "stop_sequences": ["x"], "system": "s", "top_k": None},
            "max_tokens, temperature, stop_sequences",
        ),
        ("responses", {"input": "hello", "top_p": 0.5, "instructions": "s", "store": False}, "top_p"),
        ("chat/completions", {"messages": [USER], **{f"x{at}": 1 for at in range(50)}, "y" * 99: 1}, None),
    ],
)
async def test_members_without_effect_are_named_in_each_api(
    tmp_path: Path, path: str, body: dict[str, Any], ignored: str | None
) -> None:
    async with served(tmp_path) as (_, run):
        for stream in (False, True):
            sent = body | {"model": "workflow:support", "stream": stream}
            async with run.session.post(f"{run.url}/v1/{path}", json=sent) as answer:
                named = answer.headers["X-Warmroute-Ignored"]
            assert (answer.status, named) == (200, ignored or ", ".join(f"x{at}" for at in range(20)))


@pytest.mark.parametrize("model", ["workflow:support", "moved"])
async def test_a_response_of_a_workflow_does_not_run_in_the_background(tmp_path: Path, model: str) -> None:
    state = {"url": f"sqlite:///{tmp_path / 'state.db'}"}
    async with served(tmp_path, state=state, model_aliases={"moved": "workflow:support"}) as (engine, run):
        got, _, found = await run.post({"model": model, "input": "hello", "background": True}, "/v1/responses")
        assert (got, found["error"]["code"], found["error"]["param"]) == (400, "workflow_door", "background")
        assert "/v1/workflows/runs" in found["error"]["message"]
    assert not engine.replica.requests


@pytest.mark.parametrize("member", ["previous_response_id", "conversation"])
async def test_a_workflow_has_no_earlier_turns(tmp_path: Path, member: str) -> None:
    async with served(tmp_path, state={"url": f"sqlite:///{tmp_path / 'state.db'}"}) as (engine, run):
        got, _, found = await run.post({"model": "workflow:support", "input": "hello", member: "x_1"}, "/v1/responses")
        assert (got, found["error"]["code"], found["error"]["param"]) == (400, "workflow_door", member)
        assert "Answers of a workflow are not kept" in found["error"]["message"]
    assert not engine.replica.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_members_that_ask_for_what_a_workflow_does_anyway_are_no_error(tmp_path: Path, stream: bool) -> None:
    more = {"response_format": {"type": "text"}, "tools": [], "logprobs": False, "n": 1, "é": 1, "stop": ["x"]}
    async with served(tmp_path) as (_, run):
        async with run.session.post(f"{run.url}/v1/chat/completions", json=chat(stream=stream, **more)) as answer:
            assert answer.status == 200
            assert answer.headers["X-Warmroute-Ignored"] == "response_format, tools, logprobs, stop"
        for format_ in ({"type": "json_object"}, {"type": "text", "more": 1}):
            got, _, found = await run.post(chat(response_format=format_))
            assert (got, found["error"]["code"]) == (400, "workflow_door")


@pytest.mark.parametrize("given", [[], 0, "", False, "text"])
async def test_inputs_by_name_are_an_object(tmp_path: Path, given: Any) -> None:
    async with served(tmp_path) as (_, run):
        got, _, found = await run.post(chat(workflow_inputs=given))
        assert (got, found["error"]["param"]) == (400, "workflow_inputs")


async def test_an_unknown_workflow_and_one_without_a_primary_output(tmp_path: Path) -> None:
    two = document({"a": {**CHAT, "yield": "a"}, "b": {**CHAT, "yield": "b"}}, name="two")
    async with served(tmp_path, two) as (_, run):
        error = (await run.post(chat("workflow:none")))[2]["error"]
        assert (error["code"], error["param"]) == ("workflow_not_found", "model")
        assert (await run.post(chat("workflow:two")))[2]["error"]["code"] == "workflow_door"
        got, _, found = await run.post({"model": "workflow:two", "prompt": "x"}, "/v1/completions")
        assert (got, found["error"]["code"]) == (400, "workflow_door")
        got, _, found = await run.post(chat("workflow:two"), "/v1/messages/count_tokens")
        assert (got, "A workflow answers chat, Messages and Responses" in found["error"]["message"]) == (400, True)


@pytest.mark.parametrize("model", ["workflow:loop", "again"])
async def test_no_step_calls_a_workflow(tmp_path: Path, model: str) -> None:
    step = {"chat": {**CHAT["chat"], "model": model}, "yield": "answer"}
    loop = document({"answer": step}, name="loop", primary="answer")
    async with served(tmp_path, loop, model_aliases={"again": "workflow:loop"}) as (engine, run):
        status, _, answer = await run.post(chat("workflow:loop"))
        assert (status, answer["error"]["message"]) == (
            400,
            "step answer: A step calls a model; 'workflow:loop' is a workflow.",
        )
    assert not engine.replica.requests


async def test_a_conversation_with_images_may_be_longer_than_other_values(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 3_000_000}"}}
    asked = {"role": "user", "content": [{"type": "text", "text": "what is it"}, image]}
    steps = {
        "a": {"chat": {"from": "${inputs.messages}"}, "yield": "a"},
        "b": {"chat": {"from": "a", "append": [{"role": "user", "content": "${last_text(inputs.messages)}"}]}, "yield": "b"},
    }

    async def post(run: Running, path: str = "/v1/chat/completions") -> tuple[int, Any]:
        body = io.BytesIO(json.dumps({"model": "workflow:see", "messages": [asked]}).encode())
        async with run.session.post(run.url + path, data=body) as answer:
            return answer.status, await answer.json()

    async with served(tmp_path, document(steps, name="see", primary="a")) as (scripted, run):
        got, found = await post(run)
        assert (got, found["choices"][0]["message"]["content"]) == (200, ANSWER)
        sent = [request.json["messages"] for request in scripted.replica.requests]
        assert sent == [[asked], [asked, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "what is it"}]]
        asked["content"] = "x" * (4 << 20)
        got, found = await post(run)
        assert (got, found["error"]["code"], found["error"]["param"]) == (400, "inputs_invalid", "inputs")
        asked["content"] = "x" * (16 << 20)
        for path in ("/v1/chat/completions", "/v1/workflows/runs", "/v1/workflows/plan"):
            got, found = await post(run, path)
            assert (got, found["error"]["code"]) == (413, "workflow_too_large"), path
        await eventually(lambda: run.gateway.memory.held == 0)


async def test_the_last_text_goes_to_the_only_required_text(tmp_path: Path) -> None:
    step = {"chat": {"append": [{"role": "user", "content": "about ${inputs.q} ${inputs.t}"}]}, "yield": "a"}
    inputs = {"q": {"type": "string", "required": True}, "t": {"type": "string", "default": "none"}}
    async with served(tmp_path, document({"a": step}, name="ask", inputs=inputs)) as (scripted, run):
        assert (await run.post(chat("workflow:ask", workflow_inputs={"t": "this"})))[0] == 200
    assert scripted.replica.requests[0].json["messages"][-1]["content"] == "about hello this"


async def test_a_workflow_without_a_place_for_the_messages_gets_its_inputs_by_name(tmp_path: Path) -> None:
    step = {"chat": {"append": [{"role": "user", "content": "about ${inputs.a} ${inputs.b}"}]}, "yield": "o"}
    inputs = {name: {"type": "string", "required": True} for name in "ab"}
    async with served(tmp_path, document({"s": step}, name="ask", inputs=inputs)) as (scripted, run):
        got, _, found = await run.post(chat("workflow:ask"))
        assert (got, found["error"]["code"]) == (400, "workflow_door")
        assert "give a, b in 'workflow_inputs'" in found["error"]["message"]
        assert (await run.post(chat("workflow:ask", workflow_inputs={"a": "x", "b": "y"})))[0] == 200
    assert scripted.replica.requests[0].json["messages"][-1]["content"] == "about x y"


@pytest.mark.parametrize(
    ("path", "more"), [("messages", {"messages": [USER], "max_tokens": 9}), ("responses", {"input": "hello"})]
)
async def test_other_inputs_are_given_in_each_api(tmp_path: Path, path: str, more: dict[str, Any]) -> None:
    step = {"chat": {"append": [{"role": "user", "content": "about ${inputs.t}"}]}, "yield": "a"}
    inputs = {"q": {"type": "messages", "required": True}, "t": {"type": "string", "required": True}}
    body = {"model": "workflow:ask", "workflow_inputs": {"t": "this"}, **more}
    async with served(tmp_path, document({"a": step}, name="ask", inputs=inputs)) as (scripted, run):
        assert (await run.post(body, f"/v1/{path}"))[0] == 200
    assert scripted.replica.requests[0].json["messages"][-1]["content"] == "about this"


async def test_an_error_before_the_first_byte_has_the_status_of_its_step(tmp_path: Path) -> None:
    failing = ScriptedEngine(lambda _body: ScriptedAnswer("too long", status=400))
    async with served(tmp_path, engine=failing) as (_, run):
        for stream in (False, True):
            got, _, found = await run.post(chat(stream=stream))
            assert (got, found["error"]["code"]) == (400, "scripted")
            assert "too long" in found["error"]["message"]


async def test_an_answer_without_its_primary_output_has_the_reason_of_the_skipped_step(tmp_path: Path) -> None:
    failing = ScriptedEngine(lambda _body: ScriptedAnswer("too long", status=400))
    hedge = document({"a": {**CHAT, "on_error": "skip", "yield": "a"}}, name="support")
    async with served(tmp_path, hedge, engine=failing) as (_, run):
        got, _, found = await run.post(chat())
    assert (got, found["error"]["code"]) == (502, "workflow_door")
    assert found["error"]["message"].endswith("without its primary output 'a'. Step a: too long")


@pytest.mark.parametrize("outputs", [{}, {"outputs": {"o": "${b.value}"}}])
async def test_its_reason_is_not_that_of_another_step(tmp_path: Path, outputs: dict[str, Any]) -> None:
    failing = {"let": "${1 + 'text'}", "on_error": "skip"}
    steps = {"a": failing, "b": {"let": "${a.value}", "yield": "o"}, "c": failing}
    async with served(tmp_path, document(steps, name="support", **outputs)) as (_, run):
        for stream in (False, True):
            got, _, found = await run.post(chat(stream=stream))
            assert (got, ". Step a: " in found["error"]["message"]) == (502, True)


async def test_an_error_after_the_first_byte_is_an_event_and_its_step_is_not_repeated(tmp_path: Path) -> None:
    breaking = ScriptedEngine(lambda _body: ScriptedAnswer(ANSWER, broken=True))
    async with breaking.replica:
        (tmp_path / "support.yaml").write_text(json.dumps(SUPPORT))
        config: Any = {
            "pools": [{"replicas": [breaking.replica.url], "resume_streams": False}],
            "workflows": {"directory": str(tmp_path)},
        }
        async with running(**config) as run:
            with pytest.raises(openai.APIError):
                async for _ in await run.client.chat.completions.create(**chat(stream=True)):
                    pass
            assert len(breaking.replica.requests) == 1
            assert (await run.post(chat()))[0] == 502
    assert len(breaking.replica.requests) == 3, "without a stream no text is out"


async def test_a_gateway_that_goes_down_ends_the_stream_with_an_error(tmp_path: Path) -> None:
    engine = ScriptedEngine(script, holds=True)
    async with served(tmp_path, engine=engine) as (_, run):
        chunks = aiter(await run.client.chat.completions.create(**chat(stream=True)))
        await anext(chunks)
        ending = asyncio.create_task(run.gateway.running.wait(0.0, asyncio.Event()))
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in chunks:
                pass
        await ending


@pytest.mark.parametrize(("verdict", "text", "stream"), [("Yes", ANSWER, False), ("No", None, False), ("No", None, True)])
async def test_a_provisional_primary_output_is_held_back_until_it_is_confirmed(
    tmp_path: Path, verdict: str, text: str | None, stream: bool
) -> None:
    def answer(body: dict[str, Any]) -> ScriptedAnswer:
        judging = body["messages"][-1]["content"] == "judge"
        return ScriptedAnswer(verdict if judging else ANSWER, 2 if judging else 1)

    engine = ScriptedEngine(answer, holds=True)
    async with served(tmp_path, GUESS, engine=engine) as (_, run):
        asked = asyncio.create_task(run.post(chat("workflow:guess", stream=stream)))
        await eventually(lambda: len(engine.held) == 2)
        engine.release()
        await eventually(lambda: len(engine.held) == 1)
        assert not asked.done()
        engine.release()
        got, _, found = await asked
    if text is None:
        assert (got, found["error"]["code"]) == (502, "workflow_door")
    else:
        assert found["choices"][0]["message"]["content"] == text


PULSES: Any = {"limits": {"keepalive_s": 0.02, "drain_timeout_s": 1}}
SILENCE: Any = {"limits": {"keepalive_s": 3600, "drain_timeout_s": 1}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 100},
    "/v1/responses": {"input": "hello", "store": False},
}


async def bytes_of(run: Running, path: str, go: asyncio.Event | None) -> tuple[int, bytes]:
    """The status and the bytes of a stream. go: set once there is a pulse."""
    body = {"model": "workflow:support", "stream": True, **BODIES[path]}
    async with run.session.post(run.url + path, json=body) as answer:
        begin = b""
        if go is not None:
            begin = await answer.content.readuntil(b"\n\n")
            go.set()
        return answer.status, begin + await answer.read()


def without_pulses(data: bytes) -> list[bytes]:
    """The events, without ids and times."""
    events = [each for each in data.split(b"\n\n") if each and not each.startswith((b": ", b"event: ping"))]
    return [re.sub(rb'(run|msg|resp)_[0-9a-f]+|"created(_at)?":\d+|"completed_at":\d+', b"", each) for each in events]


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_waits_for_the_first_text_gets_signs_of_life(tmp_path: Path, path: str) -> None:
    (tmp_path / "support.yaml").write_text(json.dumps(document({"answer": {**CHAT, "yield": "answer"}}, name="support")))
    workflows, go = {"directory": str(tmp_path)}, asyncio.Event()
    async with FakeReplica([once(go, streams("hello"))]) as replica:
        async with running(replica, workflows=workflows, **PULSES) as run:
            status_code, pulsed = await bytes_of(run, path, go)
        async with running(replica, workflows=workflows, **SILENCE) as run:
            _, silent = await bytes_of(run, path, None)
    assert status_code == 200
    assert pulsed.startswith(b"event: ping\n" if path == "/v1/messages" else b": waiting\n")
    assert without_pulses(pulsed) == without_pulses(silent)


@pytest.mark.parametrize("path", BODIES)
async def test_a_client_gets_signs_of_life_between_two_texts(tmp_path: Path, path: str, request_lines: Any) -> None:
    (tmp_path / "support.yaml").write_text(json.dumps(document({"answer": {**CHAT, "yield": "answer"}}, name="support")))
    go, body = asyncio.Event(), {"model": "workflow:support", "stream": True, **BODIES[path]}
    async with (
        FakeReplica([streams("hel", "lo", hold=go)]) as replica,
        running(replica, workflows={"directory": str(tmp_path)}, **PULSES) as run,
        run.session.post(run.url + path, json=body) as answer,
    ):
        while b"hel" not in await answer.content.readuntil(b"\n\n"):
            pass
        pulse = await answer.content.readuntil(b"\n\n")
        go.set()
        rest = await answer.read()
    assert pulse.startswith(b"event: ping\n" if path == "/v1/messages" else b": generating\n")
    assert b'"lo"' in rest
    (line,) = [each for each in request_lines() if each["path"] == path and each["model"] == "workflow:support"]
    assert line["pulses"] >= 1


@pytest.mark.parametrize("path", BODIES)
async def test_a_failure_after_a_sign_of_life_is_an_event_with_its_code(tmp_path: Path, path: str) -> None:
    (tmp_path / "support.yaml").write_text(json.dumps(document({"answer": {**CHAT, "yield": "answer"}}, name="support")))
    go = asyncio.Event()
    async with (
        FakeReplica([once(go, status(400, "no such tool"))]) as replica,
        running(replica, workflows={"directory": str(tmp_path)}, **PULSES) as run,
    ):
        status_code, data = await bytes_of(run, path, go)
    (event,) = [each for each in without_pulses(data) if not each.startswith(b"data: [DONE]")]
    assert (status_code, b"step answer: no such tool" in event) == (200, True)
