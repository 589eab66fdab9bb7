"""One workflow, unmodified clients: OpenAI's and Anthropic's Python packages, and the requests that Open WebUI sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import runpy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.conftest import Running, eventually, running
from tests.support.compiled import documented
from tests.support.paths import ROOT
from tests.support.scripted_engine import ScriptedAnswer, ScriptedEngine

NAME = "workflow:answer_critic_copilot"
ALIAS = "gpt-5-support"
ANSWER = "The warranty lasts for two years, counted from the day on which you bought the device."
COPILOT = ["And abroad?", "Who pays?"]
QUESTION = "How long does the warranty last?"
DOCUMENT = {
    "workflow": 1,
    "name": "answer_critic_copilot",
    "inputs": {"message_list": {"type": "messages", "required": True}},
    "defaults": {"model": "m", "max_tokens": 512},
    "steps": {
        "answer": {"chat": {"from": "${inputs.message_list}", "temperature": 0.7}, "yield": "answer"},
        "critic": {
            "chat": {
                "from": "answer",
                "append": [{"role": "system", "content": "Does the answer above violate the policy?"}],
                "choices": ["Yes", "No"],
            },
            "yield": "critic",
        },
        "copilot": {
            "chat": {
                "from": "answer",
                "append": [{"role": "system", "content": "What might the user ask next?"}],
                "output": "list",
            },
            "yield": "copilot",
        },
    },
    "primary": "answer",
}
OTHERS = {"critic": "No", "copilot": COPILOT}
REFUSED = ScriptedAnswer("the prompt is too long", status=400, code="context_length_exceeded")
BROKEN = ScriptedAnswer(ANSWER, broken=True)


def script(body: dict[str, Any]) -> ScriptedAnswer:
    last = body["messages"][-1]["content"]
    return ScriptedAnswer("No" if "policy" in last else json.dumps(COPILOT) if "ask next" in last else ANSWER)


@asynccontextmanager
async def served(
    path: Path, answer: ScriptedAnswer | None = None, *, holds: bool = False
) -> AsyncIterator[tuple[ScriptedEngine, Running]]:
    """answer: of all calls; None: those of `script`."""
    (path / "support.yaml").write_text(json.dumps(DOCUMENT))
    engine = ScriptedEngine(script if answer is None else lambda _body: answer, holds=holds)
    async with engine.replica:
        config: Any = {
            "pools": [{"replicas": [engine.replica.url], "resume_streams": False}],
            "workflows": {"directory": str(path)},
            "model_aliases": {ALIAS: NAME},
        }
        async with running(**config) as run:
            yield engine, run


@asynccontextmanager
async def anthropic_client(run: Running) -> AsyncIterator[anthropic.AsyncAnthropic]:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    async with anthropic.AsyncAnthropic(base_url=run.url, api_key="k", max_retries=0, http_client=http) as client:
        yield client


# -- the texts of one stream, by API


async def chat(run: Running, model: str = NAME) -> AsyncIterator[str]:
    messages: Any = [{"role": "user", "content": QUESTION}]
    async for each in await run.client.chat.completions.create(model=model, messages=messages, stream=True):
        if each.choices and (text := each.choices[0].delta.content):
            yield text


async def messages(run: Running, model: str = NAME) -> AsyncIterator[str]:
    asked: Any = [{"role": "user", "content": QUESTION}]
    async with (
        anthropic_client(run) as client,
        client.messages.stream(model=model, messages=asked, max_tokens=100) as stream,
    ):
        async for text in stream.text_stream:
            yield text
        message = await stream.get_final_message()
        assert (message.model, message.stop_reason) == (model, "end_turn")
        assert message.usage.output_tokens > 0


async def responses(run: Running, model: str = NAME) -> AsyncIterator[str]:
    async for each in await run.client.responses.create(model=model, input=QUESTION, store=False, stream=True):
        if each.type == "response.output_text.delta":
            yield each.delta
        elif each.type == "response.failed":
            raise RuntimeError(each.response.error)


Api = Callable[..., AsyncIterator[str]]
each_api = pytest.mark.parametrize("api", [chat, messages, responses], ids=lambda api: api.__name__)


@each_api
@pytest.mark.parametrize("model", [NAME, ALIAS])
async def test_the_answer_is_read_as_it_comes(tmp_path: Path, api: Api, model: str) -> None:
    async with served(tmp_path, holds=True) as (engine, run):
        texts = api(run, model)
        first = await anext(texts)
        assert first == ANSWER[: len(first)] != ANSWER
        assert len(engine.held) == 1
        engine.release()
        await eventually(lambda: len(engine.held) == 2)  # the critic and the suggestions, at once
        engine.release()
        engine.release()
        assert first + "".join([text async for text in texts]) == ANSWER
        assert engine.cache.calls == 3


@each_api
async def test_a_failure_before_the_first_byte_has_its_status(tmp_path: Path, api: Api) -> None:
    async with served(tmp_path, REFUSED) as (_, run):
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as caught:
            _ = [text async for text in api(run)]
        assert "step answer: the prompt is too long" in str(caught.value)


@each_api
async def test_a_failure_after_the_first_byte_ends_the_stream_with_an_error(tmp_path: Path, api: Api) -> None:
    async with served(tmp_path, BROKEN) as (engine, run):
        with pytest.raises((openai.APIError, anthropic.APIStatusError, RuntimeError), match="step answer"):
            _ = [text async for text in api(run)]
        assert len(engine.replica.requests) == 1, "a step whose text a client has read is not repeated"


@pytest.mark.parametrize(
    ("path", "asked"),
    [("chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}), ("responses", {"input": QUESTION})],
)
async def test_an_error_after_the_first_byte_is_read_by_the_ai_sdk(tmp_path: Path, path: str, asked: dict[str, Any]) -> None:
    """Its providers for OpenAI find an error in a member `error` of an event, with these members; a string, or an event without
    it, would be an unknown chunk, and the stream end well. Nothing but [DONE] may follow.
    """
    async with served(tmp_path, BROKEN) as (_, run):
        body = {"model": NAME, "stream": True, **asked}
        async with run.session.post(f"{run.url}/v1/{path}", json=body) as answer:
            lines = (await answer.text()).split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [each for each in events if each.get("error")] == [events[-1]]
    text = "step answer: The answer broke off."
    members = {"type": "server_error", "param": None, "code": "incomplete_answer", "status": 502}
    assert events[-1]["error"] == {"message": text, **members}


# -- Open WebUI: its backend reads the list of models, sends each turn as a stream, and asks the same model for follow-ups, a
# title and tags, each in one message of the user

HEADERS = {
    "Authorization": "Bearer sk-openwebui",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Ada%20L",
    "X-OpenWebUI-User-Id": "6f2c7d1e-3a53-4f3c-9a43-9ad1a94ef1b0",
    "X-OpenWebUI-User-Email": "ada@example.com",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "0d5b5f0c-11c8-4e0e-8f8b-c9bd2fb1f5ad",
}
TASK = "### Task:\nGenerate a title of 3 to 5 words for the chat history.\n<chat_history>\n{}\n</chat_history>"


async def test_the_requests_of_open_webui(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, run):
        _, _, raw = await run.get("/v1/models", headers=HEADERS)
        assert NAME in [each["id"] for each in json.loads(raw)["data"]]

        history: list[dict[str, str]] = []
        for question in (QUESTION, "And for a used one?"):
            history.append({"role": "user", "content": question})
            body = {"stream": True, "model": NAME, "messages": history, "stream_options": {"include_usage": True}}
            async with run.session.post(run.url + "/v1/chat/completions", json=body, headers=HEADERS) as answer:
                assert (answer.status, answer.content_type) == (200, "text/event-stream")
                lines = [line.decode().rstrip("\n") async for line in answer.content]
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            assert [line for line in lines if line][-1] == "data: [DONE]"
            assert not any("error" in each for each in events)
            text = "".join(choice["delta"].get("content") or "" for each in events for choice in each["choices"])
            assert text == ANSWER
            assert [each["workflow"]["outputs"] for each in events if "workflow" in each] == [OTHERS]
            assert events[-1]["usage"]["total_tokens"] > 0
            history.append({"role": "assistant", "content": text})

        for more in ({}, {"max_completion_tokens": 1000}, {}):
            asked = [{"role": "user", "content": TASK.format(history)}]
            body = {"model": NAME, "messages": asked, "stream": False, **more}
            got, _, found = await run.post(body, headers=HEADERS)
            assert (got, found["choices"][0]["message"]["content"]) == (200, ANSWER)


@documented
async def test_the_client_of_the_docs() -> None:
    client = runpy.run_path(str(ROOT / "docs" / "clients" / "workflow_run.py"))
    said = "One line\u2028of two\x85texts"
    steps = {"a": {"chat": {"from": "${inputs.message_list}"}, "yield": {"as": "a", "stream": "delta"}}}
    document = {**DOCUMENT, "steps": steps, "primary": "a"}
    inputs = {"message_list": [{"role": "user", "content": QUESTION}]}
    scripted = ScriptedEngine(lambda body: REFUSED if "seed" in body else ScriptedAnswer(said))
    async with scripted.replica, running(scripted.replica) as run:

        def outcome(document: dict[str, Any], **members: Any) -> Any:
            try:
                return client["outputs"](run.url, document, inputs, **members)
            except client["RunError"] as error:
                return error.error

        told = await asyncio.to_thread(lambda: list(client["events"](run.url, document, inputs, key="unused")))
        assert "".join(data["text"] for kind, data in told if kind == "output.delta") == said
        assert (told[-1][0], told[-1][1]["outputs"]) == ("run.completed", {"a": said})
        assert await asyncio.to_thread(outcome, document) == {"a": said}
        seeded = {**document, "defaults": {"model": "m", "seed": 1}}
        assert (await asyncio.to_thread(outcome, seeded))["code"] == "step_failed"
        assert (await asyncio.to_thread(outcome, {**document, "name": "A"}))["code"] == "workflow_invalid"
        assert await asyncio.to_thread(outcome, document, limits={"seconds": 0}) == {"reason": "run_timeout"}


async def test_clients_that_leave_at_random_moments_leave_no_memory(tmp_path: Path) -> None:
    chance = random.Random(1)

    def failing(_body: dict[str, Any]) -> ScriptedAnswer:
        broken, refused, endless = (chance.random() < share for share in (0.2, 0.2, 0.3))
        return ScriptedAnswer(ANSWER, None if endless else 0, status=500 if refused else 200, broken=broken)

    async def leaves(run: Running) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.random() * 0.6):
                body = {"model": NAME, "messages": [{"role": "user", "content": QUESTION}], "stream": True}
                async with run.session.post(run.url + "/v1/chat/completions", json=body) as answer:
                    await answer.content.readany()
                    answer.close()

    (tmp_path / "support.yaml").write_text(json.dumps(DOCUMENT))
    engine = ScriptedEngine(failing)
    async with engine.replica, running(engine.replica, workflows={"directory": str(tmp_path)}) as run:
        for _ in range(15):
            await asyncio.gather(*(leaves(run) for _ in range(16)))
        await run.session.close()
        await eventually(lambda: run.gateway.memory.held == 0)
