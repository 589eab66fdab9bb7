"""Default paths of SQLite's files and other files of the gateway."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final
from urllib.parse import unquote

SQLITE: Final = "sqlite"  # URL of a file in the state folder
_FILE: Final = "sqlite:///"
LEDGER_FILE: Final = "ledger.sqlite"  # default name


def state_folder() -> Path:
    """The default folder of files that outlive a restart (XDG Base Directory Specification)."""
    for name in (os.environ.get("XDG_STATE_HOME", ""), os.path.expanduser("~/.local/state"), tempfile.gettempdir()):
        if os.path.isabs(name):  # a user may have no home
            folder = Path(name)
            break
    return folder / "warmroute"


def with_path(url: str, name: str) -> str:
    """The URL; `sqlite` without a path becomes the file of this name in the state folder."""
    return f"{_FILE}{state_folder() / name}" if url == SQLITE else url


def file_of(url: str) -> Path | None:
    """The file of SQLite; None: the URL, which has a path, is of another database."""
    return Path(unquote(url.removeprefix(_FILE).partition("?")[0])) if url.startswith(_FILE) else None
