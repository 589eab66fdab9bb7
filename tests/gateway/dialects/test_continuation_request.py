"""The request for the rest of an answer: what is changed in it, and where there can be none."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from gateway.dialects.dialect import COMPLETE, IMPOSSIBLE
from gateway.dialects.finished_answer import FinishedAnswer
from gateway.dialects.json_edits import apply
from gateway.dialects.openai.continuation_request import continue_body
from gateway.dialects.openai.request import CHAT, COMPLETION
from gateway.dialects.usage import Usage
from tests.support.continuing_engine import chat, completion


def kind_of(body: dict[str, Any]) -> str:
    return CHAT if "messages" in body else COMPLETION


def continuation(kind: str, body: bytes, text: str, tokens: int) -> bytes | None:
    """The request for the rest; b"": nothing is left of it; None: it cannot be asked for."""
    verdict, edits = continue_body(kind, body, text, tokens)
    if verdict == IMPOSSIBLE:
        return None
    return b"" if verdict == COMPLETE else apply(body, edits)


def rest_of(body: dict[str, Any], text: str = "So far", pieces: int = 2) -> Any:
    rest = continuation(kind_of(body), orjson.dumps(body), text, pieces)
    return rest if rest is None or rest == b"" else orjson.loads(rest)


def test_a_chat_goes_on_with_an_open_message() -> None:
    body = chat(max_tokens=10, max_completion_tokens=8, min_tokens=1, seed=3, stop=["x"], vendor=[1])
    assert rest_of(body) == {
        **body,
        "messages": [*body["messages"], {"role": "assistant", "content": "So far"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "max_tokens": 8,
        "max_completion_tokens": 6,
        "min_tokens": 0,
    }


def test_a_message_that_the_client_has_begun_is_extended() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well", "name": "n"}]
    for goes_on in (True, "content"):
        body = chat(messages=messages, continue_final_message=goes_on, add_generation_prompt=False)
        assert rest_of(body) == {**body, "messages": [messages[0], {**messages[1], "content": "WellSo far"}]}
    assert rest_of(chat(messages=messages))["messages"] == [*messages, {"role": "assistant", "content": "So far"}]


ODD = b'{"seed" : 12345678901234567890123, "z":{"b":1, "a":2}, %b "model":"m" } \n'


def test_a_continuation_changes_nothing_else() -> None:
    """Numbers beyond 64 bits, the order of keys, white space: every other byte is the client's."""
    begun = ODD % b'"messages" : [ {"role":"user","content":"\\u00e9"} ] , "max_tokens" : 9,'
    assert continuation(CHAT, begun, 'a"b', 2) == ODD.replace(
        b" } \n", b' ,"add_generation_prompt":false,"continue_final_message":true} \n'
    ) % (b'"messages" : [ {"role":"user","content":"\\u00e9"} ,{"role":"assistant","content":"a\\"b"}] , "max_tokens" : 7,')
    begun = ODD % b'"messages":[{"content" : "W\\u00e9" , "role":"assistant"}], "continue_final_message":true,'
    assert continuation(CHAT, begun, "é\n", 1) == begun.replace(b'W\\u00e9"', 'W\\u00e9é\\n"'.encode()).replace(
        b" } \n", b' ,"add_generation_prompt":false} \n'
    )
    begun = ODD % b'"prompt":"a\\tb","prompt":"c\\td", "max_tokens":9,'
    assert continuation(COMPLETION, begun, "e", 1) == begun.replace(b'\\td"', b'\\tde"').replace(b"9,", b"8,")


def test_a_completion_goes_on_with_its_prompt() -> None:
    assert rest_of(completion(max_tokens=5)) == completion(max_tokens=3, prompt="A story: So far")


def test_without_text_the_request_is_repeated_as_it_was() -> None:
    raw = b'{ "messages": [ {"role":"user"} ], "max_tokens":1 }'
    assert continuation(CHAT, raw, "", 0) is raw


def test_nothing_is_left_when_all_tokens_are_there() -> None:
    assert rest_of(chat(max_tokens=2)) == b""
    assert rest_of(completion(max_tokens=1)) == b""
    so_far = FinishedAnswer()
    so_far.pieces, so_far.usage = 1, Usage(10, 3)
    tokens = so_far.tokens
    assert continuation(CHAT, orjson.dumps(chat(max_tokens=3)), "a b c", tokens) == b""
    assert json.loads(continuation(CHAT, orjson.dumps(chat(max_tokens=5)), "a b c", tokens) or b"")["max_tokens"] == 2
    assert rest_of(chat(max_tokens=1, max_completion_tokens=2)) == b""


@pytest.mark.parametrize(
    "body",
    [
        chat(n=2),
        chat(tools=[{"type": "function"}]),
        chat(tool_choice="auto"),
        chat(response_format={"type": "json_object"}),
        chat(logprobs=True),
        chat(audio={"voice": "x"}),
        chat(frequency_penalty=0.5),
        chat(repetition_penalty=1.1),
        chat(n_cmpl=2),
        chat(modalities=["text", "audio"]),
        chat(max_tokens=10.0),
        chat(max_tokens="10"),
        chat(max_tokens=-1),
        chat(max_tokens=0),
        chat(max_tokens=True),
        chat(max_tokens=1e30),
        chat(max_completion_tokens=10.0),
        chat(max_tokens=2, max_completion_tokens=100),
        chat(min_tokens=1.0),
        chat(add_generation_prompt=0),
        chat(include_reasoning=False),
        chat(stream_interval=8),
        chat(truncation="auto"),
        *(
            chat(**{name: 100})
            for name in ("n_predict", "max_new_tokens", "num_predict", "max_output_tokens", "t_max_predict_ms")
        ),
        chat(n_predict=0),
        chat(truncate_prompt_tokens=-1),
        *(
            chat(**{name: "x"})
            for name in ("regex", "ebnf", "json_schema", "grammar", "structural_tag", "guided_x", "return_x")
        ),
        *(chat(**{name: {"a": 1}}) for name in ("structured_outputs", "guided_json", "vllm_xargs", "kv_transfer_params")),
        chat(input_ids=[1]),
        chat(prompt_embeds=""),
        chat(custom_logit_processor="x"),
        chat(bad_words=["x"]),
        completion(max_tokens=100.0),
        chat(add_generation_prompt=False),
        chat(continue_final_message="reasoning_content"),
        chat(messages=[{"role": "assistant", "content": [{"type": "text", "text": "a"}]}], continue_final_message=True),
        completion(best_of=2),
        completion(echo=True),
        completion(logprobs=1),
        completion(suffix="end"),
        completion(prompt=[1, 2, 3]),
        completion(prompt=["a"]),
        completion(max_tokens=None),
    ],
)
def test_what_would_come_out_otherwise_is_not_asked_for(body: dict[str, Any]) -> None:
    assert rest_of(body) is None


def test_fields_with_their_defaults_do_not_prevent_a_continuation() -> None:
    body = chat(n=1, tools=[], tool_choice=None, logprobs=False, presence_penalty=0, response_format=None)
    body |= {"repetition_penalty": 1.0, "regex": None, "guided_json": None, "structured_outputs": {}, "truncation": "disabled"}
    body |= {"n_predict": None, "return_token_ids": False, "min_tokens": None, "add_generation_prompt": True}
    assert rest_of(body)["messages"][-1]["content"] == "So far"
