"""The table of runs, in the schema of stored responses."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Column, Float, Index, String, Table

from gateway.features.histories.tables import schema

# Runs have a row here while they are queued or in progress; the transaction that deletes it decides how the
# response ends. runner: its gateway process. alive_until: expiry of the last renewal.
runs: Final = Table(
    "warmroute_runs",
    schema,
    Column("owner", String, primary_key=True),
    Column("id", String, primary_key=True),
    Column("runner", String, nullable=False),
    Column("alive_until", Float, nullable=False),
    Index("warmroute_runs_by_runner", "runner"),
    Index("warmroute_runs_by_life", "alive_until"),
)
