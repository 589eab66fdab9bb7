"""The key `workers`: how many processes serve together."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from gateway.config.hints import FIXED, PROCESSES
from gateway.config.sections import Section

MAX_WORKERS = 64  # every message of a worker goes to all others

WORKERS: Final = Section(
    "workers",
    Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_WORKERS,
            description="Processes that serve together, as one gateway.",
            extra={FIXED: True, PROCESSES: True},
        ),
    ],
    1,
    flag="processes that serve together",
)
