"""Reads stored items without blocking the event loop: short ones at once, long ones in the parser process. A thread would not
help, because the JSON library holds the interpreter lock.

Stored items were parsed before, within the parser's bounds. Several turns together have their own bound (`item_jobs.py`), and
so have the bodies that add items to conversations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final

from gateway.features.histories.conversation_fields import ConversationFields, parse_fields
from gateway.features.histories.item_forms import input_items, listed, picked
from gateway.features.histories.references import Reference, references_in
from gateway.parser.parsing import Parsing

PICK: Final = "histories.pick"
LIST: Final = "histories.list"
PAGE: Final = "histories.page"
CONVERSATION: Final = "histories.conversation"
REFERENCES: Final = "histories.references"
_MODULE: Final = "gateway.features.histories.item_jobs"
OPERATIONS: Final[Mapping[str, str]] = {
    PICK: f"{_MODULE}:pick",
    LIST: f"{_MODULE}:enumerate_items",
    PAGE: f"{_MODULE}:page",
    CONVERSATION: f"{_MODULE}:parse_conversation",
    REFERENCES: f"{_MODULE}:find_references",
}
"""For the parser process: the place of each operation, by its name."""


class StoredItems:
    """Reads them (see the module), and adds its operations to the parser process.

    client: the unit of fairness in the parser process. All methods raise GatewayError 413, 500 or 503.
    """

    def __init__(self, parsing: Parsing) -> None:
        self._parsing = parsing
        parsing.process.operations.update(OPERATIONS)

    async def picked(self, joined: bytes, ids: Collection[str], places: Mapping[str, int], client: str) -> dict[str, bytes]:
        """The items (JSON) with these ids (`item_forms.py`)."""
        if self._parsing.is_quick(joined, client):
            return await self._parsing.turns.take(partial(picked, joined, ids, places), client)
        (found,) = await self._parsing.process.run((PICK, list(ids), dict(places)), joined, client)
        return dict(found)

    async def conversation_fields(self, body: bytes, client: str) -> ConversationFields:
        """The fields of a request to `/v1/conversations`. Also raises GatewayError 400."""
        if self._parsing.is_quick(body, client):
            return await self._parsing.turns.take(partial(parse_fields, body), client)
        return ConversationFields(*await self._parsing.process.run((CONVERSATION,), body, client))

    async def listed(self, joined: bytes, max_items: int, client: str) -> list[tuple[str, bytes]] | None:
        """The id of each item, and the item in the form of lists (JSON). None: more than max_items, or nested too deeply."""
        if self._parsing.is_quick(joined, client):
            return await self._parsing.turns.take(partial(listed, joined, max_items), client)
        found: list[tuple[str, bytes]] | None = (await self._parsing.process.run((LIST, max_items), joined, client))[0]
        return found

    async def input_items(self, turns: Sequence[tuple[str, bytes, bytes]], query: Mapping[str, str], client: str) -> bytes:
        """A page of the input of the model in the last of these turns: (id, input, output) each, the oldest first.

        query: limit, order, after. Also raises GatewayError 400.
        """
        pieces = [piece for _, input_, output in turns for piece in (input_, output)]
        pieces[-1] = b""  # the output of the last turn is no input
        joined, ids, sizes = b"".join(pieces), [id_ for id_, _, _ in turns], list(map(len, pieces))
        if self._parsing.is_quick(joined, client):
            return await self._parsing.turns.take(partial(input_items, joined, ids, sizes, query), client)
        (page,) = await self._parsing.process.run((PAGE, ids, sizes, dict(query)), joined, client)
        return bytes(page)

    async def references(self, body: bytes, client: str) -> list[Reference]:
        """The references to stored items in a body. Also raises GatewayError 400."""
        if self._parsing.scans_at_once(body, client):
            return await self._parsing.turns.take(partial(references_in, body), client)
        (found,) = await self._parsing.process.run((REFERENCES,), body, client)
        return list(found)

    def __repr__(self) -> str:
        return f"<StoredItems by {self._parsing.process!r}>"
