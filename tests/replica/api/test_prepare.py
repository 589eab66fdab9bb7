"""Errors name the fields that the client has sent; what comes back of prompts is bounded, and made once."""

import contextlib
import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from replica.api.bodies import LONG_BODY
from replica.api.completions.requests import parse
from replica.api.prepare import prepare
from replica.api.responses.requests import MAX_REPEATED, parse_responses
from replica.api.server import ServerConfig
from replica.api.validation import ApiError
from replica.cache.prefix import Prefix, Scope
from replica.engine import EngineInfo, EngineRequest, Sequence
from replica.sim.cost import SimConfig
from tests.replica.conftest import Replica, serve
from tests.replica.fakes import WatchedEngine

CHAT, COMPLETION, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
MANY = "x y " * 6000
LARK = 'start: "a"'


PATTERN = {"name": "x", "schema": {"type": "string", "pattern": "x"}}  # the simulated engine does not follow it


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": MANY}]}, "messages"),
        (COMPLETION, {"prompt": MANY}, "prompt"),
        (COMPLETION, {"prompt": [-1]}, "prompt"),
        (COMPLETION, {"prompt": ["a"] * 2000}, "prompt"),
        (COMPLETION, {"prompt": ["a"] * 200, "n": 100, "temperature": 1}, "n"),
        (RESPONSES, {"input": MANY}, "input"),
        (CHAT, {"messages": HI, "max_tokens": 9000}, "max_tokens"),
        (CHAT, {"messages": HI, "max_completion_tokens": 9000}, "max_completion_tokens"),
        (COMPLETION, {"prompt": "Hi", "max_tokens": 9000}, "max_tokens"),
        (RESPONSES, {"input": "Hi", "max_output_tokens": 9000}, "max_output_tokens"),
        (CHAT, {"messages": HI, "response_format": {"type": "json_schema", "json_schema": PATTERN}}, "response_format"),
        (CHAT, {"messages": HI, "guided_grammar": LARK}, "guided_grammar"),
        (CHAT, {"messages": HI, "guided_grammar": "a" * 40_000}, "guided_grammar"),
        (COMPLETION, {"prompt": "Hi", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
        (RESPONSES, {"input": "Hi", "text": {"format": {"type": "json_schema", **PATTERN}}}, "text.format"),
    ],
)
async def test_an_error_names_the_field_that_was_sent(replica: Replica, path: str, body: dict[str, Any], param: str) -> None:
    status, answer, _ = await replica.post(path, body)
    error: Any = answer["error"]
    assert (status, error["param"]) == (400, param), error


class Scoring(WatchedEngine):
    """Says that it has scores, and a small vocabulary."""

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, scores=True, vocab_size=1000)

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [1] if text.strip() == "known" else [5000]


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"n": 12, "logprobs": 20, "max_tokens": 2048}, False),
        ({"n": 13, "logprobs": 20, "max_tokens": 2048}, True),
        ({"n": 128, "logprobs": 20, "max_tokens": 2048, "stream": True}, False),
        ({"n": 128, "logprobs": 0, "max_tokens": 4096}, False),
        ({"prompt": [[1]] * 13, "logprobs": 20, "max_tokens": 2048}, True),
    ],
)
def test_scores_that_are_collected_have_a_bound(fields: dict[str, Any], refused: bool) -> None:
    body = {"prompt": [1], "temperature": 1.0} | fields
    request = parse("completion", json.dumps(body).encode(), "sim")
    with pytest.raises(ApiError, match="at most 524,288 are collected") if refused else contextlib.nullcontext():
        prepare(Scoring(SimConfig(kv_tokens=1_000_000)), request)


def test_bad_words_that_cannot_be_drawn_are_left_out() -> None:
    """A tokenizer may have more tokens than its model."""
    request = parse("completion", json.dumps({"prompt": [1], "bad_words": ["known", "unknown"]}).encode(), "sim")
    assert [one.bad_words for one in prepare(Scoring(SimConfig()), request).requests] == [((1,),)]


@pytest.mark.parametrize("name", ["metadata", "text", "tools", "tool_choice"])
def test_what_a_response_repeats_has_a_bound(name: str) -> None:
    long = "x" * MAX_REPEATED
    values: dict[str, Any] = {
        "metadata": {"a": long},
        "text": {"format": {"type": "text"}, "a": long},
        "tools": [{"type": "web_search", "a": long}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [long]},
    }
    with pytest.raises(ApiError, match="at most 1,048,576 are repeated") as refused:
        parse_responses(json.dumps({"input": "Hi", name: values[name]}).encode(), "sim")
    assert (refused.value.status, refused.value.param) == (400, name)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/" + "x" * 5000, {}),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x" * 5000, "content": ""}]}],
            },
        ),
    ],
    ids=["path", "id"],
)
async def test_an_error_has_the_beginning_of_what_was_sent(replica: Replica, path: str, body: dict[str, Any]) -> None:
    _, answer, _ = await replica.post(path, body)
    error: Any = answer["error"]
    assert "x" * 150 in error["message"]
    assert len(error["message"]) < 600


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "w " * 150_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "w " * 150_000}]}, "messages"),
        ("/v1/responses/input_tokens", {"input": "w " * 150_000}, "input"),
        (RESPONSES, {"input": "word " * 40_000}, "input"),
    ],
)
async def test_so_does_one_that_comes_before_all_is_tokenized(path: str, body: dict[str, Any], param: str) -> None:
    async for replica in serve(WatchedEngine(SimConfig(kv_tokens=1_000)), None, ServerConfig()):
        status, answer, _ = await replica.post(path, body)
        error: Any = answer["error"]
        assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded")


@pytest.mark.parametrize("name", ["echo", "return_token_ids"])
async def test_prompts_come_back_as_long_as_the_answer_is_of_a_sane_size(name: str) -> None:
    async for replica in serve(WatchedEngine(SimConfig(decode_rate=10_000.0, prefill_rate=1e6)), None, ServerConfig()):
        body = {"prompt": [[7] * 3_000] * 5, "n": 128, "temperature": 1, name: True, "max_tokens": 1}
        status, answer, _ = await replica.post(COMPLETION, body)
        error: Any = answer["error"]
        assert (status, error["param"]) == (400, name)
        assert "1,920,000 tokens of prompts; at most 262,144" in error["message"]
        status, answer, _ = await replica.post(COMPLETION, body | {"n": 2})
        assert status == 200


async def test_a_chat_has_its_prompt_once() -> None:
    async for replica in serve(WatchedEngine(SimConfig(decode_rate=10_000.0, prefill_rate=1e6)), None, ServerConfig()):
        body = {"messages": [{"role": "user", "content": "x " * 3_000}], "n": 128, "temperature": 1, "max_tokens": 1}
        status, answer, _ = await replica.post(CHAT, body | {"return_token_ids": True})
        assert status == 200
        ids: Any = answer["prompt_token_ids"]
        assert 128 * len(ids) > 262_144


async def test_a_prompt_of_tokens_becomes_a_text_once_and_beside_the_event_loop() -> None:
    class Listening(WatchedEngine):
        decoded_by: list[threading.Thread]

        def decode(self, tokens: list[int], special: bool = False) -> str:
            if len(tokens) > 1:
                self.decoded_by.append(threading.current_thread())
            return super().decode(tokens, special)

    engine = Listening(SimConfig(decode_rate=10_000.0, prefill_rate=1e6))
    engine.decoded_by = []
    async for replica in serve(engine, None, ServerConfig()):
        body = {"prompt": [[7] * LONG_BODY, [8] * 10], "n": 4, "temperature": 1, "echo": True, "max_tokens": 1}
        status, answer, _ = await replica.post(COMPLETION, body)
        choices: Any = answer["choices"]
        assert (status, len(choices)) == (200, 8)
        assert len(engine.decoded_by) == 2
        assert threading.main_thread() not in engine.decoded_by


async def test_the_blocks_of_a_prompt_are_hashed_before_the_engine_has_it() -> None:
    class Listening(WatchedEngine):
        def __init__(self) -> None:
            super().__init__(SimConfig(decode_rate=10_000.0, prefill_rate=1e6))
            self.seen: list[EngineRequest] = []

        def submit(self, request: EngineRequest) -> Sequence:
            self.seen.append(request)
            return super().submit(request)

    engine = Listening()
    async for replica in serve(engine, None, ServerConfig()):
        prompts = [[7] * 40, [8] * LONG_BODY]
        body = {"prompt": prompts, "max_tokens": 1, "cache_salt": "a", "n": 2, "temperature": 1}
        assert (await replica.post(COMPLETION, body))[0] == 200
        assert [request.hashed is not None and request.hashed.keys for request in engine.seen] == [
            Prefix(prompts[at], 16, Scope(salt="a")).keys for at in (0, 1, 0, 1)
        ]
