"""A snapshot of the prefix index of a gateway's routers, for a file or another process.

Its chunks are records (`router/snapshot/records.py`). Its header has their format, and identifies the process of each replica,
so that the prefixes of a restarted replica are not restored (`origins.py`).

Structs lose their types in modules compiled by mypyc, so this module is not compiled (`hatch_build.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

from msgspec import Meta, Struct

from gateway.config.schema import RoutingConfig

# To be incremented when the meaning of block keys, routing events or records changes. Other formats are not read.
FORMAT: Final = 1
# Our chunks are far smaller: a megabyte, or one prompt's keys (`router/snapshot/collect.py`).
MAX_CHUNK_BYTES: Final = 16 << 20
MAX_REPLICAS: Final = 1 << 16


class Origin(Struct, frozen=True, array_like=True):
    """The identity of a replica's process. instance: of its member, "" if unknown. started: start of the process, as in
    `Facts`.
    """

    url: Annotated[str, Meta(max_length=4096)]
    instance: Annotated[str, Meta(max_length=256)]
    started: float | None


class Header(Struct, frozen=True, array_like=True):
    """format: by `format_of`. origins: by replica. partial: the snapshot lacks replicas that may still join, although an
    earlier snapshot had them.
    """

    format: Annotated[str, Meta(max_length=256)]
    origins: Annotated[Mapping[str, Origin], Meta(max_length=MAX_REPLICAS)]
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """chunks: encoded records. at: its time, by this machine's monotonic clock. source: its origin, for the log."""

    header: Header
    chunks: Sequence[bytes]
    at: float
    source: str = field(default="", compare=False)

    @property
    def size(self) -> int:
        return sum(map(len, self.chunks))

    def __repr__(self) -> str:
        return f"<Snapshot of {len(self.header.origins)} replicas, {len(self.chunks)} chunks, {self.size} bytes>"


class KnowledgeError(ValueError):
    """A snapshot cannot be made or restored. The message is the reason."""


def format_of(routing: RoutingConfig) -> str:
    """The format of block keys, which must be equal in two gateways that share: a version, and the length of a block."""
    return f"{FORMAT}/{routing.block_bytes}"


def difference_of(theirs: str, ours: str) -> str:
    """Why block keys of one format are useless in another."""
    (their_format, _, their_length), (our_format, _, our_length) = theirs.partition("/"), ours.partition("/")
    if their_format != our_format or not their_length.isdigit():
        return f"its release makes blocks in another way ({theirs}, not {ours})"
    return f"routing.block_bytes is {their_length} there and {our_length} here: both must have the same configuration"
