"""From a checked body to the engine's requests, one per prompt: tokenize, truncate, check against the engine's limits."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from replica.api.generation import GenerationRequest
from replica.api.prompts import Prompt
from replica.api.truncation import truncated
from replica.api.validation import ApiError
from replica.engine import Engine, Message, PromptError, Request, Sampling

# The longest answer of a chat without max_tokens: engines reserve memory for the longest answer that is possible.
MAX_ANSWER_TOKENS = 2048
TOO_LONG = "context_length_exceeded"
_SAMPLING_FIELDS = tuple(field.name for field in fields(Sampling))


class ContextError(ApiError):
    """The prompt, or the prompt and `max_tokens` behind it, are more than the `context` of the engine. All in tokens;
    `max_tokens` None: the prompt alone is too long."""

    def __init__(self, message: str, param: str, tokens: int, max_tokens: int | None, context: int) -> None:
        super().__init__(400, message, param, TOO_LONG)
        self.tokens, self.max_tokens, self.context = tokens, max_tokens, context


@dataclass(frozen=True, slots=True)
class Prepared:
    """The engine's requests, the number of messages left out to make the prompts fit, and the positions of the first prompt's
    marks in tokens."""

    requests: Sequence[Request]
    dropped: int = 0
    marks: tuple[int, ...] = ()


def prompt_tokens(engine: Engine, prompt: Prompt) -> list[int]:
    """The tokens of a prompt, in whatever form it was sent. Raises ApiError."""
    if prompt.messages is not None:
        try:
            return engine.encode_chat(prompt.messages, prompt.tools, prompt.end, prompt.template)
        except PromptError as error:
            raise ApiError(400, f"These messages do not fit the model's chat template: {error}.", "messages") from None
    if prompt.text is not None:
        return engine.encode(prompt.text, prompt.special)
    check_tokens(engine, prompt.tokens or [], "prompt")
    return prompt.tokens or []


def check_tokens(engine: Engine, tokens: list[int] | tuple[int, ...], name: str) -> None:
    """Raises ApiError, which names this field, if a token id is not in the vocabulary."""
    if not all(0 <= token < engine.info.vocab_size for token in tokens):
        raise ApiError(400, f"{name} has token ids outside 0 to {engine.info.vocab_size - 1}.", name)


def prepare(engine: Engine, request: GenerationRequest) -> Prepared:
    """Raises ApiError. Can take seconds; calls only those of the engine's methods that may run in another thread."""
    _check_supported(engine, request)
    check_tokens(engine, request.sampling.stop_tokens, "stop_token_ids")
    check_tokens(engine, list(request.sampling.logit_bias), "logit_bias")
    prepared = [_prepared(engine, request, prompt) for prompt in request.prompts]
    first, marks = request.prompts[0], tuple[int, ...]()
    if first.marks:
        marks = tuple(_position(engine, first, mark, prepared[0][0].prompt) for mark in first.marks)
    return Prepared([one for one, _ in prepared], sum(dropped for _, dropped in prepared), marks)


def _position(engine: Engine, prompt: Prompt, mark: list[Message] | None, tokens: Sequence[int]) -> int:
    """How many of a prompt's tokens it shares with the conversation up to a mark."""
    if mark is None:
        return len(tokens)
    try:
        begun = engine.encode_chat(mark, prompt.tools, "none", prompt.template)
    except PromptError:
        return 0  # a template that wants more than this beginning
    return next((at for at, (one, two) in enumerate(zip(begun, tokens, strict=False)) if one != two), len(begun))


def echoed(engine: Engine, prompt: Prompt) -> str:
    """The text of a completion's prompt."""
    return prompt.text if prompt.text is not None else engine.decode(prompt.tokens or [], special=True)


def with_seed(request: Request, index: int) -> Request:
    """The request of the index-th answer to a prompt: each has a seed of its own, as in vLLM."""
    return request if request.seed is None or not index else replace(request, seed=request.seed + index)


def _prepared(engine: Engine, request: GenerationRequest, prompt: Prompt) -> tuple[Request, int]:
    dropped = 0
    tokens = prompt_tokens(engine, prompt)
    if prompt.truncation == "auto" and len(tokens) > _prompt_limit(engine, request):
        tokens, dropped = _truncate(engine, request, prompt)
    room = _answer_room(engine, request, prompt, len(tokens))
    max_tokens = request.max_tokens or min(room, MAX_ANSWER_TOKENS)
    least = request.sampling.min_tokens
    if least > max_tokens:
        message = f"min_tokens is {least}, but the answer has at most {max_tokens} tokens: lower it, or raise max_tokens."
        raise ApiError(400, message, "min_tokens")
    sampling = {name: getattr(request.sampling, name) for name in _SAMPLING_FIELDS}
    return Request(tokens, max_tokens, scope=request.scope, keep_s=request.keep_s, **sampling), dropped


def _check_supported(engine: Engine, request: GenerationRequest) -> None:
    if not engine.info.scores and request.sampling.logprobs is not None:
        raise ApiError(400, "The simulated engine has no token scores: leave out logprobs.", "logprobs")
    if request.sampling.grammar is not None:
        reason = engine.grammar_error(request.sampling.grammar)
        if reason is not None:
            param = "tool_choice" if request.sampling.grammar.kind == "calls" else "response_format"
            raise ApiError(400, f"The answer cannot be constrained to this format: {reason}", param)


def _prompt_limit(engine: Engine, request: GenerationRequest) -> int:
    """Tokens of the longest prompt that leaves room for the answer."""
    return engine.info.context - (request.max_tokens or 1)


def _truncate(engine: Engine, request: GenerationRequest, prompt: Prompt) -> tuple[list[int], int]:
    limit = _prompt_limit(engine, request)

    def tokens(messages: list[Message]) -> list[int]:
        return prompt_tokens(engine, replace(prompt, messages=messages))

    kept, dropped = truncated(prompt.messages or [], lambda messages: len(tokens(messages)) <= limit)
    return tokens(kept), dropped


def _answer_room(engine: Engine, request: GenerationRequest, prompt: Prompt, length: int) -> int:
    """Tokens left for the answer behind a prompt of this length. Raises ApiError if that is none, or less than max_tokens."""
    context = engine.info.context
    room = context - length
    chat = prompt.messages is not None
    param = "messages" if chat else "prompt"
    if not length:
        raise ApiError(400, "The prompt has no tokens: there is nothing to continue.", param)
    if room < 1:
        truncatable = chat and prompt.truncation != "auto"
        advice = "Shorten it, or send truncation: 'auto'" if truncatable else "Shorten it"
        message = f"The prompt has {length} tokens; at most {context - 1} leave room for an answer. {advice}."
        raise ContextError(message, param, length, None, context)
    if request.max_tokens is not None and request.max_tokens > room:
        message = (
            f"{length} prompt tokens and {request.max_tokens} for the answer are more than the {context} tokens of "
            f"this replica: ask for at most {room}, or shorten the prompt."
        )
        raise ContextError(message, "max_tokens", length, request.max_tokens, context)
    return room
