"""Recent requests, kept for whoever records this gateway's traffic (`warmroute record`), and only while somebody does.

A recorder asks every second or so (`page`), with a cursor: the number of the last row that it has. The first question begins
the recording; QUIET_S after the last one it ends, and everything is freed. Rows stay for other recorders, and for a question
that is asked again because its answer was lost, until RING_BYTES push the oldest out; who asks too late finds a gap in the
numbers, and counts the lost ones. So any number of recorders read the same rows, and none has to say goodbye.

Who is not recorded costs nothing: until the first question, and after the last, this is no observer of requests at all.

Rows have lengths, counts, times, names of models, replicas and tenants, and block keys: hashes of the prompt, which only
operators get, who may as well ask what the index holds (POST /warmroute/route). The recorder turns them into plain numbers.

Sampling is by conversation: of those with a session, the gateway leaves out the ones that no recorder wants. Those without
are recognised by the recorder, which sees the rows of all workers.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from gateway.cluster.messages import decode

QUIET_S: Final = 60.0  # seconds without a question after which a recording ends
RING_BYTES: Final = 32 << 20  # of rows, in each worker
PAGE_BYTES: Final = 1 << 19  # of an answer; one row at least
ROW_BYTES: Final = 700  # of a row beside its block keys, about
_WHOLE: Final = float(1 << 64)  # session keys are below
_QUESTION: Final = msgspec.msgpack.Decoder(tuple[dict[str, int], float])

TOPIC: Final = "recording"

Row = tuple[object, ...]
"""The values of a request, in the order of the fields of `features/recording/command/rows.py`."""


class RecordingPage:
    """The rows from number `first` to `last` that a recorder wants. left: how many there are behind them."""

    __slots__ = ("first", "last", "left", "ring", "rows", "skipped")

    def __init__(self, ring: str, first: int, last: int, rows: list[Row], left: int, skipped: int) -> None:
        self.ring = ring
        self.first = first
        self.last = last
        self.rows = rows
        self.left = left
        self.skipped = skipped

    def encode(self) -> bytes:
        """As JSON; bytes in it are base64."""
        fields = {name: getattr(self, name) for name in ("ring", "first", "last", "left", "skipped", "rows")}
        return msgspec.json.encode(fields)


class Recording:
    """See the top of this file. Time is an argument. `begin` and `end` are called when a recording does.

    ring: an id of this recording of this worker, "" while there is none. skipped: requests since it began that have no row,
    for they reached no replica.
    """

    def __init__(self, new_id: Callable[[], str], ring_bytes: int = RING_BYTES) -> None:
        self.begin: Callable[[], None] = _nothing
        self.end: Callable[[], None] = _nothing
        self.ring = ""
        self.skipped = 0
        self.asked = 0  # questions, of all recorders
        self._new_id = new_id
        self._ring_bytes = ring_bytes
        self._rows: deque[tuple[int, int, Row]] = deque()  # session key, bytes
        self._next = 1  # number of the next row
        self._bytes = 0
        self._share = 0.0  # of the conversations, the largest that was asked for
        self._asked_at = 0.0

    # -- the observer's side

    def wants(self, session_key: int) -> bool:
        """Whether a request of this session has a row. 0: of none that its client has named."""
        return session_key == 0 or session_key / _WHOLE < self._share

    def add(self, session_key: int, keys: bytes, row: Row) -> None:
        """keys: those in the row. O(rows that are pushed out)."""
        size = ROW_BYTES + len(keys)
        self._rows.append((session_key, size, row))
        self._next += 1
        self._bytes += size
        while self._bytes > self._ring_bytes and len(self._rows) > 1:
            self._bytes -= self._rows.popleft()[1]

    # -- the recorders' side

    def answer(self, question: bytes, now: float) -> bytes:
        """A page, encoded. question: as `question_of` makes it. Raises MessageError."""
        cursors, share = decode(_QUESTION, question)
        return self.page(cursors, share, now).encode()

    def page(self, cursors: dict[str, int], share: float, now: float, most_bytes: int = PAGE_BYTES) -> RecordingPage:
        """The rows after a recorder's cursor. cursors: of all workers' rings; share: of the conversations. O(rows)."""
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
            if rows and size + row_size > most_bytes:
                break
            taken += 1
            if session_key == 0 or session_key / _WHOLE < share:
                rows.append(row)
                size += row_size
        first += skip
        return RecordingPage(self.ring, first, first + taken - 1, rows, len(self._rows) - skip - taken, self.skipped)

    def sweep(self, now: float) -> None:
        """End a recording that nobody asks for any more. To be called every second or so."""
        if self.ring and now - self._asked_at > QUIET_S:
            self.end()
            self._rows.clear()
            self.ring, self._bytes, self._share, self.skipped, self._next = "", 0, 0.0, 0, 1

    def check(self) -> None:
        """Raises AssertionError if a bound is broken. O(rows)."""
        assert self._bytes == sum([size for _, size, _ in self._rows])
        assert self._bytes <= self._ring_bytes or len(self._rows) == 1
        assert self.ring or not self._rows

    def __repr__(self) -> str:
        return f"<Recording {self.ring or 'off'}, {len(self._rows)} rows, {self._bytes} bytes>"


def question_of(cursors: dict[str, int], share: float) -> bytes:
    """A recorder's question to all processes. cursors, share: as in `Recording.page`."""
    return msgspec.msgpack.encode((cursors, share))


def _nothing() -> None:
    """Nobody wants to know."""
