"""Where a body is parsed: at once in the event loop if it cannot take long, else in the parser process.

What a body costs depends on its values more than on its length. So a body is parsed in the loop if it is so short that it
cannot have too many values (UNCOUNTED_BYTES: half a millisecond; 10 to 20 if it consists of brackets), or if it is not long
(INLINE_BYTES) and has no more values than INLINE_STRUCTURE. Counting them takes half a millisecond a MiB. Parsing takes 1 to 3
ms a MiB of text, and 15 to 40 ms for the worst of such bodies: an object with 131,000 different names, say, or 64,000 nested
objects. Of many bodies that arrive at once, `Turns` put off what does not fit into one turn of the loop. How long it takes to
put the prompt together is bounded by MAX_PARTS, which is checked before the fields of a message or a list of parts are read: a
body that has more costs little more than its parsing.

Any other body is parsed by `process.py` while the loop turns, with a bound on its structure, and comes back as an ApiRequest
whose block keys are made already. bench/gateway/parsing.py has the measurements.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from gateway.dialects.api_request import ApiRequest, NeedsHelper
from gateway.dialects.dialect import COMPLETE, IMPOSSIBLE, Continuation, Dialect, PartialAnswer
from gateway.dialects.json_edits import Edit, apply, pieces
from gateway.dialects.json_structure import signs
from gateway.parser import wire
from gateway.parser.process import ParserProcess
from gateway.turns import Turns, turns_of
from router import Prompt

UNCOUNTED_BYTES: Final = 256 << 10
INLINE_BYTES: Final = 2 << 20
INLINE_STRUCTURE: Final = (
    1 << 17
)  # signs, as `json_structure.signs` counts them; `{` counts twice, for an object costs the most
MAX_PARTS: Final = 8192  # of a prompt that is put together in the loop: three for a message, two for a part of its content, ...
_COPIED_AT_ONCE: Final = 1 << 20
_CONTINUED_INLINE_BYTES: Final = 1 << 15  # of a body that is scanned in the event loop for its continuation


class Parsing:
    """See the top of this file. block_bytes, block_tokens: the sizes of the router's blocks."""

    def __init__(self, process: ParserProcess, block_bytes: int, block_tokens: int) -> None:
        self.process = process
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._turns: Turns | None = None

    @property
    def turns(self) -> Turns:
        """In which bodies are parsed in the event loop, for many may arrive in the same turn of it."""
        if self._turns is None:
            self._turns = turns_of(asyncio.get_running_loop())
        return self._turns

    def at_once(self, dialect: Dialect, raw: bytes) -> ApiRequest | None:
        """The request, if it can be parsed here; None: `parse` has to be awaited. Raises GatewayError. While `turns` are not
        free, `in_turn` is to be awaited instead.
        """
        begin = time.perf_counter()
        try:
            return _here(dialect, raw)
        finally:
            self.turns.spent(time.perf_counter() - begin)

    async def in_turn(self, dialect: Dialect, raw: bytes) -> ApiRequest | None:
        """`at_once`, when it is this body's turn."""
        return await self.turns.take(partial(_here, dialect, raw))

    async def parse(self, dialect: Dialect, raw: bytes, scope: tuple[str, ...] = (), client: str = "") -> ApiRequest:
        """The request, parsed by the other process. scope: names that its block keys are seeded with, beside model and salt.
        client: those of different clients take turns.

        Raises GatewayError: what is wrong with the body, or that it could not be parsed.
        """
        arguments = wire.PARSE, dialect.name, self._block_bytes, self._block_tokens, scope
        parsed = wire.Parsed(*await self.process.ask(arguments, raw, client))
        body = await _edited(raw, parsed.edits)
        api = ApiRequest(parsed.model, None, parsed.salt, stream=parsed.stream, metered=parsed.metered, body=body)
        api.strip_usage, api.stores, api.countable = parsed.strip_usage, parsed.stores, parsed.countable
        if parsed.prompt:
            api.made = Prompt(*parsed.prompt)
        return api

    async def continuation(self, dialect: Dialect, body: bytes, so_far: PartialAnswer, client: str = "") -> bytes | None:
        """The request for the rest of an answer; b"": nothing is left of what may be generated; None: it cannot be asked for.

        dialect: one that has a continuation. client: as for `parse`. Raises GatewayError if the body could not be parsed.
        """
        if len(body) <= _CONTINUED_INLINE_BYTES:
            return continued(dialect.continuation, body, so_far)
        arguments = wire.CONTINUE, dialect.name, so_far.text, so_far.tokens
        verdict, edits = await self.process.ask(arguments, body, client)
        if verdict == IMPOSSIBLE:
            return None
        return b"" if verdict == COMPLETE else await _edited(body, edits)


def continued(continuation: Continuation | None, body: bytes, so_far: PartialAnswer) -> bytes | None:
    """`Parsing.continuation` of a small body."""
    assert continuation is not None
    verdict, edits = continuation.request(body, so_far.text, so_far.tokens)
    if verdict == IMPOSSIBLE:
        return None
    return b"" if verdict == COMPLETE else apply(body, edits)


def _here(dialect: Dialect, raw: bytes) -> ApiRequest | None:
    if len(raw) > UNCOUNTED_BYTES:
        if dialect.is_opaque(raw):
            return dialect.parse_opaque(raw)
        if len(raw) > INLINE_BYTES or _has_many_values(raw):
            return None
    try:
        api = dialect.parse(raw, MAX_PARTS)
    except NeedsHelper:
        return None
    if api.edits:
        api.body, api.edits = apply(raw, api.edits), ()
    return api


def _has_many_values(raw: bytes) -> bool:
    """Whether a body may have more values than INLINE_STRUCTURE. Its objects are counted only where they decide."""
    count = signs(raw)
    return 2 * count > INLINE_STRUCTURE and count + raw.count(b"{") > INLINE_STRUCTURE


async def _edited(raw: bytes, edits: Sequence[Edit]) -> bytes:
    """The edited body, copied piece by piece while the loop turns."""
    if len(raw) <= _COPIED_AT_ONCE:
        return apply(raw, edits)
    if not edits:
        return raw
    copy = io.BytesIO()
    for piece in pieces(raw, edits):
        for at in range(0, len(piece), _COPIED_AT_ONCE):
            copy.write(piece[at : at + _COPIED_AT_ONCE])
            await asyncio.sleep(0)
    return copy.getvalue()
