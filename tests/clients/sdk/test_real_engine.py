"""The real engine, with a tiny model of random weights, by the official clients through a gateway: what a simulated engine does
not do (structured output), and whole and streamed answers of each API, as they are and translated.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from aiohttp import web
from pydantic import BaseModel, ConfigDict

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from replica.api.server import ServerConfig, create_app
from tests.clients.sdk.engines import chat_alone
from tests.clients.sdk.tap import Tapped
from tests.gateway.conftest import running
from tests.replica.tiny import running as engine_of
from tests.replica.tiny import spoken_model

pytestmark = pytest.mark.model
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TURNS: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


class Vote(BaseModel):
    model_config = ConfigDict(extra="forbid")
    choice: Literal["yes", "no"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spoken_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=["native", "translated"])
async def clients(request: pytest.FixtureRequest, model: Path) -> AsyncIterator[Tapped]:
    async with contextlib.AsyncExitStack() as stack:
        engine = await stack.enter_async_context(engine_of(model, chat_template=TEMPLATE))
        app = create_app(engine, "m", ServerConfig())
        app.cleanup_ctx.clear()  # the engine has a lifetime of its own
        if request.param == "translated":
            app.middlewares.append(chat_alone)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        run = await stack.enter_async_context(running(f"http://127.0.0.1:{runner.addresses[0][1]}"))
        tapped = Tapped(run.url)
        yield tapped
        tapped.check()


async def test_structured_output(clients: Tapped) -> None:
    async with clients.openai() as client:
        response = await client.responses.parse(model="m", input="Hi", text_format=Vote, max_output_tokens=300)
        assert response.output_parsed is not None
        assert response.output_parsed.choice in ("yes", "no")
        async with client.responses.stream(model="m", input="Hi", text_format=Vote, max_output_tokens=300) as parts:
            assert (await parts.get_final_response()).output_parsed == response.output_parsed
        chat = await client.chat.completions.parse(model="m", messages=TURNS, response_format=Vote, max_tokens=300)
        assert chat.choices[0].message.parsed == response.output_parsed
    async with clients.anthropic() as other:
        message = await other.messages.parse(model="m", max_tokens=300, messages=TURNS, output_format=Vote)
        assert message.parsed_output == response.output_parsed


async def test_a_forced_call(clients: Tapped) -> None:
    async with clients.openai() as client:
        function: Any = {"type": "function", "name": "vote", "parameters": TOOL, "strict": True}
        asked: Any = {"model": "m", "input": "Hi", "tools": [function], "tool_choice": "required", "max_output_tokens": 300}
        called: Any = (await client.responses.create(**asked)).output
    async with clients.anthropic() as other:
        tools: Any = [{"name": "vote", "input_schema": TOOL}]
        message = await other.messages.create(
            model="m", max_tokens=300, messages=TURNS, tools=tools, tool_choice={"type": "any"}
        )
    assert [(item.type, item.name) for item in called] == [("function_call", "vote")]
    assert [(block.type, block.input["n"] in (1, 2)) for block in message.content if block.type == "tool_use"] == [
        ("tool_use", True)
    ]


async def messages(clients: Tapped) -> tuple[str, str]:
    async with clients.anthropic() as client:
        whole = await client.messages.create(model="m", max_tokens=12, messages=TURNS)
        async with client.messages.stream(model="m", max_tokens=12, messages=TURNS) as stream:
            text = await stream.get_final_text()
    return whole.content[0].text if whole.content[0].type == "text" else "", text


async def responses(clients: Tapped) -> tuple[str, str]:
    async with clients.openai() as client:
        whole = await client.responses.create(model="m", input="Hi", max_output_tokens=12)
        stream = await client.responses.create(model="m", input="Hi", max_output_tokens=12, stream=True)
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
    return whole.output_text, text


@pytest.mark.parametrize("talk", [messages, responses], ids=["messages", "responses"])
async def test_whole_and_streamed_answers_are_the_same(
    clients: Tapped, talk: Callable[[Tapped], Awaitable[tuple[str, str]]]
) -> None:
    whole, streamed = await talk(clients)
    assert whole == streamed != ""
