"""OpenAI's shapes: a body in, a `Call` out; answers, stream chunks, usage and errors as bytes.

`parse` accepts what vLLM accepts: unknown fields are ignored, `model` may be left out. Fields that would change the
answer and that we do not honour are named in `Call.ignored`, for the response header `x-warmroute-ignored`.
Everything wrong is an `ApiError` that says which field, what was expected, and so what to do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import orjson

from replica.engine import Finish, Message, Tail
from replica.prefix import Scope

T = TypeVar("T", int, float)
Kind = Literal["chat", "completion"]

DONE = b"data: [DONE]\n\n"
DEFAULT_COMPLETION_TOKENS = 16  # what OpenAI and vLLM give a completion that names no max_tokens
MAX_STOPS = 16
MAX_SALT = 1024
RETENTION_S: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}
NOT_HONOURED = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "top_k",
    "min_p",
    "min_tokens",
    "response_format",
    "structured_outputs",
    "tool_choice",
    "echo",
    "suffix",
    "stop_token_ids",
)


class ApiError(Exception):
    """An answer other than 200, in OpenAI's shape."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request body. Exactly one of messages, text, tokens is set."""

    kind: Kind
    messages: list[Message] | None
    tools: list[Any] | None
    tail: Tail
    text: str | None
    tokens: list[int] | None
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stops: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    scope: Scope
    keep_s: float
    ignored: tuple[str, ...]


def parse(kind: Kind, raw: bytes, model: str) -> Call:
    """Check one body; `model` is the only name that we serve."""
    body = _object(raw)
    if body.get("model") not in (None, model):
        message = f"The model {body['model']!r} does not exist; this replica serves {model!r}."
        raise ApiError(404, message, "model", "model_not_found")
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
        raise ApiError(400, "Only one answer per request is supported: leave out n and best_of, or send 1.", "n")
    messages = tools = text = tokens = None
    if kind == "chat":
        messages, tools = _messages(body), _list_or_none(body, "tools")
    else:
        text, tokens = _prompt(body)
    stream, include_usage = _streaming(body)
    return Call(
        kind=kind,
        messages=messages,
        tools=tools,
        tail=_tail(body),
        text=text,
        tokens=tokens,
        max_tokens=_max_tokens(kind, body),
        # Greedy unless asked: the same prompt then gives the same answer, which is what people compare caches with.
        temperature=_number(body, "temperature", 0.0, (0.0, 2.0)),
        top_p=_top_p(body),
        seed=_integer(body, "seed"),
        stops=_stops(body),
        ignore_eos=_flag(body, "ignore_eos"),
        stream=stream,
        include_usage=include_usage,
        scope=Scope(salt=_salt(body)),
        keep_s=_retention(body),
        ignored=tuple(name for name in NOT_HONOURED if body.get(name) not in (None, False, 0, {}, [])),
    )


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"The body must be a JSON object, not {_name(body)}.")
    return body


def _messages(body: dict[str, Any]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list with at least one message.", "messages")
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: object, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where} must be an object with a role (a string) and content.", where)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    elif content is None:
        content = ""  # an assistant's message that only calls tools
    elif not isinstance(content, str):
        raise ApiError(400, f"{where}.content must be a string or a list of parts, not {_name(content)}.", where)
    return {**message, "content": content}


def _part(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise ApiError(
            400, f"{where} must be a text part ({{'type': 'text', 'text': ...}}): this model reads text only.", where
        )
    return text


def _tail(body: dict[str, Any]) -> Tail:
    goes_on, headed = _flag(body, "continue_final_message"), body.get("add_generation_prompt")
    if goes_on and headed:
        message = (
            "continue_final_message goes on with the last message, add_generation_prompt begins another: send one of them."
        )
        raise ApiError(400, message, "continue_final_message")
    return "open" if goes_on else "none" if headed is not None and not _flag(body, "add_generation_prompt") else "answer"


def _prompt(body: dict[str, Any]) -> tuple[str | None, list[int] | None]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt, None
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return None, prompt
    if isinstance(prompt, list) and len(prompt) > 1 and all(isinstance(item, str | list) for item in prompt):
        raise ApiError(400, "Only one prompt per request is supported: send them one by one.", "prompt")
    raise ApiError(400, "prompt must be a text or a list of token ids (integers), and not empty.", "prompt")


def _max_tokens(kind: Kind, body: dict[str, Any]) -> int | None:
    names = ("max_completion_tokens", "max_tokens") if kind == "chat" else ("max_tokens",)
    for name in names:
        value = _integer(body, name)
        if value is not None:
            if value < 1:
                raise ApiError(400, f"{name} must be at least 1, got {value}.", name)
            return value
    return None if kind == "chat" else DEFAULT_COMPLETION_TOKENS


def _streaming(body: dict[str, Any]) -> tuple[bool, bool]:
    stream, options = _flag(body, "stream"), body.get("stream_options")
    if options is None:
        return stream, False
    if not isinstance(options, dict):
        raise ApiError(400, "stream_options must be an object such as {'include_usage': true}.", "stream_options")
    if not stream:
        raise ApiError(400, "stream_options is only allowed together with stream: true.", "stream_options")
    return stream, _flag(options, "include_usage")


def _stops(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(400, f"stop must be a string or a list of at most {MAX_STOPS} strings, none empty.", "stop")
    return tuple(stops)


def _salt(body: dict[str, Any]) -> str | None:
    """vLLM's field: requests share cached blocks only with those of the same salt."""
    salt = body.get("cache_salt")
    if salt is None or (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT):
        return salt
    raise ApiError(400, f"cache_salt must be a string of 1 to {MAX_SALT} characters.", "cache_salt")


def _retention(body: dict[str, Any]) -> float:
    """Ours: for how long after its end a request would like its prefix to stay cached; 0 when it does not say."""
    wish = body.get("cache_retention")
    if wish is None:
        return 0.0
    if isinstance(wish, str) and wish in RETENTION_S:
        return RETENTION_S[wish]
    raise ApiError(400, f"cache_retention must be one of {', '.join(map(repr, RETENTION_S))}, or left out.", "cache_retention")


def _top_p(body: dict[str, Any]) -> float:
    value = _number(body, "top_p", 1.0, (0.0, 1.0))
    if value == 0:
        raise ApiError(400, "top_p must be above 0; for greedy answers send temperature: 0.", "top_p")
    return value


def _number(body: dict[str, Any], name: str, default: float, bounds: tuple[float, float]) -> float:
    value = body.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not bounds[0] <= value <= bounds[1]:
        raise ApiError(400, f"{name} must be a number from {bounds[0]:g} to {bounds[1]:g}, got {value!r}.", name)
    return float(value)


def _integer(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None or type(value) is int:
        return value
    raise ApiError(400, f"{name} must be an integer, not {_name(value)}.", name)


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ApiError(400, f"{name} must be true or false, not {_name(value)}.", name)


def _list_or_none(body: dict[str, Any], name: str) -> list[Any] | None:
    value = body.get(name)
    if value is None or isinstance(value, list):
        return value or None
    raise ApiError(400, f"{name} must be a list, not {_name(value)}.", name)


def _name(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request cost; `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """The frame around one answer: the same id, model and time in every chunk."""

    kind: Kind
    id: str
    model: str
    created: int

    def _frame(self, name: str, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        frame = {"id": self.id, "object": name, "created": self.created, "model": self.model, "choices": choices}
        return frame | {"usage": usage.body()} if usage else frame

    def whole(self, text: str, finish: Finish, usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        if self.kind == "chat":
            choice["message"] = {"role": "assistant", "content": text}
            return orjson.dumps(self._frame("chat.completion", [choice], usage))
        choice["text"] = text
        return orjson.dumps(self._frame("text_completion", [choice], usage))

    def head(self) -> bytes:
        """The first chunk of a streamed chat: the role, as in vLLM. A completion has none."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None) if self.kind == "chat" else b""

    def piece(self, text: str, finish: Finish | None) -> bytes:
        """A chunk with new text."""
        return self._chunk({"delta": {"content": text}} if self.kind == "chat" else {"text": text}, finish)

    def usage(self, usage: Usage) -> bytes:
        """The chunk that include_usage asks for."""
        return _event(self._frame(self._stream_name, [], usage))

    @property
    def _stream_name(self) -> str:
        return "chat.completion.chunk" if self.kind == "chat" else "text_completion"

    def _chunk(self, content: dict[str, Any], finish: Finish | None) -> bytes:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return _event(self._frame(self._stream_name, [choice], None))


def error_event(error: ApiError) -> bytes:
    """How a stream that has begun says that it failed."""
    return _event(error.body())


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
