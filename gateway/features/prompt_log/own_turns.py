"""The parts of logs that bodies have: small bodies are read in the event loop, large ones in the parser process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from gateway.admission.memory import MemoryLease, parsing
from gateway.dialects.json_structure import signs
from gateway.features.prompt_log.job import own_named
from gateway.features.prompt_log.turns.own_turn import OwnTurn
from gateway.parser.parsing import Parsing

OPERATION: Final = "prompt_log.own"
QUICK_BYTES: Final = 1 << 18  # of a body that is named in the event loop: 1 ms, and 3 ms with so many signs
_QUICK_SIGNS: Final = 1 << 11


def is_named_at_once(body: bytes) -> bool:
    """True for a body that is named in the event loop. O(length)."""
    return len(body) <= QUICK_BYTES and signs(body) <= _QUICK_SIGNS


class OwnTurns:
    """Reads bodies."""

    def __init__(self, parsing_: Parsing) -> None:
        self._parsing = parsing_

    async def of(
        self, body: bytes, form: str, chain: bytes, bases: Sequence[Sequence[str]], lease: MemoryLease, *, named: bool = False
    ) -> OwnTurn:
        """The part of a log that a body has (`own_turn`). Raises GatewayError 400, 413, 500 or 503."""
        if is_named_at_once(body):
            return await self._parsing.turns.take(
                partial(own_named, body, form, chain, bases, named=named), lease.account.client
            )
        with parsing(lease, len(body)):
            operation = OPERATION, form, chain, [list(ids) for ids in bases], named
            found = await self._parsing.process.run(operation, body, lease.account.client)
        return OwnTurn(*found)
