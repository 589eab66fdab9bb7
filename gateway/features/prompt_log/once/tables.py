"""The table of tokens, in the schema of stored responses."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Index, Table

from gateway.database.columns import floats, keys, texts
from gateway.features.histories.tables import schema

# A token names one generation of its owner. digest: of the request, so that the token cannot name another one. runner: the
# process that generates, until alive_until. turn: the id of the stored turn; "": the generation has not ended.
once: Final = Table(
    "warmroute_once",
    schema,
    *keys("owner", "token"),
    *texts("digest", "runner"),
    *floats("alive_until"),
    *texts("turn"),
    *floats("expires_at"),
    Index("warmroute_once_by_runner", "runner"),
    Index("warmroute_once_by_expiry", "expires_at"),
)
