"""An engine's words about a full context become those of the client's API, whatever the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import orjson
import pytest

from gateway.dialects.anthropic import errors as anthropic
from gateway.dialects.full_context import CODE, PATTERNS, FullContext, full_context
from gateway.dialects.openai.errors import full_context_error
from gateway.fleet.engines import DISTRIBUTED_LLAMA, ENGINES, EngineProfile
from tests.gateway.fleet.test_engine_conformance import kept_in, recorded

COMMON: Final = "This model's maximum context length is 4096 tokens"
AT_LEAST: Final = "However, you requested 64 output tokens and your prompt contains at least 4033 input tokens"
# Engine, its words, and the numbers in them: prompt, output, most. Verbatim, but for the numbers.
WORDS: Final[tuple[tuple[str, str, tuple[int, int, int]], ...]] = (
    ("vllm", f"{COMMON}. However, your prompt contains at least 4097 input tokens, which exceeds this limit", (4097, 0, 4096)),
    ("vllm", f"{COMMON}. {AT_LEAST}, for a total of at least 4097 tokens. Please reduce", (4033, 64, 4096)),
    (
        "vllm",
        f"{COMMON}. However, you requested 64 output tokens and your prompt contains 100000 characters (more than 24192",
        (0, 64, 4096),
    ),
    ("vllm", f"{COMMON}. However, your request has 5000 input tokens. Please reduce the length", (5000, 0, 4096)),
    ("vllm", f"{COMMON}. However, your request has 8 input tokens plus 4090 'max_tokens'.", (8, 4090, 4096)),
    (
        "vllm",
        f"{COMMON}. However, you requested 5060 tokens (4036 in the messages, 1024 in the completion).",
        (4036, 1024, 4096),
    ),
    ("vllm", f"{COMMON}, however you requested 4116 tokens (3860 in your prompt; 256 for the completion).", (3860, 256, 4096)),
    (
        "vllm",
        f"'max_tokens' or 'max_completion_tokens' is too large: 5000. {COMMON} and your request has 100 input tokens",
        (100, 5000, 4096),
    ),
    ("vllm", "The decoder prompt (length 5000) is longer than the maximum model length of 4096. Make sure", (5000, 0, 4096)),
    ("sglang", "The input (61709 tokens) is longer than the model's context length (40960 tokens).", (61709, 0, 40960)),
    (
        "sglang",
        "Requested token count exceeds the model's maximum context length of 64000 tokens. You requested a total of 71897"
        " tokens: 7897 tokens from the input messages and 64000 tokens for the completion. Please reduce the number",
        (7897, 64000, 64000),
    ),
    ("sglang", "Input length (265330) exceeds model's maximum context length (262144).", (265330, 0, 262144)),
    (
        "sglang",
        "Input length (9000 tokens) exceeds the maximum allowed length (8192 tokens). Use a shorter input",
        (9000, 0, 8192),
    ),
    ("llamacpp", "request (9031 tokens) exceeds the available context size (4096 tokens), try increasing it", (9031, 0, 4096)),
    ("llamacpp", "the request exceeds the available context size. try increasing the context size", (0, 0, 0)),
    (
        "tgi",
        "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens and 20 `max_new_tokens`",
        (5000, 20, 4096),
    ),
    ("tgi", "Input validation error: `inputs` must have less than 4096 tokens. Given: 5000", (5000, 0, 4096)),
    ("ollama", "prompt too long; exceeded max context length by 904 tokens", (0, 0, 0)),
    ("warmroute", "The prompt has 5000 tokens; at most 4095 leave room for an answer. Shorten it.", (5000, 0, 4095)),
    ("warmroute", "100 prompt tokens and 4000 for the answer are more than the 4096 tokens of the model.", (100, 4000, 4096)),
    ("openai", f"{COMMON}. However, your messages resulted in 5000 tokens. Please reduce", (5000, 0, 4096)),
    ("unknown", f"{COMMON}. However, you requested 5000 tokens.", (0, 0, 4096)),
)


def error(message: str, **more: Any) -> bytes:
    return json.dumps({"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400, **more}}).encode()


def read(body: bytes) -> FullContext:
    found = full_context(body)
    assert found is not None
    return found


@pytest.mark.parametrize(("engine", "message", "numbers"), WORDS)
def test_an_engine_s_words_and_their_numbers(engine: str, message: str, numbers: tuple[int, int, int]) -> None:
    found = read(error(message))
    assert (found.prompt, found.output, found.most) == numbers
    assert found.least == ("at least" in message or not numbers[0])
    first = next(name for name, pattern in PATTERNS if pattern.search(message))
    assert first == engine


@pytest.mark.parametrize(
    "engine", [engine for engine in ENGINES if engine is not DISTRIBUTED_LLAMA], ids=lambda each: each.name
)
def test_every_engine_of_the_table_has_words(engine: EngineProfile) -> None:
    """They become those of both APIs. Distributed-Llama has none: it cuts the prompt."""
    words = [message for name, message, _ in WORDS if name == engine.name]
    assert words
    for message in words:
        full = read(error(message))
        full.complete(5000, 4096)
        said: str = orjson.loads(anthropic.full_context_error(full, "r-1"))["error"]["message"]
        assert said.startswith(("prompt is too long: ", "input length and `max_tokens` exceed context limit: "))
        assert orjson.loads(full_context_error(full, error(message)))["error"]["code"] == CODE


def test_every_pattern_has_words() -> None:
    tried = {next(pattern for _, pattern in PATTERNS if pattern.search(words)) for _, words, _ in WORDS}
    assert tried == {pattern for _, pattern in PATTERNS}, "a pattern without words"


@recorded
@pytest.mark.parametrize(("name", "numbers"), [("vllm", (4097, 4096)), ("llamacpp", (9031, 4096))])
def test_recorded_errors(name: str, numbers: tuple[int, int]) -> None:
    found = read(json.dumps(kept_in(f"{name}/error_too_long.json")).encode())
    assert (found.prompt, found.most) == numbers


@pytest.mark.parametrize(
    "body",
    [
        error("prompt is too long: 24000 tokens > 20000 maximum"),
        error("input length and `max_tokens` exceed context limit: 1 + 2 > 2, decrease input length or `max_tokens`"),
        error("'messages' is required"),
        error(""),
        b"{",
        b"[]",
        b"maximum context length is 4096 tokens",
        error(COMMON + "x" * (16 << 10)),
    ],
)
def test_other_errors_and_right_words_stay(body: bytes) -> None:
    assert full_context(body) is None


def test_an_error_with_only_the_code_counts() -> None:
    found = read(error("Your input exceeds the context window of this model.", code=CODE))
    assert repr(found) == "<FullContext 0+ and 0 of 0>"


@pytest.mark.parametrize(
    ("message", "estimate", "context", "words"),
    [
        (WORDS[0][1], 0, None, "prompt is too long: 4097 tokens > 4096 maximum"),
        (WORDS[0][1], 9000, None, "prompt is too long: 9000 tokens > 4096 maximum"),  # the engine stopped counting at 4097
        (WORDS[3][1], 9000, None, "prompt is too long: 5000 tokens > 4096 maximum"),  # it has counted
        (
            "Requested token count exceeds the model's maximum context length of 64000 tokens. You requested a total of 71897"
            " tokens: 7897 tokens from the input messages and 64000 tokens for the completion.",
            0,
            None,
            "input length and `max_tokens` exceed context limit: 7897 + 64000 > 64000, decrease input length or `max_tokens`"
            " and try again",
        ),
        # There is too little room for an answer.
        (WORDS[5][1], 0, None, "prompt is too long: 4036 tokens > 3072 maximum"),
        (
            "prompt too long; exceeded max context length by 904 tokens",
            5000,
            None,
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        ("the request exceeds the available context size", 5000, 4096, "prompt is too long: 5000 tokens > 4096 maximum"),
        (
            "the request exceeds the available context size",
            0,
            None,
            "prompt is too long: the request exceeds the available context size",
        ),
        (
            f"{COMMON}.",
            3000,
            None,
            "prompt is too long: 4097 tokens > 4096 maximum",
        ),  # more than the maximum, as clients expect
    ],
)
def test_words_of_messages(message: str, estimate: int, context: int | None, words: str) -> None:
    found = read(error(message))
    found.complete(estimate, context)
    answer = orjson.loads(anthropic.full_context_error(found, "r-1"))
    assert answer == {"type": "error", "error": {"type": "invalid_request_error", "message": words}, "request_id": "r-1"}


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (error("the request exceeds the available context size", n_ctx=4096), {"param": None, "n_ctx": 4096}),
        (b'{"object":"error","message":"the request exceeds the available context size","code":400}', {"param": None}),
        (b'{"error":"the request exceeds the available context size","error_type":"validation"}', {"param": None}),
    ],
)
def test_openai_s_code(body: bytes, kept: Mapping[str, Any]) -> None:
    """The engine's message and its members stay."""
    answer = orjson.loads(full_context_error(read(body), body))
    message = "the request exceeds the available context size"
    assert answer == {"error": {"message": message, "type": "invalid_request_error", "code": CODE, **kept}}
