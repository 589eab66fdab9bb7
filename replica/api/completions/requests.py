"""Request bodies in, checked `GenerationRequest`s out.

`parse` accepts the same bodies as vLLM: `model` may be left out. An unknown or unsupported field is no error: it is listed in
`GenerationRequest.ignored`, for the response header `x-warmroute-ignored`. A supported field with a wrong value is an
`ApiError`. The supported fields are the fields of the Structs here; a chat's body is read as two of them.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from msgspec import Meta, Struct

from replica.api.completions.answer import CompletionAnswer
from replica.api.completions.encoder import Kind
from replica.api.completions.response_format import ResponseFields, grammar_of
from replica.api.generation import (
    MAX_STOP,
    MAX_STOPS,
    CacheSalt,
    GenerationRequest,
    OutputOptions,
    RetentionFields,
    UsageReporting,
)
from replica.api.prompts import ChatPromptFields, RequestPrompt, chat_prompt, chat_tool_use, text_prompts
from replica.api.tools import ToolUse
from replica.api.validation import ApiError, Flag, TokenIds, asks, check_model, checked, ignored_fields, read_object
from replica.cache.prefix import Scope
from replica.engine import GREEDY_BELOW, Grammar, SamplingOptions

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's and vLLM's default for a completion without max_tokens
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 1024
MAX_BIASES = 4096
_NEEDS_SCORES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "top_k", "min_p")

Count = Annotated[int, Meta(ge=1, description="an integer of at least 1")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number from 0 to 1")]
Penalty = Annotated[float, Meta(ge=-2, le=2, description="a number from -2 to 2")]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS, description=f"an integer from 0 to {MAX_LOGPROBS}")]
TokenKey = Annotated[str, Meta(pattern="^[0-9]{1,11}$")]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP)]


class StreamOptions(Struct, kw_only=True):
    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None


class GenerationFields(ResponseFields, kw_only=True):
    """The common fields of chats and completions."""

    model: Any = None
    user: Any = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description=f"an integer from 1 to {MAX_CHOICES}")] | None = None
    best_of: Any = None
    stream: Flag | None = None
    stream_options: Annotated[StreamOptions, Meta(description="an object such as {'include_usage': true}")] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2, description="a number from 0 to 2")] | None = None
    top_p: (
        Annotated[float, Meta(gt=0, le=1, description="a number above 0, up to 1 (for greedy answers: temperature 0)")] | None
    ) = None
    top_k: Annotated[int, Meta(ge=-1, description="an integer: at least 1, or 0 or -1 for all tokens")] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Meta(description="an integer")] | None = None
    stop: (
        Annotated[
            Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)],
            Meta(description=f"a string or a list of at most {MAX_STOPS} strings, of 1 to {MAX_STOP} characters"),
        ]
        | None
    ) = None
    stop_token_ids: (
        Annotated[
            list[int], Meta(max_length=MAX_STOP_TOKENS, description=f"a list of at most {MAX_STOP_TOKENS} token ids (integers)")
        ]
        | None
    ) = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    # Scores are divided by it: a much lower value would make them infinite.
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10, description="a number from 0.01 to 10")] | None = None
    logit_bias: (
        Annotated[
            dict[TokenKey, Bias],
            Meta(
                max_length=MAX_BIASES, description=f"an object of at most {MAX_BIASES} token ids and numbers from -100 to 100"
            ),
        ]
        | None
    ) = None
    cache_salt: CacheSalt | None = None
    skip_special_tokens: Flag | None = None
    return_token_ids: Flag | None = None


class ChatFields(GenerationFields, kw_only=True):
    """The fields of a chat, without its prompt's."""

    max_completion_tokens: Count | None = None
    logprobs: Flag | None = None
    top_logprobs: Logprobs | None = None


class CompletionFields(GenerationFields, kw_only=True):
    prompt: Any = None
    echo: Flag | None = None
    suffix: Any = None
    logprobs: Logprobs | None = None


SUPPORTED: Mapping[Kind, frozenset[str]] = {
    "chat": frozenset([*ChatFields.__struct_fields__, *ChatPromptFields.__struct_fields__, *RetentionFields.__struct_fields__]),
    "completion": frozenset([*CompletionFields.__struct_fields__, *RetentionFields.__struct_fields__]) - {"suffix"},
}


class TokenizeChatBody(ChatPromptFields, kw_only=True):
    return_token_strs: Flag | None = None


class TokenizeTextBody(Struct, kw_only=True):
    prompt: Any = None
    add_special_tokens: Flag | None = None
    return_token_strs: Flag | None = None


class DetokenizeBody(Struct):
    tokens: TokenIds


def parse(kind: Kind, raw: bytes, model: str) -> GenerationRequest:
    """Check one body; `model` is the only served name. Raises ApiError."""
    body = read_object(raw)
    check_model(body, model)
    if kind == "chat":
        chat, prompted = checked(body, ChatFields), checked(body, ChatPromptFields)
        prompts, logprobs, output = [chat_prompt(prompted)], _chat_logprobs(chat), _output(chat)
        fields: GenerationFields = chat
        tools, max_tokens = chat_tool_use(prompted), chat.max_completion_tokens or chat.max_tokens
        limit_field = "max_completion_tokens" if chat.max_completion_tokens else "max_tokens"
    else:
        fields = text = checked(body, CompletionFields)
        prompts, logprobs, output = text_prompts(text.prompt), text.logprobs, _completion_output(text)
        tools, max_tokens, limit_field = ToolUse(), text.max_tokens or DEFAULT_COMPLETION_TOKENS, "max_tokens"
    format_field, grammar = grammar_of(fields, tools.forced)
    sampling = _sampling(fields, logprobs, grammar)
    n = _choices(fields, sampling)
    return GenerationRequest(
        prompts=prompts,
        n=n,
        max_tokens=max_tokens,
        sampling=sampling,
        stops=tuple([fields.stop] if isinstance(fields.stop, str) else fields.stop or ()),
        output=output,
        encoder=partial(CompletionAnswer, kind, n, output, scored=logprobs is not None, tools=tools.read),
        scope=Scope(salt=fields.cache_salt),
        keep_s=checked(body, RetentionFields).keep_s,
        bad_words=tuple(fields.bad_words or ()),
        needs_scores=tuple(name for name in _NEEDS_SCORES if asks(name, body.get(name))),
        ignored=ignored_fields(body, SUPPORTED[kind]),
        limit_field=limit_field,
        format_field=format_field,
    )


def parse_tokenize(raw: bytes, model: str) -> tuple[RequestPrompt, bool]:
    """vLLM's /tokenize: the prompt, a text or messages, and True if the tokens are also wanted as strings. Raises ApiError."""
    body = read_object(raw)
    check_model(body, model)
    if body.get("messages") is not None:
        chat = checked(body, TokenizeChatBody)
        return chat_prompt(chat), bool(chat.return_token_strs)
    text = checked(body, TokenizeTextBody)
    if not isinstance(text.prompt, str):
        raise ApiError(400, "Send messages (a list), or a prompt (a string).", "prompt")
    special = text.add_special_tokens is not False
    return RequestPrompt(text=text.prompt, param="prompt", special=special), bool(text.return_token_strs)


def parse_detokenize(raw: bytes, model: str) -> list[int]:
    """vLLM's /detokenize: the token ids. Raises ApiError."""
    body = read_object(raw)
    check_model(body, model)
    return checked(body, DetokenizeBody).tokens


def _completion_output(fields: CompletionFields) -> OutputOptions:
    if fields.suffix is not None:
        raise ApiError(400, "suffix is not supported, as in vLLM: this model only continues a text.", "suffix")
    if fields.echo and fields.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not supported: a prompt has no scores here.", "echo")
    return _output(fields, bool(fields.echo))


def _output(fields: GenerationFields, echo: bool = False) -> OutputOptions:
    return OutputOptions(
        stream=bool(fields.stream),
        usage=_usage(fields),
        echo=echo,
        token_ids=bool(fields.return_token_ids),
        special=fields.skip_special_tokens is False,
    )


def _usage(fields: GenerationFields) -> UsageReporting:
    options = fields.stream_options
    if options is None:
        return "none"
    if not fields.stream:
        raise ApiError(400, "stream_options is only allowed together with stream: true.", "stream_options")
    if not options.include_usage:
        return "none"
    return "each" if options.continuous_usage_stats else "last"


def _choices(fields: GenerationFields, sampling: SamplingOptions) -> int:
    n = fields.n or 1
    if fields.best_of not in (None, n):
        raise ApiError(400, "best_of is not supported: leave it out, n answers are made.", "best_of")
    if n > 1 and sampling.greedy:
        message = f"n above 1 needs a temperature of at least {GREEDY_BELOW:g}: below it, this gives the same answer n times."
        raise ApiError(400, message, "n")
    return n


def _sampling(fields: GenerationFields, logprobs: int | None, grammar: Grammar | None) -> SamplingOptions:
    return SamplingOptions(
        # Greedy by default: the same prompt then gives the same answer, which makes caches comparable.
        temperature=fields.temperature or 0.0,
        top_p=fields.top_p or 1.0,
        top_k=max(0, fields.top_k or 0),
        min_p=fields.min_p or 0.0,
        seed=fields.seed,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=fields.repetition_penalty or 1.0,
        logit_bias={int(token): bias for token, bias in (fields.logit_bias or {}).items()},
        logprobs=logprobs,
        stop_tokens=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=fields.min_tokens or 0,
        grammar=grammar,
        allowed_tokens=fields.allowed_token_ids or (),
    )


def _chat_logprobs(fields: ChatFields) -> int | None:
    """The number of likeliest tokens to report beside each token; None: no scores at all."""
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise ApiError(400, "top_logprobs is only allowed together with logprobs: true.", "top_logprobs")
    return None
