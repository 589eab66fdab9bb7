"""The section `ledger`: the usage of every request, in a database."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from gateway.config.hints import EXPECTED, FALSE, FIXED
from gateway.config.kinds import ConfigSection, DatabaseUrl, about
from gateway.config.listen import OFF
from gateway.config.sections import Section

MAX_DAYS = 36_500  # of retention

Days = Annotated[int, Meta(gt=0, le=MAX_DAYS)]


class LedgerConfig(ConfigSection, frozen=True):
    """The usage of every request, in a database: row by row, and summed up by day."""

    url: Annotated[
        DatabaseUrl,
        about(
            "sqlite (a file in the user's state folder), sqlite:///PATH, postgresql://USER@HOST/NAME (the password is in"
            " PGPASSWORD), or off: there is none."
        ),
    ] = OFF
    retention_d: Annotated[Days, about("Days that the row of a request is kept.")] = 30


LEDGER: Final = Section(
    "ledger",
    Annotated[
        LedgerConfig,
        Meta(extra={FALSE: {"url": OFF}, EXPECTED: "a mapping such as {url: sqlite}, or off for none,", FIXED: True}),
    ],
    LedgerConfig(),
)
