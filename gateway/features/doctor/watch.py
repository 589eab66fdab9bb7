"""Records requests of a running gateway for the doctor, while an operator is interested.

    an operator asks ──► begin: for WATCH_S from now ──► requests get outlines ──► record: one record each, no text
                         asked again: longer                                      expire: the records are dropped

Without a watch, a request costs one check of `Outliner.on`. Requests are examined when the operator asks, not on arrival: each
worker sends its records, and they are sorted by time (`program.py`), because a conversation's requests may be at different
workers. Salts leave their worker as digests.

Bounds: the latest MAX_RECORDS, with MAX_BYTES. Synchronous; time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from gateway.cluster.messages import decode
from gateway.dialects.body import join_salt, parts_of_salt
from gateway.dialects.prompt.outline import Outliner
from gateway.dialects.prompt.segments import Outline, packed, unpacked
from gateway.features.doctor.differences import digest_of
from gateway.features.doctor.observed import MAX_KEYS, ObservedOutcome, ObservedRequest

TOPIC: Final = "doctor"
WATCH_S: Final = 600.0  # duration of a watch after the last question
MAX_RECORDS: Final = 4000
MAX_BYTES: Final = 16 << 20
_WATCHED: Final = msgspec.msgpack.Decoder(tuple[float | None, tuple[tuple[float, bytes], ...]])


class SeenRequest(NamedTuple):
    """A finished request. time: its arrival. live_replicas: the replicas that accepted requests, in any order. entries: keys of
    the entries of its prompt log, b"": unknown. thread: the agent of its session, or "".
    """

    time: float
    model: str
    salt: str
    tenant: str
    session: str
    keys: bytes
    units: int
    block: int
    exact: bool
    outline: Outline
    replica: str
    prompt_tokens: int | None
    cached_tokens: int | None
    available_tokens: int
    reason: str
    live_replicas: Sequence[str]
    first_byte: float | None
    entries: bytes = b""
    thread: str = ""


class WatchedRequests(NamedTuple):
    """The records of one worker. since: start of its watch; None: no watch. records: (arrival, record) of each request."""

    since: float | None
    records: Sequence[tuple[float, bytes]]


class RecordsError(ValueError):
    """The bytes are not valid records."""


class DoctorWatch:
    """The watch in one worker. outliner: of its parser. `begins` and `ends`: called when it starts and ends."""

    def __init__(self, outliner: Outliner, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self.outliner = outliner
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._records = deque[tuple[float, bytes]]()  # (arrival, record)
        self._bytes = 0
        self._until = 0.0
        self.since: float | None = None
        self.begins: Callable[[], None] = _nothing
        self.ends: Callable[[], None] = _nothing

    @property
    def on(self) -> bool:
        return self.outliner.on

    def begin(self, now: float) -> None:
        """Starts or prolongs the watch."""
        if self.since is None:
            self.since = now
            self.begins()
        self._until = now + WATCH_S
        self.outliner.on = True

    def expire(self, now: float) -> None:
        """Ends the watch, and drops all records, if no operator has asked for WATCH_S."""
        if self.since is not None and now >= self._until:
            self.since = None
            self.ends()
            self.outliner.on = False
            self.outliner.clear()
            self._records.clear()
            self._bytes = 0

    def record(self, seen: SeenRequest) -> None:
        """Records a finished request. O(segments)."""
        own, head = parts_of_salt(seen.salt)
        fields = seen._replace(
            model=_valid(seen.model),
            salt=join_salt(digest_of(own), _valid(head)),
            tenant=_valid(seen.tenant),
            session=_valid(seen.session),
            thread=_valid(seen.thread),
            keys=seen.keys[:MAX_KEYS],
        )
        record = msgspec.msgpack.encode((*fields[:9], packed(seen.outline), *fields[10:]))
        self._records.append((seen.time, record))
        self._bytes += len(record)
        while len(self._records) > self._max_records or (self._bytes > self._max_bytes and self._records):
            self._bytes -= len(self._records.popleft()[1])

    def watched(self) -> WatchedRequests:
        """All records. O(records), which are not copied."""
        return WatchedRequests(self.since, list(self._records))

    def answer(self, now: float) -> bytes:
        """All encoded records, for the examination. Starts or prolongs the watch."""
        self.expire(now)
        self.begin(now)
        return msgspec.msgpack.encode(self.watched())

    def check(self) -> None:
        """For tests. Raises AssertionError if an invariant is broken."""
        assert self._bytes == sum(len(record) for _, record in self._records)
        assert len(self._records) <= self._max_records
        assert self._bytes <= self._max_bytes

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"<Watch, {'on' if self.on else 'off'}, {len(self)} requests>"


def decode_watched(answer: bytes) -> WatchedRequests:
    """Decodes an answer of `DoctorWatch.answer`. Raises MessageError."""
    return WatchedRequests(*decode(_WATCHED, answer))


def _valid(name: str) -> str:
    """Header bytes that are not text are lone surrogates, which cannot be encoded; they are replaced."""
    return name if name.isascii() else name.encode("utf-8", "replace").decode()


def observed(record: bytes) -> ObservedRequest:
    """Raises RecordsError."""
    try:
        fields: Sequence[Any] = msgspec.msgpack.decode(record)
        values: list[Any] = [*fields[:9], unpacked(fields[9]), *fields[10:]]
        seen = SeenRequest(*values)
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError) as error:
        raise RecordsError(str(error)) from error
    found = ObservedRequest(seen.model, seen.keys, seen.units, seen.block, exact=seen.exact, outline=seen.outline)
    found.time, found.salt, found.tenant, found.session = seen.time, seen.salt, seen.tenant, seen.session
    tokens = seen.prompt_tokens, seen.cached_tokens, seen.available_tokens
    found.entries, found.thread = seen.entries, seen.thread
    found.outcome = ObservedOutcome(seen.replica, *tokens, seen.reason, frozenset(seen.live_replicas), seen.first_byte)
    return found


def _nothing() -> None: ...
