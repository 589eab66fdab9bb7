"""No body, whatever is in it, is answered by anything but an answer or the client's mistake, and the engine lives on."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from replica.api.completions.requests import SUPPORTED
from replica.api.messages.requests import SUPPORTED as MESSAGES
from replica.api.responses.requests import SUPPORTED as RESPONSES
from tests.replica.tiny import serving, spoken_model

pytestmark = pytest.mark.model
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
# Each API: its path, its fields, a good body.
APIS: dict[str, tuple[str, frozenset[str], dict[str, Any]]] = {
    "chat": ("chat/completions", SUPPORTED["chat"], HI | {"temperature": 1.0}),
    "completion": ("completions", SUPPORTED["completion"], {"prompt": "Hi", "max_tokens": 1, "temperature": 1.0}),
    "messages": ("messages", MESSAGES, HI),
    "count_tokens": ("messages/count_tokens", MESSAGES, HI),
    "responses": ("responses", RESPONSES, {"input": "Hi", "max_output_tokens": 1}),
    "input_tokens": ("responses/input_tokens", RESPONSES, {"input": "Hi"}),
}
HEAD = orjson.dumps(HI)
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.5, 1e-30, 1e300, 1 << 63, -(1 << 63)),
    *("", "x", "\x00", "\ud7ff\U0010ffff", "([" * 50, "{" * 50, "auto", "1e400"),
    *([], [None], [[]], [[[1]]], [0], [-1], [1 << 40], ["a", 1], [{}], [["x"]], ["x"] * 3),
    *({}, {"": ""}, {"1": 100}, {"-1": 1}, {"type": "json_object"}, {"type": "json_schema"}, {"json": {}}, {"regex": "("}),
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(?=a)"}}},
    [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": {}}]}],
    [{"role": {}, "content": "x"}],
    [{"role": "assistant", "content": "x", "tool_calls": 5}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": []}]}],
    [{"type": "text", "text": 5, "cache_control": {"type": "ephemeral"}}],
    [{"type": []}],
    [{"type": "function", "name": "f", "parameters": []}],
    [{"type": "function_call", "name": 1}],
    {"type": "tool", "name": 5},
    {"format": {"type": "json_schema", "schema": {"$ref": "#/nowhere"}}},
    {"grammar": "start:"},
    {"grammar": 'root ::= "a"'},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spoken_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def client(model: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(model, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}") as asking:
        yield asking


@pytest.mark.parametrize("kind", ["chat", "completion", "messages", "responses"])
async def test_no_value_of_any_field_is_the_servers_mistake(client: openai.AsyncOpenAI, kind: str) -> None:
    path, fields, good = APIS[kind]
    wrong = {}
    for field in sorted(fields):
        for value in VALUES:
            answer = await client._client.post(f"{client.base_url}{path}", content=orjson.dumps(good | {field: value}))
            if answer.status_code not in (200, 400, 404):
                wrong[f"{field}={value!r}"] = (answer.status_code, answer.text[:200])
    assert not wrong
    assert (await client._client.get(str(client.base_url).removesuffix("v1/") + "health")).status_code == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        b"null",
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 500 + b"]" * 500 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "seed": 123456789012345678901234567890}',
        b'{"prompt": "x", "prompt": 5}',
    ],
)
async def test_bodies_that_are_no_requests(client: openai.AsyncOpenAI, raw: bytes) -> None:
    for path, *_ in APIS.values():
        answer = await client._client.post(f"{client.base_url}{path}", content=raw)
        assert answer.status_code == 400
        shape = {"type", "message"} if path.startswith("messages") else {"message", "type", "param", "code"}
        assert set(answer.json()["error"]) == shape
