"""KV events: the contents of the prefix cache, published over ZMQ in vLLM's format, so that followers of vLLM work with it.

Theory of operation. `KvEventPublisher` is a listener of the block ledger. The thread that changes the cache only queues events
and wakes the publisher's thread by a socket. That thread takes all queued events, makes one batch of them, gives it the next
sequence number from 0, keeps it for replay (the last `buffer_steps` batches) and publishes it: topic, sequence number in
8 bytes, msgpack. A follower that has missed batches requests all from a number on from the replay socket, and gets each batch,
then an end marker. A restarted publisher starts at 0, by which followers notice the restart.

A batch is `[seconds, events, rank]`. An event is a map with its type first (vLLM since 0.24) or an array with its type
first (before). Block hashes are the last 8 bytes of our keys. The medium is "GPU", as in vLLM, for any kind of memory. The
fields of LoRA adapters are always null: the replica has none.
"""

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgpack
import zmq

from replica.cache.prefix import BlockRun, Key

EventFormat = Literal["map", "array"]
MEDIUM, KIND, GROUP = "GPU", "full_attention", 0
END = (-1).to_bytes(8, "big", signed=True)
LINGER_MS = 1000  # how long closing waits for slow followers to receive the last batches


class EndpointError(Exception):
    """An endpoint cannot be bound or connected to; the message is for the user."""


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """Endpoints as in vLLM: an endpoint with `*` or `::`, and ipc and inproc, is bound; any other is connected to. `rank`: the
    data-parallel rank in each batch.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    form: EventFormat = "map"
    rank: int = 0
    buffer_steps: int = 10_000
    hwm: int = 100_000


def endpoint_of(endpoint: str, index: int) -> str:
    """The endpoint of the index-th replica of a process: the TCP port plus the index, as for vLLM's data-parallel ranks; any
    other name with the index appended. An open port (`*`) stays open.
    """
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}-{index}" if index else endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + index}" if port.isdecimal() and int(port) else endpoint


def block_hash(key: Key) -> int:
    """The low 64 bits of a key."""
    return int.from_bytes(key[-8:], "big")


def stored(run: BlockRun, size: int) -> dict[str, Any]:
    """The event BlockStored, with its members in the order of the array form."""
    # Only a sequence's first block carries its salt.
    extra = [run.scope.salt] if run.scope.salt is not None and run.parent is None else None
    return {
        "type": "BlockStored",
        "block_hashes": [block_hash(key) for key in run.keys],
        "parent_block_hash": None if run.parent is None else block_hash(run.parent),
        "token_ids": run.tokens.tolist(),
        "block_size": size,
        "lora_id": None,
        "medium": MEDIUM,
        "lora_name": None,
        "extra_keys": [None if at else extra for at in range(len(run.keys))],
        "group_idx": GROUP,
        "kv_cache_spec_kind": KIND,
        "kv_cache_spec_sliding_window": None,
    }


def removed(key: Key) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [block_hash(key)], "medium": MEDIUM, "group_idx": GROUP}


def cleared() -> dict[str, Any]:
    return {"type": "AllBlocksCleared"}


def encode(seconds: float, events: list[dict[str, Any]], form: EventFormat, rank: int = 0) -> bytes:
    """One batch. As in vLLM, the map form leaves out the sliding window if there is none."""
    if form == "array":
        bodies: list[Any] = [list(event.values()) for event in events]
    else:
        optional = "kv_cache_spec_sliding_window"
        bodies = [{name: value for name, value in event.items() if name != optional or value is not None} for event in events]
    packed: bytes = msgpack.packb([seconds, bodies, rank])
    return packed


class KvEventPublisher:
    """A CacheListener that publishes KV events. Its sockets are open from its construction until `close`. The constructor
    raises EndpointError.
    """

    def __init__(self, config: EventsConfig, block_size: int, clock: Callable[[], float] = time.time) -> None:
        self.config, self._size, self._clock = config, block_size, clock
        self._queue: deque[dict[str, Any]] = deque()
        self._batches: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._sequence = 0
        self._closing = False
        self._context = zmq.Context()
        self._publisher = self._socket(zmq.PUB, config.endpoint, config.hwm)
        # A follower may ask for all batches, and a ROUTER socket drops those beyond its limit.
        room = config.buffer_steps + 16
        self._replay = self._socket(zmq.ROUTER, config.replay_endpoint, room) if config.replay_endpoint else None
        self.endpoint = self._publisher.getsockopt_string(zmq.LAST_ENDPOINT)  # with the port that was bound
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if self._replay else None
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        batches = f"{self._sequence} batches, {len(self._batches)} kept"
        return f"<KvEventPublisher {self.endpoint}, {batches}, {len(self._queue)} events waiting>"

    def source(self) -> dict[str, object]:
        """One publisher's entry in vLLM's /kv_event_sources."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.config.endpoint,
            "replay_endpoint": self.config.replay_endpoint,
            "buffer_steps": self.config.buffer_steps,
            "hwm": self.config.hwm,
            "topic": self.config.topic,
        }

    def stored(self, run: BlockRun) -> None:
        self._put(stored(run, self._size))

    def removed(self, key: Key) -> None:
        self._put(removed(key))

    def cleared(self) -> None:
        self._put(cleared())

    def close(self) -> None:
        """Publish the queued events, then stop. The publisher cannot be used afterwards."""
        self._closing = True
        self._wake()
        self._thread.join()
        for made in (self._publisher, self._replay):
            if made is not None:
                made.close(LINGER_MS)
        self._context.term()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _socket(self, kind: int, endpoint: str, room: int) -> "zmq.Socket[bytes]":
        made = self._context.socket(kind)
        made.setsockopt(zmq.SNDHWM, room)
        binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        try:
            (made.bind if binds else made.connect)(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise EndpointError(f"cannot {'bind' if binds else 'connect'} KV events to {endpoint}: {error}") from error
        return made

    def _put(self, event: dict[str, Any]) -> None:
        self._queue.append(event)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the buffer is full: the thread will wake anyway
            self._wake_sender.send(b"!")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_receiver, zmq.POLLIN)
        if self._replay:
            poller.register(self._replay, zmq.POLLIN)
        while not self._closing or self._queue:
            ready = dict(poller.poll())
            if self._wake_receiver.fileno() in ready:
                self._wake_receiver.recv(4096)
            self._publish()
            if self._replay in ready:
                self._answer_replay()

    def _publish(self) -> None:
        if not self._queue:
            return
        number = self._sequence.to_bytes(8, "big")
        self._sequence += 1  # before the queue is empty: each event is in one of them
        events = [self._queue.popleft() for _ in range(len(self._queue))]
        payload = encode(self._clock(), events, self.config.form, self.config.rank)
        self._batches.append((number, payload))
        self._publisher.send_multipart([self.config.topic.encode(), number, payload])

    def _answer_replay(self) -> None:
        """Answer one replay request: all kept batches from a number on, then the end marker."""
        assert self._replay is not None
        peer, *question = self._replay.recv_multipart()
        if len(question) != 2 or question[0] or len(question[1]) != 8:
            return  # not a replay request: there is no useful answer
        topic = self.config.topic.encode()
        for number, payload in self._batches:
            if number >= question[1]:
                self._replay.send_multipart([peer, b"", topic, number, payload])
        self._replay.send_multipart([peer, b"", b"", END, b""])
