"""What of a request its answer depends on."""

from __future__ import annotations

import orjson


class Echo:
    """stops: the stop sequences. empty: nothing was to be generated."""

    __slots__ = ("empty", "stops")

    def __init__(self, stops: list[str], *, empty: bool) -> None:
        self.stops = stops
        self.empty = empty

    def written(self) -> bytes:
        """As JSON; b"": there is nothing."""
        return orjson.dumps({"stops": self.stops, "empty": self.empty}) if self.stops or self.empty else b""

    def __repr__(self) -> str:
        return f"<Echo {self.stops} empty={self.empty}>"


def read_echo(data: bytes) -> Echo:
    """data: as `Echo.written` gave it."""
    if not data:
        return Echo([], empty=False)
    fields = orjson.loads(data)
    return Echo(fields["stops"], empty=fields["empty"])
