"""At a start: the store may have runs that are to go on. Without the libraries of the store, which most never need."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Final

from gateway.database.places import file_of

_QUERY: Final = "SELECT 1 FROM warmroute_workflow_runs WHERE status IN ('queued', 'running') LIMIT 1"


def may_have_runs(url: str) -> bool:
    """True for a database that only the store can read. Blocks."""
    path = file_of(url)
    if path is None:
        return True
    if not path.is_file():
        return False
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as file:
            return file.execute(_QUERY).fetchone() is not None
    except sqlite3.Error:  # there is no such table; the store itself reports all others at its first use
        return False
