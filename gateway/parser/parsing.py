"""Parses a body in the event loop if that is quick, else in the parser process.

The cost of a body depends on its number of values more than on its length. A body is parsed in the loop if it is too short to
have too many values (UNCOUNTED_BYTES: 0.5 ms; 10 to 20 ms if it is all brackets), or if it has at most INLINE_BYTES and
INLINE_STRUCTURE values. Counting takes 0.5 ms/MiB, parsing 1 to 3 ms/MiB of text, and 15 to 40 ms for the worst of such bodies
(an object with 131,000 different names, 64,000 nested objects). If many bodies arrive at once, `Turns` spreads them over turns
of the loop, and a client that takes more than its share of the loop has its bodies above SMALL_BYTES parsed in the process
(`shares.py`). Building the prompt is bounded by MAX_PARTS, checked before the fields of a message or a list of parts are read:
a body with more parts costs little more than its parsing.

Any other body is parsed by `process.py` while the loop runs, with a bound on its structure, and comes back as an ApiRequest
with its block keys. Measurements: bench/gateway/parsing.py.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from gateway.config.aliases import Aliases
from gateway.dialects.api_request import ApiRequest, NeedsHelper
from gateway.dialects.dialect import COMPLETE, IMPOSSIBLE, Continuation, Dialect
from gateway.dialects.finished_answer import FinishedAnswer
from gateway.dialects.json_edits import Edit, Members, apply, pieces, read_object
from gateway.dialects.json_structure import is_quick, signs
from gateway.dialects.models.rename import rename
from gateway.dialects.prompt.outline import Outliner
from gateway.dialects.steering import cuts_of
from gateway.parser import wire
from gateway.parser.process import ParserProcess
from gateway.shares import QUICK_S
from gateway.turns import Turns, turns_of

SMALL_BYTES: Final = 16 << 10
UNCOUNTED_BYTES: Final = 256 << 10
INLINE_BYTES: Final = 2 << 20
# Values: `{`, `[` and `,`, as `json_structure.signs` counts them, `{` twice, because objects cost the most.
INLINE_STRUCTURE: Final = 1 << 17
MAX_PARTS: Final = 8192  # of a prompt built in the loop: three per message, two per part of its content, ...
OUTLINED_INLINE_BYTES: Final = 1 << 17  # of a body whose prompt is outlined in the loop: 10 ms, if nothing is cached
_COPIED_AT_ONCE: Final = 1 << 20
_CONTINUED_INLINE_BYTES: Final = 1 << 15  # of a body whose continuation is built in the event loop
_SCANNED_INLINE_BYTES: Final = 1 << 17  # of a body that is scanned in the event loop


class Parsing:
    """Parses bodies (see the module). block_bytes, block_tokens: the sizes of the router's blocks. clock: monotonic seconds."""

    def __init__(
        self,
        process: ParserProcess,
        block_bytes: int,
        block_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.process = process
        self.outliner = Outliner()
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._clock = clock
        self._turns: Turns | None = None

    @property
    def turns(self) -> Turns:
        """Spreads parsing over turns of the event loop when many bodies arrive in one turn."""
        if self._turns is None:
            self._turns = turns_of(asyncio.get_running_loop())
        return self._turns

    def at_once(self, dialect: Dialect, raw: bytes, aliases: Aliases | None = None, client: str = "") -> ApiRequest | None:
        """The request, if the event loop can parse it; None: await `parse`. Raises GatewayError. Call it only if `turns` is
        free, else await `in_turn`. aliases: of models; the request gets the model's own name. client: whose share of the loop
        it takes.
        """
        large = len(raw) > SMALL_BYTES
        if large and self.turns.exceeds_share(client) and not dialect.is_opaque(raw):
            return None
        begin = self._clock()
        try:
            return _in_loop(dialect, raw, aliases, self.outliner)
        finally:
            took_s = self._clock() - begin
            self.turns.spent(took_s)
            if large and took_s > QUICK_S:
                self.turns.charge(client, took_s)

    async def in_turn(
        self, dialect: Dialect, raw: bytes, aliases: Aliases | None = None, client: str = ""
    ) -> ApiRequest | None:
        """`at_once`, in this body's turn."""
        return await self.turns.take(partial(self.at_once, dialect, raw, aliases, client))

    async def parse(
        self,
        dialect: Dialect,
        raw: bytes,
        scope: tuple[str, ...] = (),
        client: str = "",
        aliases: Aliases | None = None,
    ) -> ApiRequest:
        """The request, parsed by the parser process. scope: seeds the block keys, beside model and salt. client: jobs are
        taken from clients in turn. aliases: as for `at_once`.

        Raises GatewayError: 400 or 413 for the body, 500 or 503 if it could not be parsed.
        """
        blocks, names = (self._block_bytes, self._block_tokens), aliases.names if aliases else {}
        arguments = wire.PARSE, dialect.name, *blocks, scope, names, self.outliner.on
        parsed = wire.ParsedBody(*await self.process.run(arguments, raw, client))
        return wire.request_of(parsed, await edited(raw, parsed.edits))

    async def continuation(self, dialect: Dialect, body: bytes, so_far: FinishedAnswer, client: str = "") -> bytes | None:
        """The request for the rest of an answer; b"": the answer is complete; None: it cannot be continued.

        dialect: must have a continuation. client: as for `parse`. Raises GatewayError if the body could not be parsed.
        """
        if len(body) <= _CONTINUED_INLINE_BYTES:
            return continued(dialect.continuation, body, so_far)
        arguments = wire.CONTINUE, dialect.name, so_far.text, so_far.tokens
        verdict, edits = await self.process.run(arguments, body, client)
        if verdict == IMPOSSIBLE:
            return None
        return b"" if verdict == COMPLETE else await edited(body, edits)

    async def members(self, body: bytes, client: str = "") -> Members:
        """The positions of the members of a valid JSON object. client: as for `parse`. Raises the errors of `parse`."""
        if self.scans_at_once(body, client):
            return await self.turns.take(partial(read_object, body), client)
        return Members(body, *await self.process.run((wire.MEMBERS,), body, client))

    async def cuts(self, body: bytes, names: Sequence[str], client: str = "") -> Sequence[Edit]:
        """The edits that cut all members with these names out of a body (`steering.py`). client: as for `parse`. Raises the
        errors of `parse`.
        """
        if self.scans_at_once(body, client):
            return await self.turns.take(partial(cuts_of, body, names), client)
        edits: Sequence[Edit]
        (edits,) = await self.process.run((wire.CUTS, tuple(names)), body, client)
        return edits

    def scans_at_once(self, body: bytes, client: str) -> bool:
        """True if the event loop may scan this body of the client for members."""
        return len(body) <= (SMALL_BYTES if self.turns.exceeds_share(client) else _SCANNED_INLINE_BYTES)

    def is_quick(self, raw: bytes, client: str) -> bool:
        """True if the event loop may parse this JSON text of the client."""
        return is_quick(raw) and (len(raw) <= SMALL_BYTES or not self.turns.exceeds_share(client))


def continued(continuation: Continuation | None, body: bytes, so_far: FinishedAnswer) -> bytes | None:
    """`Parsing.continuation` of a small body, in the event loop."""
    assert continuation is not None
    verdict, edits = continuation.request(body, so_far.text, so_far.tokens)
    if verdict == IMPOSSIBLE:
        return None
    return b"" if verdict == COMPLETE else apply(body, edits)


def _in_loop(dialect: Dialect, raw: bytes, aliases: Aliases | None, outliner: Outliner) -> ApiRequest | None:
    """The parsed request. None: the body belongs into the parser process."""
    if len(raw) > UNCOUNTED_BYTES:
        if dialect.is_opaque(raw):
            return dialect.parse_opaque(raw)
        if len(raw) > INLINE_BYTES or _has_many_values(raw):
            return None
    try:
        api = dialect.parse(raw, MAX_PARTS)
        if aliases is not None:
            rename(api, raw, aliases, at_once=True)
    except NeedsHelper:
        return None
    if outliner.on and isinstance(api.prompt, bytes):
        if len(raw) > OUTLINED_INLINE_BYTES:
            return None
        api.outline = outliner.outline(api.prompt)
    if api.edits:
        api.body, api.edits = apply(raw, api.edits), ()
    return api


def _has_many_values(raw: bytes) -> bool:
    """True if a body may have more values than INLINE_STRUCTURE. Objects are counted only if they decide."""
    count = signs(raw)
    return 2 * count > INLINE_STRUCTURE and count + raw.count(b"{") > INLINE_STRUCTURE


async def edited(raw: bytes, edits: Sequence[Edit]) -> bytes:
    """The edited body, copied in pieces between which the loop runs."""
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
