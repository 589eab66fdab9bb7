"""What a server needs from an engine, and the values that pass between them.

Theory of operation. The server turns an HTTP body into a `Request` and gives it to `Engine.submit`, which never
blocks and returns a `Sequence`: the request as long as it lives inside the engine. The engine pushes tokens into it;
the server takes them out with `next`. Engines call `push` and `fail` on the event loop's thread only.

Invariants: a sequence ends exactly once (finished, failed or closed) and the engine hears of a `close` only when it
came before the end; tokens that the server has not taken yet are merged into one step, so a slow client costs one
list and no queue; `cached_tokens` is the engine's own number, set before the first token.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from replica.blocks import CacheCounts
from replica.prefix import Scope

Finish = Literal["stop", "length"]
Tail = Literal["answer", "open", "none"]  # a chat prompt's end: the head of an answer, the last message still open, neither
Message = dict[str, Any]
GREEDY_BELOW = 1e-3  # a temperature this low divides scores out of float32's range, and is greedy for any purpose


class EngineError(Exception):
    """The engine could not finish a request; the message is for the client."""


class PromptError(ValueError):
    """The client's messages cannot become a prompt; the message is for the client."""


class SetupError(Exception):
    """The replica cannot start, and the message says what the user can do about it."""


@dataclass(frozen=True, slots=True)
class Template:
    """What a request changes of the chat template: another text, further variables."""

    text: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like: a JSON schema, a JSON list of texts of which it is one, or a regular expression."""

    kind: Literal["json", "choice", "regex"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn, and which one ends the answer.

    `temperature` 0 is greedy, `top_k` 0 is all. Presence and frequency penalties count the answer's tokens, the repetition
    penalty the prompt's too. `logprobs` is how many of the likeliest tokens are told beside each one, None for no scores.
    No token that would end the answer is drawn before `min_tokens` others.
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

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class Request(Sampling):
    """One prompt to continue, and how. `scope` is whose cached blocks it may use and leaves behind; for `keep_s` seconds after
    its end these are to be kept, if there is room."""

    prompt: Items[int]
    max_tokens: int
    scope: Scope = field(default_factory=Scope)
    keep_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The logarithm of a token's chance as the model sees it, before any sampling; and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens that became available since the last step, their scores if they were asked for; `finish` on the last step, and
    `end_token` if its last token is what ended the answer: it is no part of the text."""

    tokens: list[int]
    finish: Finish | None
    scores: list[TokenScore] = field(default_factory=list)
    end_token: int | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is, fixed at start. `context` is the most tokens (prompt and answer) of one request; `scores` tells
    whether there are any, to be told and to be changed."""

    kind: str
    context: int
    vocab_size: int
    block_size: int
    num_blocks: int
    scores: bool = True


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine is doing now. `kv_usage` is the share of blocks that running requests hold, 0 to 1."""

    running: int
    waiting: int
    kv_usage: float


class Sequence:
    """One request inside an engine, closed exactly once. All methods O(tokens given)."""

    def __init__(self, request: Request, on_close: Callable[["Sequence"], None]) -> None:
        self.request = request
        self.cached_tokens = 0
        self.ended = False
        self._on_close = on_close
        self.queued_s = 0.0  # how long it waited before the engine began with it; the engine's own number too
        self._tokens: list[int] = []
        self._scores: list[TokenScore] = []
        self._finish: Finish | None = None
        self._end_token: int | None = None
        self._error: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = "failed" if self._error else self._finish or ("closed" if self.ended else "open")
        return f"<Sequence {state}, {len(self.request.prompt)} prompt tokens, {len(self._tokens)} not taken>"

    def push(self, tokens: Iterable[int], finish: Finish | None = None, scores: Iterable[TokenScore] = ()) -> None:
        """The engine has new tokens; with `finish` they are the last."""
        if self.ended:
            return
        self._tokens.extend(tokens)
        self._scores.extend(scores)
        self._finish = finish
        self.ended = finish is not None
        self._wake()

    def end(self, tokens: list[int], scores: Iterable[TokenScore] = ()) -> None:
        """The last tokens, of which the last one ends the answer and is no part of its text."""
        if not self.ended:
            self._end_token = tokens[-1]
        self.push(tokens, "stop", scores)

    def fail(self, message: str) -> None:
        """The engine gives this request up."""
        if not self.ended:
            self.ended, self._error = True, message
            self._wake()

    async def next(self) -> Step:
        """Wait for new tokens; raise EngineError when no more will come. Not to be called again after a step with `finish`."""
        if not self._tokens and self._finish is None and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None and not self._tokens:
            raise EngineError(self._error)
        tokens, self._tokens = self._tokens, []
        scores, self._scores = self._scores, []
        return Step(tokens, self._finish, scores, self._end_token)

    def close(self) -> None:
        """Nobody wants the rest: the engine stops working on it. Does nothing once the sequence has ended."""
        if not self.ended:
            self.ended = True
            self._on_close(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Engine(Protocol):
    """The interface of both engines. Everything but the coroutines is synchronous, and called on the event loop's thread;
    `encode`, `encode_chat` and `grammar_error`, which can take long, also in another one beside it."""

    @property
    def info(self) -> EngineInfo: ...

    async def start(self) -> None:
        """Begin to serve; `submit` may be called from here on."""

    async def close(self) -> None:
        """Stop working and free everything; open sequences fail."""

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text; `special`: with those that the model wants around it."""

    def encode_chat(
        self, messages: list[Message], tools: list[Any] | None, tail: Tail = "answer", template: Template | None = None
    ) -> list[int]:
        """The template's prompt for these messages. Raises PromptError."""

    def decode(self, tokens: list[int], special: bool = False) -> str:
        """The text of tokens; `special`: that of special tokens too."""

    def token_strings(self, tokens: list[int]) -> list[str]:
        """Each token as the vocabulary spells it."""

    def grammar_error(self, grammar: Grammar) -> str | None:
        """Why answers cannot be kept to this grammar, if they cannot; the message is for the client."""

    def submit(self, request: Request) -> Sequence:
        """Take a request in; its prompt and max_tokens have been checked against `info`, its grammar by `grammar_error`."""

    def load(self) -> Load: ...

    def cache_counts(self) -> CacheCounts: ...

    def failure(self) -> str | None:
        """Why the engine can serve no more, or None while it can."""

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, and nothing done, while requests run."""
