"""Values between the HTTP server and an API: a checked request with its encoder, and the encoder's information about the
answer.

Theory of operation. An API (chat and completions, Messages, Responses) is two things: a function from a body to a
`GenerationRequest`, and an `Encoder` that turns the engine's output into the API's bytes. Everything between them is shared:
admission, tokenizing, generation, stop strings, metrics, the connection to the client. A request brings the maker of its own
encoder, so the server does not know which API it serves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol, Self

from msgspec import Meta, Struct

from replica.api.prompts import RequestPrompt
from replica.api.validation import ApiError
from replica.cache.prefix import Scope
from replica.engine import SamplingOptions
from replica.output.generation import Delta, TokenUsage

UsageReporting = Literal["none", "last", "each"]  # in a stream: in no chunk, in an additional one at the end, in each chunk
Retention = Literal["5m", "1h"]
RETENTION_S: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}  # seconds of each Retention
OPENAI_RETENTION_S: Mapping[str, float] = {"in_memory": 0.0, "in-memory": 0.0, "24h": 86400.0, "30m": 1800.0}
MAX_STOPS = 16
MAX_STOP = 1024  # characters of a stop string
MAX_SALT = 1024
# vLLM's field, in all APIs: requests share cached blocks only with requests of the same salt.
CacheSalt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT, description=f"a string of 1 to {MAX_SALT} characters")]


class CacheOptions(Struct, kw_only=True):
    """OpenAI's `prompt_cache_options`. Its `mode` concerns billing only."""

    ttl: Annotated[Literal["30m"], Meta(description="'30m', or left out")] | None = None
    mode: Any = None


class RetentionFields(Struct, kw_only=True):
    """The time after its end for which a request's prefix should stay cached: our own field, and OpenAI's two."""

    cache_retention: Annotated[Retention, Meta(description="one of '5m', '1h', or left out")] | None = None
    prompt_cache_retention: (
        Annotated[Literal["in_memory", "in-memory", "24h"], Meta(description="'in_memory' or '24h', or left out")] | None
    ) = None
    prompt_cache_options: Annotated[CacheOptions, Meta(description="an object such as {'ttl': '30m'}")] | None = None

    @property
    def keep_s(self) -> float:
        """The longest requested retention."""
        options = self.prompt_cache_options
        own = RETENTION_S[self.cache_retention] if self.cache_retention else 0.0
        openai = [OPENAI_RETENTION_S[name] for name in (self.prompt_cache_retention, options and options.ttl) if name]
        return max([own, *openai])


class Counts(Protocol):
    """The tokens of a request until now: of all its answers, and of one of them."""

    def usage(self) -> TokenUsage: ...

    def usage_of(self, index: int) -> TokenUsage: ...


class Encoder(Protocol):
    """The bytes of one response: either `whole`, once; or as a stream each `delta`, then `end` or `failed`."""

    def whole(self, answers: Sequence[Delta], usage: TokenUsage) -> bytes:
        """The body of a plain response; `answers` have all their text."""

    def delta(self, index: int, delta: Delta, counts: Counts) -> bytes:
        """New text of one answer, as events; b"" if there is nothing to send."""

    def end(self, counts: Counts) -> bytes:
        """The events after the last delta of the last answer."""

    def failed(self, error: ApiError) -> bytes:
        """The events by which a stream that has begun ends with an error."""


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """Values known before the first token. `name`: the client's id of this request, or a random one. `created` in seconds of
    Unix time. `prompts`: token ids of each prompt. `marks`: positions of marks in the first prompt, in tokens. `dropped`:
    number of messages left out to make the prompt fit. `spell` gives a token's text. `block_size`: of the cache, in tokens.
    """

    name: str
    model: str
    created: int
    prompts: Sequence[Sequence[int]]
    spell: Callable[[int], str]
    block_size: int = 1
    dropped: int = 0
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """The form of answers: as a stream, with `usage` in it, preceded by the prompt (`echo`), with token ids, with special
    tokens.
    """

    stream: bool = False
    usage: UsageReporting = "none"
    echo: bool = False
    token_ids: bool = False
    special: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request body: `n` answers to each prompt. `needs_scores`: sent fields that only an engine with token scores can
    apply. `bad_words` become tokens of `sampling` when it is prepared. `limit_field`, `format_field`: sources of `max_tokens`
    and of the grammar of `sampling`, for errors. `repeated`: characters of the request that its encoder repeats. `transfer`:
    its fields about another replica that computes or takes its prompt (`transfer.py`).
    """

    prompts: list[RequestPrompt]
    n: int
    max_tokens: int | None
    sampling: SamplingOptions
    stops: tuple[str, ...]
    output: OutputOptions
    encoder: Callable[[AnswerContext], Encoder]
    scope: Scope = field(default_factory=Scope)
    keep_s: float = 0.0
    needs_scores: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    limit_field: str = "max_tokens"
    format_field: str = "response_format"
    repeated: int = 0
    transfer: Any = None

    def prepared(self) -> Self:
        """The part that is needed after the engine's requests were made: without prompts, and other values in these."""
        return replace(self, prompts=[], sampling=SamplingOptions(), bad_words=())
