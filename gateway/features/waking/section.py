"""The key `health.wake`: sleeping engines are woken when they are needed."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from gateway.config.hints import FIXED
from gateway.config.kinds import about
from gateway.config.sections import Section

WAKE: Final = Section(
    "wake",
    Annotated[
        bool,
        Meta(extra={FIXED: True}),
        about("A sleeping engine is woken (POST /wake_up) when all others of its pool are full, or none is awake."),
    ],
    False,
    within="health",
)
