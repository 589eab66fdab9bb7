"""Broken streams, pure: wherever a stream is cut, what is told, asked for and spliced gives the undisturbed answer."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import resume
from gateway.api.openai import CHAT, COMPLETION
from gateway.metering import Usage
from gateway.resume import Kept, Splice, Told, continuation, ending, told
from gateway.tap import StreamTap
from tests.fakes import DONE
from tests.gateway.test_tap import cut
from tests.teller import CACHED_TOKENS, ENGINE_ERROR, PROMPT_TOKENS, STORY, TEXT, Style, chat, completion, events, line

USAGE = {"stream_options": {"include_usage": True}}
EACH = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
styles = st.builds(Style, st.booleans(), st.booleans())
places = st.lists(st.integers(0, 5000), max_size=8)


def kind_of(body: dict[str, Any]) -> str:
    return CHAT if "messages" in body else COMPLETION


def read(data: bytes) -> tuple[str, list[str], list[Any], list[Any], int]:
    """What a client makes of a stream: the text, why it ended, the usages, who sent it, how many [DONE]."""
    text, finishes, usages, heads, done = "", list[str](), list[Any](), list[Any](), 0
    for event in data.split(b"\n\n")[:-1]:
        content = event.removeprefix(b"data: ")
        if content == b"[DONE]":
            done += 1
            continue
        answer = json.loads(content)
        assert not done
        heads.append((answer["id"], answer["created"], answer["model"]))
        usages += [answer["usage"]] if answer.get("usage") else []
        for choice in answer["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, finishes, usages, heads, done


def resumed(body: dict[str, Any], cuts: list[int], style: Style, where: list[int]) -> tuple[bytes, Usage | None]:
    """What the client gets, and the usage, where one replica after the other dies after so many events."""
    kind, sent, usage, parts = kind_of(body), b"", None, 0
    strip = "stream_options" not in body
    asked = {**USAGE, **body}
    for stop in [*cuts, None]:
        so_far = told(kind, sent)
        assert so_far is not None
        rest = b"" if so_far.finished or so_far.done else continuation(kind, orjson.dumps(asked), so_far)
        assert rest is not None
        if not rest:
            return sent + ending(kind, so_far, None if strip else usage or so_far.usage), usage or so_far.usage
        splice = Splice(so_far, strip)
        stream = b"".join(events(orjson.loads(rest), f"c-{parts}", style)[:stop])
        sent += b"".join([splice.feed(chunk) for chunk in cut(stream, where)])
        usage, parts = splice.usage or usage, parts + 1
        if splice.tap.done:
            break
    return sent, usage


@given(
    st.sampled_from(
        [
            chat(),
            chat(**USAGE),
            chat(**EACH),
            chat(max_tokens=7, **USAGE),
            completion(**EACH),
            chat(max_tokens=len(STORY)),
            completion(**USAGE),
        ]
    )
    | st.builds(lambda limit: completion(max_tokens=limit), st.integers(1, 30)),
    st.lists(st.integers(1, 25), max_size=3),
    styles,
    places,
)
def test_wherever_it_is_cut_the_client_reads_the_undisturbed_answer(
    body: dict[str, Any], cuts: list[int], style: Style, where: list[int]
) -> None:
    whole, whole_usage = resumed(body, [], style, [])
    sent, usage = resumed(body, cuts, style, where)
    text, finishes, usages, heads, done = read(sent)
    expected = read(whole)
    assert (text, finishes, done) == (expected[0], expected[1], 1)
    assert set(heads) == {("c-0", 0, "m")}
    assert whole_usage is not None
    assert whole_usage.completion == len(STORY[: body.get("max_tokens", 1000)])
    if usage:  # else it was cut where nothing but the usage was missing
        assert (usage.prompt, usage.completion) == (whole_usage.prompt, whole_usage.completion)
        assert usage.cached in (None, CACHED_TOKENS)
    assert bool(usages) is (bool(usage) and "stream_options" in body)
    for counts in usages:
        assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
        assert counts["prompt_tokens"] == PROMPT_TOKENS


@given(st.integers(0, 25), styles)
def test_what_is_told_is_exact(count: int, style: Style) -> None:
    sent = b"".join(events(chat(), style=style)[:count])
    so_far = told(CHAT, sent)
    assert so_far is not None
    assert so_far.text == "".join(STORY[: so_far.pieces])
    assert so_far.text == read(sent)[0]
    assert so_far.tokens == so_far.pieces
    assert so_far.done is (DONE in sent)


def chunk_of(**choice: Any) -> bytes:
    return line({"id": "c", "object": "o", "created": 1, "model": "m", "choices": [{"index": 0, **choice}]})


@pytest.mark.parametrize(
    "odd",
    [
        chunk_of(delta={"tool_calls": [{"index": 0}]}),
        chunk_of(delta={"content": "a", "reasoning_content": "hm"}),
        chunk_of(delta={"reasoning": "hm"}),
        chunk_of(delta={"content": ["a"]}),
        chunk_of(delta={"content": "a"}, logprobs={"content": []}),
        chunk_of(delta="a"),
        chunk_of(index=1, delta={"content": "a"}),
        line({"choices": [{"index": 0, "delta": {}}, {"index": 1, "delta": {}}]}),
        line({"choices": None}),
        line({"error": {"message": "bad", "code": 400}}),
        b"data: {broken\n\n",
        b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}',  # half of a monster
        b"data: [1]\n\n",
    ],
)
def test_what_is_more_than_a_text_is_not_resumed(odd: bytes) -> None:
    before = events(chat())[0]
    if odd.endswith(b"\n\n"):
        assert told(CHAT, before + odd) is None
    assert told(CHAT, before + odd[:40]) is None


def test_comments_and_empty_fields_do_no_harm() -> None:
    data = b": ping\n\n" + chunk_of(delta={"role": "assistant", "content": None, "tool_calls": [], "refusal": None})
    so_far = told(CHAT, data + chunk_of(delta={"content": "a"}) + chunk_of(delta={}, finish_reason="stop"))
    assert so_far is not None
    assert (so_far.text, so_far.pieces, so_far.finished, so_far.done) == ("a", 1, True, False)


def rest_of(body: dict[str, Any], text: str = "So far", pieces: int = 2) -> Any:
    rest = continuation(kind_of(body), orjson.dumps(body), Told(text=text, pieces=pieces))
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
    assert continuation(CHAT, begun, Told(text='a"b', pieces=2)) == ODD.replace(
        b" } \n", b' ,"add_generation_prompt":false,"continue_final_message":true} \n'
    ) % (b'"messages" : [ {"role":"user","content":"\\u00e9"} ,{"role":"assistant","content":"a\\"b"}] , "max_tokens" : 7,')
    begun = ODD % b'"messages":[{"content" : "W\\u00e9" , "role":"assistant"}], "continue_final_message":true,'
    assert continuation(CHAT, begun, Told(text="é\n", pieces=1)) == begun.replace(
        b'W\\u00e9"', 'W\\u00e9é\\n"'.encode()
    ).replace(b" } \n", b' ,"add_generation_prompt":false} \n')
    begun = ODD % b'"prompt":"a\\tb","prompt":"c\\td", "max_tokens":9,'
    assert continuation(COMPLETION, begun, Told(text="e", pieces=1)) == begun.replace(b'\\td"', b'\\tde"').replace(b"9,", b"8,")


def test_a_completion_goes_on_with_its_prompt() -> None:
    assert rest_of(completion(max_tokens=5)) == completion(max_tokens=3, prompt="A story: So far")


def test_without_text_the_request_is_repeated_as_it_was() -> None:
    raw = b'{ "messages": [ {"role":"user"} ], "max_tokens":1 }'
    assert continuation(CHAT, raw, Told(pieces=0)) is raw


def test_nothing_is_left_when_all_tokens_are_there() -> None:
    assert rest_of(chat(max_tokens=2)) == b""
    assert rest_of(completion(max_tokens=1)) == b""
    told_by_usage = Told(text="a b c", pieces=1, usage=Usage(10, 3))
    assert continuation(CHAT, orjson.dumps(chat(max_tokens=3)), told_by_usage) == b""
    assert json.loads(continuation(CHAT, orjson.dumps(chat(max_tokens=5)), told_by_usage) or b"")["max_tokens"] == 2


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


def test_what_says_nothing_does_not_hinder() -> None:
    body = chat(n=1, tools=[], tool_choice=None, logprobs=False, presence_penalty=0, response_format=None)
    assert rest_of(body)["messages"][-1]["content"] == "So far"


def test_streams_beyond_a_bound_are_not_kept() -> None:
    original, resume.MAX_KEPT_BYTES = resume.MAX_KEPT_BYTES, 10
    try:
        kept = Kept()
        for size in (4, 6):
            kept.add(b"x" * size)
        assert kept.whole() == b"x" * 10
        kept.add(b"x")
        kept.add(b"y")
        assert kept.whole() is None
        assert kept._parts == []
    finally:
        resume.MAX_KEPT_BYTES = original


def test_each_event_of_a_continuation_passes_at_once() -> None:
    splice = Splice(Told(head={"id": "first"}, text="a", pieces=1), strip_usage=True)
    role, *rest = events(chat())
    assert splice.feed(role) == b"", "the client knows the role already"
    assert orjson.loads(splice.feed(rest[0])[6:])["id"] == "first"
    assert splice.feed(rest[1][:20]) == b""
    assert splice.feed(rest[1][20:])
    assert splice.feed(b": ping\n\n") == b": ping\n\n"
    assert splice.feed(DONE[:-2]) == b""
    assert splice.finish() == DONE[:-2]


def test_cached_tokens_are_at_most_the_prompt() -> None:
    splice = Splice(Told(head={"id": "first"}, text="a b", pieces=2), strip_usage=False)
    usage = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_cache_hit_tokens": 12, "vendor": 1}
    out = orjson.loads(splice.feed(line({"choices": [], "usage": usage}))[6:])
    assert out["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "total_tokens": 15,
        "prompt_cache_hit_tokens": 10,
        "vendor": 1,
    }
    assert splice.usage == Usage(10, 5, 10)


@given(st.integers(0, 20), places, st.booleans())
def test_an_engines_word_of_its_failure_does_not_pass(count: int, where: list[int], strip: bool) -> None:
    good = b"".join(events(chat())[:-1][:count])
    tap = StreamTap(strip)
    out = b"".join([tap.feed_closely(chunk) for chunk in cut(good + ENGINE_ERROR + DONE, where)]) + tap.finish()
    assert out == good
    assert tap.failure is not None
    assert "out of memory" in tap.failure.message
    assert not tap.done


@pytest.mark.parametrize(
    ("error", "own"),
    [
        ({"message": "x", "code": 500}, True),
        ({"message": "x", "code": 503, "type": "t"}, True),
        ({"message": "x", "code": None, "type": "server_error"}, True),
        ({"message": "x", "code": 400, "type": "server_error"}, False),
        ({"message": "x", "code": "invalid", "type": "invalid_request_error"}, False),
        ("text", False),
        (None, False),
    ],
)
def test_whose_fault_an_error_event_is(error: Any, own: bool) -> None:
    tap = StreamTap(strip_usage=True)
    event = line({"error": error})
    assert tap.feed_closely(event) == (b"" if own else event)
    assert (tap.failure is not None) is own
    assert StreamTap(strip_usage=True).feed(event) == event, "to one who does not look closely it is an event like any other"


def test_an_answer_that_talks_of_errors_is_no_error() -> None:
    data = chunk_of(delta={"content": '{"error": {"code": 500}}'})
    tap = StreamTap(strip_usage=True)
    assert tap.feed_closely(data) == data
    assert tap.failure is None
    assert TEXT
