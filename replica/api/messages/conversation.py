"""Anthropic's conversations as the engine's: system prompt, turns of blocks and their breakpoints in, chat messages out.

Theory of operation. The result equals the messages of a client of chat completions, so both have the same tokens and share
their cache, as in vLLM: the blocks of the system prompt are one system message; `tool_use` blocks are the assistant's
`tool_calls`; a turn's `tool_result` blocks are messages of the role tool, before the rest of the turn; thinking goes with its
turn as `reasoning_content`, for templates that print it. System turns at the head of `messages` are added to the system prompt,
later ones stay in their place, so that a longer conversation extends its prompt.

Claude Code begins the system prompt with a line that differs in each request; it is left out, because otherwise nothing would
ever be found in the cache.

For each breakpoint the conversation up to it is stored (`marks`): the engine computes its length in tokens later.
"""

from typing import Any

from replica.api.messages.cache_control import Breakpoints, CacheMarks
from replica.api.prompts import chat_message
from replica.api.validation import ApiError, kind_of, shortened
from replica.engine import Message

NONCE = "x-anthropic-billing-header:"
_EXPECTED = "'text', 'tool_use', 'tool_result', 'thinking', 'redacted_thinking', 'document', 'image'"
_UNREADABLE = "this replica's model reads text only"
_PARTS = ("text", "document", "search_result", "image")  # valid content of a turn or a tool's result


class Conversation:
    """Build it in the order of the prompt: `tools`, `system`, `turn`s, `end`. All raise ApiError. O(body)."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.marks: list[list[Message]] = []
        self._breakpoints = Breakpoints()
        self._system: list[str] = []
        self._head_marks: list[str | None] = []  # breakpoints in it: the system prompt up to there; None: on a tool
        self._called: set[str] = set()  # ids of the calls that the next user's turn may answer
        self._turns = 0  # after the system prompt

    def tools(self, tools: list[Any]) -> None:
        """Templates print tools in the head of the prompt, some of them behind the system prompt: a breakpoint on a tool counts
        at the end of that head.
        """
        for at, tool in enumerate(tools):
            if isinstance(tool, dict) and self._breakpoints.read(tool, f"tools.{at}"):
                self._head_marks.append(None)

    def system(self, system: object) -> None:
        """`system` of the body: a text, blocks or nothing."""
        self._add_to_system(system, "system", "")

    def turn(self, message: object, at: int) -> None:
        """`messages[at]` of the body."""
        path = f"messages.{at}"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(message, dict) or role not in ("user", "assistant", "system"):
            raise _wrong(f"{path}.role", "Input should be 'user', 'assistant' or 'system'")
        content = message.get("content")
        if not isinstance(content, str | list) or content == []:
            raise _wrong(path, "all messages must have non-empty content (a string or a list of blocks)")
        if role == "system" and not self._turns:
            self._add_to_system(content, f"{path}.content", "\n\n")
            return
        self._begin()
        self._turns += 1
        blocks = [{"type": "text", "text": content}] if role == "system" and isinstance(content, str) else content
        if isinstance(blocks, str):
            self._called = set()
            self.messages.append({"role": role, "content": blocks})
        elif role == "assistant":
            self._assistant(blocks, path)
        else:
            self._user(blocks, path, role)

    def end(self, body: dict[str, Any]) -> CacheMarks:
        """The breakpoint at the top of the body comes last."""
        self._begin()
        if self._breakpoints.read({"cache_control": body.get("cache_control")}, "body"):
            self._mark(None)
        return self._breakpoints.checked()

    @property
    def open(self) -> bool:
        """True if the last turn is the beginning of the answer, to be continued."""
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last

    def _add_to_system(self, system: object, path: str, gap: str) -> None:
        texts = [{"type": "text", "text": system}] if isinstance(system, str) else system
        if texts is None:
            return
        if not isinstance(texts, list):
            raise _wrong(path, f"Input should be a valid string or a list of text blocks, not {kind_of(system)}")
        for at, block in enumerate(texts):
            where = f"{path}.{at}"
            if not isinstance(block, dict) or block.get("type") != "text":
                raise _wrong(f"{where}.type", "Input should be 'text'")
            text = without_nonce(_text(block, where))
            if text:
                self._system += [gap, text] if self._system else [text]
                gap = ""
            if self._breakpoints.read(block, where) and self._breakpoints.few:
                self._head_marks.append("".join(self._system))

    def _begin(self) -> None:
        """Complete the head: its message, and its marks."""
        if self._turns or self.messages:
            return
        system = "".join(self._system)
        if system:
            self.messages.append({"role": "system", "content": system})
        for text in self._head_marks:
            head = system if text is None else text
            self._snapshot([{"role": "system", "content": head}] if head else [{"role": "user", "content": ""}])
        self._head_marks.clear()

    def _user(self, blocks: list[Any], path: str, role: str) -> None:
        parts: list[dict[str, Any]] = []
        for at, block in enumerate(blocks):
            where = f"{path}.content.{at}"
            kind = _kind(block, where)
            if kind == "tool_result" and role == "user":
                self._result(block, where)
                if self._breakpoints.read(block, where):
                    self._mark(None)
            elif kind in _PARTS:
                text = _readable(block, where)
                parts += _part(without_nonce(text) if role == "system" else text)
                if self._breakpoints.read(block, where):
                    self._mark({"role": role, "content": list(parts)})
            else:
                raise _wrong(where, f"a block of the type {kind!r} cannot be in a turn of the role {role!r}")
        if role == "user":
            self._called = set()
        if parts:
            self.messages.append(chat_message({"role": role, "content": parts}, path))

    def _result(self, block: dict[str, Any], where: str) -> None:
        name = block.get("tool_use_id")
        if not isinstance(name, str) or name not in self._called:
            shown = shortened(name) if isinstance(name, str) else ""
            message = (
                f"unexpected `tool_use_id` found in `tool_result` blocks: {shown}. Each "
                "`tool_result` block must have a corresponding `tool_use` block in the previous message."
            )
            raise _wrong(where, message)
        content = block.get("content")
        inner = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        if not isinstance(inner, list):
            raise _wrong(f"{where}.content", "Input should be a valid string or a list of blocks")
        parts: list[dict[str, Any]] = []
        for at, part in enumerate(inner):
            inside = f"{where}.content.{at}"
            if _kind(part, inside) not in _PARTS:
                raise _wrong(inside, f"a tool's result cannot have a block of the type {part['type']!r}")
            parts += _part(_readable(part, inside))
            if self._breakpoints.read(part, inside):
                self._mark({"role": "tool", "tool_call_id": name, "content": list(parts)})
        self.messages.append(chat_message({"role": "tool", "tool_call_id": name, "content": parts}, where))

    def _assistant(self, blocks: list[Any], path: str) -> None:
        parts: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        thoughts: list[str] = []
        for at, block in enumerate(blocks):
            where = f"{path}.content.{at}"
            kind = _kind(block, where)
            if kind == "text":
                parts += _part(_text(block, where))
            elif kind == "tool_use":
                calls.append(_call(block, where))
            elif kind == "thinking":
                thoughts += [block["thinking"]] if isinstance(block.get("thinking"), str) else []
            elif kind != "redacted_thinking":
                raise _wrong(where, f"a block of the type {kind!r} cannot be in a turn of the role 'assistant'")
            if self._breakpoints.read(block, where):
                self._mark(_assistant_message(parts, calls, thoughts))
        self._called = {call["id"] for call in calls}
        if parts or calls or thoughts:
            self.messages.append(chat_message(_assistant_message(parts, calls, thoughts), path))

    def _mark(self, last: Message | None) -> None:
        """Mark the end of all messages so far, and of the beginning of one more."""
        if self._breakpoints.few:
            self._snapshot([*self.messages, *([chat_message(last, "")] if last else [])])

    def _snapshot(self, messages: list[Message]) -> None:
        if self._breakpoints.few:
            self.marks.append(messages)


def without_nonce(text: str) -> str:
    """A text of a system prompt without Claude Code's accounting line."""
    return text.partition("\n")[2] if text.startswith(NONCE) else text


def _assistant_message(parts: list[dict[str, Any]], calls: list[dict[str, Any]], thoughts: list[str]) -> Message:
    message: Message = {"role": "assistant", "content": list(parts)}
    if calls:
        message["tool_calls"] = list(calls)
    if thoughts:
        message["reasoning"] = message["reasoning_content"] = "".join(thoughts)
    return message


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, called, arguments = block.get("name"), block.get("id"), block.get("input")
    if not isinstance(name, str) or not isinstance(called, str) or not isinstance(arguments, dict):
        raise _wrong(where, "a tool_use block must have an id and a name (strings) and an input (an object)")
    return {"id": called, "type": "function", "function": {"name": name, "arguments": arguments}}


def _kind(block: object, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind not in (*_PARTS, "tool_use", "tool_result", "thinking", "redacted_thinking"):
        found = f"Input tag {kind!r}" if isinstance(kind, str) and len(kind) <= 64 else "The block's type"
        raise _wrong(where, f"{found} does not match any of the expected tags: {_EXPECTED}")
    return str(kind)


def _part(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def _text(block: dict[str, Any], where: str) -> str:
    text = block.get("text")
    if not isinstance(text, str):
        raise _wrong(f"{where}.text", "Input should be a valid string")
    return text


def _readable(block: dict[str, Any], where: str) -> str:
    """The text of a text block, of a document or of a search result."""
    if block["type"] == "text":
        return _text(block, where)
    source = block.get("source")
    if block["type"] == "document" and isinstance(source, dict):
        if source.get("type") == "text" and isinstance(source.get("data"), str):
            return str(source["data"])
        if source.get("type") == "content":
            return _joined(source.get("content"), f"{where}.source.content")
    if block["type"] == "search_result":
        return _joined(block.get("content"), f"{where}.content")
    raise _wrong(where, f"{block['type']} blocks cannot be read: {_UNREADABLE}")


def _joined(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) and block.get("type") == "text" for block in content):
        raise _wrong(where, f"Input should be a string or a list of text blocks: {_UNREADABLE}")
    return "".join(_text(block, f"{where}.{at}") for at, block in enumerate(content))


def _wrong(path: str, message: str) -> ApiError:
    return ApiError(400, f"{path}: {message}", path)
