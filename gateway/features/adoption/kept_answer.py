"""An answer that is kept from its beginning while its client reads it, because the client may leave and send its request again.

    KeptReply ──► its client, until that leaves
        └───────► KeptAnswer: pieces ── `left` ──► a detached answer: the pieces, then the rest, for the client that adopts it

Beginnings are bounded: MAX_KEPT bytes per answer, a share of the memory budget in all, and the client's share of the budget. A
larger answer is not kept, and its request ends with its client. Each step of STEP bytes is charged before its use. A plain
answer of at most AT_ONCE bytes is not kept while its client is there, because its request ends when it is written.
"""

from __future__ import annotations

import asyncio
from secrets import randbits
from typing import Final

from gateway.admission.memory import MemoryLease
from gateway.errors import CLIENT_LEFT
from gateway.features.adoption.identity import digest_of
from gateway.features.runs.detached_answer import DetachedAnswer
from gateway.request.client import AnswerKeeper, ClientReply
from gateway.request.exchange import Exchange
from gateway.request.record import SettledRequest
from gateway.request.slots import Slot
from gateway.server.http.request import HttpRequest
from gateway.upstream.client import PausableSource
from router.native import mypyc_attr

MAX_KEPT: Final = 4 << 20  # bytes of an answer, with PIECE_BYTES for each of its pieces
STEP: Final = 16 << 10
UNCHARGED: Final = 8 << 10  # as of a connection's write buffer
AT_ONCE: Final = 4 << 10  # such an answer and its head never wait in the gateway for their client to read
PIECE_BYTES: Final = 48  # overhead of a piece
_JOINED: Final = 64 << 10  # bytes of the pieces of a log


@mypyc_attr(allow_interpreted_subclasses=True)
class Abandonments:
    """Decides on answers whose clients have left."""

    def left(self, kept: KeptAnswer, task: asyncio.Task[None] | None) -> bool:
        """The client has left. True: the answer goes on."""
        raise NotImplementedError

    def overflowed(self, kept: KeptAnswer) -> None:
        """The log of a detached answer has dropped its beginning."""
        raise NotImplementedError

    def ended(self, kept: KeptAnswer) -> None:
        """The request of a detached answer has ended."""
        raise NotImplementedError


class KeptAnswers:
    """The kept answers of a process. most: bytes of all beginnings. held: charged now. waiting: number of generations without a
    client.
    """

    __slots__ = ("abandonments", "held", "most", "seed", "waiting")

    def __init__(self, abandonments: Abandonments, most: int) -> None:
        self.abandonments = abandonments
        self.most = most
        self.held = 0
        self.waiting = 0
        self.seed = randbits(64)  # secret: no client can search for two bodies with one digest

    def claims(self, exchange: Exchange) -> bool:
        """Begins to keep the answer. True: the request may get a waiting one. Called once for each request."""
        request = exchange.request
        if not (exchange.dialect.pulsed and exchange.api.metered and isinstance(request, HttpRequest)):
            return False
        request.keeper = KeptAnswer(self, exchange)
        return self.waiting > 0

    def settled(self, record: SettledRequest) -> None:
        """A request has ended. If its client has left, and no other one follows the answer, that is its end."""
        kept = LEFT.get(record)
        if kept is not None and not kept.followed and record.status < 400:
            record.status, record.error, record.answer.complete = CLIENT_LEFT, "the client left", False

    def __repr__(self) -> str:
        return f"<KeptAnswers {self.held} bytes, {self.waiting} waiting>"


class KeptAnswer(AnswerKeeper):
    """One kept answer. exchange: None once the request has ended. detached: the answer once the client has left. followed:
    another client reads that. keeps: nothing of the answer is missing so far. pause_s: after which the client has come
    again, as an earlier answer to the same request was interrupted.
    """

    detached: DetachedAnswer | None = None
    followed = False
    keeps = True
    pause_s = 0.0
    _body_size = 0
    _charged = UNCHARGED
    _digest: int | None = None
    _lease: MemoryLease | None = None
    _lines = b""
    _pieces: list[bytes] | None = None
    _reply: KeptReply | None = None
    _size = 0
    _source: PausableSource | None = None
    _status = 0
    _unsent = False
    _whole = False

    def __init__(self, answers: KeptAnswers, exchange: Exchange) -> None:
        self.exchange: Exchange | None = exchange
        self._all = answers

    # -- for its request

    def identify(self) -> int:
        if self._digest is None:
            assert self.exchange is not None
            self._body_size = len(self.exchange.api.body)
            self._digest = digest_of(self.exchange, self._all.seed)
        return self._digest

    def awaits_equal(self, other: KeptAnswer) -> bool:
        """True if its client is connected, has been sent nothing but pulses, and has sent the body of `other`."""
        exchange = self.exchange
        if exchange is None or self.detached is not None or not exchange.request.attended:
            return False
        delivered, digest = exchange.delivered, other.identify()
        if delivered.reply is not None and not (delivered.early and delivered.reader is None):
            return False
        if self._digest is None and len(exchange.api.body) != other._body_size:  # mostly: then it is not computed
            return False
        return self.identify() == digest

    def reply(self, inner: ClientReply, size: int | None) -> ClientReply:
        if self.detached is None and size is not None and size <= AT_ONCE and not inner.gone:
            self.keeps = False
            return inner
        self.identify()  # the request may drop its body once the answer has begun
        self._reply = made = KeptReply(self, inner if self.detached is None else None)
        return made

    def left(self, task: asyncio.Task[None] | None) -> bool:
        exchange = self.exchange
        if not self.keeps or exchange is None or (self._whole and not self._unsent) or _is_broken(exchange):
            return False
        reader = exchange.delivered.reader
        if reader is not None and reader.done and not reader.holds:  # only the end of the framing is missing
            return False
        return self._all.abandonments.left(self, task)

    def close(self) -> None:
        if self._unsent and self.detached is None and self._reply is not None and self._reply.lost:
            self.left(None)
        self._drop()
        if self.detached is not None:
            self.detached.finish(complete=False)
            self._all.abandonments.ended(self)
        self.exchange = self._reply = self._source = None

    def detach(self, detached: DetachedAnswer) -> None:
        """The client has left: the answer goes on in this one."""
        pieces, self._pieces = self._pieces or [], None
        self.detached = detached
        if self._status:
            detached.begin(self._status, self._lines)
        part, size = list[bytes](), 0
        for piece in pieces:
            part.append(piece)
            size += len(piece)
            if size >= _JOINED:
                detached.add(b"".join(part))
                part, size = [], 0
        detached.add(b"".join(part))
        self._release()
        if self._whole:
            detached.finish(complete=True)
        if self._reply is not None:
            self._reply.inner = None
        detached.feed_from(self._source)
        if self._source is not None:
            self._source.resume()  # the client may not have read

    # -- for its reply

    def begin(self, status: int, lines: bytes, first: bytes, *, whole: bool) -> None:
        detached = self.detached
        if detached is None:
            self._status, self._lines, self._whole = status, lines, whole
            self.add(first)
        elif not detached.begun.is_set():
            detached.begin(status, lines)
            self.add(first)
            if whole:
                detached.finish(complete=True)

    def add(self, data: bytes) -> None:
        detached = self.detached
        if detached is not None:
            if not detached.finished:
                detached.add(data)
                if detached.log.first and not self.followed:
                    self._all.abandonments.overflowed(self)
            return
        if data and self.keeps:
            self._size += len(data) + PIECE_BYTES
            if self._size > self._charged and not self._charge():
                self._drop()
            elif self._pieces is None:
                self._pieces = [data]
            else:
                self._pieces.append(data)

    def end(self) -> None:
        self._whole = True
        if self.detached is not None:
            self.detached.broken = self.exchange is not None and _is_broken(self.exchange)
            self.detached.finish(complete=True)

    def sent(self, *, flows: bool) -> None:
        """The client has been sent the whole answer. flows: and nothing of it waits in the gateway."""
        self._unsent = self._whole and not flows

    def cut(self) -> None:
        if self.detached is not None:
            self.detached.finish(complete=False)
        self._drop()

    def feed_from(self, source: PausableSource | None) -> None:
        self._source = source
        if self.detached is not None:
            self.detached.feed_from(source)

    # -- memory

    def _charge(self) -> bool:
        """False: there is no room for the present size."""
        step = self._size - self._charged + STEP
        if self._size > MAX_KEPT or self._all.held + step > self._all.most or self.exchange is None:
            return False
        if self._lease is None:
            self._lease = self.exchange.request.lease.account.lease()
        if not self._lease.grow(step):
            return False
        self._charged += step
        self._all.held += step
        return True

    def _drop(self) -> None:
        """Keep nothing more. Idempotent."""
        self.keeps, self._pieces = False, None
        self._release()

    def _release(self) -> None:
        if self._lease is not None:
            self._all.held -= self._charged - UNCHARGED
            self._charged = UNCHARGED
            self._lease.close()
            self._lease = None

    def __repr__(self) -> str:
        return f"<KeptAnswer {self.detached!r}>" if self.detached is not None else f"<KeptAnswer {self._size} bytes>"


class KeptReply(ClientReply):
    """Writes an answer to its client, and keeps it. inner: the client's; None: that has left."""

    def __init__(self, kept: KeptAnswer, inner: ClientReply | None) -> None:
        super().__init__()
        self._kept = kept
        self.inner = inner
        self.lost = False  # the client has left before it was sent all
        self.keep_alive = inner is not None and inner.keep_alive

    def begin(self, status: int, headers: bytes, *, length: int | None, first: bytes = b"") -> None:
        whole = length is not None and length == len(first)
        self._kept.begin(status, headers, first, whole=whole)
        self.begun = True
        inner = self.inner
        if inner is not None:
            try:
                inner.begin(status, headers, length=length, first=first)
            except ConnectionError:
                self._left()
            self.keep_alive = inner.keep_alive
            if whole:
                self._kept.sent(flows=not self.lost and inner.flows)

    def write(self, data: bytes) -> None:
        self._kept.add(data)
        if self.inner is not None:
            try:
                self.inner.write(data)
            except ConnectionError:
                self._left()

    def end(self, last: bytes = b"") -> None:
        self._kept.add(last)
        self._kept.end()
        inner = self.inner
        if inner is not None:
            try:
                inner.end(last)
            except ConnectionError:
                self._left()
            self._kept.sent(flows=not self.lost and inner.flows)

    @property
    def flows(self) -> bool:
        if self.inner is not None:
            return self.inner.flows
        return self._kept.followed  # without a follower there are no signs of life

    def cut(self) -> None:
        self._kept.cut()
        self.keep_alive = False
        if self.inner is not None:
            self.inner.cut()

    async def flushed(self) -> None:
        if self.inner is not None:
            await self.inner.flushed()

    def feed_from(self, answer: PausableSource | None) -> None:
        self._kept.feed_from(answer)
        if self.inner is not None:
            self.inner.feed_from(answer)

    def _left(self) -> None:
        """Its client has left. Raises ConnectionError if the answer is not kept."""
        if not self._kept.keeps:
            raise ConnectionResetError("the client left")
        self.lost = True

    def __repr__(self) -> str:
        return f"<KeptReply of {self._kept!r}>"


def _is_broken(exchange: Exchange) -> bool:
    """True if the answer is an error, or ends with an error event: nothing to be adopted later."""
    return exchange.record.code != "" or exchange.delivered.status >= 400


LEFT: Final = Slot[KeptAnswer]("adoption.left")  # of requests whose clients have left
