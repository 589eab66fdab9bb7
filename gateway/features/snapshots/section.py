"""The section `snapshot`: a file of the prefix index."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from gateway.config.hints import EXPECTED, FALSE, FIXED
from gateway.config.kinds import ConfigSection, about
from gateway.config.listen import AUTO, OFF
from gateway.config.sections import Section


class SnapshotConfig(ConfigSection, frozen=True):
    """A file with the prefix index, so that a restart is not cold."""

    file: Annotated[
        str,
        Meta(min_length=1, max_length=1024, extra={FALSE: OFF, EXPECTED: "auto, off, or the path of a file"}),
        about("auto (in the user's state folder, named by the address of `listen`; off with port 0), off, or a path."),
    ] = AUTO


SNAPSHOT: Final = Section(
    "snapshot",
    Annotated[
        SnapshotConfig, Meta(extra={FALSE: {"file": OFF}, EXPECTED: "a mapping such as {file: auto}, or off", FIXED: True})
    ],
    SnapshotConfig(),
)
