"""Bodies in, `Call`s out.

`parse` accepts what vLLM accepts: `model` may be left out, and a field that we do not know, or know and do not honour, is
no error: it is named in `Call.ignored`, for the response header `x-warmroute-ignored`. A field that we do honour and that
is wrong is an `ApiError`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from replica.engine import Message, Sampling, Tail, Template
from replica.fields import ApiError, flag, integer, kind_of, list_or_none, number, read_object, token_ids
from replica.prefix import Scope
from replica.shapes import FIELDS, grammar_of

Kind = Literal["chat", "completion"]
Truncation = Literal["auto", "disabled"]

DEFAULT_COMPLETION_TOKENS = 16  # what OpenAI and vLLM give a completion that names no max_tokens
MAX_STOPS = 16
MAX_SALT = 1024
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_NAMED = 20  # ignored fields in the header; a body may have thousands
RETENTION_S: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}
_SAFE_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_BOTH = frozenset(FIELDS) | frozenset(
    re.findall(
        r"\w+",
        "model n best_of stream stream_options max_tokens temperature top_p top_k min_p seed stop stop_token_ids ignore_eos "
        "presence_penalty frequency_penalty repetition_penalty logit_bias logprobs cache_salt cache_retention user",
    )
)
_HONOURED: Mapping[Kind, frozenset[str]] = {
    "chat": _BOTH
    | frozenset(
        re.findall(
            r"\w+",
            "messages tools max_completion_tokens top_logprobs truncation chat_template chat_template_kwargs "
            "add_generation_prompt continue_final_message",
        )
    ),
    "completion": _BOTH | {"prompt"},
}
_SCORED = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "top_k", "min_p")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a prompt is made of. Exactly one of messages, text, tokens is set."""

    messages: list[Message] | None = None
    tools: list[Any] | None = None
    tail: Tail = "answer"
    template: Template = field(default_factory=Template)
    truncation: Truncation = "disabled"
    text: str | None = None
    tokens: list[int] | None = None
    special: bool = True  # may a text get the tokenizer's own tokens around it


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request body. `scored` names the fields that only an engine with scores can honour."""

    kind: Kind
    prompt: Prompt
    n: int
    max_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    scope: Scope
    keep_s: float
    scored: tuple[str, ...]
    ignored: tuple[str, ...]


def parse(kind: Kind, raw: bytes, model: str) -> Call:
    """Check one body; `model` is the only name that we serve."""
    body = read_object(raw)
    check_model(body, model)
    stream, include_usage = _streaming(body)
    sampling = _sampling(kind, body)
    return Call(
        kind=kind,
        prompt=chat_prompt(body) if kind == "chat" else _prompt(body),
        n=_choices(body, sampling),
        max_tokens=_max_tokens(kind, body),
        sampling=sampling,
        stops=_stops(body),
        stream=stream,
        include_usage=include_usage,
        scope=Scope(salt=_salt(body)),
        keep_s=_retention(body),
        scored=tuple(name for name in _SCORED if _says_something(body.get(name))),
        ignored=_ignored(kind, body),
    )


def check_model(body: Mapping[str, Any], model: str) -> None:
    if body.get("model") not in (None, model):
        message = f"The model {body['model']!r} does not exist; this replica serves {model!r}."
        raise ApiError(404, message, "model", "model_not_found")


def parse_tokenize(raw: bytes, model: str) -> tuple[Prompt, bool]:
    """vLLM's /tokenize: a text or messages; and whether the tokens' strings are asked for."""
    body = read_object(raw)
    check_model(body, model)
    strings = flag(body, "return_token_strs")
    if "messages" in body:
        return chat_prompt(body), strings
    text = body.get("prompt")
    if not isinstance(text, str):
        raise ApiError(400, "Send messages (a list), or a prompt (a string).", "prompt")
    return Prompt(text=text, special=flag(body, "add_special_tokens", default=True)), strings


def parse_detokenize(raw: bytes, model: str) -> list[int]:
    body = read_object(raw)
    check_model(body, model)
    if "tokens" not in body:
        raise ApiError(400, "tokens must be a list of token ids (integers).", "tokens")
    return token_ids(body, "tokens")


def chat_prompt(body: dict[str, Any]) -> Prompt:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list with at least one message.", "messages")
    return Prompt(
        messages=[_message(message, f"messages[{at}]") for at, message in enumerate(messages)],
        tools=list_or_none(body, "tools"),
        tail=_tail(body),
        template=_template(body),
        truncation=_truncation(body),
    )


def _message(message: object, where: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where} must be an object with a role (a string) and content.", where)
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    elif content is None:
        content = ""  # an assistant's message that only calls tools
    elif not isinstance(content, str):
        raise ApiError(400, f"{where}.content must be a string or a list of parts, not {kind_of(content)}.", where)
    return {**message, "content": content}


def _part(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise ApiError(
            400, f"{where} must be a text part ({{'type': 'text', 'text': ...}}): this model reads text only.", where
        )
    return text


def _tail(body: dict[str, Any]) -> Tail:
    goes_on, headed = flag(body, "continue_final_message"), body.get("add_generation_prompt")
    if goes_on and headed:
        message = (
            "continue_final_message goes on with the last message, add_generation_prompt begins another: send one of them."
        )
        raise ApiError(400, message, "continue_final_message")
    return "open" if goes_on else "none" if headed is not None and not flag(body, "add_generation_prompt") else "answer"


def _prompt(body: dict[str, Any]) -> Prompt:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return Prompt(text=prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return Prompt(tokens=prompt)
    if isinstance(prompt, list) and len(prompt) > 1 and all(isinstance(item, str | list) for item in prompt):
        raise ApiError(400, "Only one prompt per request is supported: send them one by one.", "prompt")
    raise ApiError(400, "prompt must be a text or a list of token ids (integers), and not empty.", "prompt")


def _max_tokens(kind: Kind, body: dict[str, Any]) -> int | None:
    names = ("max_completion_tokens", "max_tokens") if kind == "chat" else ("max_tokens",)
    for name in names:
        value = integer(body, name)
        if value is not None:
            if value < 1:
                raise ApiError(400, f"{name} must be at least 1, got {value}.", name)
            return value
    return None if kind == "chat" else DEFAULT_COMPLETION_TOKENS


def _streaming(body: dict[str, Any]) -> tuple[bool, bool]:
    stream, options = flag(body, "stream"), body.get("stream_options")
    if options is None:
        return stream, False
    if not isinstance(options, dict):
        raise ApiError(400, "stream_options must be an object such as {'include_usage': true}.", "stream_options")
    if not stream:
        raise ApiError(400, "stream_options is only allowed together with stream: true.", "stream_options")
    return stream, flag(options, "include_usage")


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
    value = number(body, "top_p", 1.0, (0.0, 1.0))
    if value == 0:
        raise ApiError(400, "top_p must be above 0; for greedy answers send temperature: 0.", "top_p")
    return value


def _template(body: dict[str, Any]) -> Template:
    text, variables = body.get("chat_template"), body.get("chat_template_kwargs")
    if text is not None and not isinstance(text, str):
        raise ApiError(400, f"chat_template must be a string, not {kind_of(text)}.", "chat_template")
    if variables is not None and not isinstance(variables, dict):
        raise ApiError(400, f"chat_template_kwargs must be an object, not {kind_of(variables)}.", "chat_template_kwargs")
    return Template(text, variables or {})


def _truncation(body: dict[str, Any]) -> Truncation:
    value = body.get("truncation")
    if value in (None, "disabled"):
        return "disabled"
    if value == "auto":
        return "auto"
    raise ApiError(400, "truncation must be 'auto' (drop the oldest turns if need be) or 'disabled'.", "truncation")


def _choices(body: dict[str, Any], sampling: Sampling) -> int:
    n = integer(body, "n", (1, MAX_CHOICES)) or 1
    if body.get("best_of") not in (None, n):
        raise ApiError(400, "best_of is not supported: leave it out, n answers are made.", "best_of")
    if n > 1 and sampling.greedy:
        raise ApiError(400, "n above 1 without a temperature would give the same answer n times: send a temperature.", "n")
    return n


def _sampling(kind: Kind, body: dict[str, Any]) -> Sampling:
    top_k = integer(body, "top_k")
    if top_k is not None and top_k < -1:
        raise ApiError(400, f"top_k must be at least 1, or 0 or -1 for all tokens, got {top_k}.", "top_k")
    repetition = number(body, "repetition_penalty", 1.0, (0.0, 10.0))
    if repetition == 0:
        raise ApiError(400, "repetition_penalty must be above 0; 1 is none.", "repetition_penalty")
    return Sampling(
        # Greedy unless asked: the same prompt then gives the same answer, which is what people compare caches with.
        temperature=number(body, "temperature", 0.0, (0.0, 2.0)),
        top_p=_top_p(body),
        top_k=max(0, top_k or 0),
        min_p=number(body, "min_p", 0.0, (0.0, 1.0)),
        seed=integer(body, "seed"),
        presence_penalty=number(body, "presence_penalty", 0.0, (-2.0, 2.0)),
        frequency_penalty=number(body, "frequency_penalty", 0.0, (-2.0, 2.0)),
        repetition_penalty=repetition,
        logit_bias=_logit_bias(body),
        logprobs=_logprobs(kind, body),
        stop_tokens=tuple(token_ids(body, "stop_token_ids")),
        ignore_eos=flag(body, "ignore_eos"),
        grammar=grammar_of(body),
    )


def _logit_bias(body: dict[str, Any]) -> dict[int, float]:
    biases = body.get("logit_bias")
    if biases is None:
        return {}
    if not isinstance(biases, dict) or not all(token.isdecimal() and len(token) < 12 for token in biases):
        raise ApiError(400, "logit_bias must be an object of token ids and numbers from -100 to 100.", "logit_bias")
    try:
        return {int(token): number(biases, token, 0.0, (-100.0, 100.0)) for token in biases}
    except ApiError as error:
        raise ApiError(400, f"logit_bias: {error.message}", "logit_bias") from None


def _logprobs(kind: Kind, body: dict[str, Any]) -> int | None:
    """How many of the likeliest tokens to tell beside each one; None: nothing is told."""
    if kind == "completion":
        return integer(body, "logprobs", (0, MAX_LOGPROBS))
    top = integer(body, "top_logprobs", (0, MAX_LOGPROBS))
    if flag(body, "logprobs"):
        return top or 0
    if top:
        raise ApiError(400, "top_logprobs is only allowed together with logprobs: true.", "top_logprobs")
    return None


def _says_something(value: object) -> bool:
    return value not in (None, False, 0, {}, [], "")


def _ignored(kind: Kind, body: dict[str, Any]) -> tuple[str, ...]:
    names = (name for name, value in body.items() if name not in _HONOURED[kind] and _says_something(value))
    return tuple(sorted(name for name in names if _SAFE_NAME.fullmatch(name)))[:MAX_NAMED]
