"""Random conversations, as values, and in the words of three dialects."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from hypothesis import strategies as st

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
NAMES = st.sampled_from(["read", "write", "run"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**25), 10**25) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXTS, VALUES, max_size=3)
DATA = st.binary(min_size=1, max_size=9)


@dataclass(frozen=True)
class Said:
    """texts, image: of a user."""

    texts: tuple[str, ...]
    image: bytes = b""


@dataclass(frozen=True)
class Called:
    name: str
    arguments: Any
    result: tuple[str, ...]


@dataclass(frozen=True)
class Answered:
    """order: of the results of its calls."""

    texts: tuple[str, ...]
    reasoning: str = ""
    calls: tuple[Called, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def results(self) -> list[tuple[int, Called]]:
        return [(number, self.calls[number]) for number in self.order]


@dataclass(frozen=True)
class Conversation:
    system: tuple[str, ...]
    tools: tuple[tuple[str, str], ...]
    effort: str
    turns: tuple[Said | Answered, ...] = field(default=())


def _texts(least: int = 0) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(TEXTS, min_size=least, max_size=2).map(tuple)


@st.composite
def _answers(draw: st.DrawFn) -> Answered:
    calls = draw(st.lists(st.builds(Called, NAMES, ARGUMENTS, _texts()), max_size=3).map(tuple))
    order = draw(st.permutations(range(len(calls))).map(tuple))
    return Answered(draw(_texts(0 if calls else 1)), draw(st.just("") | TEXTS), calls, order)


_SAID = st.builds(Said, _texts(1), st.just(b"") | DATA)


def is_distinct(whole: Conversation) -> bool:
    """True if all dialects can tell its turns apart: calls after a text are of the same answer in Responses."""
    pairs = zip(whole.turns, whole.turns[1:], strict=False)
    return not any(
        isinstance(one, Answered) and not one.calls and isinstance(two, Answered) and not (two.texts or two.reasoning)
        for one, two in pairs
    )


CONVERSATIONS = st.builds(
    Conversation,
    _texts(),
    st.lists(st.tuples(NAMES, TEXTS), max_size=2).map(tuple),
    st.sampled_from(["", "high"]),
    st.lists(_SAID | _answers(), min_size=1, max_size=6).map(tuple),
).filter(is_distinct)


@st.composite
def changed(draw: st.DrawFn, whole: Conversation) -> Conversation:
    """The conversation with one change, which may change nothing that a model sees (the order of results)."""
    at = draw(st.integers(0, len(whole.turns) - 1))
    turn = draw(_SAID | _answers() | st.just(whole.turns[at]))
    if turn == whole.turns[at] and isinstance(turn, Answered) and turn.calls:
        which = draw(st.integers(0, len(turn.calls) - 1))
        call = replace(turn.calls[which], arguments=draw(VALUES), result=draw(_texts()))
        order = draw(st.permutations(turn.order).map(tuple))
        turn = replace(turn, order=order, calls=(*turn.calls[:which], call, *turn.calls[which + 1 :]))
    kind = draw(st.sampled_from(["turn", "drop", "swap", "system", "tools", "effort"]))
    rest = whole.turns[at + 1 :]
    if kind == "turn":
        return replace(whole, turns=(*whole.turns[:at], turn, *rest))
    if kind == "drop":
        return replace(whole, turns=whole.turns[:at] + rest)
    if kind == "swap":
        return replace(whole, turns=(*whole.turns[:at], *rest[:1], whole.turns[at], *rest[1:]))
    if kind == "system":
        return replace(whole, system=draw(_texts()))
    if kind == "tools":
        return replace(whole, tools=whole.tools[::-1])
    return replace(whole, effort="" if whole.effort else "high")


def seen(whole: Conversation) -> tuple[str, str]:
    """All that a model sees: frame and turns, in a form of their own, for comparison. Doubles count by their value."""
    frame = json.dumps([whole.system, whole.tools, whole.effort])
    turns = [
        [turn.texts, sha256(turn.image).hexdigest() if turn.image else ""]
        if isinstance(turn, Said)
        else [turn.texts, turn.reasoning, [[call.name, _doubles(call.arguments)] for call in turn.calls], _results(turn)]
        for turn in whole.turns
    ]
    return frame, json.dumps(turns, sort_keys=True)


def _results(turn: Answered) -> list[Any]:
    return [[number, call.result] for number, call in turn.results]


def _doubles(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) or 0.0  # one zero
    if isinstance(value, list):
        return [_doubles(each) for each in value]
    if isinstance(value, dict):
        return {name: _doubles(each) for name, each in value.items()}
    return value


class Writer:
    """Writes conversations in three dialects, with the freedoms that each has. chance: chooses among them."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def chat(self, whole: Conversation) -> dict[str, Any]:
        messages = [{"role": self._one_of("system", "developer"), "content": text} for text in whole.system]
        for number, turn in enumerate(whole.turns):
            if isinstance(turn, Said):
                messages.append({"role": "user", "content": self._parts(turn, "text", self._chat_image)})
                continue
            calls = [
                {"id": f"c{number}-{at}", "type": "function", "function": self._function(call)}
                for at, call in enumerate(turn.calls)
            ]
            answer: dict[str, Any] = {"role": "assistant", "content": self._parts(turn, "text") or None}
            if turn.reasoning:
                answer[self._one_of("reasoning", "reasoning_content")] = turn.reasoning
            messages.append(self._noise({**answer, "tool_calls": calls}))
            for at, call in turn.results:
                content = self._content(call.result, "text")
                messages.append({"role": "tool", "tool_call_id": f"c{number}-{at}", "content": content})
        tools = [
            {"type": "function", "function": {"name": name, "description": text, "parameters": {"type": "object"}}}
            for name, text in whole.tools
        ]
        return {"tools": tools, **({"reasoning_effort": whole.effort} if whole.effort else {}), "messages": messages}

    def messages(self, whole: Conversation) -> dict[str, Any]:
        messages: list[dict[str, Any]] = [{"role": "system", "content": text} for text in whole.system]
        for number, turn in enumerate(whole.turns):
            if isinstance(turn, Said):
                messages.append({"role": "user", "content": self._parts(turn, "text", self._messages_image)})
                continue
            thought = [{"type": "thinking", "thinking": turn.reasoning, "signature": "s"}] if turn.reasoning else []
            calls = [
                self._noise({"type": "tool_use", "id": f"t{number}-{at}", "name": call.name, "input": call.arguments})
                for at, call in enumerate(turn.calls)
            ]
            said = [self._marked({"type": "text", "text": text}) for text in turn.texts]
            messages.append({"role": "assistant", "content": [*thought, *said, *calls]})
            results = [
                {"type": "tool_result", "tool_use_id": f"t{number}-{at}", "content": self._content(call.result, "text")}
                for at, call in turn.results
            ]
            cut = self._chance.randint(0, len(results))
            messages += [{"role": "user", "content": each} for each in (results[:cut], results[cut:]) if each]
        tools = [{"name": name, "description": text, "input_schema": {"type": "object"}} for name, text in whole.tools]
        return {"tools": tools, **({"reasoning_effort": whole.effort} if whole.effort else {}), "messages": messages}

    def responses(self, whole: Conversation) -> dict[str, Any]:
        items: list[dict[str, Any]] = [{"role": "developer", "content": text} for text in whole.system]
        for number, turn in enumerate(whole.turns):
            if isinstance(turn, Said):
                items.append({"role": "user", "content": self._parts(turn, "input_text", self._responses_image)})
                continue
            if turn.reasoning:
                items.append({"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": turn.reasoning}]})
            if turn.texts:
                items.append(self._noise({"type": "message", "role": "assistant", "content": self._parts(turn, "output_text")}))
            items += [
                {"type": "function_call", "call_id": f"f{number}-{at}", **self._function(call)}
                for at, call in enumerate(turn.calls)
            ]
            items += [
                {
                    "type": "function_call_output",
                    "call_id": f"f{number}-{at}",
                    "output": self._content(call.result, "input_text"),
                }
                for at, call in turn.results
            ]
        tools = [
            {"type": "function", "name": name, "description": text, "parameters": {"type": "object"}, "strict": None}
            for name, text in whole.tools
        ]
        return {"tools": tools, **({"reasoning": {"effort": whole.effort}} if whole.effort else {}), "input": items}

    def _parts(self, turn: Said | Answered, kind: str, image: Any = None) -> Any:
        if isinstance(turn, Said) and turn.image:
            return [*({"type": kind, "text": text} for text in turn.texts), image(turn.image)]
        return self._content(turn.texts, kind)

    def _content(self, texts: tuple[str, ...], kind: str) -> Any:
        """A list of parts, among which empty ones are nothing, or one text."""
        if len(texts) <= 1 and self._chance.random() < 0.5:
            return "".join(texts)
        return [{"type": kind, "text": text} for text in (*texts, *([""] if self._chance.random() < 0.2 else []))]

    def _chat_image(self, data: bytes) -> dict[str, Any]:
        url = f"data:image/{self._one_of('png', 'jpeg')};base64,{base64.b64encode(data).decode()}"
        return {"type": "image_url", "image_url": {"url": url, **self._one_of({}, {"detail": "auto"})}}

    def _messages_image(self, data: bytes) -> dict[str, Any]:
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
        return self._marked({"type": "image", "source": source})

    def _responses_image(self, data: bytes) -> dict[str, Any]:
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        return {"type": "input_image", "image_url": url, "detail": "auto"}

    def _function(self, call: Called) -> dict[str, Any]:
        return {"name": call.name, "arguments": self._json(call.arguments)}

    def _json(self, value: Any) -> str:
        """Arguments in some spelling."""
        if isinstance(value, dict):
            members = list(value.items())
            self._chance.shuffle(members)
            value = dict(members)
        text = json.dumps(value, ensure_ascii=self._one_of(True, False), indent=self._one_of(None, 1))
        return str(self._one_of(text, f" {text}\n"))

    def _noise(self, value: dict[str, Any]) -> dict[str, Any]:
        """Members that do not count, and another order of the members."""
        members = list({"id": str(self._chance.random()), "status": None, **value}.items())
        self._chance.shuffle(members)
        return dict(members)

    def _marked(self, block: dict[str, Any]) -> dict[str, Any]:
        return {**block, "cache_control": {"type": "ephemeral"}} if self._chance.random() < 0.3 else block

    def _one_of(self, *choices: Any) -> Any:
        return self._chance.choice(choices)
