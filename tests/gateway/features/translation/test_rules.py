"""What chat has no form for, in both translations: text at its place, left out with a reason, or a 400 that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest

from gateway.errors import GatewayError
from gateway.features.translation.messages.translation import MessagesTranslation
from gateway.features.translation.responses.translation import ResponsesTranslation
from gateway.features.translation.rules import REFUSED, RULES, Omissions
from gateway.features.translation.translation import TranslatedRequest
from tests.gateway.conftest import running
from tests.gateway.features.translation.test_translation import MESSAGES, RESPONSES, chat_only
from tests.support.fakes import FakeReplica, answers

BASE64 = "iVBORw0KGgo" * 400
TOOL = {"name": "f", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
# Blocks of an assistant's or a user's turn, and their text.
BLOCKS: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"id": 5, "query": "x"}},
        '[server_tool_use] {"name":"web_search","input":{"id":5,"query":"x"}}',
    ),
    (
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": [{"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "E", "page_age": None}],
        },
        '[web_search_tool_result] {"content":[{"url":"u","title":"t"}]}',
    ),
    (
        {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": [{"type": "text", "text": "7"}]},
        '[mcp_tool_result] {"is_error":false,"content":[{"text":"7"}]}',
    ),
    ({"type": "compaction", "content": "The user wants a boat."}, "The user wants a boat."),
    (
        {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "x"}]},
        '[search_result] {"source":"u","title":"t","content":[{"text":"x"}]}',
    ),
    ({"type": "tool_reference", "tool_name": "f"}, '[tool_reference] {"tool_name":"f"}'),
    ({"type": "of_next_year", "text": "hi"}, "hi"),
    (
        {"type": "code_execution_tool_result", "content": {"stdout": "4", "file": BASE64}},
        '[code_execution_tool_result] {"content":{"stdout":"4"}}',
    ),
    # Left out.
    ({"type": "redacted_thinking", "data": "opaque"}, ""),
    ({"type": "container_upload", "file_id": "f"}, ""),
    ({"type": "image", "source": {"type": "url", "url": "u"}}, ""),
    ({"type": "of_next_year", "encrypted_content": "opaque"}, ""),
    ({"type": "of_next_year", "data": BASE64}, ""),
]


def translated(kind: type[MessagesTranslation] | type[ResponsesTranslation], **body: Any) -> TranslatedRequest:
    return kind().request(orjson.dumps({"model": "m", **body}))


def messages_of(request: TranslatedRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = orjson.loads(request.body)["messages"]
    return found


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
@pytest.mark.parametrize(("block", "text"), BLOCKS, ids=lambda value: value["type"] if isinstance(value, dict) else "")
def test_blocks_of_messages(block: dict[str, Any], text: str, role: str) -> None:
    if role == "user" and block["type"] == "image":
        return
    said = {"type": "text", "text": "said"}
    turn = {"role": role, "content": [said, block]}
    if role == "tool":
        turn = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [said, block]}]}
    request = translated(MessagesTranslation, max_tokens=5, messages=[{"role": "user", "content": "hi"}, turn])
    content = messages_of(request)[1]["content"]
    if block["type"] == "image" and role == "tool":
        assert messages_of(request)[2]["content"][0]["type"] == "image_url"
    elif text:
        assert content == [said, {"type": "text", "text": text}]
        assert not request.left_out
    else:
        assert content == "said"
        assert [line.partition(":")[0] for line in request.left_out] == [block["type"]]


CALL = {
    "type": "local_shell_call",
    "id": "i",
    "call_id": "c",
    "status": "completed",
    "action": {"type": "exec", "command": ["ls"]},
}
ITEMS: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}},
        [{"role": "assistant", "content": '[web_search_call] {"action":{"type":"search","query":"x"}}'}],
    ),
    (
        {"type": "mcp_call", "id": "m", "name": "add", "server_label": "s", "arguments": "{}", "output": "7"},
        [{"role": "assistant", "content": '[mcp_call] {"name":"add","server_label":"s","arguments":"{}","output":"7"}'}],
    ),
    (
        {"type": "image_generation_call", "id": "g", "result": BASE64, "revised_prompt": "a cat"},
        [{"role": "assistant", "content": '[image_generation_call] {"revised_prompt":"a cat"}'}],
    ),
    (
        CALL,
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "local_shell", "arguments": '{"action":{"type":"exec","command":["ls"]}}'},
                    }
                ],
            }
        ],
    ),
    (
        {"type": "local_shell_call_output", "call_id": "c", "output": "a b"},
        [{"role": "tool", "tool_call_id": "c", "content": "a b"}],
    ),
    (
        {"type": "tool_search_output", "call_id": "c", "tools": [{"name": "f"}]},
        [{"role": "tool", "tool_call_id": "c", "content": '{"tools":[{"name":"f"}]}'}],
    ),
    (
        {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True},
        [{"role": "user", "content": '[mcp_approval_response] {"approval_request_id":"a","approve":true}'}],
    ),
    ({"type": "of_next_year", "content": "hi"}, [{"role": "user", "content": "hi"}]),
    # Left out.
    ({"type": "compaction", "id": "c", "encrypted_content": "opaque"}, []),
    ({"type": "compaction_trigger"}, []),
    ({"type": "web_search_call", "id": "ws", "status": "completed"}, [{"role": "assistant", "content": ""}]),
    ({"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "opaque"}, [{"role": "assistant", "content": ""}]),
    (
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "of_next_year"}]},
        [{"role": "user", "content": "a"}],
    ),
]


@pytest.mark.parametrize(("item", "turns"), ITEMS, ids=lambda value: value.get("type", "") if isinstance(value, dict) else "")
def test_items_of_responses(item: dict[str, Any], turns: list[dict[str, Any]]) -> None:
    request = translated(ResponsesTranslation, input=[{"role": "user", "content": "hi"}, item])
    assert messages_of(request)[1:] == turns
    assert bool(request.left_out) == (turns in ([], [{"role": "assistant", "content": ""}]) or item.get("role") == "user")


def test_a_server_s_call_and_the_text_behind_it_are_one_answer() -> None:
    """Templates refuse two turns of one role."""
    search = {"type": "web_search_call", "id": "ws", "action": {"query": "x"}}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Found."}]}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    (turn,) = messages_of(translated(ResponsesTranslation, input=[thought, search, said]))
    text = '[web_search_call] {"action":{"query":"x"}}\n\nFound.'
    assert turn == {"role": "assistant", "content": text, "reasoning_content": "hm"}


@pytest.mark.parametrize("body", [{"input": []}, {"input": [{"type": "compaction_trigger"}]}])
def test_an_empty_input_is_an_empty_turn(body: dict[str, Any]) -> None:
    assert messages_of(translated(ResponsesTranslation, **body)) == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("kind", "tool", "left_out"),
    [
        (MessagesTranslation, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}, "web_search"),
        (MessagesTranslation, {"type": "mcp_toolset", "mcp_server_name": "s"}, "mcp_toolset"),
        (ResponsesTranslation, {"type": "file_search", "vector_store_ids": []}, "file_search"),
        (ResponsesTranslation, {"type": "web_search"}, "web_search"),
    ],
)
def test_a_tool_of_servers_beside_others_is_left_out(kind: Any, tool: dict[str, Any], left_out: str) -> None:
    hi = [{"role": "user", "content": "hi"}]
    body: dict[str, Any] = {"input": hi, "tools": [FUNCTION, tool]}
    if kind is MessagesTranslation:
        body = {"messages": hi, "max_tokens": 5, "tools": [TOOL, tool], "mcp_servers": [{"name": "s"}]}
    request = translated(kind, **body)
    assert [function["function"]["name"] for function in orjson.loads(request.body)["tools"]] == ["f"]
    assert f"{left_out}: nothing here runs it" in request.left_out


@pytest.mark.parametrize("kind", ["bash_20250124", "text_editor_20250728", "memory_20250818"])
def test_tools_that_the_client_runs_in_a_form_of_anthropic_s(kind: str) -> None:
    tools = [{"type": kind, "name": "it"}]
    request = translated(MessagesTranslation, max_tokens=5, messages=[{"role": "user", "content": "hi"}], tools=tools)
    (tool,) = orjson.loads(request.body)["tools"]
    assert tool["function"]["name"] == "it"
    assert "command" in tool["function"]["parameters"]["properties"]
    assert not request.left_out


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ResponsesTranslation, {"input": [{"type": "item_reference", "id": "i"}]}, "input[0]"),
        (ResponsesTranslation, {"input": "x", "tools": [FUNCTION, {"type": "apply_patch"}]}, "tools[1].type"),
        (MessagesTranslation, {"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools[0].type"),
    ],
)
def test_what_is_refused(kind: Any, body: dict[str, Any], param: str) -> None:
    if kind is MessagesTranslation:
        body = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}], **body}
    with pytest.raises(GatewayError) as caught:
        translated(kind, **body)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("translation", [MessagesTranslation, ResponsesTranslation])
def test_every_rule_of_the_table_is_tried(translation: Any, kind: str) -> None:
    """Each in both translations, with something that could become text. Messages has no type that is refused."""
    (action, reason), thing = RULES[kind], {"type": kind, "note": "readable"}
    hi = {"role": "user", "content": "hi"}
    body: dict[str, Any] = {"input": [hi, thing]}
    if translation is MessagesTranslation:
        body = {"max_tokens": 5, "messages": [hi, {"role": "assistant", "content": [thing]}]}
    if action == REFUSED and translation is ResponsesTranslation:
        with pytest.raises(GatewayError, match=reason) as caught:
            translated(translation, **body)
        assert caught.value.status == 400
    else:
        request = translated(translation, **body)
        assert request.left_out == [f"{kind}: {reason}"]
        assert b"readable" not in request.body


def test_omissions_are_bounded() -> None:
    omissions = Omissions()
    for number in range(100):
        omissions.add(f"{number}" * 100, "x")
        omissions.add("0" * 100, "x")
    assert len(omissions.found) == Omissions.MOST
    assert max(map(len, omissions.found)) < 60


@pytest.mark.parametrize("size", [1, 100_000], ids=["small", "large"])
async def test_what_was_left_out_is_in_the_log(size: int, request_lines: Callable[[], list[dict[str, Any]]]) -> None:
    """Large bodies are translated in a process of their own."""
    history = [{"role": "user", "content": "x" * size}, {"role": "assistant", "content": [{"type": "redacted_thinking"}]}]
    async with FakeReplica([chat_only(answers())]) as replica, running(replica) as run:
        body = {"model": "m", "max_tokens": 5, "messages": [*history, {"role": "user", "content": "go on"}]}
        assert (await run.post(body, MESSAGES))[0] == 200
        assert request_lines()[-1]["left_out"] == ["redacted_thinking: no model here can read it"]
        items = [{"role": "user", "content": "x" * size}, {"type": "compaction", "encrypted_content": "opaque"}]
        assert (await run.post({"model": "m", "input": items}, RESPONSES))[0] == 200
        assert request_lines()[-1]["left_out"] == ["compaction: no model here can read it"]
        assert (await run.post({"model": "m", "input": "x" * size}, RESPONSES))[0] == 200
        assert "left_out" not in request_lines()[-1]


@pytest.mark.parametrize("arguments", ["", None, {}, "{}"])
def test_a_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    """Engines parse them, and refuse an empty text in every later turn."""
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    (turn,) = messages_of(translated(ResponsesTranslation, input=[item]))
    assert turn["tool_calls"][0]["function"]["arguments"] == "{}"
    use = {"type": "tool_use", "id": "c", "name": "f", "input": arguments or None}
    if arguments != "{}":
        history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [use]}]
        turn = messages_of(translated(MessagesTranslation, max_tokens=5, messages=history))[1]
        assert turn["tool_calls"][0]["function"]["arguments"] == "{}"
