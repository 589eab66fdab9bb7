"""The table of stored workflows, in the schema of stored responses."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Table

from gateway.database.columns import blobs, floats, keys
from gateway.features.histories.tables import schema

# document: JSON. entry: its entry in a list of workflows and the names of its outputs, JSON.
workflows: Final = Table(
    "warmroute_workflows",
    schema,
    *keys("owner", "name"),
    Column("version", BigInteger, primary_key=True, autoincrement=False),
    *floats("created_at"),
    *blobs("document", "entry"),
)
