"""The table of runs, in the schema of stored responses."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Index, Table

from gateway.database.columns import floats, keys, texts
from gateway.features.histories.tables import schema

# A run has a row while it is queued or in progress; the transaction that deletes the row decides how the response ends.
# runner: its gateway process. alive_until: expiry of the last renewal.
runs: Final = Table(
    "warmroute_runs",
    schema,
    *keys("owner", "id"),
    *texts("runner"),
    *floats("alive_until"),
    Index("warmroute_runs_by_runner", "runner"),
    Index("warmroute_runs_by_life", "alive_until"),
)
