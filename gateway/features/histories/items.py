"""Items of what the gateway keeps, read where that does not hold up the loop: at once if it is quick, else in the parser
process. (A thread would not do: the JSON library holds the interpreter while it reads.)

What is kept was parsed before, with its bounds; several turns together have a bound of their own (`helper.py`). So have the
bodies by which items come into conversations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from gateway.dialects.json_structure import is_quick
from gateway.dialects.responses.conversation import ConversationFields, parse_fields
from gateway.dialects.responses.items import input_items, listed, picked
from gateway.parser import wire
from gateway.parser.parsing import Parsing


class KeptItems:
    """See the top of this file. client: the unit of fairness in the parser process. Raises GatewayError 413, 500 or 503."""

    def __init__(self, parsing: Parsing) -> None:
        self._parsing = parsing

    async def picked(self, joined: bytes, ids: Collection[str], places: Mapping[str, int], client: str) -> dict[str, bytes]:
        """Some items, JSON, by id (`responses/items.py`)."""
        if is_quick(joined):
            return await self._parsing.turns.take(partial(picked, joined, ids, places))
        (found,) = await self._parsing.process.run((wire.PICK, list(ids), dict(places)), joined, client)
        return dict(found)

    async def given(self, body: bytes, client: str) -> ConversationFields:
        """What a request to `/v1/conversations` says. Raises GatewayError 400 as well."""
        if is_quick(body):
            return await self._parsing.turns.take(partial(parse_fields, body))
        return ConversationFields(*await self._parsing.process.run((wire.GIVEN,), body, client))

    async def listed(self, joined: bytes, most: int, client: str) -> list[tuple[str, bytes]] | None:
        """Each item's id, and the item as it is listed, JSON. None: more than `most`, or nested too deeply."""
        if is_quick(joined):
            return await self._parsing.turns.take(partial(listed, joined, most))
        found: list[tuple[str, bytes]] | None = (await self._parsing.process.run((wire.LIST, most), joined, client))[0]
        return found

    async def input_items(self, turns: Sequence[tuple[str, bytes, bytes]], query: Mapping[str, str], client: str) -> bytes:
        """A page of what the model has read for the last of these turns: (id, input, output) each, the oldest first.

        query: limit, order, after. Raises GatewayError 400 as well.
        """
        pieces = [piece for _, given, made in turns for piece in (given, made)]
        pieces[-1] = b""  # what it has answered
        joined, ids, sizes = b"".join(pieces), [id_ for id_, _, _ in turns], list(map(len, pieces))
        if is_quick(joined):
            return await self._parsing.turns.take(partial(input_items, joined, ids, sizes, query))
        (page,) = await self._parsing.process.run((wire.PAGE, ids, sizes, dict(query)), joined, client)
        return bytes(page)

    def __repr__(self) -> str:
        return f"<KeptItems by {self._parsing.process!r}>"
