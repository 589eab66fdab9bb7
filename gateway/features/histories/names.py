"""Look-up of items by their ids: in the outputs and inputs of responses, and in conversations.

    an id from an engine ──► the table of names ──► its response, if it is still stored ──► the item in its output
    an id from the list of input items ──► contains the response and the position in it
    another id ──► the conversations

The table has only items of outputs: clients repeat their whole history with every turn, so a row for each item of each turn
would be a quadratic number of rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, and_, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from gateway.dialects.responses.items import picked as picked_of
from gateway.dialects.responses.items import place_of
from gateway.features.histories.records import HistoryTooLargeError
from gateway.features.histories.tables import conversations, items, names, responses

_AT_ONCE: Final = 500  # ids in a statement

Pick = Callable[[bytes, Collection[str], Mapping[str, int]], Awaitable[dict[str, bytes]]]
"""`responses/items.py: picked`, here or in the parser process: `Parsing.picked` moves long work there."""


async def at_once(joined: bytes, ids: Collection[str], places: Mapping[str, int]) -> dict[str, bytes]:
    """Pick items in this process; it blocks the event loop."""
    return picked_of(joined, ids, places)


def _add(dialect: Any) -> Any:
    made = dialect.insert(names)
    return made.on_conflict_do_update(index_elements=["owner", "id"], set_={"response": made.excluded.response})


_ADD_SQLITE: Final = _add(sqlite)
_ADD_POSTGRES: Final = _add(postgresql)
_ITS_RESPONSE: Final = and_(responses.c.owner == names.c.owner, responses.c.id == names.c.response)
_ITS_CONVERSATION: Final = and_(conversations.c.owner == items.c.owner, conversations.c.id == items.c.conversation)

Sought = dict[str, str]
"""The response of each item's id."""
Contents = dict[str, tuple[bytes, bytes]]
"""Input and output of each response."""


class ItemLocations(NamedTuple):
    """Locations of items. others: ids that may be in conversations. size: bytes of the responses and conversations' items."""

    sought: Sought
    others: list[str]
    size: int


def add(connection: Connection, owner: str, response: str, ids: Iterable[str]) -> None:
    """Add the ids of the items in a response. response: its id."""
    rows = [{"owner": owner, "id": id_, "response": response} for id_ in sorted(ids)]
    if not rows:
        return
    connection.execute(_ADD_SQLITE if connection.dialect.name == "sqlite" else _ADD_POSTGRES, rows)


def remove(connection: Connection, owner: str, response: str) -> None:
    """Remove the ids of the items in a response. response: its id."""
    connection.execute(delete(names).where(names.c.owner == owner, names.c.response == response))


def found(connection: Connection, owner: str, ids: Sequence[str], now: float, most: int) -> ItemLocations:
    """Find the locations of items. Raises HistoryTooLargeError if they have more than `most` bytes. O(ids)."""
    sought = {id_: place[0] for id_ in ids if (place := place_of(id_))}
    for part in _parts(ids):
        query = select(names.c.id, names.c.response).join(responses, _ITS_RESPONSE)
        kept = and_(names.c.owner == owner, names.c.id.in_(part), responses.c.emptied == 0, responses.c.expires_at > now)
        sought |= {row.id: row.response for row in connection.execute(query.where(kept))}
    others, size = [id_ for id_ in ids if id_ not in sought], 0
    items_size = select(func.coalesce(func.sum(func.length(items.c.item)), 0)).join(conversations, _ITS_CONVERSATION)
    content_size = select(func.coalesce(func.sum(func.length(responses.c.input) + func.length(responses.c.output)), 0))
    sums = [items_size.where(_kept_items(owner, part, now)) for part in _parts(others)]
    sums += [content_size.where(_kept_responses(owner, part, now)) for part in _parts(_once(sought))]
    for query in sums:
        size += connection.execute(query).scalar_one()
        if size > most:
            raise HistoryTooLargeError(size, len(ids))
    return ItemLocations(sought, others, size)


def read(connection: Connection, owner: str, places: ItemLocations, now: float) -> tuple[dict[str, bytes], Contents]:
    """Read the items of conversations by id, and the contents of responses. O(bytes)."""
    own, contents = dict[str, bytes](), Contents()
    for part in _parts(places.others):
        query = select(items.c.id, items.c.item).join(conversations, _ITS_CONVERSATION)
        own |= {row.id: row.item for row in connection.execute(query.where(_kept_items(owner, part, now)))}
    for part in _parts(_once(places.sought)):
        query = select(responses.c.id, responses.c.input, responses.c.output).where(_kept_responses(owner, part, now))
        contents |= {row.id: (row.input, row.output) for row in connection.execute(query)}
    return own, contents


async def picked(sought: Sought, contents: Contents, pick: Pick) -> dict[str, bytes]:
    """Pick the items (JSON) by id, without missing ones. O(length of the contents)."""
    by_response = dict[str, list[str]]()
    for id_, response in sought.items():
        by_response.setdefault(response, []).append(id_)
    out = dict[str, bytes]()
    for response, ids in by_response.items():
        if response not in contents:
            continue
        given, made = contents[response]
        places = {id_: place for id_ in ids if (place := place_of(id_)) and place[0] == response}
        found = await pick(made, set(ids), {id_: at for id_, (_, is_made, at) in places.items() if is_made})
        left = {id_: at for id_, (_, is_made, at) in places.items() if not is_made and id_ not in found}
        out |= found | (await pick(given, (), left) if left else {})
    return out


def _kept_items(owner: str, ids: Sequence[str], now: float) -> Any:
    """Condition for stored items of conversations."""
    return and_(items.c.owner == owner, items.c.id.in_(ids), conversations.c.emptied == 0, conversations.c.expires_at > now)


def _kept_responses(owner: str, ids: Sequence[str], now: float) -> Any:
    return and_(responses.c.owner == owner, responses.c.id.in_(ids), responses.c.emptied == 0, responses.c.expires_at > now)


def _once(sought: Sought) -> list[str]:
    return list(dict.fromkeys(sought.values()))


def _parts(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[at : at + _AT_ONCE] for at in range(0, len(ids), _AT_ONCE)]
