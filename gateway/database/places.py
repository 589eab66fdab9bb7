"""Where SQLite's files, and others of the gateway, are if the configuration names no place."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

SQLITE: Final = "sqlite"  # as a URL: a file in the folder of such files
LEDGER_FILE: Final = "ledger.sqlite"  # where the configuration names none


def state_folder() -> Path:
    """Where files are by default (XDG Base Directory Specification: state that outlives a restart)."""
    for name in (os.environ.get("XDG_STATE_HOME", ""), os.path.expanduser("~/.local/state"), tempfile.gettempdir()):
        if os.path.isabs(name):  # a user may have no home
            folder = Path(name)
            break
    return folder / "warmroute"


def with_path(url: str, name: str) -> str:
    """The URL with a path, where it has none: of the file of this name in the state folder."""
    return f"sqlite:///{state_folder() / name}" if url == SQLITE else url
