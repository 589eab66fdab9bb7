"""The interface between the HTTP server and an engine, and the values that pass between them.

Theory of operation. The server turns an HTTP body into an `EngineRequest` and passes it to `Engine.submit`, which never
blocks and returns a `Sequence`: the request for as long as it lives inside the engine. The engine pushes tokens into
it; the server takes them out with `next`. Engines call `push`, `end` and `fail` on the event loop's thread only.

Invariants: a sequence ends exactly once (finished, failed or closed), and the engine is called back for a `close` only
if that came before the end; tokens that the server has not taken yet are merged into one `NewTokens`, so a slow client
costs one list and no queue; `cached_tokens` is the engine's own number, set before the first token.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from replica.cache.blocks import CacheCounts
from replica.cache.prefix import Prefix, Scope

FinishReason = Literal["stop", "length"]
# The end of a chat prompt: the header of an answer; the last message, left open; neither.
PromptEnd = Literal["answer", "open", "none"]
GrammarKind = Literal["json", "choice", "regex", "lark", "calls"]
Message = dict[str, Any]
GREEDY_BELOW = 1e-3  # greedy in effect: a token with a score 0.02 below the best would be drawn twice in a billion draws


class EngineError(Exception):
    """The engine could not finish a request; the message is for the client."""


class PromptError(ValueError):
    """The client's messages cannot become a prompt; the message is for the client."""


class PromptTooLong(Exception):
    """A text has more tokens than an engine counts (`counted`); the exact number is unknown."""

    def __init__(self, least: int) -> None:
        super().__init__(f"more than {least:,} tokens")
        self.least = least


class SetupError(Exception):
    """The replica cannot start; the message states the remedy."""


@dataclass(frozen=True, slots=True)
class TemplateOverride:
    """A request's changes to the chat template: another text, additional variables."""

    text: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, unsafe_hash=True)
class Grammar:
    """A constraint on an answer: a JSON schema, a JSON list of the allowed texts, a regular expression, a context-free grammar
    (Lark's, or GBNF), or one call of a function (a JSON list of objects with a `name` and the JSON schema of its `parameters`).
    `compiled`: the engine's compiled form, which `grammar_error` makes; compiling takes long.
    """

    kind: GrammarKind
    text: str
    compiled: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling options, and the tokens that end the answer.

    `temperature` 0 is greedy, `top_k` 0 means all tokens. Presence and frequency penalties count the answer's tokens, the
    repetition penalty also the prompt's. `logprobs` is the number of likeliest tokens reported with each token, None for no
    scores. No end token is drawn before `min_tokens` others. If `allowed_tokens` is not empty, only these are drawn; no token
    is drawn that completes one of `bad_words` (sequences of tokens). If no token is left, the model's end token is drawn.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    grammar: Grammar | None = None
    allowed_tokens: Items[int] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class EngineRequest(SamplingOptions):
    """One prompt to continue. `scope` selects the cached blocks that it may use and adds to; these are kept for `keep_s`
    seconds after its end, if there is room. `taken_over`: leading tokens of the prompt that another replica has computed, and
    that arrive after `transfer_s`; `taken_cached`: of these, tokens cached there, None if unknown (simulated engine). `hashed`:
    the prompt in blocks, with `prompt` as its tokens, if another thread has computed the block keys: for a long prompt this
    takes too long for the event loop.
    """

    prompt: Items[int]
    max_tokens: int
    scope: Scope = field(default_factory=Scope)
    keep_s: float = 0.0
    taken_over: int = 0
    taken_cached: int | None = None
    transfer_s: float = 0.0
    hashed: Prefix | None = field(default=None, compare=False, repr=False)

    def prefix(self, size: int) -> Prefix:
        """The prompt in blocks of `size` tokens; the caller may extend it. O(prompt), or O(1) if `hashed` is set."""
        known = self.hashed
        if known is not None and known.tokens is self.prompt and (known.size, known.scope) == (size, self.scope):
            return known.copy()
        return Prefix(self.prompt, size, self.scope)


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The log-probability of a token in the model's own distribution, before sampling; and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens since the last call of `Sequence.next`, with their scores if those were requested. `finish` is set on the last
    one; so is `end_token` if its last token ended the answer: that token is not part of the text.
    """

    tokens: list[int]
    finish: FinishReason | None
    scores: list[TokenScore] = field(default_factory=list)
    end_token: int | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """An engine's fixed properties. `context`: the most tokens (prompt and answer) of one request. `longest_token`: the most
    characters that one token can stand for. `scores`: whether the engine has token scores, to report them and to apply
    penalties to them."""

    kind: str
    context: int
    vocab_size: int
    block_size: int
    num_blocks: int
    longest_token: int
    scores: bool = True


def counted(context: int) -> int:
    """The most tokens of a text that an engine with this context counts. Tokenizing a text of millions of tokens would take
    gigabytes and many seconds, and hold the interpreter's lock for tenths of a second.
    """
    return max(2 * context, 1 << 17)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests running and waiting now. `kv_usage` is the share of blocks that running requests hold, 0 to 1."""

    running: int
    waiting: int
    kv_usage: float


class Detokenizer(Protocol):
    """Incremental decoding of one answer. The pieces of all `push`es and of `finish` join to the answer's text."""

    def push(self, tokens: Items[int]) -> str:
        """Add tokens; returns the new text, empty while it ends in half a character."""

    def finish(self) -> str:
        """The rest of the text, even if it ends in half a character. No `push` afterwards."""


class Sequence:
    """One request inside an engine, closed exactly once. All methods O(tokens passed)."""

    def __init__(self, request: EngineRequest, on_close: Callable[["Sequence"], None]) -> None:
        self.request = request
        self.cached_tokens = 0
        self.ended = False
        self._on_close = on_close
        self.queued_s = 0.0  # seconds in the engine's queue; measured by the engine
        self._tokens: list[int] = []
        self._scores: list[TokenScore] = []
        self._finish: FinishReason | None = None
        self._end_token: int | None = None
        self._error: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = "failed" if self._error else self._finish or ("closed" if self.ended else "open")
        return f"<Sequence {state}, {len(self.request.prompt)} prompt tokens, {self.pending} not taken>"

    @property
    def pending(self) -> int:
        """Tokens that were pushed and not taken yet."""
        return len(self._tokens)

    def push(self, tokens: Iterable[int], finish: FinishReason | None = None, scores: Iterable[TokenScore] = ()) -> None:
        """Add new tokens; with `finish`, these are the last ones."""
        if self.ended:
            return
        self._tokens.extend(tokens)
        self._scores.extend(scores)
        self._finish = finish
        self.ended = finish is not None
        self._wake()

    def end(self, tokens: list[int], scores: Iterable[TokenScore] = ()) -> None:
        """Add the last tokens, of which the very last ends the answer and is not part of its text."""
        if not self.ended:
            self._end_token = tokens[-1]
        self.push(tokens, "stop", scores)

    def fail(self, message: str) -> None:
        """End the request with an error from the engine."""
        if not self.ended:
            self.ended, self._error = True, message
            self._wake()

    async def next(self) -> NewTokens:
        """Wait for new tokens. Raises EngineError if no more will come. Not to be called again after `finish`."""
        if not self._tokens and self._finish is None and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None and not self._tokens:
            raise EngineError(self._error)
        tokens, self._tokens = self._tokens, []
        scores, self._scores = self._scores, []
        return NewTokens(tokens, self._finish, scores, self._end_token)

    def close(self) -> None:
        """Cancel the rest: the engine stops working on it. No effect once the sequence has ended."""
        if not self.ended:
            self.ended = True
            self._on_close(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Engine(Protocol):
    """The interface of both engines. Everything but the coroutines is synchronous and called on the event loop's thread;
    `encode`, `encode_chat`, `decode`, `detokenizer` and the detokenizer's methods, `token_strings` and `grammar_error`, which
    can take long, may run in another thread meanwhile.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def prefix_caching(self) -> bool:
        """Return whether prefixes are cached; valid after `start`, as some models are served without prefix caching."""

    async def start(self) -> None:
        """Begin to serve; `submit` may be called afterwards."""

    async def close(self) -> None:
        """Stop working and free everything; open sequences fail."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text; `special`: with the special tokens that the model wants around it. Raises PromptTooLong."""

    def encode_chat(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        end: PromptEnd = "answer",
        template: TemplateOverride | None = None,
    ) -> list[int]:
        """The chat template's prompt for these messages. Raises PromptError and PromptTooLong."""

    def decode(self, tokens: list[int], special: bool = False) -> str:
        """The text of tokens; `special`: including the text of special tokens."""

    def detokenizer(self, special: bool = False) -> Detokenizer:
        """The same as `decode`, incrementally, for one answer."""

    def token_strings(self, tokens: list[int]) -> list[str]:
        """Each token as the vocabulary spells it."""

    def grammar_error(self, grammar: Grammar) -> str | None:
        """The reason why answers cannot follow this grammar, for the client; None if they can."""

    def submit(self, request: EngineRequest) -> Sequence:
        """Accept a request. The caller has checked its prompt and max_tokens against `info`, and its grammar by
        `grammar_error`.
        """

    def load(self) -> EngineLoad: ...

    def cache_counts(self) -> CacheCounts: ...

    def failure(self) -> str | None:
        """The reason why the engine can serve no more, None while it can."""

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks; False, and nothing dropped, while requests run."""
