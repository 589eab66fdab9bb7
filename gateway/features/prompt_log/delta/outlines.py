"""Outlines of bodies: in the event loop if few bytes are new, else in the parser process."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from gateway.admission.memory import MemoryLease, parsing
from gateway.errors import GatewayError
from gateway.features.prompt_log.delta.digests import DigestMemo, ElementDigests, SeenValue
from gateway.features.prompt_log.delta.outline import SEEDS_APART, BodyOutline, CutPlace, ScannedBody
from gateway.features.prompt_log.delta.scanning import TooManyNewError
from gateway.features.prompt_log.naming.canonical import NoNameError
from gateway.features.prompt_log.own_turns import QUICK_BYTES
from gateway.parser.parsing import SMALL_BYTES, Parsing

OPERATION: Final = "prompt_log.delta"
_HASHED_BYTES: Final = 8 << 20  # of a body that is outlined in the event loop: hashes take 1 ms


class Outlines:
    """Makes outlines. seed: of the hashes that elements are remembered by, below 2**62."""

    def __init__(self, parsing_: Parsing, seed: int) -> None:
        self._parsing = parsing_
        self._memo = DigestMemo()
        self._seed = seed

    async def of(self, body: bytes, form: str, owner: str, lease: MemoryLease) -> BodyOutline | None:
        """The outline; None: its log has no name. owner: only its own elements are remembered for it. Raises GatewayError 500
        or 503.
        """
        client, turns = lease.account.client, self._parsing.turns
        seed = SEEDS_APART * (xxh3_64_intdigest(owner.encode("utf-8", "surrogatepass"), self._seed) // (2 * SEEDS_APART))
        most = SMALL_BYTES if turns.exceeds_share(client) else _HASHED_BYTES
        try:
            if len(body) <= most:
                try:
                    return await turns.take(partial(self._quick, body, form, seed), client)
                except TooManyNewError:
                    pass
            return await self._elsewhere(body, form, seed, lease)
        except NoNameError:
            return None

    def _quick(self, body: bytes, form: str, seed: int) -> BodyOutline:
        """Raises NoNameError, or TooManyNewError."""
        return ScannedBody(body, form, self._memo, seed, QUICK_BYTES).outline()

    async def _elsewhere(self, body: bytes, form: str, seed: int, lease: MemoryLease) -> BodyOutline | None:
        with parsing(lease, len(body)):
            try:
                found = await self._parsing.process.run((OPERATION, form, seed), body, lease.account.client)
            except GatewayError as error:
                if error.status < 500:  # the body has too many values
                    return None
                raise
        named, fields, remembered = found
        if not named:
            return None
        for key, value in remembered:
            self._memo.put(tuple(key), _read(*value))
        frame, framed, list_at, places, *rest = fields
        return BodyOutline(frame, framed, list_at, tuple(CutPlace(*place) for place in places), *rest)

    def __repr__(self) -> str:
        return f"<Outlines, {self._memo!r}>"


def _read(kind: str, *fields: Any) -> Any:
    """A value of the memo, as `job.py` writes it."""
    if kind == "element":
        return ElementDigests(*fields)
    return SeenValue(*fields) if kind == "value" else fields[0]
