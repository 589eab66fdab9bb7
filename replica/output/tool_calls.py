"""Tool calls in an answer's text, in the form that Hermes introduced and Qwen's templates request:

    <tool_call>
    {"name": "find", "arguments": {"what": "it"}}
    </tool_call>

Theory of operation. Text goes in, piece by piece; text that may be sent and complete calls come out, in order. Text from
`<tool_call>` on is held until the call is complete. If it does not become a call (other JSON, no end), it comes out as text, so
no text of a model is lost. A call that only lacks its end tag at the answer's end counts as a call. White space around calls
is dropped: templates write their own there. The parts do not depend on how the text was split.
"""

from dataclasses import dataclass

import orjson

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCallText:
    """A function's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str


Part = str | ToolCallText


class ToolCallReader:
    """Call `push` with text as it arrives, then `finish` once. A `push` is O(text + held text), and searches only the new part
    of an unfinished call.
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = False  # `_held` begins after OPEN
        self._searched = 0  # characters of `_held` in which CLOSE does not begin
        self._gap = ""  # the white space before OPEN
        self._after_call = False  # only white space since a call

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """The parts in the held text."""
        held, self._held = self._held, ""
        if not self._inside:
            return [] if self._after_call and not held.strip() else [held] if held else []
        return [call_of(held) or self._gap + OPEN + held]

    def _step(self, parts: list[Part]) -> bool:
        """Read up to the next tag; False if there is none yet."""
        return self._read_call(parts) if self._inside else self._read_text(parts)

    def _read_call(self, parts: list[Part]) -> bool:
        at = self._held.find(CLOSE, self._searched)
        if at < 0:
            self._searched = max(0, len(self._held) - len(CLOSE) + 1)
            return False
        body, self._held = self._held[:at], self._held[at + len(CLOSE) :]
        call = call_of(body)
        parts.append(call or self._gap + OPEN + body + CLOSE)
        self._inside, self._after_call, self._searched = False, call is not None, 0
        return True

    def _read_text(self, parts: list[Part]) -> bool:
        text, tag, rest = self._held.partition(OPEN)
        if tag:
            self._held, self._inside = rest, True
            text, self._gap = _split_end(text)
            self._add(parts, text)
            return True
        # A possible beginning of a tag, and the white space before it, stay held.
        ready, _ = _split_end(text[: len(text) - _begun(text)])
        self._held = text[len(ready) :]
        self._add(parts, ready)
        return False

    def _add(self, parts: list[Part], text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            parts.append(text)


def parts_of(text: str) -> list[Part]:
    """A whole answer's parts, with neighbouring texts joined."""
    reader = ToolCallReader()
    parts: list[Part] = []
    for part in reader.push(text) + reader.finish():
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] += part
        else:
            parts.append(part)
    return parts


def call_of(body: str) -> ToolCallText | None:
    """The call between the tags, None if it is invalid. Arguments may be missing, an object, or an object as JSON text."""
    try:
        value = orjson.loads(body)
        arguments = value.get("arguments") or {} if isinstance(value, dict) else None
        if isinstance(arguments, str):
            arguments = orjson.loads(arguments)
        if not isinstance(arguments, dict) or not isinstance(value["name"], str) or not value["name"]:
            return None
        orjson.dumps([[[[arguments]]]])  # the nesting of the arguments in an answer
        return ToolCallText(value["name"], orjson.dumps(arguments).decode())
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, KeyError):
        return None


def _split_end(text: str) -> tuple[str, str]:
    """A text without the white space at its end, and that white space."""
    rest = text.rstrip()
    return rest, text[len(rest) :]


def _begun(text: str) -> int:
    """The length of the longest suffix of the text that is a prefix of OPEN."""
    return next((size for size in range(min(len(text), len(OPEN) - 1), 0, -1) if OPEN.startswith(text[-size:])), 0)
