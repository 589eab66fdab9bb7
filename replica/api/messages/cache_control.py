"""Cache breakpoints: where a request wants its prompt cached, and for how long.

A breakpoint is a `cache_control` on a tool, a block of the system prompt or of a message, or one at the top of the body, which
stands for the last block. This replica caches every full block of tokens anyway: a breakpoint asks for retention, and marks the
end of the computed tokens that the usage counts as written to the cache. Mistakes are answered in Anthropic's words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replica.api.generation import RETENTION_S, Retention
from replica.api.validation import ApiError

MAX_BREAKPOINTS = 4
_ORDER = "Note that blocks are processed in the following order: `tools`, `system`, `messages`."


@dataclass(frozen=True, slots=True)
class CacheMarks:
    """A request's demands on the cache: the ttls of its breakpoints in the order of the prompt."""

    ttls: Sequence[Retention] = ()

    @property
    def keep_s(self) -> float:
        """Retention of everything that this request caches: the longest requested one."""
        return max((RETENTION_S[ttl] for ttl in self.ttls), default=0.0)


class Breakpoints:
    """Collects the breakpoints of one body, in the order of the prompt; call `checked` once at the end."""

    def __init__(self) -> None:
        self._found: list[Retention] = []

    @property
    def few(self) -> bool:
        """True if there are not too many."""
        return len(self._found) <= MAX_BREAKPOINTS

    def read(self, block: dict[str, Any], path: str) -> bool:
        """Add a block's breakpoint. True if it has one. Raises ApiError."""
        control = block.get("cache_control")
        if control is None:
            return False
        if not isinstance(control, dict) or control.get("type") != "ephemeral":
            raise _wrong(f"{path}.cache_control.type", "Input should be 'ephemeral'")
        ttl: Retention | None = control.get("ttl") or "5m"
        if not isinstance(ttl, str) or ttl not in RETENTION_S:
            raise _wrong(f"{path}.cache_control.ttl", "Input should be '5m' or '1h'")
        if block.get("type") == "text" and not block.get("text"):
            raise _wrong(f"{path}.text", "cache_control cannot be set for empty text blocks")
        if ttl == "1h" and "5m" in self._found:
            message = f"a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block. {_ORDER}"
            raise _wrong(f"{path}.cache_control.ttl", message)
        self._found.append(ttl)
        return True

    def checked(self) -> CacheMarks:
        """The collected marks. Raises ApiError if there are too many."""
        if not self.few:
            message = f"A maximum of {MAX_BREAKPOINTS} blocks with cache_control may be provided. Found {len(self._found)}."
            raise ApiError(400, message)
        return CacheMarks(tuple(self._found))


def _wrong(path: str, message: str) -> ApiError:
    return ApiError(400, f"{path}: {message}", path)
