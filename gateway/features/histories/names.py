"""Look-up of items by their ids: in the outputs and inputs of responses, and in conversations.

    an id from an engine ──► the table of names ──► its response, if it is still stored ──► the item in its output
    an id from the list of input items ──► contains the response and the position in it
    any other id ──► the conversations

The table has only items of outputs: clients repeat their whole history with every turn, so a row for each item of each turn
would be a quadratic number of rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, and_, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from gateway.features.histories.item_forms import picked as picked_of
from gateway.features.histories.item_forms import place_of
from gateway.features.histories.records import HistoryTooLargeError
from gateway.features.histories.tables import conversations, items, names, responses

_IDS_PER_STATEMENT: Final = 500

Pick = Callable[[bytes, Collection[str], Mapping[str, int]], Awaitable[dict[str, bytes]]]
"""`item_forms.py: picked`, in this process or, for long contents, in the parser process."""


async def pick_in_process(joined: bytes, ids: Collection[str], places: Mapping[str, int]) -> dict[str, bytes]:
    """Picks items in this process. Blocks the event loop."""
    return picked_of(joined, ids, places)


def _add(dialect: Any) -> Any:
    made = dialect.insert(names)
    return made.on_conflict_do_update(index_elements=["owner", "id"], set_={"response": made.excluded.response})


_ADD_SQLITE: Final = _add(sqlite)
_ADD_POSTGRES: Final = _add(postgresql)
_ITS_RESPONSE: Final = and_(responses.c.owner == names.c.owner, responses.c.id == names.c.response)
_ITS_CONVERSATION: Final = and_(conversations.c.owner == items.c.owner, conversations.c.id == items.c.conversation)

ResponseIds = dict[str, str]
"""The id of an item -> the id of its response."""
Contents = dict[str, tuple[bytes, bytes]]
"""The id of a response -> its input and output."""


class ItemLocations(NamedTuple):
    """Locations of items. response_ids: the response of each item. conversation_ids: ids of items that may be in conversations.
    size: of the responses and conversation items, in bytes.
    """

    response_ids: ResponseIds
    conversation_ids: list[str]
    size: int


def add(connection: Connection, owner: str, response: str, ids: Iterable[str]) -> None:
    """Adds the ids of the items in a response."""
    rows = [{"owner": owner, "id": id_, "response": response} for id_ in sorted(ids)]
    if not rows:
        return
    connection.execute(_ADD_SQLITE if connection.dialect.name == "sqlite" else _ADD_POSTGRES, rows)


def remove(connection: Connection, owner: str, response: str) -> None:
    """Removes the ids of the items in a response."""
    connection.execute(delete(names).where(names.c.owner == owner, names.c.response == response))


def locate(connection: Connection, owner: str, ids: Sequence[str], now: float, max_bytes: int) -> ItemLocations:
    """Finds the locations of items. Raises HistoryTooLargeError if they have more than max_bytes. O(ids)."""
    response_ids = {id_: place[0] for id_ in ids if (place := place_of(id_))}
    for part in _parts(ids):
        query = select(names.c.id, names.c.response).join(responses, _ITS_RESPONSE)
        kept = and_(names.c.owner == owner, names.c.id.in_(part), responses.c.emptied == 0, responses.c.expires_at > now)
        response_ids |= {row.id: row.response for row in connection.execute(query.where(kept))}
    conversation_ids, size = [id_ for id_ in ids if id_ not in response_ids], 0
    items_size = select(func.coalesce(func.sum(func.length(items.c.item)), 0)).join(conversations, _ITS_CONVERSATION)
    content_size = select(func.coalesce(func.sum(func.length(responses.c.input) + func.length(responses.c.output)), 0))
    sums = [items_size.where(_stored_items(owner, part, now)) for part in _parts(conversation_ids)]
    sums += [content_size.where(_stored_responses(owner, part, now)) for part in _parts(_distinct_responses(response_ids))]
    for query in sums:
        size += connection.execute(query).scalar_one()
        if size > max_bytes:
            raise HistoryTooLargeError(size, len(ids))
    return ItemLocations(response_ids, conversation_ids, size)


def read(connection: Connection, owner: str, places: ItemLocations, now: float) -> tuple[dict[str, bytes], Contents]:
    """Reads the items of conversations by id, and the contents of responses. O(bytes)."""
    own, contents = dict[str, bytes](), Contents()
    for part in _parts(places.conversation_ids):
        query = select(items.c.id, items.c.item).join(conversations, _ITS_CONVERSATION)
        own |= {row.id: row.item for row in connection.execute(query.where(_stored_items(owner, part, now)))}
    for part in _parts(_distinct_responses(places.response_ids)):
        query = select(responses.c.id, responses.c.input, responses.c.output).where(_stored_responses(owner, part, now))
        contents |= {row.id: (row.input, row.output) for row in connection.execute(query)}
    return own, contents


async def picked(response_ids: ResponseIds, contents: Contents, pick: Pick) -> dict[str, bytes]:
    """Picks the items (JSON) by id, without missing ones. O(length of the contents)."""
    by_response = dict[str, list[str]]()
    for id_, response in response_ids.items():
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


def _stored_items(owner: str, ids: Sequence[str], now: float) -> Any:
    """Condition for stored items of conversations."""
    return and_(items.c.owner == owner, items.c.id.in_(ids), conversations.c.emptied == 0, conversations.c.expires_at > now)


def _stored_responses(owner: str, ids: Sequence[str], now: float) -> Any:
    return and_(responses.c.owner == owner, responses.c.id.in_(ids), responses.c.emptied == 0, responses.c.expires_at > now)


def _distinct_responses(response_ids: ResponseIds) -> list[str]:
    return list(dict.fromkeys(response_ids.values()))


def _parts(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[at : at + _IDS_PER_STATEMENT] for at in range(0, len(ids), _IDS_PER_STATEMENT)]
