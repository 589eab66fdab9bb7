"""From a checked body to the engine's requests, one per prompt: tokenize, truncate, check against the engine's limits."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from replica.api.generation import GenerationRequest
from replica.api.prompts import RequestPrompt
from replica.api.validation import ApiError, json_text, shortened
from replica.cache.prefix import Prefix
from replica.engine import Engine, EngineRequest, GrammarKind, Message, PromptError, PromptTooLong, SamplingOptions, counted

# The longest answer of a chat without max_tokens: engines reserve memory for the longest answer that is possible.
MAX_ANSWER_TOKENS = 2048
MAX_RETURNED = 1 << 18  # tokens of prompts repeated in the answers to one request
MAX_SCORES = 1 << 19  # of the plain answers to one request: 450 bytes for each while they are written
TOKEN_BYTES = 16  # of a token of a prompt: in its array, and in the keys of blocks of four tokens or more
TOO_LONG = "context_length_exceeded"
TEMPLATE_MAY_DROP = 4  # times as long as the context: a chat is refused unseen; its template may leave texts out
# Characters of a format. Longer ones take seconds to compile, and many milliseconds a token.
MAX_FORMAT: Mapping[GrammarKind, int] = {
    "json": 1 << 18,
    "choice": 1 << 18,
    "calls": 1 << 18,
    "regex": 1 << 16,
    "lark": 1 << 15,
}
_MESSAGE_FIELDS = "role", "content", "tool_calls", "reasoning_content"  # the fields that templates write
_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingOptions))


class ContextError(ApiError):
    """The prompt, or the prompt and `max_tokens` behind it, exceed the `context` of the engine. All in tokens; `max_tokens`
    None: the prompt alone is too long.
    """

    def __init__(self, message: str, param: str, tokens: int, max_tokens: int | None, context: int) -> None:
        super().__init__(400, message, param, TOO_LONG)
        self.tokens, self.max_tokens, self.context = tokens, max_tokens, context


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """The engine's requests, the number of messages left out to make the prompts fit, the positions of the first prompt's marks
    in tokens, and the text of each prompt for answers that begin with it.
    """

    requests: Sequence[EngineRequest]
    dropped: int = 0
    marks: tuple[int, ...] = ()
    echoes: Sequence[str] = ()

    @property
    def size(self) -> int:
        """Approximate bytes. O(requests)."""
        tokens = sum(TOKEN_BYTES * len(one.prompt) + 8 * len(one.allowed_tokens) for one in self.requests)
        return tokens + sum(map(len, self.echoes))


def prompt_tokens(engine: Engine, prompt: RequestPrompt) -> list[int]:
    """The tokens of a prompt in any form. Raises ApiError, ContextError if it certainly has too many."""
    _check_length(engine, prompt, counted(engine.info.context))
    try:
        if prompt.messages is not None:
            return _known(engine, engine.encode_chat(prompt.messages, prompt.tools, prompt.end, prompt.template))
        if prompt.text is not None:
            return _known(engine, engine.encode(prompt.text, prompt.special))
    except PromptError as error:
        reason = shortened(str(error))
        raise ApiError(400, f"These messages do not fit the model's chat template: {reason}.", prompt.param) from None
    except PromptTooLong as error:
        raise _too_long(engine, prompt, error.least) from None
    check_tokens(engine, prompt.tokens or [], prompt.param)
    return prompt.tokens or []


def _known(engine: Engine, tokens: list[int]) -> list[int]:
    """The tokens of a text, without unknown ones: some tokenizers have more tokens than their model has been trained with."""
    size = engine.info.vocab_size
    if tokens and max(tokens) >= size:
        raise ApiError(400, f"The text has the token {max(tokens)}, and the model knows those below {size}: leave it out.")
    return tokens


def check_tokens(engine: Engine, tokens: list[int] | tuple[int, ...], name: str) -> None:
    """Raises ApiError, which names this field, if a token id is not in the vocabulary."""
    size = engine.info.vocab_size
    if not all(0 <= token < size for token in tokens):
        raise out_of_vocabulary(engine, name)


def out_of_vocabulary(engine: Engine, name: str) -> ApiError:
    return ApiError(400, f"{name} has token ids outside 0 to {engine.info.vocab_size - 1}.", name)


def prepare(engine: Engine, request: GenerationRequest) -> PreparedRequest:
    """The engine's requests for a checked body. Raises ApiError. Can take seconds; calls only engine methods that may run in
    another thread.
    """
    _check_supported(engine, request)
    check_tokens(engine, request.sampling.stop_tokens, "stop_token_ids")
    check_tokens(engine, list(request.sampling.logit_bias), "logit_bias")
    request = replace(request, sampling=_masked(engine, request))
    prepared = [_prepared(engine, request, prompt) for prompt in request.prompts]
    _check_returned(request, sum(len(one.prompt) for one, _ in prepared))
    _check_scores(request, sum(one.max_tokens for one, _ in prepared))
    first, marks = request.prompts[0], tuple[int, ...]()
    if first.marks:
        marks = tuple(_position(engine, first, mark, prepared[0][0].prompt) for mark in first.marks)
    echoes = [_text(engine, prompt) for prompt in request.prompts] if request.output.echo else []
    return PreparedRequest([one for one, _ in prepared], sum(dropped for _, dropped in prepared), marks, echoes)


def _check_returned(request: GenerationRequest, tokens: int) -> None:
    """`tokens`: of all prompts. Each answer to a completion repeats its prompt; answers to a chat have it once."""
    returned = request.n * tokens
    if request.prompts[0].messages is not None or returned <= MAX_RETURNED:
        return
    for name, sent in (("echo", request.output.echo), ("return_token_ids", request.output.token_ids)):
        if sent:
            raise ApiError(400, f"{name} would return {returned:,} tokens of prompts; at most {MAX_RETURNED:,} are.", name)


def _check_scores(request: GenerationRequest, tokens: int) -> None:
    """`tokens`: maximum of one answer to each prompt."""
    logprobs = request.sampling.logprobs
    scores = 0 if logprobs is None else request.n * tokens * (logprobs + 1)
    if scores > MAX_SCORES and not request.output.stream:
        message = f"The answer may have {scores:,} logprobs; at most {MAX_SCORES:,} are collected: send stream: true, or ask"
        raise ApiError(400, f"{message} for fewer answers, tokens or top_logprobs.", "logprobs")


def _position(engine: Engine, prompt: RequestPrompt, mark: list[Message] | None, tokens: Sequence[int]) -> int:
    """The number of a prompt's tokens that it shares with the conversation up to a mark."""
    if mark is None:
        return len(tokens)
    try:
        begun = engine.encode_chat(mark, prompt.tools, "none", prompt.template)
    except PromptError:
        return 0  # the template refuses this beginning alone
    return next((at for at, (one, two) in enumerate(zip(begun, tokens, strict=False)) if one != two), len(begun))


def _text(engine: Engine, prompt: RequestPrompt) -> str:
    """The text of a completion's prompt."""
    return prompt.text if prompt.text is not None else engine.decode(prompt.tokens or [], special=True)


def with_seed(request: EngineRequest, index: int) -> EngineRequest:
    """The request of the index-th answer to a prompt: each has its own seed, as in vLLM."""
    return request if request.seed is None or not index else replace(request, seed=request.seed + index)


def _prepared(engine: Engine, request: GenerationRequest, prompt: RequestPrompt) -> tuple[EngineRequest, int]:
    prompt, dropped = _shortened(engine, request, prompt)
    tokens = _fitting(engine, request, prompt) if prompt.truncation == "auto" else prompt_tokens(engine, prompt)
    if tokens is None:
        tokens, more = _truncate(engine, request, prompt)
        dropped += more
    room = _answer_room(engine, request, prompt, len(tokens))
    max_tokens = request.max_tokens or min(room, MAX_ANSWER_TOKENS)
    least = request.sampling.min_tokens
    if least > max_tokens:
        answer = f"the answer has at most {max_tokens} tokens"
        message = f"min_tokens is {least}, but {answer}: lower it, or raise {request.limit_field}."
        raise ApiError(400, message, "min_tokens")
    sampling = {name: getattr(request.sampling, name) for name in _SAMPLING_FIELDS}
    scope = request.scope
    prefix = Prefix(tokens, engine.info.block_size, scope)
    return EngineRequest(prefix.tokens, max_tokens, scope=scope, keep_s=request.keep_s, hashed=prefix, **sampling), dropped


def _check_supported(engine: Engine, request: GenerationRequest) -> None:
    sampling = request.sampling
    needed = {
        "logprobs": sampling.logprobs is not None,
        "bad_words": bool(request.bad_words),
        "allowed_token_ids": len(sampling.allowed_tokens) > 0,
    }
    for name, sent in needed.items():
        if sent and not engine.info.scores:
            raise ApiError(400, f"The simulated engine has no token scores: leave out {name}.", name)
    grammar = sampling.grammar
    if grammar is None:
        return
    param, limit = "tool_choice" if grammar.kind == "calls" else request.format_field, MAX_FORMAT[grammar.kind]
    if len(grammar.text) > limit:
        raise ApiError(400, f"The format has {len(grammar.text):,} characters; at most {limit:,} can be followed.", param)
    reason = engine.grammar_error(grammar)
    if reason is not None:
        raise ApiError(400, f"The answer cannot be constrained to this format: {reason}", param)


def _masked(engine: Engine, request: GenerationRequest) -> SamplingOptions:
    """The sampling with excluded words as tokens."""
    sampling = request.sampling
    allowed = array("q", sorted(set(sampling.allowed_tokens)))
    if allowed and not 0 <= allowed[0] <= allowed[-1] < engine.info.vocab_size:
        raise out_of_vocabulary(engine, "allowed_token_ids")
    spellings = dict.fromkeys(spelling for word in request.bad_words for spelling in _spellings(engine, word))
    spellings = {each: None for each in spellings if max(each) < engine.info.vocab_size}  # others cannot be drawn
    return replace(sampling, allowed_tokens=allowed, bad_words=tuple(spellings))


def _spellings(engine: Engine, word: str) -> list[tuple[int, ...]]:
    """The tokens of a word at the beginning of a text and, if they differ, in the middle: as in vLLM."""
    first, later = (tuple(engine.encode(space + word.lstrip(), special=False)) for space in ("", " "))
    return [each for each in (first, later) if each and (each is first or (len(each) == len(first) and each[0] != first[0]))]


def _prompt_limit(engine: Engine, request: GenerationRequest) -> int:
    """Tokens of the longest prompt that leaves room for the answer."""
    return engine.info.context - (request.max_tokens or 1)


def _shortened(engine: Engine, request: GenerationRequest, prompt: RequestPrompt) -> tuple[RequestPrompt, int]:
    """The prompt without turns that certainly do not fit, and the number of their messages: each message is at least one token.
    Raises ContextError for a prompt that is certainly too long.
    """
    limit = _prompt_limit(engine, request)
    dropped = 0
    if prompt.messages is not None and prompt.truncation == "auto" and len(prompt.messages) > limit:
        kept, dropped = truncated(prompt.messages, lambda messages: len(messages) <= limit)
        prompt = replace(prompt, messages=kept)
    if prompt.truncation != "auto":
        _check_length(engine, prompt, engine.info.context)
    return prompt, dropped


def _check_length(engine: Engine, prompt: RequestPrompt, most: int) -> None:
    """Raises ContextError if it certainly has more tokens than `most`, because tokenizing it would take seconds. O(texts)."""
    least, spare = _characters(prompt) // engine.info.longest_token, 1 if prompt.messages is None else TEMPLATE_MAY_DROP
    if least > spare * most:
        raise _too_long(engine, prompt, least)


def _characters(prompt: RequestPrompt) -> int:
    """The characters of everything in a prompt. O(texts)."""
    if prompt.messages is None:
        return len(prompt.text or "")
    tools = len(json_text(prompt.tools, "tools")) if prompt.tools else 0
    return tools + sum(_length(message.get(field)) for message in prompt.messages for field in _MESSAGE_FIELDS)


def _length(value: object) -> int:
    """Characters of a field of a message."""
    return len(value) if isinstance(value, str) else len(json_text(value, "messages")) if value else 0


def _too_long(engine: Engine, prompt: RequestPrompt, least: int) -> ContextError:
    room, most = engine.info.context - 1, counted(engine.info.context)
    message = f"The prompt has more than {least:,} tokens; at most {room:,} leave room for an answer, and {most:,} are counted."
    message += " Shorten it."
    return ContextError(message, prompt.param, least, None, engine.info.context)


def _truncate(engine: Engine, request: GenerationRequest, prompt: RequestPrompt) -> tuple[list[int], int]:
    def fits(messages: list[Message]) -> bool:
        return _fitting(engine, request, replace(prompt, messages=messages)) is not None

    kept, dropped = truncated(prompt.messages or [], fits)
    return prompt_tokens(engine, replace(prompt, messages=kept)), dropped


def _fitting(engine: Engine, request: GenerationRequest, prompt: RequestPrompt) -> list[int] | None:
    """The tokens of a prompt, None if they leave no room for the answer. Raises ApiError for an invalid prompt."""
    try:
        tokens = prompt_tokens(engine, prompt)
    except ContextError:
        return None
    return tokens if len(tokens) <= _prompt_limit(engine, request) else None


def _answer_room(engine: Engine, request: GenerationRequest, prompt: RequestPrompt, length: int) -> int:
    """Tokens left for the answer behind a prompt of this length. Raises ApiError if that is none, or less than max_tokens."""
    context = engine.info.context
    room = context - length
    if not length:
        raise ApiError(400, "The prompt has no tokens: there is nothing to continue.", prompt.param)
    if room < 1:
        truncatable = prompt.messages is not None and prompt.truncation != "auto"
        advice = "Shorten it, or send truncation: 'auto'" if truncatable else "Shorten it"
        message = f"The prompt has {length} tokens; at most {context - 1} leave room for an answer. {advice}."
        raise ContextError(message, prompt.param, length, None, context)
    if request.max_tokens is not None and request.max_tokens > room:
        message = (
            f"{length} prompt tokens and {request.max_tokens} for the answer are more than the {context} tokens of "
            f"this replica: ask for at most {room}, or shorten the prompt."
        )
        raise ContextError(message, request.limit_field, length, request.max_tokens, context)
    return room


def truncated(messages: list[Message], fits: Callable[[list[Message]], bool]) -> tuple[list[Message], int]:
    """Drops as few of a conversation's oldest turns as necessary; returns the remaining messages and the number of dropped
    ones.

    A turn begins with a user's message and has all messages up to the next one: an answer, tool calls, their results. So the
    rest never begins with an answer to nothing. The messages before the first user's message (the system prompt) and the last
    turn always stay, even if they do not fit. Calls `fits` O(log turns) times.
    """
    users = [at for at, message in enumerate(messages) if message.get("role") == "user"]
    if not users:
        return messages, 0
    head = messages[: users[0]]
    low, high = 0, len(users) - 1  # the number of turns to be dropped is in low to high
    while low < high:
        middle = (low + high) // 2
        if fits(head + messages[users[middle] :]):
            high = middle
        else:
            low = middle + 1
    return head + messages[users[low] :], users[low] - users[0]
