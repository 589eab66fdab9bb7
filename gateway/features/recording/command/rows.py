"""The answers of GET /warmroute/recording, and the part of GET /warmroute/replicas that a trace contains."""

from __future__ import annotations

from msgspec import Struct


class TraceRow(Struct, frozen=True, array_like=True):
    """One request, as made by `RecordTraffic` (gateway/features/recording/observer.py). ids: units are token ids instead of
    bytes.
    """

    begun: float
    ttft: float | None
    seconds: float
    prompt_tokens: int | None
    estimated_tokens: int
    completion_tokens: int | None
    cached: int | None
    predicted: int
    units: int
    block: int
    ids: bool
    keys: bytes
    session_key: int
    client: int
    status: int
    model: str
    pool: str
    replica: str
    tenant: str


class TracePage(Struct, frozen=True):
    """The rows `first` to `last` of one worker, without unwanted conversations."""

    ring: str
    first: int
    last: int
    left: int
    skipped: int
    rows: tuple[TraceRow, ...]


class RecordedAnswer(Struct, frozen=True):
    """now: the gateway's clock, which also gives the rows' times."""

    version: str
    now: float
    policy: str
    pages: tuple[TracePage, ...]


class ReplicaRow(Struct, frozen=True):
    name: str
    pool: str | None
    prefill_tokens_per_second: float
    capacity_tokens: int | None = None
    engine_kv_tokens: int | None = None
    learned_capacity_tokens: int | None = None

    @property
    def kv_tokens(self) -> int | None:
        return self.capacity_tokens or self.engine_kv_tokens or self.learned_capacity_tokens


class TraceFleet(Struct, frozen=True):
    replicas: tuple[ReplicaRow, ...]
