"""Messages for errors of the database: the database, the error, advice. Without I/O."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

LOCKED: Final = "is locked"  # of SQLite: another process holds the file
MAX_REASON: Final = 300  # characters
_OTHER_FILE: Final = "it is no SQLite database, or damaged: name another file, or move it away"
_NO_ACCESS: Final = "this process has no access: change its permissions, or name another path"
_WHERE: Final = "is it running, and are host and port right?"
_LOGIN: Final = "set PGPASSWORD, or PGPASSFILE to a file in the form of .pgpass"
ADVICE: Final[Sequence[tuple[str, str]]] = (  # by a part of the reason; the first match counts
    ("not a database", _OTHER_FILE),
    ("malformed", _OTHER_FILE),
    ("disk is full", "make room there"),
    ("No space left", "make room there"),
    ("File too large", "raise the limit of this process for files (ulimit -f)"),
    ("No such file", "is the path right?"),
    ("Not a directory", "is the path right?"),
    ("File exists", "is the path right?"),
    ("Is a directory", "name a file"),
    ("Permission denied", _NO_ACCESS),
    ("Read-only file system", _NO_ACCESS),
    ("readonly database", _NO_ACCESS),
    (LOCKED, "another process has it locked: find that process"),
    ("disk I/O error", "look at its disk"),
    ("Connection refused", _WHERE),
    ("unreachable", _WHERE),
    ("No route to host", _WHERE),
    ("timed out", _WHERE),
    ("Connect call failed", _WHERE),
    ("Name or service not known", "is the host's name right?"),
    ("name resolution", "is the host's name right?"),
    ("No address associated", "is the host's name right?"),
    ("password", _LOGIN),
    ("does not exist", "make it, or name another one"),
)


class StoreError(Exception):
    """Base of the errors of stored objects. Work raises it between two statements: its connection stays usable."""


class StoreFailed(StoreError):
    """The database is unreachable, too slow, full, or refuses the operation. The text includes advice.

    in_doubt: True for a write that may be stored all the same, because its transaction had begun.
    """

    in_doubt = False


def failed(where: str, error: Exception) -> StoreFailed:
    """Make a StoreFailed of an error. where: the database, without a secret."""
    return StoreFailed(f"the database {where}: {reason_of(error, where)}")


def reason_of(error: Exception, where: str = "") -> str:
    """The reason in one line, with advice; without the statement and its values (prompts), which SQLAlchemy adds."""
    text = " ".join(_text(error, where).split())[:MAX_REASON]
    advice = next((advice for part, advice in ADVICE if part in text), "")
    return f"{text} ({advice})" if advice else text


def _text(error: Exception, where: str) -> str:
    cause = getattr(error, "orig", None) or error
    if isinstance(cause, OSError) and cause.strerror:
        if cause.errno and cause.strerror.startswith("Connect call failed"):  # asyncio's text, with an address
            return os.strerror(cause.errno)
        return f"{cause.strerror}: {cause.filename}" if cause.filename not in (None, where) else cause.strerror
    return str(cause) or type(cause).__name__
