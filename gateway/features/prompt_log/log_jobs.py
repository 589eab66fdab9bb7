"""Work on the stored bytes of logs: on short ones in the event loop, in turns, on long ones in the parser process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from gateway.admission.memory import LARGE_BODY, MemoryLease
from gateway.features.prompt_log import job
from gateway.features.prompt_log.bases import Base
from gateway.parser.parsing import Parsing

_MODULE: Final = "gateway.features.prompt_log.job"
_HASHED_AT_ONCE: Final = 2000  # entries of a log: 3 ms
_WORKS: Final = (job.chains_after, job.copied, job.entries, job.sealed_parts, job.difference_at, job.response_names)


def _operation(work: Callable[..., Any]) -> str:
    return f"prompt_log.{work.__name__}"


OPERATIONS: Final[Mapping[str, str]] = {_operation(work): f"{_MODULE}:{work.__name__}" for work in _WORKS}
"""For the parser process: the place of each operation, by its name."""


class LogJobs:
    """Does that work (see the module)."""

    def __init__(self, parsing: Parsing) -> None:
        self._parsing = parsing

    async def do(self, work: Callable[..., Any], pieces: Sequence[bytes], client: str, *arguments: Any) -> Any:
        """The result of a function of `job.py`, called with the joined pieces and these arguments. Raises GatewayError."""
        joined = b"".join(pieces)
        if self._parsing.is_quick(joined, client):
            return await self._parsing.turns.take(partial(work, joined, *arguments), client)
        return await self._parsing.process.run((_operation(work), *arguments), joined, client)

    async def chains(self, base: Base, since: bytes, limit: int, client: str) -> tuple[int, list[bytes], list[bytes]]:
        """`job.chains_after` of a log."""
        if base.length <= _HASHED_AT_ONCE:
            first, page, latest = job.chains_after(base.digests, since, limit)
        else:
            operation = _operation(job.chains_after), since, limit
            first, page, latest = await self._parsing.process.run(operation, base.digests, client)
        return first, list(page), list(latest)

    async def latest(self, base: Base, client: str) -> list[bytes]:
        """The chains after the last entries of a log."""
        return (await self.chains(base, b"", 0, client))[2]


def charge(lease: MemoryLease, size: int) -> None:
    """Charges the bytes of a log. Raises GatewayError 503."""
    if size >= LARGE_BODY:
        lease.charge(size)
