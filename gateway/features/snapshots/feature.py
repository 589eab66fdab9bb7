"""A gateway of one process, with its prefix index in a file."""

from __future__ import annotations

from gateway.core import Core
from gateway.features.snapshots.keeper import file_of
from gateway.features.snapshots.single_process import with_file


def install(core: Core) -> None:
    snapshot = file_of(core.config) if core.around.lasts else None
    core.control_plane = lambda local: with_file(local, snapshot)
