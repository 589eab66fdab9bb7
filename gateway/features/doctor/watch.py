"""What a running gateway remembers of its requests for the doctor, while an operator is interested, and nothing otherwise.

    an operator asks ──► begin: for WATCH_S from now ──► requests get outlines ──► seen: one record each, no text
                         asked again: longer                                        expire: the records are dropped

While nobody has asked, a request costs one look at `Outliner.on`. Requests are examined when the operator asks, not when they
come: each worker gives its records, and they are put in the order of time (`program.py`), for a conversation's requests may
have gone to different workers. Salts leave their worker as digests.

Bounds: MAX_RECORDS, MAX_BYTES, of the last ones. Synchronous; time is an argument.
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
WATCH_S: Final = 600.0  # after the last question
MAX_RECORDS: Final = 4000
MAX_BYTES: Final = 16 << 20
_WATCHED: Final = msgspec.msgpack.Decoder(tuple[float | None, tuple[tuple[float, bytes], ...]])


class SeenRequest(NamedTuple):
    """A request that has ended. time: when it came. ups: the replicas that took requests, in any order."""

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
    ups: Sequence[str]
    first_byte: float | None


class WatchedRequests(NamedTuple):
    """What one worker has seen. since: when its watch began, None: there is none. records: of each request, when it came and
    its record.
    """

    since: float | None
    records: Sequence[tuple[float, bytes]]


class RecordsError(ValueError):
    """These bytes are no records."""


class DoctorWatch:
    """See the top of this file; one in each worker. outliner: that of its parsing. `begins` and `ends`: called when
    it does."""

    def __init__(self, outliner: Outliner, most: int = MAX_RECORDS, most_bytes: int = MAX_BYTES) -> None:
        self.outliner = outliner
        self._most = most
        self._most_bytes = most_bytes
        self._records = deque[tuple[float, bytes]]()  # when each came
        self._bytes = 0
        self._until = 0.0
        self.since: float | None = None
        self.begins: Callable[[], None] = _nothing
        self.ends: Callable[[], None] = _nothing

    @property
    def on(self) -> bool:
        return self.outliner.on

    def begin(self, now: float) -> None:
        """An operator is interested."""
        if self.since is None:
            self.since = now
            self.begins()
        self._until = now + WATCH_S
        self.outliner.on = True

    def expire(self, now: float) -> None:
        """Nobody has asked for too long: forget all."""
        if self.since is not None and now >= self._until:
            self.since = None
            self.ends()
            self.outliner.on = False
            self.outliner.clear()
            self._records.clear()
            self._bytes = 0

    def saw(self, seen: SeenRequest) -> None:
        """A request has ended. O(segments)."""
        own, head = parts_of_salt(seen.salt)
        fields = seen._replace(
            model=_valid(seen.model),
            salt=join_salt(digest_of(own), _valid(head)),
            tenant=_valid(seen.tenant),
            session=_valid(seen.session),
            keys=seen.keys[:MAX_KEYS],
        )
        record = msgspec.msgpack.encode((*fields[:9], packed(seen.outline), *fields[10:]))
        self._records.append((seen.time, record))
        self._bytes += len(record)
        while len(self._records) > self._most or (self._bytes > self._most_bytes and self._records):
            self._bytes -= len(self._records.popleft()[1])

    def watched(self) -> WatchedRequests:
        """All that it has. O(records): they are not copied."""
        return WatchedRequests(self.since, list(self._records))

    def answer(self, now: float) -> bytes:
        """All that it has, for the process that examines it; the watch goes on, or begins now."""
        self.expire(now)
        self.begin(now)
        return msgspec.msgpack.encode(self.watched())

    def check(self) -> None:
        """For tests: raises AssertionError if its books are wrong."""
        assert self._bytes == sum(len(record) for _, record in self._records)
        assert len(self._records) <= self._most
        assert self._bytes <= self._most_bytes

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"<Watch, {'on' if self.on else 'off'}, {len(self)} requests>"


def decode_watched(answer: bytes) -> WatchedRequests:
    """Of `DoctorWatch.answer`. Raises MessageError."""
    return WatchedRequests(*decode(_WATCHED, answer))


def _valid(name: str) -> str:
    """A header's bytes that are no text are lone surrogates, which no encoding has."""
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
    found.outcome = ObservedOutcome(seen.replica, *tokens, seen.reason, frozenset(seen.ups), seen.first_byte)
    return found


def _nothing() -> None: ...
