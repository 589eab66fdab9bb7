"""A snapshot of what a gateway's routers know, as it is written to a file or sent to another process.

Its chunks are records (`router/snapshot/records.py`); its header says what they refer to: the format, and for each replica
which process it was, so that what a restarted one had is not believed (`origins.py`).

Structs lose their types in modules that mypyc compiles: this one is not compiled (`hatch_build.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

from msgspec import Meta, Struct

from gateway.config.schema import RoutingConfig

# To be raised when block keys, routing events or records change their meaning: what another format wrote is not read.
FORMAT: Final = 1
# Ours are far shorter: of a megabyte, or one prompt's keys (`router/snapshot/collect.py`).
MAX_CHUNK_BYTES: Final = 16 << 20
MAX_REPLICAS: Final = 1 << 16


class Origin(Struct, frozen=True, array_like=True):
    """Which process a replica was. instance: of its member, "" where unknown. started: of its process, as `Facts` has it."""

    url: Annotated[str, Meta(max_length=4096)]
    instance: Annotated[str, Meta(max_length=256)]
    started: float | None


class Header(Struct, frozen=True, array_like=True):
    """format: `format_of` the configuration. origins: by replica. partial: replicas of the snapshot that its gateway began with
    may still join, and are missing here.
    """

    format: Annotated[str, Meta(max_length=256)]
    origins: Annotated[Mapping[str, Origin], Meta(max_length=MAX_REPLICAS)]
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """chunks: encoded records. at: its moment, by this machine's monotonic clock. source: where it comes from, for the log."""

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
    """A snapshot cannot be made, or be taken in; its text is the reason."""


def format_of(routing: RoutingConfig) -> str:
    """The format of block keys, the same in two gateways that share: its version, and the lengths of blocks."""
    return f"{FORMAT}/{routing.block_bytes}/{routing.block_tokens}"


def difference_of(theirs: str, ours: str) -> str:
    """The reason why block keys of one format mean nothing in another."""
    (their_format, *their_lengths), (our_format, *our_lengths) = theirs.split("/"), ours.split("/")
    if their_format != our_format or len(their_lengths) != len(our_lengths):
        return f"its release makes blocks in another way ({theirs}, not {ours})"
    names = ("routing.block_bytes", "routing.block_tokens")
    lengths = zip(names, their_lengths, our_lengths, strict=True)
    differ = [f"{name} is {their} there and {our} here" for name, their, our in lengths if their != our]
    return f"{', '.join(differ)}: both have to be configured alike"
