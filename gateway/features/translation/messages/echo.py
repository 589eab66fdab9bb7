"""The part of a request that its answer depends on."""

from __future__ import annotations

import orjson


class Echo:
    """stops: the stop sequences. empty: the request wants no generated tokens."""

    __slots__ = ("empty", "stops")

    def __init__(self, stops: list[str], *, empty: bool) -> None:
        self.stops = stops
        self.empty = empty

    def written(self) -> bytes:
        """As JSON; b"" for the defaults."""
        return orjson.dumps({"stops": self.stops, "empty": self.empty}) if self.stops or self.empty else b""

    def __repr__(self) -> str:
        return f"<Echo {self.stops} empty={self.empty}>"


def read_echo(data: bytes) -> Echo:
    """data: of `Echo.written`."""
    if not data:
        return Echo([], empty=False)
    fields = orjson.loads(data)
    return Echo(fields["stops"], empty=fields["empty"])
