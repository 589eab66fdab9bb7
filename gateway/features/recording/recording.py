"""Recent requests for recorders of this gateway's traffic (`warmroute record`), stored only while a recorder asks.

A recorder asks about every second (`page`), with a cursor: the number of its last row. The first question starts the recording.
QUIET_S after the last one it ends, and everything is freed. Rows stay for other recorders, and for a repeated question after a
lost answer, until RING_BYTES push the oldest out. A late recorder finds a gap in the numbers, and counts the lost rows. So any
number of recorders read the same rows, and none has to sign off.

Without a recorder nothing is spent: before the first question, and after the end, this does not observe requests.

Rows have lengths, counts, times, names of models, replicas and tenants, and block keys, which are hashes of the prompt. Only
operators get them, who can also query the index (POST /warmroute/route). The recorder converts all of them to plain numbers.

Sampling is by conversation. The gateway drops conversations with a session that no recorder wants. The recorder, which sees the
rows of all workers, recognises the others.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.cluster.messages import decode

QUIET_S: Final = 60.0  # a recording ends after this time without a question
RING_BYTES: Final = 32 << 20  # rows of each worker
PAGE_BYTES: Final = 1 << 19  # per answer, but at least one row
ROW_BYTES: Final = 700  # estimated size of a row without its block keys
_KEY_RANGE: Final = float(1 << 64)  # of session keys
_QUESTION: Final = msgspec.msgpack.Decoder(tuple[dict[str, int], float])

TOPIC: Final = "recording"

Row = tuple[object, ...]
"""The values of a request, in the order of the fields of `features/recording/command/rows.py`."""


class RecordingPage:
    """The wanted rows from number `first` to `last`. left: number of later rows."""

    __slots__ = ("first", "last", "left", "ring", "rows", "skipped")

    def __init__(self, ring: str, first: int, last: int, rows: list[Row], left: int, skipped: int) -> None:
        self.ring = ring
        self.first = first
        self.last = last
        self.rows = rows
        self.left = left
        self.skipped = skipped

    def encode(self) -> bytes:
        """As JSON; bytes are base64."""
        fields = {name: getattr(self, name) for name in ("ring", "first", "last", "left", "skipped", "rows")}
        return msgspec.json.encode(fields)


class Recording:
    """The rows of one worker. Time is an argument. `begin` and `end` are called when a recording starts and ends.

    ring: the id of this recording of this worker, "" without one. skipped: requests since its start without a row, because they
    reached no replica.
    """

    def __init__(self, new_id: Callable[[], str], ring_bytes: int = RING_BYTES) -> None:
        self.begin: Callable[[], None] = _nothing
        self.end: Callable[[], None] = _nothing
        self.ring = ""
        self.skipped = 0
        self.asked = 0  # questions of all recorders
        self._new_id = new_id
        self._ring_bytes = ring_bytes
        self._rows: deque[tuple[int, int, Row]] = deque()  # (session key, bytes, row)
        self._next = 1  # number of the next row
        self._bytes = 0
        self._share = 0.0  # of the conversations: the largest share requested
        self._asked_at = 0.0

    # -- called for requests

    def wants(self, session_key: int) -> bool:
        """True if a request of this session needs a row. 0: its client has named no session."""
        return session_key == 0 or session_key / _KEY_RANGE < self._share

    def add(self, session_key: int, keys: bytes, row: Row) -> None:
        """keys: the keys in the row. O(dropped rows)."""
        size = ROW_BYTES + len(keys)
        self._rows.append((session_key, size, row))
        self._next += 1
        self._bytes += size
        while self._bytes > self._ring_bytes and len(self._rows) > 1:
            self._bytes -= self._rows.popleft()[1]

    # -- called for recorders

    def answer(self, question: bytes, now: float) -> bytes:
        """An encoded page. question: by `question_of`. Raises MessageError."""
        cursors, share = decode(_QUESTION, question)
        return self.page(cursors, share, now).encode()

    def page(self, cursors: dict[str, int], share: float, now: float, max_bytes: int = PAGE_BYTES) -> RecordingPage:
        """The rows after a recorder's cursor. cursors: by ring. share: of the conversations. O(rows)."""
        if not self.ring:
            self.ring = self._new_id()
            self.begin()
        self._asked_at = now
        self.asked += 1
        self._share = max(self._share, share)
        first = self._next - len(self._rows)
        after = cursors.get(self.ring, first - 1)
        skip = min(max(0, after + 1 - first), len(self._rows))
        rows, size, taken = list[Row](), 0, 0
        for session_key, row_size, row in itertools.islice(self._rows, skip, None):
            if rows and size + row_size > max_bytes:
                break
            taken += 1
            if session_key == 0 or session_key / _KEY_RANGE < share:
                rows.append(row)
                size += row_size
        first += skip
        return RecordingPage(self.ring, first, first + taken - 1, rows, len(self._rows) - skip - taken, self.skipped)

    def sweep(self, now: float) -> None:
        """Ends a recording without questions. To be called about every second."""
        if self.ring and now - self._asked_at > QUIET_S:
            self.end()
            self._rows.clear()
            self.ring, self._bytes, self._share, self.skipped, self._next = "", 0, 0.0, 0, 1

    def check(self) -> None:
        """Raises AssertionError if a bound is exceeded. O(rows)."""
        assert self._bytes == sum([size for _, size, _ in self._rows])
        assert self._bytes <= self._ring_bytes or len(self._rows) == 1
        assert self.ring or not self._rows

    def __repr__(self) -> str:
        return f"<Recording {self.ring or 'off'}, {len(self._rows)} rows, {self._bytes} bytes>"


def question_of(cursors: dict[str, int], share: float) -> bytes:
    """A recorder's question to all processes. cursors, share: as in `Recording.page`."""
    return msgspec.msgpack.encode((cursors, share))


def _nothing() -> None:
    """Default for `begin` and `end`."""
