"""A replica for real coding agents: it asks for calls of the shell, then says that it is done, in each of the three APIs.

What it reports as cached is what it has: the longest beginning that this prompt shares with an earlier one of the same replica,
as its canonical text. One token is four bytes of that.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from gateway.dialects.table import Dialects
from tests.gateway.dialects.events.test_named import named
from tests.support.fakes import DONE, STREAM_HEAD, FakeReplica, FakeRequest, chunk, http, status

CALLS: Final = 2
SHELLS: Final = ("exec_command", "shell_command", "bash", "Bash")
_DIALECTS: Final = Dialects()
_numbers = itertools.count(1)


class Script(NamedTuple):
    """calls: how many it asks for, one after the other. command: of the shell; `{call}` is the number of the call, from 0."""

    calls: int = CALLS
    command: str = "echo step{call}; ls"

    def next_of(self, tools: list[Any], calls: int) -> tuple[str, str] | None:
        """The tool for the call after so many, and its arguments. None: no more calls, or the agent has no shell (it asks for a
        title).
        """
        shell = next((name for name in SHELLS if name in tools), "")
        if not shell or calls >= self.calls:
            return None
        command = self.command.format(call=calls)
        about = {"cmd": command} if shell == "exec_command" else {"command": command, "description": f"step {calls}"}
        return shell, json.dumps(about)


class AgentEngine(FakeReplica):
    """paths: the APIs that it speaks. prompts: those that it has computed, as canonical texts. cached: of each, what it had, in
    tokens. full: the next request with tools is refused with these words, and later ones get
    a text: a summary has no calls. done: streams of chat have `[DONE]`.
    """

    def __init__(self, *paths: str, asks: Script | None = None) -> None:
        super().__init__(script=[self.answer])
        self.paths = paths or tuple(WRITERS)
        self.prompts = list[bytes]()
        self.cached = list[int]()
        self.full = ""
        self.done = True
        self.asks = asks or Script()
        self._calls = True

    async def answer(self, request: FakeRequest, writer: asyncio.StreamWriter) -> None:
        path, body = request.path.partition("?")[0], request.json
        if path == "/v1/messages/count_tokens":
            return writer.write(http(200, b'{"input_tokens": 100}'))
        if path not in self.paths:
            return writer.write(http(404, b'{"detail":"Not Found"}'))
        if body.get("previous_response_id"):  # as vLLM, whose store is off
            return await status(404, "Response with this id not found.")(request, writer)
        if self.full and body.get("tools"):
            words, self.full, self._calls = self.full, "", False
            return await status(400, words)(request, writer)
        tokens, cached = self._prefill(path, request.body)
        write = WRITERS[path]
        answer, events = write(body if self._calls else {**body, "tools": []}, tokens, cached, self.asks)
        if body.get("stream"):
            sent = events if self.done else [event for event in events if event != DONE]
            writer.write(STREAM_HEAD + b"".join(map(chunk, sent)) + b"0\r\n\r\n")
        else:
            writer.write(http(200, json.dumps(answer).encode()))
        return None

    def _prefill(self, path: str, raw: bytes) -> tuple[int, int]:
        prompt = _DIALECTS.at(path).parse(raw).prompt
        assert isinstance(prompt, bytes)
        shared = max((common_length(prompt, one) for one in self.prompts), default=0)
        self.prompts.append(prompt)
        self.cached.append(shared // 4)
        return len(prompt) // 4, shared // 4


def common_length(one: bytes, other: bytes) -> int:
    """Of their common beginning, in bytes."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[:middle] == other[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


Answer = tuple[dict[str, Any], list[bytes]]
"""A whole answer, and the events of the same as a stream."""


def _responses(body: dict[str, Any], tokens: int, cached: int, asks: Script) -> Answer:
    items = body["input"] if isinstance(body["input"], list) else []
    calls = sum(str(item.get("type", "")).endswith("call_output") for item in items)
    call, number = asks.next_of([tool.get("name") for tool in body.get("tools") or []], calls), next(_numbers)
    if call:
        item: dict[str, Any] = {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "name": call[0]}
        item |= {"arguments": call[1], "status": "completed"}
    else:
        text = {"type": "output_text", "text": "Done.", "annotations": []}
        item = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed", "content": [text]}
    usage = {"input_tokens": tokens, "input_tokens_details": {"cached_tokens": cached}, "output_tokens": 5}
    usage |= {"output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": tokens + 5}
    answer = {"id": f"resp_{number}", "object": "response", "created_at": 1, "model": body["model"], "output": [item]}
    answer |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "status": "completed", "usage": usage}
    begun = {**answer, "status": "in_progress", "output": [], "usage": None}
    written = [] if call else [{"item_id": item["id"], "output_index": 0, "content_index": 0, "delta": "Done.", "logprobs": []}]
    events = [
        named("response.created", response=begun, sequence_number=0),
        named("response.output_item.added", output_index=0, item=item, sequence_number=1),
        *(named("response.output_text.delta", sequence_number=2, **delta) for delta in written),
        named("response.output_item.done", output_index=0, item=item, sequence_number=3),
        named("response.completed", response=answer, sequence_number=4),
    ]
    return answer, events


def _messages(body: dict[str, Any], tokens: int, cached: int, asks: Script) -> Answer:
    blocks = [block for message in body["messages"] if isinstance(message["content"], list) for block in message["content"]]
    calls = sum(block.get("type") == "tool_result" for block in blocks)
    call, number = asks.next_of([tool.get("name") for tool in body.get("tools") or []], calls), next(_numbers)
    usage = {"input_tokens": tokens - cached, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
    usage["output_tokens"] = 5
    if call:
        shell, arguments = call
        block = {"type": "tool_use", "id": f"toolu_{number}", "name": shell, "input": json.loads(arguments)}
        begun, delta, stop = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": arguments}, "tool_use"
    else:
        block = {"type": "text", "text": "Done."}
        begun, delta, stop = {**block, "text": ""}, {"type": "text_delta", "text": "Done."}, "end_turn"
    answer = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": body["model"], "content": [block]}
    answer |= {"stop_reason": stop, "stop_sequence": None, "usage": usage}
    events = [
        named("message_start", message={**answer, "content": [], "stop_reason": None}),
        named("content_block_start", index=0, content_block=begun),
        named("content_block_delta", index=0, delta=delta),
        named("content_block_stop", index=0),
        named("message_delta", delta={"stop_reason": stop, "stop_sequence": None}, usage=usage),
        named("message_stop"),
    ]
    return answer, events


def _chat(body: dict[str, Any], tokens: int, cached: int, asks: Script) -> Answer:
    calls = sum(message["role"] == "tool" for message in body["messages"])
    call, number = asks.next_of([tool["function"]["name"] for tool in body.get("tools") or []], calls), next(_numbers)
    message: dict[str, Any] = {"role": "assistant", "content": "Done."}
    stop = "stop"
    if call:
        asked = {"id": f"call_{number}", "type": "function", "function": {"name": call[0], "arguments": call[1]}}
        message, stop = {"role": "assistant", "content": None, "tool_calls": [{"index": 0, **asked}]}, "tool_calls"
    usage = {"prompt_tokens": tokens, "completion_tokens": 5, "total_tokens": tokens + 5}
    usage["prompt_tokens_details"] = {"cached_tokens": cached}  # type: ignore[assignment]
    head = {"id": f"chatcmpl-{number}", "created": 1, "model": body["model"]}
    answer = {**head, "object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": stop}]}

    def event(**more: Any) -> bytes:
        return b"data: " + json.dumps({**head, "object": "chat.completion.chunk", **more}).encode() + b"\n\n"

    events = [
        event(choices=[{"index": 0, "delta": message, "finish_reason": None}]),
        event(choices=[{"index": 0, "delta": {}, "finish_reason": stop}]),
        event(choices=[], usage=usage),
        DONE,
    ]
    return {**answer, "usage": usage}, events


WRITERS: Final[dict[str, Callable[[dict[str, Any], int, int, Script], Answer]]] = {
    "/v1/responses": _responses,
    "/v1/messages": _messages,
    "/v1/chat/completions": _chat,
}
