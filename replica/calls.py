"""Bodies in, `Call`s out.

`parse` accepts what vLLM accepts: `model` may be left out, and a field that we do not know, or know and do not honour, is
no error: it is named in `Call.ignored`, for the response header `x-warmroute-ignored`. A field that we do honour and that
is wrong is an `ApiError`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from replica.engine import Sampling
from replica.fields import ApiError, flag, integer, number, read_object, token_ids
from replica.prefix import Scope
from replica.prompts import Prompt, chat_prompt, text_prompts
from replica.shapes import FIELDS, grammar_of

Kind = Literal["chat", "completion"]
UsageWish = Literal["none", "last", "each"]  # of a stream: in no chunk, in one of its own, in each one

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
        "presence_penalty frequency_penalty repetition_penalty logit_bias logprobs cache_salt cache_retention user "
        "min_tokens skip_special_tokens return_token_ids",
    )
)
_HONOURED: Mapping[Kind, frozenset[str]] = {
    "chat": _BOTH
    | frozenset(
        re.findall(
            r"\w+",
            "messages tools tool_choice max_completion_tokens top_logprobs truncation chat_template chat_template_kwargs "
            "add_generation_prompt continue_final_message",
        )
    ),
    "completion": _BOTH | {"prompt", "echo"},
}
_SCORED = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "top_k", "min_p")


@dataclass(frozen=True, slots=True)
class Telling:
    """How answers are told: in a stream or not, `usage` in it, the prompt first (`echo`), token ids too, special tokens too."""

    stream: bool = False
    usage: UsageWish = "none"
    echo: bool = False
    token_ids: bool = False
    special: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request body: `n` answers to each prompt. `scored` names the fields that only an engine with scores can
    honour."""

    kind: Kind
    prompts: list[Prompt]
    n: int
    max_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    telling: Telling
    scope: Scope
    keep_s: float
    scored: tuple[str, ...]
    ignored: tuple[str, ...]


def parse(kind: Kind, raw: bytes, model: str) -> Call:
    """Check one body; `model` is the only name that we serve."""
    body = read_object(raw)
    check_model(body, model)
    sampling = _sampling(kind, body)
    return Call(
        kind=kind,
        prompts=[chat_prompt(body)] if kind == "chat" else text_prompts(body),
        n=_choices(body, sampling),
        max_tokens=_max_tokens(kind, body),
        sampling=sampling,
        stops=_stops(body),
        telling=_telling(kind, body),
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


def _max_tokens(kind: Kind, body: dict[str, Any]) -> int | None:
    names = ("max_completion_tokens", "max_tokens") if kind == "chat" else ("max_tokens",)
    for name in names:
        value = integer(body, name)
        if value is not None:
            if value < 1:
                raise ApiError(400, f"{name} must be at least 1, got {value}.", name)
            return value
    return None if kind == "chat" else DEFAULT_COMPLETION_TOKENS


def _telling(kind: Kind, body: dict[str, Any]) -> Telling:
    if kind == "completion" and body.get("suffix") is not None:
        raise ApiError(400, "suffix is not supported, as in vLLM: this model only goes on with a text.", "suffix")
    echo = kind == "completion" and flag(body, "echo")
    if echo and body.get("logprobs") is not None:
        raise ApiError(400, "echo with logprobs is not supported: a prompt has no scores here.", "echo")
    stream = flag(body, "stream")
    return Telling(
        stream=stream,
        usage=_usage(body, stream),
        echo=echo,
        token_ids=flag(body, "return_token_ids"),
        special=not flag(body, "skip_special_tokens", default=True),
    )


def _usage(body: dict[str, Any], stream: bool) -> UsageWish:
    options = body.get("stream_options")
    if options is None:
        return "none"
    if not isinstance(options, dict):
        raise ApiError(400, "stream_options must be an object such as {'include_usage': true}.", "stream_options")
    if not stream:
        raise ApiError(400, "stream_options is only allowed together with stream: true.", "stream_options")
    included, continuous = flag(options, "include_usage"), flag(options, "continuous_usage_stats")
    return "none" if not included else "each" if continuous else "last"


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
    return Sampling(
        # Greedy unless asked: the same prompt then gives the same answer, which is what people compare caches with.
        temperature=number(body, "temperature", 0.0, (0.0, 2.0)),
        top_p=_top_p(body),
        top_k=max(0, top_k or 0),
        min_p=number(body, "min_p", 0.0, (0.0, 1.0)),
        seed=integer(body, "seed"),
        presence_penalty=number(body, "presence_penalty", 0.0, (-2.0, 2.0)),
        frequency_penalty=number(body, "frequency_penalty", 0.0, (-2.0, 2.0)),
        # Scores are divided by it: by much less they would not be numbers any more.
        repetition_penalty=number(body, "repetition_penalty", 1.0, (0.01, 10.0)),
        logit_bias=_logit_bias(body),
        logprobs=_logprobs(kind, body),
        stop_tokens=tuple(token_ids(body, "stop_token_ids")),
        ignore_eos=flag(body, "ignore_eos"),
        min_tokens=_min_tokens(body),
        grammar=grammar_of(body),
    )


def _min_tokens(body: dict[str, Any]) -> int:
    least = integer(body, "min_tokens") or 0
    if least < 0:
        raise ApiError(400, f"min_tokens must be at least 0, got {least}.", "min_tokens")
    return least


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
