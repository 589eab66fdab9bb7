"""The key `routing.compare`: whether other policies are followed."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from gateway.config.hints import FIXED
from gateway.config.kinds import about
from gateway.config.sections import Section

COMPARE: Final = Section(
    "compare",
    Annotated[
        bool,
        Meta(extra={FIXED: True}),
        about("Follow what other policies would have found cached, to show what routing saves."),
    ],
    False,
    within="routing",
)
