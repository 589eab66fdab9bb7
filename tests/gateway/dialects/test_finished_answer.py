"""Finished answers: the same value from a body and from a stream, in each dialect; cut, strange and large streams."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.finished_answer import MAX_ANSWER, MAX_NAME, MAX_PARTS, MAX_VALUES, AnswerAssembler, FinishedAnswer
from gateway.dialects.openai.chat_answer import MAX_CALLS
from gateway.dialects.table import DIALECTS
from gateway.dialects.usage import Usage
from tests.gateway.dialects.conversations import TEXTS, VALUES
from tests.gateway.dialects.test_openai_stream import cut
from tests.support.paths import CAPTURES

CHAT, COMPLETION, MESSAGES, RESPONSES = "chat", "completion", "messages", "responses"
ALL = (CHAT, COMPLETION, MESSAGES, RESPONSES)
DONE = b"data: [DONE]\n\n"
places = st.lists(st.integers(0, 4000), max_size=6)


def assembler(dialect: str) -> AnswerAssembler:
    found = {one.name: one for one in DIALECTS.values()}[dialect].assembler()
    assert found is not None
    return found


def of_stream(dialect: str, *chunks: bytes) -> FinishedAnswer | None:
    made = assembler(dialect)
    for chunk in chunks:
        made.feed(chunk)
    made.finish()
    return made.answer()


def of_body(dialect: str, body: bytes | dict[str, Any]) -> FinishedAnswer | None:
    made = assembler(dialect)
    made.read(body if isinstance(body, bytes) else json.dumps(body).encode())
    return made.answer()


def said(answer: FinishedAnswer | None) -> tuple[Any, ...] | None:
    return known(answer) if answer else None


def known(answer: FinishedAnswer | None) -> tuple[Any, ...]:
    """All that a value says."""
    assert answer is not None
    parts = [(part.kind, part.id, part.name, part.text) for part in answer.parts]
    return answer.id, answer.model, parts, answer.finish_reason, answer.stop, answer.token_ids, answer.usage, answer.whole


def event(data: dict[str, Any], name: str = "") -> bytes:
    head = b"event: %b\n" % name.encode() if name else b""
    return head + b"data: %b\n\n" % json.dumps(data).encode()


# -- one answer in each dialect, whole and as a stream


def chat(
    pieces: list[str], thoughts: list[str], calls: list[dict[str, Any]], reason: str = ""
) -> tuple[dict[str, Any], list[bytes]]:
    head = {"id": "c-1", "model": "m", "created": 1}
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
    reason = reason or ("tool_calls" if calls else "stop")
    made = [
        {"id": f"call_{at}", "type": "function", "function": {"name": f"f{at}", "arguments": json.dumps(each)}}
        for at, each in enumerate(calls)
    ]
    message = {"role": "assistant", "content": "".join(pieces), "reasoning": "".join(thoughts), "tool_calls": made}
    body = {
        **head,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "stop_reason": "END"}],
        "usage": usage,
    }
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning": each} for each in thoughts] + [{"content": each} for each in pieces]
    for at, call in enumerate(made):
        arguments = call["function"]["arguments"]  # type: ignore[index]
        deltas.append({"tool_calls": [{**call, "index": at, "function": {"name": f"f{at}", "arguments": ""}}]})
        deltas += [{"tool_calls": [{"index": at, "function": {"arguments": each}}]} for each in (arguments[:3], arguments[3:])]
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason, "stop_reason": "END"}]})
    chunks.append({**head, "choices": [], "usage": usage})
    return body, [*[event(each) for each in chunks], DONE]


def completion(pieces: list[str], _thoughts: list[str], _calls: list[dict[str, Any]]) -> tuple[dict[str, Any], list[bytes]]:
    head = {"id": "c-1", "model": "m"}
    usage = {"prompt_tokens": 9, "completion_tokens": 5}
    body = {**head, "choices": [{"index": 0, "text": "".join(pieces), "finish_reason": "length"}], "usage": usage}
    chunks: list[dict[str, Any]] = [{**head, "choices": [{"index": 0, "text": each}]} for each in pieces]
    last: dict[str, Any] = {**head, "choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage}
    return body, [*[event(each) for each in (*chunks, last)], DONE]


def messages(pieces: list[str], thoughts: list[str], calls: list[dict[str, Any]]) -> tuple[dict[str, Any], list[bytes]]:
    head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if thoughts:
        deltas = [{"type": "thinking_delta", "thinking": each} for each in thoughts]
        blocks.append(({"type": "thinking", "thinking": "", "signature": "s"}, deltas))
        blocks.append(({"type": "redacted_thinking", "data": "sealed"}, []))
    if pieces:
        blocks.append(({"type": "text", "text": ""}, [{"type": "text_delta", "text": each} for each in pieces]))
    for at, call in enumerate(calls):
        text = json.dumps(call)
        deltas = [{"type": "input_json_delta", "partial_json": each} for each in ("", text[:2], text[2:])]
        blocks.append(({"type": "tool_use", "id": f"call_{at}", "name": f"f{at}", "input": {}}, deltas))
    content, events = (
        [],
        [event({"type": "message_start", "message": {**head, "content": [], "usage": {"input_tokens": 9}}}, "message_start")],
    )
    inputs = iter(calls)
    for at, (block, deltas) in enumerate(blocks):
        whole = dict(block)
        for name in ("text", "thinking"):
            if name in block:
                whole[name] = "".join(delta[name] for delta in deltas)
        if block["type"] == "tool_use":
            whole["input"] = next(inputs)
        content.append(whole)
        events.append(event({"type": "content_block_start", "index": at, "content_block": block}, "content_block_start"))
        events += [event({"type": "content_block_delta", "index": at, "delta": each}, "content_block_delta") for each in deltas]
        events.append(event({"type": "content_block_stop", "index": at}, "content_block_stop"))
    why = {"stop_reason": "tool_use" if calls else "stop_sequence", "stop_sequence": None if calls else "END"}
    usage = {"input_tokens": 5, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 0, "output_tokens": 5}
    events.append(event({"type": "message_delta", "delta": why, "usage": usage}, "message_delta"))
    events.append(event({"type": "message_stop"}, "message_stop"))
    return {**head, "content": content, **why, "usage": usage}, events


def responses(pieces: list[str], thoughts: list[str], calls: list[dict[str, Any]]) -> tuple[dict[str, Any], list[bytes]]:
    head: dict[str, Any] = {
        "id": "resp_1",
        "object": "response",
        "model": "m",
        "status": "in_progress",
        "output": [],
        "usage": None,
    }
    output, told = list[dict[str, Any]](), list[tuple[str, dict[str, Any]]]()
    if thoughts:
        text = "".join(thoughts)
        item = {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": text}],
            "encrypted_content": "sealed",
        }
        told.append(
            ("response.output_item.added", {"output_index": 0, "item": {"type": "reasoning", "id": "rs_1", "summary": []}})
        )
        place = {"output_index": 0, "summary_index": 0}
        told += [("response.reasoning_summary_text.delta", {**place, "delta": each}) for each in thoughts]
        told.append(("response.output_item.done", {"output_index": 0, "item": item}))
        output.append(item)
    if pieces:
        at = len(output)
        item = {"type": "message", "id": "msg_1", "content": [{"type": "output_text", "text": "".join(pieces)}]}
        told.append(("response.output_item.added", {"output_index": at, "item": {**item, "content": []}}))
        told += [("response.output_text.delta", {"output_index": at, "content_index": 0, "delta": each}) for each in pieces]
        told.append(("response.output_item.done", {"output_index": at, "item": item}))
        output.append(item)
    for number, call in enumerate(calls):
        at, text = len(output), json.dumps(call)
        item = {
            "type": "function_call",
            "id": f"fc_{number}",
            "call_id": f"call_{number}",
            "name": f"f{number}",
            "arguments": text,
        }
        told.append(("response.output_item.added", {"output_index": at, "item": {**item, "arguments": ""}}))
        told += [
            ("response.function_call_arguments.delta", {"output_index": at, "delta": each}) for each in (text[:2], text[2:])
        ]
        told.append(("response.output_item.done", {"output_index": at, "item": item}))
        output.append(item)
    usage = {"input_tokens": 9, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 4}}
    body = {**head, "status": "completed", "output": output, "usage": usage}
    events = [("response.created", {"response": head}), *told, ("response.completed", {"response": body})]
    return body, [event({"type": name, "sequence_number": at, **data}, name) for at, (name, data) in enumerate(events)]


Made = Callable[[list[str], list[str], list[dict[str, Any]]], tuple[dict[str, Any], list[bytes]]]
MADE: dict[str, Made] = {CHAT: chat, COMPLETION: completion, MESSAGES: messages, RESPONSES: responses}
texts = st.lists(TEXTS.filter(bool), min_size=1, max_size=4)
calls = st.lists(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=2), max_size=3)


@pytest.mark.parametrize("dialect", ALL)
@given(pieces=texts, thoughts=texts, called=calls, where=places)
def test_a_body_and_its_stream_have_the_same_value(
    dialect: str, pieces: list[str], thoughts: list[str], called: list[dict[str, Any]], where: list[int]
) -> None:
    body, events = MADE[dialect](pieces, thoughts, called)
    whole = of_body(dialect, body)
    assert known(of_stream(dialect, *cut(b"".join(events), where))) == known(whole)
    assert whole is not None
    assert whole.whole
    assert whole.text == "".join(pieces)
    if dialect != COMPLETION:
        assert whole.reasoning == "".join(thoughts)
        assert [(call.id, call.name, json.loads(call.text)) for call in whole.calls] == [
            (f"call_{at}", f"f{at}", each) for at, each in enumerate(called)
        ]
        assert whole.finish_reason == ("tool_calls" if called else "stop")
        assert whole.usage == Usage(9, 5, 4)


@pytest.mark.parametrize("dialect", ALL)
@given(at=st.integers(0, 4000))
def test_a_stream_that_is_cut_anywhere_gives_a_part_that_says_so(dialect: str, at: int) -> None:
    _, events = MADE[dialect](["Hé", "llo"], ["h", "m"], [{"a": "é"}])
    data = b"".join(events)
    whole, part = of_stream(dialect, data), of_stream(dialect, data[:at])
    assert whole is not None
    assert part is not None
    assert part.whole is (data[:at].rstrip().endswith(events[-1].rstrip()))
    for kind in ("text", "reasoning"):
        assert whole.joined(kind).startswith(part.joined(kind))
    if at >= len(data) - len(events[-1]):
        assert part.text == whole.text


@pytest.mark.parametrize("dialect", ALL)
def test_unknown_events_and_members_are_passed_over(dialect: str) -> None:
    body, events = MADE[dialect](["a", "b"], ["c"], [{"d": 1}])
    wanted = known(of_body(dialect, body))
    strange: list[bytes] = [
        b": ping\n\n",
        b"event: ping\ndata: {}\n\n",
        event({"type": "later", "index": 0}, "later"),
        b"retry: 5\n\n",
        b"id: 7\n\n",
    ]
    mixed = b"".join(each + strange[at % len(strange)] for at, each in enumerate(events))
    assert known(of_stream(dialect, b"".join(strange) + mixed)) == wanted
    assert known(of_body(dialect, {"later": {"a": [1]}, **body})) == wanted
    if dialect == MESSAGES:
        body["content"].append({"type": "server_tool_use", "id": "s", "name": "n", "input": {}})
        next(block for block in body["content"] if block["type"] == "tool_use")["text"] = "later"
    if dialect == RESPONSES:
        body["output"] += [{"type": "web_search_call", "id": "ws", "status": "completed"}, 5]
    assert known(of_body(dialect, body)) == wanted


MEMBERS = """id type model choices delta message content text tool_calls function name arguments index usage error output item
    output_index content_block response token_ids finish_reason incomplete_details input summary"""
NAMES = """message_start content_block_start content_block_delta message_delta error response.created response.output_item.done
    response.output_text.delta response.completed response.failed later"""
JUNK = st.recursive(
    VALUES,
    lambda inner: st.dictionaries(st.sampled_from(MEMBERS.split()), inner | st.lists(inner, max_size=2), max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize("dialect", ALL)
@given(junk=st.lists(st.tuples(st.sampled_from(NAMES.split()), JUNK), max_size=4))
def test_whatever_an_engine_writes_is_survived(dialect: str, junk: list[tuple[str, Any]]) -> None:
    """No reader raises; a value, or that there is none, is the same from each event alone and from its bytes one by one."""
    for name, data in junk:
        stream = b"event: %b\ndata: %b\n\n" % (name.encode(), json.dumps(data).encode()) + DONE
        assert said(of_stream(dialect, stream)) == said(of_stream(dialect, *(bytes([byte]) for byte in stream)))
        for body in (data, {"choices": [{"message": data}], "content": [data], "output": [data]}):
            written = json.dumps(body).encode()
            assert said(of_body(dialect, written)) == said(of_body(dialect, b" " + written + b"\n"))


# -- what each dialect has of its own


def test_forms_of_chat_that_engines_have() -> None:
    """A content in parts, arguments as an object, one chunk like a whole answer, token ids."""
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "hi"}]
    call = {"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}
    choice = {"message": {"content": parts, "tool_calls": [call]}, "finish_reason": "stop", "token_ids": [1, 2, None]}
    for found in (
        of_body(CHAT, {"choices": [choice]}),
        of_stream(CHAT, event({"choices": [{**choice, "index": 0}]}), DONE),
    ):
        assert found is not None
        assert (found.text, found.reasoning, found.parts[0].name, found.token_ids) == ("hi", "hm", "reasoning_content", [1, 2])
        assert [(each.id, each.name, each.text) for each in found.calls] == [("c", "f", '{"a":1}')]


def test_a_refusal() -> None:
    found = of_body(CHAT, {"choices": [{"message": {"content": None, "refusal": "No."}, "finish_reason": "stop"}]})
    assert found is not None
    assert (found.text, found.refusal) == ("", "No.")
    item = {"type": "message", "content": [{"type": "refusal", "refusal": "No."}]}
    found = of_body(RESPONSES, {"output": [item]})
    assert found is not None
    assert (found.text, found.refusal) == ("", "No.")


def test_sealed_parts_and_several_texts() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "b"}]
    found = of_body(MESSAGES, {"content": content, "stop_reason": "max_tokens"})
    assert found is not None
    assert [part.text for part in found.of("text")] == ["a", "b"]
    assert [(part.name, part.text) for part in found.of("sealed")] == [("redacted_thinking", "x")]
    assert found.finish_reason == "length"


def test_only_the_first_choice_is_read() -> None:
    second = event({"choices": [{"index": 1, "delta": {"content": "x"}}]})
    found = of_stream(CHAT, *chat(["a"], [], [])[1][:-1], second, DONE)
    assert found is not None
    assert found.text == "a"


@pytest.mark.parametrize(
    ("dialect", "report"),
    [
        (CHAT, event({"error": {"message": "out of memory", "code": 500}})),
        (COMPLETION, event({"object": "error", "message": "out of memory"})),
        (MESSAGES, event({"type": "error", "error": {"type": "api_error"}}, "error")),
        (RESPONSES, event({"type": "response.failed", "response": {"error": {"message": "x"}}}, "response.failed")),
    ],
)
def test_nothing_after_a_failure_makes_an_answer_whole(dialect: str, report: bytes) -> None:
    _, events = MADE[dialect](["a", "b"], [], [])
    found = of_stream(dialect, *events[:-3], report, *events[-3:])
    assert found is not None
    assert not found.whole


def test_a_failed_response_is_not_whole() -> None:
    found = of_body(RESPONSES, {"status": "failed", "output": [], "error": {"code": "server_error"}})
    assert found is not None
    assert not found.whole


def test_a_response_is_read_without_pieces_or_without_its_end() -> None:
    """Some engines write items only as a whole; some leave the output out of the last event."""
    body, events = responses(["a", "b"], ["c"], [{"d": 1}])
    wanted = known(of_body(RESPONSES, body))
    assert known(of_stream(RESPONSES, *[each for each in events if b"delta" not in each and b"added" not in each])) == wanted
    last = event({"type": "response.completed", "response": {**body, "output": []}}, "response.completed")
    assert known(of_stream(RESPONSES, *events[:-1], last)) == wanted


def test_custom_tools() -> None:
    item = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "a\nb"}
    found = of_body(RESPONSES, {"output": [item]})
    assert found is not None
    assert [(call.id, call.name, call.text) for call in found.calls] == [("c", "patch", "a\nb")]


def test_arguments_of_a_message_that_are_no_json_stay() -> None:
    _, events = messages([], [], [{"a": 1}])
    found = of_stream(MESSAGES, *[each.replace(b"1}", b"") for each in events])
    assert found is not None
    assert found.calls[0].text.startswith('{"a"')
    found = of_stream(MESSAGES, *[each for each in events if b"input_json_delta" not in each])
    assert found is not None
    assert found.calls[0].text == "{}"


def test_deltas_of_a_message_that_only_count_change_no_reason_and_no_arguments() -> None:
    _, events = messages([], [], [{"a": 1}])
    count = event({"type": "message_delta", "delta": {}, "usage": {"output_tokens": 9}}, "message_delta")
    at = next(at for at, each in enumerate(events) if b"input_json_delta" in each)
    found = of_stream(MESSAGES, *events[:at], count, *events[at:-1], count, events[-1])
    assert found is not None
    assert (found.calls[0].text, found.finish_reason, found.whole) == ('{"a":1}', "tool_calls", True)
    assert found.usage is not None
    assert found.usage.completion == 9


# -- bounds


def named(at: int) -> bytes:
    """A call whose name takes room."""
    block = {"type": "tool_use", "id": "c", "name": "n" * (1 << 16), "input": {}}
    return event({"index": at, "content_block": block}, "content_block_start")


def test_what_is_too_large_has_no_value_and_is_not_held() -> None:
    piece = event({"choices": [{"index": 0, "delta": {"content": "x" * 60_000}}]})
    made = assembler(CHAT)
    for _ in range(MAX_ANSWER // 60_000):
        made.feed(piece)
    assert made.answer() is not None
    assert 0.9 * MAX_ANSWER < made.size <= MAX_ANSWER
    made.feed(piece)
    assert (made.answer(), made.size) == (None, 0)
    made.feed(piece)
    made.finish()
    assert (made.answer(), made.size) == (None, 0)


@pytest.mark.parametrize(
    ("dialect", "data"),
    [
        (CHAT, b"data: " + b"x" * MAX_ANSWER + b"y"),
        (CHAT, b"data: x\n\n"),
        (CHAT, b"data: [1]\n\n"),
        (CHAT, b"data: [" + b"1," * 2 * MAX_VALUES + b"1]\n\n"),
        (CHAT, b"".join(event({"choices": [{"delta": {}, "token_ids": [7] * 9000}]}) for _ in range(13))),
        (CHAT, event({"choices": [{"delta": {"tool_calls": [{"index": at, "function": {}} for at in range(MAX_CALLS + 1)]}}]})),
        (CHAT, event({"choices": [{"delta": {"tool_calls": [{"function": {"name": "f" * (MAX_NAME + 1)}}]}}]})),
        (
            MESSAGES,
            b"".join(
                event({"index": at, "content_block": {"type": "text", "text": ""}}, "content_block_start")
                for at in range(MAX_PARTS + 1)
            ),
        ),
        (
            RESPONSES,
            event(
                {"response": {"output": [{"content": [{"type": "output_text", "text": ""}] * (MAX_PARTS + 1)}]}},
                "response.completed",
            ),
        ),
        (MESSAGES, b"".join(named(at) for at in range(80))),
        (CHAT, event({"id": "x" * (MAX_NAME + 1), "choices": []})),
        (CHAT, event({"model": "x" * (MAX_NAME + 1), "choices": []})),
        (CHAT, event({"choices": [{"index": 0, "delta": {}, "finish_reason": "x" * (MAX_NAME + 1)}]})),
    ],
)
def test_hostile_streams_have_no_value(dialect: str, data: bytes) -> None:
    assert of_stream(dialect, data) is None


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"{}", b'{"x":"' + b"y" * MAX_ANSWER + b'"}', b"[" * 100_000])
def test_bodies_that_are_no_answer_have_no_value(dialect: str, body: bytes) -> None:
    assert of_body(dialect, body) is None


def test_what_comes_byte_by_byte_is_held_in_one_piece() -> None:
    made = assembler(CHAT)
    for _ in range(20_000):
        made.feed(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
    assert made.size == 20_000


# -- recorded answers

captured = pytest.mark.skipif(not CAPTURES.is_dir(), reason="no recorded answers here")


@captured
@pytest.mark.parametrize(
    ("dialect", "body", "stream"),
    [
        (CHAT, "vllm/chat_2_same.json", "vllm/chat_5_stream_usage.sse"),
        (CHAT, "llamacpp/chat_2_same.json", "llamacpp/chat_8_stream_usage.sse"),
        (MESSAGES, "vllm/messages_anthropic.json", "vllm/messages_anthropic_stream.sse"),
        (MESSAGES, "llamacpp/messages_anthropic.json", "llamacpp/messages_anthropic_stream.sse"),
    ],
)
def test_a_recorded_body_and_the_stream_of_the_same_request(dialect: str, body: str, stream: str) -> None:
    whole = of_body(dialect, recorded(body))
    streamed = of_stream(dialect, Path(CAPTURES, stream).read_bytes())
    assert whole is not None
    assert streamed is not None
    assert whole.text
    assert (whole.text, whole.finish_reason, whole.whole) == (streamed.text, streamed.finish_reason, streamed.whole)
    assert whole.usage is not None
    assert streamed.usage is not None
    assert whole.usage.completion == streamed.usage.completion


def recorded(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(CAPTURES, file).read_text("utf-8"))["response"]
    return found


@captured
def test_other_recorded_answers() -> None:
    ids = of_body(CHAT, recorded("vllm/chat_8_return_token_ids.json"))
    assert ids is not None
    assert ids.usage is not None
    assert len(ids.token_ids) == ids.usage.completion
    told = of_stream(RESPONSES, Path(CAPTURES, "vllm/responses_stream.sse").read_bytes())
    assert told is not None
    assert (told.text, told.finish_reason, told.whole) == ("Hello there! Welcome to the world of", "length", True)
    for file in ("vllm/responses.json", "llamacpp/responses.json"):
        body = recorded(file)
        found = of_body(RESPONSES, body)
        assert found is not None
        assert found.text == body["output"][-1]["content"][0]["text"]
    texts = of_stream(COMPLETION, Path(CAPTURES, "vllm/completions_stream.sse").read_bytes())
    assert texts is not None
    assert texts.text
    assert texts.whole
