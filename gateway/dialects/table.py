"""Tables of paths: their dialects, and their names in metrics."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from gateway.dialects.anthropic.messages import CountTokens, Messages, OtherMessages
from gateway.dialects.dialect import Dialect
from gateway.dialects.openai.generations import ChatBody, Completion, DryRun
from gateway.dialects.passthrough import PassThrough, Tokenize
from gateway.dialects.responses.responses import (
    CompactResponses,
    Conversations,
    CountResponseTokens,
    Responses,
    StoredResponses,
)
from gateway.errors import bad_request

# A path that ends with a slash stands for all paths below it that have no entry of their own.
DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {
        "/v1/chat/completions": ChatBody(),
        "/v1/completions": Completion(),
        "/v1/messages": Messages(),
        "/v1/messages/count_tokens": CountTokens(),
        "/v1/messages/": OtherMessages(),
        "/v1/responses": Responses(),
        "/v1/responses/compact": CompactResponses(),
        "/v1/responses/input_tokens": CountResponseTokens(),
        "/v1/responses/": StoredResponses(),
        "/v1/conversations": Conversations(),
        "/v1/conversations/": Conversations(),
        "/tokenize": Tokenize(),
    }
)
# Paths that metrics name. True: a model computes the answers, so tokens could be counted.
ENDPOINTS: Final[Mapping[str, bool]] = MappingProxyType(
    {
        "/v1/chat/completions": True,
        "/v1/completions": True,
        "/v1/messages": True,
        "/v1/messages/count_tokens": False,
        "/v1/messages/batches": False,
        "/v1/responses": True,
        "/v1/responses/compact": True,
        "/v1/responses/input_tokens": False,
        "/v1/responses/": False,
        "/v1/conversations": False,
        "/v1/conversations/": False,
        "/v1/embeddings": True,
        "/v1/rerank": True,
        "/v1/score": True,
        "/v1/moderations": True,
        "/v1/audio/transcriptions": True,
        "/v1/audio/translations": True,
        "/v1/audio/speech": True,
        "/v1/images/generations": True,
        "/v1/images/edits": True,
        "/v1/realtime": True,
        "/v1/files": False,
        "/v1/files/": False,
        "/v1/batches": False,
        "/v1/batches/": False,
        "/v1/logs": False,
        "/v1/logs/": False,
        "/v1/workflows": False,
        "/v1/workflows/": False,
        "/tokenize": False,
        "/detokenize": False,
        "/version": False,
        "/rerank": True,
        "/v2/rerank": True,
        "/score": True,
        "/pooling": True,
        "/classify": True,
    }
)
UNLOGGED: Final = "/v1/logs/"  # the rest of such a path is the name of a content
ENGINES_OWN: Final = tuple(path for path in ENDPOINTS if not path.startswith("/v1/"))  # engines' paths outside of the API
OTHER_ENDPOINT: Final = "other"
BATCHES: Final = frozenset(["/v1/batches", "/v1/messages/batches"])  # a batch names its models in a file unseen by the gateway
_BELOW: Final = tuple(path for path in ENDPOINTS if path.endswith("/"))

OTHER: Final = PassThrough()  # for all other paths
DRY_RUN: Final = DryRun()


def endpoint_of(path: str) -> str:
    """The path as a label: itself, or the path above it that the table has. O(1)."""
    if path in ENDPOINTS:
        return path
    return next((below for below in _BELOW if path.startswith(below)), OTHER_ENDPOINT)


def generates(endpoint: str, *, has_prompt: bool) -> bool:
    """True if a model computes the answers of this endpoint. For endpoints outside the table: if the request has a prompt."""
    return ENDPOINTS.get(endpoint, has_prompt)


def computes(endpoint: str, method: str) -> bool:
    """True if a model is known to compute the answers of this endpoint, so that the size of a request is work."""
    return method == "POST" and ENDPOINTS.get(endpoint, False)


class Dialects:
    """Finds the dialect of a path or a name. table: by path."""

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

    def known(self, path: str) -> Dialect:
        """The dialect of a path that the tables have; the path may have a query. Raises GatewayError 400 for other paths, and
        lists the paths with a prompt.
        """
        bare = path.partition("?")[0]
        if bare in self._by_path or bare.startswith(self._below) or endpoint_of(bare) != OTHER_ENDPOINT:
            return self.at(bare)
        own = [each for each, dialect in self._by_path.items() if dialect.strict and not each.endswith("/")]
        prompted = dict.fromkeys([*own, *(each for each, generated in ENDPOINTS.items() if generated)])
        raise bad_request(f"'path' must be one of {', '.join(prompted)}; got {bare[:100]!r}.", "path")

    def named(self, name: str) -> Dialect:
        """The dialect of this name. Raises KeyError if there is none."""
        return self._by_name[name]

    def __repr__(self) -> str:
        return f"<Dialects {sorted(self._by_name)}>"
