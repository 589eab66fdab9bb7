"""A stream that broke off: what its client knows, what to ask another replica for, and that one's events as part of the first.

    what went to the client ── told ──► text so far ── continue_body ──► another replica ── Splice ──► one stream for the client

The tap passes whole events only, so what the client has is known exactly. The other replica gets the same request with the text
so far as the beginning of the answer: an open assistant message (`continue_final_message`), or the end of the prompt. Its
events take the first part's id, model and time; its usage becomes that of the whole. In the body only the values that have to
be different are changed; every other byte is the client's.

What is not plain text (tool calls, reasoning, log probabilities, several choices) is not resumed, nor what would come out
otherwise (penalties for what was generated, an output format). The tokens so far are those that the stream's own usage tells
(`continuous_usage_stats`), else one for each event with text: engines that put several into one are asked for some too many.

Pure: bytes in, bytes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from gateway.api.openai import CHAT
from gateway.api.splice import Edit, Members, append_element, append_text, apply, read_list, read_object
from gateway.budget import Lease
from gateway.metering import Usage, parse_usage
from gateway.tap import StreamTap, data_of, events_of, object_of

IMPOSSIBLE: Final = "impossible"  # the rest cannot be asked for
COMPLETE: Final = "complete"  # nothing is left of what may be generated
ASK: Final = "ask"

MAX_KEPT_BYTES = 4 << 20  # of one stream; a longer one is not resumed
KEPT_STEP = 1 << 16

_HEAD = ("id", "object", "created", "model")
_LIMITS = ("max_tokens", "max_completion_tokens")
# What makes an answer more than a text, or makes it depend on where the prompt ends and the answer begins.
_NEVER = (
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "audio",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "return_token_ids",
    "echo",
    "suffix",
    "use_beam_search",
    "presence_penalty",
    "frequency_penalty",
)


class Kept:
    """The bytes that went to a client, as long as they are not too many, by themselves or for the budget."""

    __slots__ = ("_charged", "_lease", "_parts", "_size", "_too_many")

    def __init__(self, lease: Lease | None = None) -> None:
        """lease: the request's; they are charged to it, in steps of KEPT_STEP."""
        self._parts: list[bytes] = []
        self._lease = lease
        self._size = self._charged = 0
        self._too_many = False

    def add(self, data: bytes) -> None:
        if self._too_many:
            return
        self._size += len(data)
        self._parts.append(data)
        if self._size > self._charged or self._size > MAX_KEPT_BYTES:
            self._charge()

    def whole(self) -> bytes | None:
        """None: they were too many."""
        return None if self._too_many else b"".join(self._parts)

    def _charge(self) -> None:
        step = self._size - self._charged + KEPT_STEP
        if self._size <= MAX_KEPT_BYTES and (self._lease is None or self._lease.grow(step)):
            self._charged += step
            return
        self._too_many = True
        self._parts.clear()
        if self._lease is not None:
            self._lease.shrink(self._charged)


@dataclass(slots=True)
class Told:
    """What a client knows of an answer.

    head: what all its events have in common, {} before the first; pieces: events with text; usage: the last that any event
    told; finished: it knows why the text ends; counted: it has the event that is only usage; done: it has [DONE].
    """

    head: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    pieces: int = 0
    usage: Usage | None = None
    finished: bool = False
    counted: bool = False
    done: bool = False

    @property
    def tokens(self) -> int:
        """Generated so far."""
        return max(self.usage.completion, self.pieces) if self.usage else self.pieces


def told(kind: str, data: bytes) -> Told | None:
    """What these events tell; None if it is more than one text. O(data)."""
    reading = Reading(kind)
    return reading.result() if reading.take(events_of(data)) else None


class Reading:
    """What the events of a stream tell, read some at a time: `take` them in order, then ask for the `result`."""

    __slots__ = ("_kind", "_so_far", "_texts")

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._so_far = Told()
        self._texts: list[str] = []

    def take(self, events: Sequence[bytes]) -> bool:
        """False: they are more than one text, and nothing more is to be asked. O(their length)."""
        return all(self._event(event) for event in events)

    def _event(self, event: bytes) -> bool:
        so_far, content = self._so_far, data_of(event).strip()
        if not content:
            return True  # a comment
        if content == b"[DONE]":
            so_far.done = True
            return True
        answer = object_of(event)
        text = _text(self._kind, answer)
        if text is None:
            return False
        if text:
            self._texts.append(text)
        so_far.head = so_far.head or {name: answer[name] for name in _HEAD if name in answer}
        choices: list[Any] = answer["choices"]
        if choices and choices[0].get("finish_reason"):
            so_far.finished = True
        if usage := parse_usage(answer):
            so_far.usage, so_far.counted = usage, not choices
        return True

    def result(self) -> Told:
        self._so_far.text, self._so_far.pieces = "".join(self._texts), len(self._texts)
        return self._so_far


def _text(kind: str, answer: Mapping[str, Any]) -> str | None:
    """The text of one event, None if it has anything beside it."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) > 1:
        return None
    if not choices:
        return ""
    choice = choices[0]
    if not isinstance(choice, dict) or choice.get("index", 0) != 0 or choice.get("logprobs"):
        return None
    if kind != CHAT:
        text = choice.get("text") or ""
    else:
        delta = choice.get("delta") or {}
        if not isinstance(delta, dict) or any(value for name, value in delta.items() if name not in ("role", "content")):
            return None
        text = delta.get("content") or ""
    return text if isinstance(text, str) else None


def continuation(kind: str, body: bytes, so_far: Told) -> bytes | None:
    """The request for the rest of an answer; None if it cannot be asked for. b"": nothing is left of what may be generated."""
    verdict, edits = continue_body(kind, body, so_far.text, so_far.tokens)
    if verdict == IMPOSSIBLE:
        return None
    return b"" if verdict == COMPLETE else apply(body, edits)


def continue_body(kind: str, body: bytes, text: str, tokens: int) -> tuple[str, list[Edit]]:
    """What to change in a request so that it asks for the rest of its answer: (IMPOSSIBLE, COMPLETE or ASK, the edits).

    text, tokens: the answer so far.
    """
    request = orjson.loads(body)
    if any(request.get(name) for name in _NEVER) or any(request.get(name) not in (None, 1) for name in ("n", "best_of")):
        return IMPOSSIBLE, []
    if not text:
        return ASK, []
    members = read_object(body)
    edits = _open_message(request, members, text) if kind == CHAT else _longer_prompt(request, members, text)
    if edits is None:
        return IMPOSSIBLE, []
    for name in _LIMITS:
        if isinstance(limit := request.get(name), int):
            if limit <= tokens:
                return COMPLETE, []
            edits.append(members.put(name, b"%d" % (limit - tokens)))
    if isinstance(least := request.get("min_tokens"), int):
        edits.append(members.put("min_tokens", b"%d" % max(0, least - tokens)))
    return ASK, edits


def _open_message(request: Mapping[str, Any], members: Members, text: str) -> list[Edit] | None:
    """A chat, with the text as an assistant's message that is still open."""
    raw, start = members.raw, members.spans["messages"][0]
    no_new_message = members.put("add_generation_prompt", b"false")
    if not (goes_on := request.get("continue_final_message")):
        if request.get("add_generation_prompt") is False:
            return None  # the text is then no message
        message = orjson.dumps({"role": "assistant", "content": text})
        return [append_element(raw, start, message), no_new_message, members.put("continue_final_message", b"true")]
    if goes_on in (True, "content") and isinstance(request["messages"][-1].get("content"), str):
        last = read_object(raw, read_list(raw, start)[0][-1][0])
        return [append_text(raw, last.spans["content"][1], text), no_new_message]
    return None


def _longer_prompt(request: Mapping[str, Any], members: Members, text: str) -> list[Edit] | None:
    """A completion, with the text as the end of its prompt. Without a limit, how much is left is the engine's secret."""
    if not isinstance(request["prompt"], str) or not isinstance(request.get("max_tokens"), int):
        return None
    return [append_text(members.raw, members.spans["prompt"][1], text)]


class Splice:
    """One continuation's events as those of the answer that they continue. usage: of the whole, once it is known."""

    def __init__(self, so_far: Told, strip_usage: bool) -> None:
        self.tap = StreamTap(strip_usage=False)
        self.usage: Usage | None = None
        self._so_far = so_far
        self._strip_usage = strip_usage

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes of the continuation; returns what may go to the client now."""
        return b"".join(map(self._event, events_of(self.tap.feed_closely(chunk))))

    def finish(self) -> bytes:
        """The continuation is over; returns what was still held (an event without its end)."""
        return b"".join(map(self._event, events_of(self.tap.finish())))

    def _event(self, event: bytes) -> bytes:
        answer = object_of(event)
        if not answer:
            return event  # a comment, or [DONE]
        choices = answer.get("choices")
        if part := parse_usage(answer):
            self.usage = usage = self._whole(part)
            answer["usage"] = _counts(answer["usage"], usage)
            if self._strip_usage and choices == []:
                return b""
        if self._so_far.head and isinstance(choices, list) and any(map(_only_role, choices)):
            return b""
        for name in self._so_far.head:
            answer[name] = self._so_far.head[name]
        return b"data: " + orjson.dumps(answer) + b"\n\n"

    def _whole(self, part: Usage) -> Usage:
        """Both parts' usage; the text so far was part of the continuation's prompt."""
        so_far = self._so_far
        prompt = so_far.usage.prompt if so_far.usage else max(0, part.prompt - so_far.tokens)
        return Usage(prompt, so_far.tokens + part.completion, None if part.cached is None else min(part.cached, prompt))


def _only_role(choice: Any) -> bool:
    if not isinstance(choice, dict) or choice.get("finish_reason"):
        return False
    delta = choice.get("delta")
    return isinstance(delta, dict) and "role" in delta and not any(value for name, value in delta.items() if name != "role")


def _counts(counts: Mapping[str, Any], usage: Usage) -> dict[str, Any]:
    """A usage object of an engine, with the numbers of the whole."""
    ours: dict[str, Any] = {
        **counts,
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
    }
    if usage.cached is not None:
        if isinstance(details := counts.get("prompt_tokens_details"), dict) and "cached_tokens" in details:
            ours["prompt_tokens_details"] = {**details, "cached_tokens": usage.cached}
        if "prompt_cache_hit_tokens" in counts:
            ours["prompt_cache_hit_tokens"] = usage.cached
    return ours


def ending(kind: str, so_far: Told, usage: Usage | None) -> bytes:
    """The end of a stream of which nothing but the end is missing. usage: to be told at the end, if the client wants it."""
    if so_far.done:
        return b""
    events = list[bytes]()
    if not so_far.finished:
        nothing: dict[str, Any] = {"delta": {}} if kind == CHAT else {"text": ""}
        events.append(_made({**so_far.head, "choices": [{"index": 0, **nothing, "logprobs": None, "finish_reason": "length"}]}))
    if usage and not so_far.counted:
        details = {} if usage.cached is None else {"prompt_tokens_details": {"cached_tokens": usage.cached}}
        events.append(_made({**so_far.head, "choices": [], "usage": _counts(details, usage)}))
    return b"".join((*events, b"data: [DONE]\n\n"))


def _made(answer: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(answer) + b"\n\n"
