"""Bodies in, answers out: every mistake has its own status, field and advice."""

import json
from typing import Any

import orjson
import pytest

from replica.api.completions.encoder import ResponseEncoder
from replica.api.completions.requests import GenerationRequest, Kind, OutputOptions, parse
from replica.api.validation import ApiError
from replica.cache.prefix import Scope
from replica.engine import SamplingOptions
from replica.output.generation import Delta, TokenUsage

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def call(kind: Kind = "chat", **fields: Any) -> GenerationRequest:
    base: dict[str, Any] = {"messages": MESSAGES} if kind == "chat" else {"prompt": "Hi"}
    return parse(kind, json.dumps(base | fields).encode(), "m")  # orjson writes no deep nesting


def nested(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("raw", "param", "message"),
    [
        (b"", None, "not valid JSON"),
        (b'{"messages": [', None, "not valid JSON"),
        (b"[]", None, "must be a JSON object, not a list"),
        (b"{}", "messages", "at least one message"),
        (b'{"messages": []}', "messages", "at least one message"),
        (b'{"messages": "hi"}', "messages", "at least one message"),
        (b'{"messages": [1]}', "messages[0]", "an object with a role"),
        (b'{"messages": [{"role": "user", "content": 1}]}', "messages[0]", "a string or a list of parts, not a number"),
    ],
)
def test_bodies_that_are_no_chat(raw: bytes, param: str | None, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        parse("chat", raw, "m")
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"max_completion_tokens": -3}, "max_completion_tokens", "at least 1, got -3"),
        ({"max_tokens": "5"}, "max_tokens", "must be an integer of at least 1, not a string"),
        ({"max_tokens": True}, "max_tokens", "must be an integer of at least 1, not a boolean"),
        ({"temperature": 3}, "temperature", "from 0 to 2, got 3"),
        ({"temperature": "hot"}, "temperature", "from 0 to 2"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"seed": 1.5}, "seed", "must be an integer"),
        ({"n": 2}, "n", "the same answer n times"),
        ({"n": 2, "temperature": 0.0005}, "n", "a temperature of at least 0.001"),
        ({"n": 0, "temperature": 1}, "n", "from 1 to 128, got 0"),
        ({"best_of": 2}, "best_of", "leave it out"),
        ({"top_k": -2}, "top_k", "at least 1, or 0 or -1"),
        ({"min_p": 1.5}, "min_p", "from 0 to 1"),
        ({"presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
        ({"frequency_penalty": "a"}, "frequency_penalty", "from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 10"),
        ({"min_tokens": -1}, "min_tokens", "at least 0"),
        ({"min_tokens": 1, "guided_regex": "a"}, "min_tokens", "leave out min_tokens"),
        ({"ignore_eos": True, "guided_regex": "a"}, "ignore_eos", "leave out ignore_eos"),
        ({"skip_special_tokens": 1}, "skip_special_tokens", "true or false"),
        ({"return_token_ids": "yes"}, "return_token_ids", "true or false"),
        ({"tool_choice": "required", "tools": [{}]}, "tool_choice", "together with tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "together with tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS}, "tool_choice", "names the function"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice", "'auto', 'none', 'required' or"),
        ({"tool_choice": "required", "tools": TOOLS, "guided_regex": "a"}, "guided_regex", "Only one format"),
        ({"tools": [nested(500)]}, "tools", "nested too deeply"),
        ({"guided_json": nested(500)}, "guided_json", "nested too deeply"),
        ({"messages": [{"role": "user", "tool_calls": nested(500)}]}, "messages", "nested too deeply"),
        ({"unknown": nested(500)}, "unknown", "nested too deeply"),
        ({"u" * 5000: nested(500)}, "u" * 200 + "...", "nested too deeply"),
        ({"bad_words": [" "]}, "bad_words", "none blank"),
        ({"bad_words": ["x" * 257]}, "bad_words", "at most 256 characters"),
        ({"bad_words": ["x"] * 1025}, "bad_words", "at most 1024 strings"),
        ({"bad_words": "x"}, "bad_words", "a list of at most 1024 strings"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "1 to 262144 token ids"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids", "1 to 262144 token ids"),
        ({"allowed_token_ids": [1] * 262_145}, "allowed_token_ids", "1 to 262144 token ids"),
        ({"allowed_token_ids": [1], "guided_regex": "a"}, "allowed_token_ids", "decides which tokens are allowed"),
        ({"bad_words": ["x"], "guided_regex": "a"}, "bad_words", "decides which tokens are allowed"),
        ({"tool_choice": "auto"}, "tool_choice", "together with tools"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": 1}},
            "stream_options.continuous_usage_stats",
            "true or false",
        ),
        ({"logit_bias": {"a": 1}}, "logit_bias", "an object of at most 4096 token ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
        ({"top_logprobs": 2}, "top_logprobs", "only allowed together with logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids", "a list of at most 1024 token ids"),
        ({"chat_template": 1}, "chat_template", "must be a string"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs", "must be an object"),
        ({"truncation": "yes"}, "truncation", "'auto'"),
        ({"stream": "yes"}, "stream", "true or false, not a string"),
        ({"stream_options": {}}, "stream_options", "only allowed together with stream"),
        ({"stream": True, "stream_options": 1}, "stream_options", "must be an object"),
        ({"stop": [""]}, "stop", "of 1 to 1024 characters"),
        ({"stop": "x" * 1025}, "stop", "of 1 to 1024 characters"),
        ({"stop": 5}, "stop", "a string or a list"),
        ({"cache_salt": ""}, "cache_salt", "1 to 1024 characters"),
        ({"cache_salt": 5}, "cache_salt", "1 to 1024 characters"),
        ({"cache_salt": "x" * 1025}, "cache_salt", "1 to 1024 characters"),
        ({"cache_retention": "24h"}, "cache_retention", "one of '5m', '1h', or left out"),
        ({"cache_retention": []}, "cache_retention", "one of '5m', '1h', or left out"),
        ({"tools": {}}, "tools", "must be a list, not an object"),
        ({"add_generation_prompt": 1}, "add_generation_prompt", "true or false, not a number"),
        ({"continue_final_message": "yes"}, "continue_final_message", "true or false, not a string"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "send one of them"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "reads text only"),
    ],
)
def test_fields_that_are_wrong(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        call(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("prompt", [None, "", [], [1, "a"], [1.5], [True], {}, 5])
def test_prompts_that_are_wrong(prompt: Any) -> None:
    with pytest.raises(ApiError, match="a text or a list of token ids"):
        call("completion", prompt=prompt)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"suffix": ""}, "suffix", "not supported"),
        ({"echo": 1}, "echo", "true or false"),
        ({"echo": True, "logprobs": 0}, "echo", "no scores"),
        ({"prompt": ["a", ""]}, "prompt", "none of them empty"),
        ({"prompt": ["a", 1]}, "prompt", "none of them empty"),
        ({"prompt": ["a"] * 4097}, "prompt", "has 4,097 prompts; one request may have 4,096"),
        ({"prompt": [[1], []]}, "prompt", "none of them empty"),
    ],
)
def test_fields_of_completions_that_are_wrong(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        call("completion", **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_another_model_is_not_found() -> None:
    with pytest.raises(ApiError, match="'x' does not exist; this replica serves 'm'") as caught:
        call(model="x")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_whose_cache_and_for_how_long() -> None:
    assert (call().scope, call().keep_s) == (Scope(), 0.0)
    checked = call(cache_salt="tenant-a", cache_retention="1h")
    assert (checked.scope, checked.keep_s) == (Scope(salt="tenant-a"), 3600.0)


def test_defaults() -> None:
    chat, completion = call(model="m"), call("completion")
    assert (chat.max_tokens, completion.max_tokens) == (None, 16)
    assert (chat.sampling, chat.n, chat.stops, chat.output) == (SamplingOptions(), 1, (), OutputOptions())
    assert chat.ignored == ()


def test_how_a_chat_prompt_ends() -> None:
    assert call().prompts[0].end == "answer"
    assert call(add_generation_prompt=True, continue_final_message=False).prompts[0].end == "answer"
    assert call(add_generation_prompt=False).prompts[0].end == "none"
    assert call(continue_final_message=True).prompts[0].end == "open"
    assert call(continue_final_message=True, add_generation_prompt=False).prompts[0].end == "open"


def test_prompts_in_all_their_forms() -> None:
    assert call("completion", prompt="a b").prompts[0].text == "a b"
    assert call("completion", prompt=["a b"]).prompts[0].text == "a b"
    assert call("completion", prompt=[1, 2]).prompts[0].tokens == [1, 2]
    assert call("completion", prompt=[[1, 2]]).prompts[0].tokens == [1, 2]
    assert [prompt.text for prompt in call("completion", prompt=["a", "b"]).prompts] == ["a", "b"]
    assert [prompt.tokens for prompt in call("completion", prompt=[[1], [2, 3]]).prompts] == [[1], [2, 3]]


def test_the_form_of_an_answer() -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    asked = call("completion", stream=True, stream_options=usage, echo=True, return_token_ids=True, skip_special_tokens=False)
    assert asked.output == OutputOptions(stream=True, usage="each", echo=True, token_ids=True, special=True)
    assert asked.ignored == ()
    assert call(stream=True, stream_options={"include_usage": True}).output.usage == "last"
    assert call(stream=True, stream_options={"continuous_usage_stats": True}).output.usage == "none"  # as in vLLM


def test_tools_stay_in_the_prompt_whatever_the_choice() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for choice in ("auto", "none", None):
        checked = call(tools=tools, tool_choice=choice)
        assert checked.prompts[0].tools == tools
        assert checked.ignored == ()
    assert call(tool_choice="none").prompts[0].tools is None


def test_messages_in_all_their_forms() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    checked = call(messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": []}])
    assert checked.prompts[0].messages is not None
    assert [message["content"] for message in checked.prompts[0].messages] == ["ab", ""]


def test_what_is_not_honoured_is_named() -> None:
    checked = call(presence_penalty=0.5, logit_bias={}, suffix="x", echo=True, prompt_logprobs=0, unknown_field=1)
    assert checked.ignored == ("echo", "prompt_logprobs", "suffix", "unknown_field")
    assert checked.needs_scores == ("presence_penalty",)
    assert call("completion", messages=[1]).ignored == ("messages",)


@pytest.mark.parametrize(
    "fields", [{"parallel_tool_calls": False}, {"made_up": False}, {"made_up": 0}, {"made_up": ""}, {"made_up": []}]
)
def test_a_field_can_ask_for_something_with_any_value(fields: dict[str, Any]) -> None:
    assert call(**fields).ignored == tuple(fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"made_up": None},
        {"parallel_tool_calls": True, "store": False, "service_tier": "auto", "metadata": {}, "echo": False},
        {"include_stop_str_in_output": False, "spaces_between_special_tokens": True, "length_penalty": 1.0},
    ],
)
def test_what_is_done_anyway_is_not_named(fields: dict[str, Any]) -> None:
    assert call(**fields).ignored == ()


def test_only_what_changes_scores_needs_scores() -> None:
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "top_k": -1, "min_p": 0}
    assert call(logit_bias={}, **neutral).needs_scores == ()
    assert call(repetition_penalty=1.5, top_k=1).needs_scores == ("repetition_penalty", "top_k")


def test_errors_will_name_the_fields_that_were_sent() -> None:
    assert (call().limit_field, call(max_tokens=5).limit_field) == ("max_tokens", "max_tokens")
    assert call(max_completion_tokens=5).limit_field == "max_completion_tokens"
    assert call("completion", guided_regex="a").format_field == "guided_regex"
    assert (call().prompts[0].param, call("completion").prompts[0].param) == ("messages", "prompt")


def test_names_of_ignored_fields_are_safe_in_a_header_and_few() -> None:
    assert call(**{"a\r\nb: c": 1, "": 1, "é": 1, "x" * 65: 1}).ignored == ()
    assert len(call(**{f"field{at}": 1 for at in range(500)}).ignored) == 20


def test_answers_have_openais_shape() -> None:
    usage = TokenUsage(prompt_tokens=10, completion_tokens=3, cached_tokens=8)
    chat = orjson.loads(ResponseEncoder("chat", "chatcmpl-1", "m", 7).whole([Delta("Yes.", finish="stop")], usage))
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": "Yes."}
    assert chat["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    text = orjson.loads(ResponseEncoder("completion", "cmpl-1", "m", 7).whole([Delta("Yes.", finish="length")], usage))
    assert (text["object"], text["choices"][0]["text"], text["choices"][0]["finish_reason"]) == (
        "text_completion",
        "Yes.",
        "length",
    )
