"""Why something cannot be had from a database. No database in here."""

from __future__ import annotations


class StoreError(Exception):
    """Something that is kept cannot be had. Work raises it between two statements: its connection is as good as before."""


class StoreFailed(StoreError):
    """The database cannot be reached, does not answer in time, refuses, is full. The text says what to look at."""
