"""Stored workflows as values, and the errors of storing them. Without I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gateway.database.failures import StoreError

MAX_NAMES: Final = 200  # of one owner
MAX_VERSIONS: Final = 100  # of one name; the oldest ones are removed


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """One version of a workflow. document, entry: JSON (`tables.py`)."""

    name: str
    version: int
    document: bytes
    entry: bytes


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """The outcome of storing a document. before: the entry of the version before, b"" for none; equal: it had this document,
    and no version was made.
    """

    version: int
    before: bytes
    equal: bool = False


class TooManyWorkflowsError(StoreError):
    """The owner has MAX_NAMES workflows."""
