"""The section `state`: responses and conversations stored for clients."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from gateway.config.hints import EXPECTED, FALSE, FIXED, MAX_NUMBER
from gateway.config.kinds import ConfigSection, DatabaseUrl, Positive, Seconds, about
from gateway.config.listen import OFF
from gateway.config.sections import Section


class StateConfig(ConfigSection, frozen=True):
    """The store of responses and conversations for clients (OpenAI's Responses API with `store`)."""

    url: Annotated[
        DatabaseUrl,
        about(
            "sqlite (a file in the user's state folder), sqlite:///PATH, postgresql://USER@HOST/NAME (the password is in"
            " PGPASSWORD), or off: nothing is kept, and requests that name a response go to the replica that has it."
        ),
    ] = "sqlite"
    ttl_s: Annotated[Seconds, about("Seconds after its last use that a response or a conversation is kept.")] = 2_592_000.0
    max_mb: Annotated[Positive, about("MiB of all that is kept.")] = 10_240
    owner_mb: Annotated[
        int,
        Meta(ge=0, le=MAX_NUMBER, extra={EXPECTED: "0 (a quarter of max_mb) or more"}),
        about("MiB of all that one owner keeps (a tenant, else a client's credentials); 0: a quarter of max_mb."),
    ] = 1024


STATE: Final = Section(
    "state",
    Annotated[
        StateConfig,
        Meta(extra={FALSE: {"url": OFF}, EXPECTED: "a mapping such as {url: sqlite}, or off to keep nothing,", FIXED: True}),
    ],
    StateConfig(),
)
