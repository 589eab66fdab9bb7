"""The key `routing.retain`: whether engines get retention hints."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from gateway.config.hints import FIXED
from gateway.config.kinds import about
from gateway.config.sections import Section

RETAIN: Final = Section(
    "retain",
    Annotated[
        bool,
        Meta(extra={FIXED: True}),
        about("Ask `warmroute replica` to evict prompts of named sessions after all others."),
    ],
    False,
    within="routing",
)
