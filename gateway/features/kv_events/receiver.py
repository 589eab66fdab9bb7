"""The thread that receives events over ZMQ, and keeps the engines' blocks.

It alone changes streams and holdings; the event loop reads them (`holdings.py`). Commands reach it through a queue and a socket
that wakes it. It gives the interpreter back after the message with which SLICE_S of work are over.

Bounds: messages of MAX_MESSAGE bytes, WAITING of them in a socket. If all engines together hold too many blocks, the
largest one's are forgotten.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import zmq

from gateway.features.kv_events.stream import EventStream, Source

log = logging.getLogger("warmroute.kv_events")

MAX_MESSAGE: Final = 2 << 20  # bytes: a step of 100,000 tokens has half as many
WAITING: Final = 256  # messages in a socket; more are dropped by the publisher, and asked for again
MAX_SOCKETS: Final = 1 << 14  # two for each publisher; the default is 1023
AT_ONCE: Final = 64  # messages of one socket in turn
SLICE_S: Final = 0.0005  # of work, until other threads may run
PAUSE_S: Final = 0.00005
CHECKED: Final = 1000  # blocks
FREED: Final = 2000  # entries of forgotten blocks, in a slice
TICK_S: Final = 1.0
CLOSING_S: Final = 5.0
BLOCK_BYTES: Final = 200  # of a block in holdings: 182 as measured
END: Final = b"\xff" * 8
_NUMBER_BYTES: Final = 8


class _Subscription:
    """A followed publisher. events, replay: zmq sockets; replay: of the last question, or None."""

    def __init__(self, events: Any) -> None:
        self.stream: EventStream
        self.events = events
        self.replay: Any = None


class EventReceiver:
    """The thread (see the module). lost: called in the thread when an engine has lost its cache. most_bytes: of all holdings.

    streams: of the followed publishers, by source; replaced, never changed, so that other threads may read it.
    """

    def __init__(self, lost: Callable[[Source], None], most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.streams: dict[Source, EventStream] = {}
        self._lost, self._most, self._clock = lost, most_bytes // BLOCK_BYTES, clock
        self._followed: dict[Source, _Subscription] = {}
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_receiver, zmq.POLLIN)
        self._unchecked = 0  # blocks since the memory was last checked
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    # -- calls of other threads

    def follow(self, source: Source) -> None:
        """Follow a publisher from now on."""
        self._command(lambda: self._begin(source))

    def leave(self, source: Source) -> None:
        """Follow it no longer."""
        self._command(lambda: self._leave(source))

    def resynchronise(self, source: Source) -> None:
        """Begin again: its process may be another one."""
        self._command(lambda: self._again(source))

    def close(self) -> None:
        """End the thread. Waits for it, a few seconds at most."""
        self._command(None)
        self._thread.join(CLOSING_S)

    def _command(self, command: Callable[[], None] | None) -> None:
        self._commands.put(command)
        with contextlib.suppress(BlockingIOError, OSError):  # the buffer is full: the thread will wake anyway
            self._wake_sender.send(b"!")

    # -- the thread

    def _run(self) -> None:
        try:
            self._loop()
        except Exception:
            log.exception("events of engines are followed no longer")
            self.streams = {}
        finally:
            for source in list(self._followed):
                self._end(source)
            self._context.destroy(linger=0)
            self._wake_receiver.close()
            self._wake_sender.close()

    def _loop(self) -> None:
        ticked = self._clock()
        while True:
            ready = dict(self._poller.poll(int(TICK_S * 1000)))
            if self._wake_receiver.fileno() in ready:
                self._wake_receiver.recv(4096)
            while not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command()
            for each in list(self._followed.values()):
                if each.events in ready:
                    self._receive(each.events, each.stream, self._live)
                if each.replay is not None and each.replay in ready:
                    self._receive(each.replay, each.stream, self._replayed)
                self._free(each.stream)
            if (now := self._clock()) - ticked >= TICK_S:
                ticked = now
                for each in self._followed.values():
                    each.stream.tick(now)
                    if not each.stream.ordering.asks:
                        self._drop(each.replay)
                        each.replay = None

    def _ask(self, followed: _Subscription, number: int) -> None:
        """Ask for a replay, over a connection of its own: later answers to earlier questions are lost with theirs."""
        self._drop(followed.replay)
        followed.replay = None
        try:
            followed.replay = self._socket(zmq.DEALER, followed.stream.source.replay)
            followed.replay.send_multipart([b"", number.to_bytes(_NUMBER_BYTES, "big")], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it counts as unanswered
            log.warning("events cannot be replayed", extra={"replica": followed.stream.source.replica, "error": str(error)})

    def _receive(self, source: Any, stream: EventStream, take: Callable[[EventStream, Sequence[bytes], float], None]) -> None:
        begin = self._clock()
        for _ in range(AT_ONCE):
            try:
                frames = source.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:  # nothing more; or the socket was replaced by another question
                return
            now = self._clock()
            before = stream.blocks
            take(stream, frames, now)
            self._unchecked += stream.blocks - before
            if self._unchecked > CHECKED:
                self._bound(now)
            if self._clock() - begin > SLICE_S:
                time.sleep(PAUSE_S)
                begin = self._clock()

    def _live(self, stream: EventStream, frames: Sequence[bytes], now: float) -> None:
        if len(frames) == 3 and len(frames[1]) == _NUMBER_BYTES:
            stream.ordering.live(int.from_bytes(frames[1], "big"), frames[2], now)
        else:
            stream.refused += 1

    def _replayed(self, stream: EventStream, frames: Sequence[bytes], now: float) -> None:
        """The payload is the last frame, the number the one before it; some publishers have a topic before that."""
        if len(frames) < 3 or len(frames[-2]) != _NUMBER_BYTES:
            stream.refused += 1
        elif frames[-2] == END or not frames[-1]:
            stream.ordering.replay_ended(now)
        else:
            stream.ordering.replayed(int.from_bytes(frames[-2], "big"), frames[-1], now)

    def _bound(self, now: float) -> None:
        """Forget the blocks of the largest engine, if there are too many."""
        self._unchecked = 0
        streams = [each.stream for each in self._followed.values()]
        if sum(stream.holdings.blocks for stream in streams) > self._most:
            largest = max(streams, key=lambda stream: stream.holdings.blocks)
            log.warning(
                "kv_events.memory_mb is too small for all blocks: those of the largest replica are not used for a while",
                extra={"replica": largest.source.replica, "blocks": largest.holdings.blocks, "room": self._most},
            )
            largest.overflow(now)

    def _free(self, stream: EventStream) -> None:
        """Free the memory of forgotten blocks, in slices."""
        while stream.holdings.free(FREED):
            time.sleep(PAUSE_S)

    # -- commands

    def _begin(self, source: Source) -> None:
        if source in self._followed:
            return
        try:
            followed = _Subscription(self._socket(zmq.SUB, source.endpoint))
            followed.events.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        except zmq.ZMQError as error:
            log.warning("events cannot be followed", extra={"replica": source.replica, "error": str(error)})
            return
        stream = followed.stream = EventStream(source, partial(self._ask, followed), self._lost)
        self._followed[source] = followed
        self.streams = {**self.streams, source: stream}
        stream.ordering.start(self._clock())

    def _socket(self, kind: int, endpoint: str) -> Any:
        made = self._context.socket(kind)
        made.setsockopt(zmq.RCVHWM, WAITING)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.IPV6, 1)
        try:
            made.connect(endpoint)
        except zmq.ZMQError:
            made.close()
            raise
        self._poller.register(made, zmq.POLLIN)
        return made

    def _leave(self, source: Source) -> None:
        followed = self._followed.get(source)
        self._end(source)
        if followed is not None:
            followed.stream.forget("")
            self._free(followed.stream)

    def _end(self, source: Source) -> None:
        followed = self._followed.pop(source, None)
        if followed is None:
            return
        self.streams = {each: stream for each, stream in self.streams.items() if each != source}
        self._drop(followed.events)
        self._drop(followed.replay)

    def _drop(self, made: Any) -> None:
        if made is not None:
            self._poller.unregister(made)
            made.close(0)

    def _again(self, source: Source) -> None:
        if followed := self._followed.get(source):
            followed.stream.forget("")
            followed.stream.ordering.start(self._clock())

    def __repr__(self) -> str:
        return f"<EventReceiver {list(self.streams.values())}>"
