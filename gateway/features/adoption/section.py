"""The key `limits.adopt_s`: how long an answer without a client goes on."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from gateway.config.hints import EXPECTED, FIXED, MAX_NUMBER
from gateway.config.kinds import about
from gateway.config.sections import Section

ADOPT_S: Final = Section(
    "adopt_s",
    Annotated[
        float,
        Meta(ge=0, le=MAX_NUMBER, extra={FIXED: True, EXPECTED: "0 (off) or more"}),
        about("Seconds that an answer goes on for a client that has left, which may send the same request again; 0: off."),
    ],
    5.0,
    within="limits",
)
