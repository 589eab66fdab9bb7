"""A stream of chat completions.

    chunk* [usage] [DONE]       all of one id, time and model
    a choice: its first delta has the role; deltas; one finish_reason, and nothing after it
    a call:   its first piece has id, type and name, the next ones only arguments; one call comes after the other

`error` ends a stream: a chunk with nothing but an `error`, then [DONE].
"""

from __future__ import annotations

import json
from typing import Any, Final

from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

CHUNK: Final[TypeAdapter[ChatCompletionChunk]] = TypeAdapter(ChatCompletionChunk)
COMPLETION: Final[TypeAdapter[ChatCompletion]] = TypeAdapter(ChatCompletion)
END: Final = b"[DONE]"


class Choice:
    """What one choice has said."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self.calls = list[dict[str, Any]]()
        self.reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        assert self.reason is None, "nothing comes after its end"
        delta: dict[str, Any] = choice["delta"]
        if not self.message:
            assert delta.get("role") == "assistant", "its first delta has the role"
            self.message["role"] = "assistant"
        for name, value in delta.items():
            if name == "tool_calls":
                for piece in value or ():
                    self.call(piece)
            elif name != "role" and value is not None:
                self.message[name] = self.message.get(name, "") + value
        self.reason = choice["finish_reason"]

    def call(self, piece: dict[str, Any]) -> None:
        at, function = piece["index"], piece["function"]
        assert at <= len(self.calls)
        if at == len(self.calls):
            assert piece["type"] == "function"
            assert piece["id"]
            assert function["name"]
            self.calls.append({**piece, "function": {"arguments": "", **function}})
        else:
            assert at == len(self.calls) - 1, "calls come one after the other"
            assert not function.get("name"), "its name comes once"
            self.calls[at]["function"]["arguments"] += function["arguments"]


def completion_of(frames: list[tuple[str, bytes]], *, foreign: bool = False) -> dict[str, Any] | None:
    """The choices and the usage that the chunks add up to; None: the stream ends with an error."""
    assert frames
    data = [line for _, line in frames]
    assert data[-1] == END, "a stream that ends with no [DONE]"
    chunks = [json.loads(line) for line in data[:-1]]
    failed = [at for at, one in enumerate(chunks) if "error" in one]
    assert failed in ([], [len(chunks) - 1])
    choices, usage = dict[int, Choice](), None
    for at, chunk in enumerate(chunks[: failed[0]] if failed else chunks):
        CHUNK.validate_json(data[at], strict=True, extra="allow" if foreign else "ignore")
        same = ("id", "model") if foreign else ("id", "model", "created")  # llama.cpp's time goes on
        assert [chunk[name] for name in same] == [chunks[0][name] for name in same]
        assert usage is None or foreign, "nothing comes after the usage"
        for choice in chunk["choices"]:
            choices.setdefault(choice["index"], Choice()).add(choice)
        usage = chunk.get("usage") or usage
    if failed:
        assert chunks[-1]["error"]["message"]
        return None
    assert choices
    assert all(one.reason for one in choices.values()), "every choice ends"
    for one in choices.values():
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in one.calls)
        assert bool(one.calls) == (one.reason == "tool_calls")
    return {"choices": choices, "usage": usage}
