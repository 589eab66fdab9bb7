"""Bodies in, answers out: every mistake has its own status, field and advice."""

from typing import Any

import orjson
import pytest

from replica.prefix import Scope
from replica.wire import Answer, ApiError, Call, Kind, Usage, parse

MESSAGES = [{"role": "user", "content": "Hi"}]


def call(kind: Kind = "chat", **fields: Any) -> Call:
    base: dict[str, Any] = {"messages": MESSAGES} if kind == "chat" else {"prompt": "Hi"}
    return parse(kind, orjson.dumps(base | fields), "m")


@pytest.mark.parametrize(
    ("raw", "param", "says"),
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
def test_bodies_that_are_no_chat(raw: bytes, param: str | None, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        parse("chat", raw, "m")
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
        ({"max_completion_tokens": -3}, "max_completion_tokens", "at least 1, got -3"),
        ({"max_tokens": "5"}, "max_tokens", "must be an integer, not a string"),
        ({"max_tokens": True}, "max_tokens", "must be an integer, not a boolean"),
        ({"temperature": 3}, "temperature", "from 0 to 2, got 3"),
        ({"temperature": "hot"}, "temperature", "from 0 to 2"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"seed": 1.5}, "seed", "must be an integer"),
        ({"n": 2}, "n", "Only one answer"),
        ({"stream": "yes"}, "stream", "true or false, not a string"),
        ({"stream_options": {}}, "stream_options", "only allowed together with stream"),
        ({"stream": True, "stream_options": 1}, "stream_options", "must be an object"),
        ({"stop": [""]}, "stop", "none empty"),
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
def test_fields_that_are_wrong(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        call(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("prompt", [None, "", [], [1, "a"], [1.5], [True], {}, 5])
def test_prompts_that_are_wrong(prompt: Any) -> None:
    with pytest.raises(ApiError, match="a text or a list of token ids"):
        call("completion", prompt=prompt)


def test_several_prompts_are_refused_with_advice() -> None:
    with pytest.raises(ApiError, match="send them one by one"):
        call("completion", prompt=["a", "b"])


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
    assert (chat.temperature, chat.top_p, chat.seed, chat.stops, chat.stream) == (0.0, 1.0, None, (), False)
    assert chat.ignored == ()


def test_how_a_chat_prompt_ends() -> None:
    assert call().tail == "answer"
    assert call(add_generation_prompt=True, continue_final_message=False).tail == "answer"
    assert call(add_generation_prompt=False).tail == "none"
    assert call(continue_final_message=True).tail == "open"
    assert call(continue_final_message=True, add_generation_prompt=False).tail == "open"


def test_prompts_in_all_their_forms() -> None:
    assert call("completion", prompt="a b").text == "a b"
    assert call("completion", prompt=["a b"]).text == "a b"
    assert call("completion", prompt=[1, 2]).tokens == [1, 2]
    assert call("completion", prompt=[[1, 2]]).tokens == [1, 2]


def test_messages_in_all_their_forms() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    checked = call(messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": []}])
    assert checked.messages is not None
    assert [message["content"] for message in checked.messages] == ["ab", ""]


def test_what_is_not_honoured_is_named() -> None:
    checked = call(presence_penalty=0.5, logprobs=True, logit_bias={}, frequency_penalty=0, unknown_field=1)
    assert checked.ignored == ("presence_penalty", "logprobs")


def test_answers_have_openais_shape() -> None:
    usage = Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=8)
    chat = orjson.loads(Answer("chat", "chatcmpl-1", "m", 7).whole("Yes.", "stop", usage))
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": "Yes."}
    assert chat["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    text = orjson.loads(Answer("completion", "cmpl-1", "m", 7).whole("Yes.", "length", usage))
    assert (text["object"], text["choices"][0]["text"], text["choices"][0]["finish_reason"]) == (
        "text_completion",
        "Yes.",
        "length",
    )
