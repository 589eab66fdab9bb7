"""The bytes of stored objects: of each owner, counted in the transactions that write them, and of all owners.

An owner may have 1 / OWNER_SHARE of all, or another maximum of the configuration. The sum of all owners is read again after an
increase of 1 / LOOKS of the maximum, so several processes may exceed it by that much each.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Table, bindparam, func, select
from sqlalchemy.dialects import postgresql, sqlite

from gateway.database.driver import SQLITE
from gateway.features.histories.records import StoreFullError
from gateway.features.histories.tables import CONTENTS, ROW, sizes

OWNER_SHARE: Final = 4
LOOKS: Final = 256


class StoredSizes:
    """max_bytes: of all owners; 0: no maximum. owner_bytes: of one owner; 0: a share of them."""

    def __init__(self, max_bytes: int = 0, owner_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.owner_bytes = owner_bytes or max_bytes // OWNER_SHARE
        self._total: int | None = None  # as last read
        self._since = 0  # added by this process since then

    def add(self, connection: Connection, owner: str, size: int) -> None:
        """Counts an owner's object in its transaction. Raises StoreFullError."""
        change(connection, owner, size)
        if not self.max_bytes:
            return
        if connection.execute(_SIZE, {"owner": owner}).scalar_one() > self.owner_bytes:
            raise StoreFullError(self.owner_bytes, of_owner=True)
        self._since += size
        if self._total is None or self._since > self.max_bytes // LOOKS or self._total + self._since > self.max_bytes:
            self._total, self._since = int(connection.execute(_TOTAL).scalar_one()), 0
        if self._total > self.max_bytes:
            raise StoreFullError(self.max_bytes, of_owner=False)

    def __repr__(self) -> str:
        return f"<StoredSizes {self._total} and {self._since} of {self.max_bytes}>"


def change(connection: Connection, owner: str, by: int) -> None:
    """Changes the size of an owner. O(1)."""
    connection.execute(_ADD_SQLITE if connection.dialect.name == SQLITE else _ADD_POSTGRES, {"owner": owner, "size": by})


def release(connection: Connection, table: Table, where: Any, row: int = ROW) -> None:
    """Subtracts the rows of a table that the caller is about to delete, and locks them. row: 0 if only their content goes.
    O(rows).
    """
    freed = dict[str, int]()
    query = select(table.c.owner, CONTENTS[table]).where(where).with_for_update()
    for owner, size in connection.execute(query).all():
        freed[owner] = freed.get(owner, 0) + size + row
    for owner in sorted(freed):  # in one order in all transactions
        change(connection, owner, -freed[owner])


def _add(dialect: Any) -> Any:
    made = dialect.insert(sizes)
    return made.on_conflict_do_update(index_elements=["owner"], set_={"size": sizes.c.size + made.excluded.size})


_ADD_SQLITE: Final = _add(sqlite)
_ADD_POSTGRES: Final = _add(postgresql)
_SIZE: Final = select(sizes.c.size).where(sizes.c.owner == bindparam("owner"))
_TOTAL: Final = select(func.coalesce(func.sum(sizes.c.size), 0))
