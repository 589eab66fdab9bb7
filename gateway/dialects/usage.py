"""Token counts of one answer as its engine reported them. Every dialect converts its own form into a `Usage`."""

from __future__ import annotations

from typing import Any, Final

MAX_TOKENS: Final = 1_000_000_000  # of one answer; a higher count is considered an error of the engine
UNKNOWN_CONTEXT: Final = 1 << 20  # tokens: the context of a model whose list does not have it
_SERVER_TURNS: Final = 16  # of a model that calls tools of its server, whose usage is summed
_TOLERANCE: Final = 2  # engines count a few tokens that no limit covers

_NEARLY: Final = 1.1
_APART: Final = 1.4  # about the root of two: the sum is twice the prompt


class Usage:
    """Tokens of one answer as the engine counted them. prompt includes cached. cached is None if the engine does not report it.
    written: tokens of the prompt newly written to the cache. hours: the part of written that stays for an hour.

    Immutable by convention. A plain class, because creating a NamedTuple takes compiled code 2,000 instructions, one percent of
    a request.
    """

    __slots__ = ("cached", "completion", "hours", "prompt", "written")

    def __init__(self, prompt: int, completion: int, cached: int | None = None, written: int = 0, hours: int = 0) -> None:
        self.prompt = prompt
        self.completion = completion
        self.cached = cached
        self.written = written
        self.hours = hours

    def _fields(self) -> tuple[object, ...]:
        return self.prompt, self.completion, self.cached, self.written, self.hours

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Usage) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return f"Usage{self._fields()}"


def bounded(
    usage: Usage, context: int | None, answers: int, output: int, *, turns: bool, prompt: int | None = None
) -> Usage | None:
    """The counts that a request can have used: `usage` itself; without tokens of the answer if it cannot have so many; None if
    the prompt cannot. context: of the model; None: unknown. answers: number in one request. output: the most tokens of each,
    as the client limits them; 0: without a limit. turns: a server may have run several turns. prompt: the most tokens of the
    prompt, as its bytes show; None: they do not.
    """
    times = answers * _TOLERANCE * (_SERVER_TURNS if turns else 1)
    size = (context or UNKNOWN_CONTEXT) * times
    if usage.prompt > (size if prompt is None else min(size, prompt)):
        return None
    if usage.completion > (min(size, output * times) if output else size):  # some engines ignore the limit
        return Usage(usage.prompt, 0, usage.cached, usage.written, usage.hours)
    return usage


def written_tokens(details: Any, prompt: int, cached: int | None) -> int:
    """The tokens of a prompt that were written to the cache, at most those not read from it. details: of the engine's usage.

    `cache_write_tokens` (OpenAI, and vLLM's Responses), else `created_cache_tokens` (vLLM's chat).
    """
    if not isinstance(details, dict):
        return 0
    written = token_count(details.get("cache_write_tokens"))
    if written is None:
        written = token_count(details.get("created_cache_tokens"))
    return min(written, prompt - (cached or 0)) if written else 0


def counted_once(usage: Usage, estimate: int) -> Usage:
    """The usage of an engine that may have counted the cached tokens in the other ones as well. estimate: of the prompt.

    It has if the two counts are nearly equal, as in a conversation that is cached but for its last turn, and one of them, not
    the sum, is about the estimate.
    """
    cached = usage.cached or 0
    rest = usage.prompt - cached - usage.written
    if not (cached <= rest <= cached * _NEARLY and usage.prompt > estimate * _APART and rest < estimate * _APART):
        return usage
    written = min(usage.written, rest - cached)
    return Usage(rest, usage.completion, cached, written, min(usage.hours, written))


def token_count(value: Any) -> int | None:
    """A plausible count: an integer from 0 to MAX_TOKENS; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS else None
