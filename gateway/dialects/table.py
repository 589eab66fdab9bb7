"""The table: from a path to the dialect that is spoken there."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from gateway.dialects.anthropic.messages import CountTokens, Messages, OtherMessages
from gateway.dialects.dialect import Dialect
from gateway.dialects.openai.generations import Chat, Completion, DryRun
from gateway.dialects.passthrough import PassThrough
from gateway.dialects.responses.responses import Responses, StoredResponses

# A path that ends with a slash stands for all below it that are not named themselves.
DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {
        "/v1/chat/completions": Chat(),
        "/v1/completions": Completion(),
        "/v1/messages": Messages(),
        "/v1/messages/count_tokens": CountTokens(),
        "/v1/messages/": OtherMessages(),
        "/v1/responses": Responses(),
        "/v1/responses/": StoredResponses(),
    }
)
OTHER: Final = PassThrough()  # of all other paths
DRY_RUN: Final = DryRun()


class Dialects:
    """Finds dialects. table: by path."""

    __slots__ = ("_below", "_by_name", "_by_path")

    def __init__(self, table: Mapping[str, Dialect] = DIALECTS) -> None:
        self._by_path = dict(table)
        self._below = tuple(path for path in table if path.endswith("/"))
        self._by_name = {dialect.name: dialect for dialect in (*table.values(), OTHER, DRY_RUN)}

    def at(self, path: str) -> Dialect:
        """The dialect of a path; every path has one. O(1)."""
        dialect = self._by_path.get(path)
        if dialect is None and path.startswith(self._below):
            dialect = self._by_path.get(path[: path.index("/", len("/v1/")) + 1])
        return dialect or OTHER

    def named(self, name: str) -> Dialect:
        """Raises KeyError if there is none."""
        return self._by_name[name]

    def __repr__(self) -> str:
        return f"<Dialects {sorted(self._by_name)}>"
