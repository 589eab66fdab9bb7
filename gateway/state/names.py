"""Items by their ids alone: in the outputs and inputs of responses, and in conversations.

    an id that an engine gave ──► the table of names ──► its response ──► the item in its output
    an id that only the list of input items has ──► says which response, and where in it
    any other ──► the conversations

Only outputs are in the table: clients repeat their whole history, ids and all, with every turn, and a row for each item of each
turn would be a square of rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import and_, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.dialects.responses.items import picked as picked_of
from gateway.dialects.responses.items import place_of
from gateway.state.records import TooLarge
from gateway.state.tables import conversations, items, names, responses

_AT_ONCE: Final = 500  # ids in a statement

Charge = Callable[[int], None]
Pick = Callable[[bytes, Collection[str], Mapping[str, int]], Awaitable[dict[str, bytes]]]
"""`responses/items.py: picked`, wherever that is done: `Parsing.picked` does it in the parser process if it takes long."""


def free(_size: int) -> None:
    """Nobody counts."""


async def at_once(joined: bytes, ids: Collection[str], places: Mapping[str, int]) -> dict[str, bytes]:
    """Here, while nothing else runs."""
    return picked_of(joined, ids, places)


Sought = dict[str, str]
"""The response of each id that has one."""


async def add(connection: AsyncConnection, owner: str, response: str, ids: Iterable[str]) -> None:
    """These are the ids of items in this response (an id) from now on."""
    rows = [{"owner": owner, "id": id_, "response": response} for id_ in sorted(ids)]
    if not rows:
        return
    made: Any = (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(names)
    await connection.execute(
        made.on_conflict_do_update(index_elements=["owner", "id"], set_={"response": made.excluded.response}), rows
    )


async def remove(connection: AsyncConnection, owner: str, response: str) -> None:
    """The ids of items in this response (an id)."""
    await connection.execute(delete(names).where(names.c.owner == owner, names.c.response == response))


async def found(
    connection: AsyncConnection, owner: str, ids: Sequence[str], now: float, most: int, charge: Charge = free
) -> tuple[Sought, dict[str, bytes], dict[str, tuple[bytes, bytes]]]:
    """(the response of each id, items of conversations by their ids, input and output of each response).

    most: bytes in all; raises TooLarge before more is read. charge: called with the bytes before they are read. O(ids).
    """
    sought = {id_: place[0] for id_ in ids if (place := place_of(id_))}
    for part in _parts(ids):
        rows = await connection.execute(
            select(names.c.id, names.c.response).where(names.c.owner == owner, names.c.id.in_(part))
        )
        sought |= {row.id: row.response for row in rows}
    own, size = await _in_conversations(connection, owner, [id_ for id_ in ids if id_ not in sought], now, most)
    charge(size)
    contents = dict[str, tuple[bytes, bytes]]()
    for part in _parts(list(dict.fromkeys(sought.values()))):
        kept = and_(
            responses.c.owner == owner, responses.c.id.in_(part), responses.c.emptied == 0, responses.c.expires_at > now
        )
        sizes = select(func.coalesce(func.sum(func.length(responses.c.input) + func.length(responses.c.output)), 0))
        size += (more := (await connection.execute(sizes.where(kept))).scalar_one())
        if size > most:
            raise TooLarge(size, len(ids))
        charge(more)
        rows = await connection.execute(select(responses.c.id, responses.c.input, responses.c.output).where(kept))
        contents |= {row.id: (row.input, row.output) for row in rows}
    return sought, own, contents


async def picked(sought: Sought, contents: dict[str, tuple[bytes, bytes]], pick: Pick) -> dict[str, bytes]:
    """The items themselves, JSON, by id; those that are not there are left out. O(length of the contents)."""
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


async def _in_conversations(
    connection: AsyncConnection, owner: str, ids: Sequence[str], now: float, most: int
) -> tuple[dict[str, bytes], int]:
    """Items by their ids, and the bytes of all that have them. Raises TooLarge before more than `most` is read."""
    own, size = dict[str, bytes](), 0
    mine = and_(conversations.c.owner == items.c.owner, conversations.c.id == items.c.conversation)
    for part in _parts(ids):
        kept = and_(
            items.c.owner == owner, items.c.id.in_(part), conversations.c.emptied == 0, conversations.c.expires_at > now
        )
        sizes = select(func.coalesce(func.sum(func.length(items.c.item)), 0)).join(conversations, mine).where(kept)
        size += (await connection.execute(sizes)).scalar_one()
        if size > most:
            raise TooLarge(size, len(ids))
        rows = await connection.execute(select(items.c.id, items.c.item).join(conversations, mine).where(kept))
        own |= {row.id: row.item for row in rows}
    return own, size


def _parts(ids: Sequence[str]) -> list[Sequence[str]]:
    return [ids[at : at + _AT_ONCE] for at in range(0, len(ids), _AT_ONCE)]
