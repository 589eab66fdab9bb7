"""KV events byte by byte as vLLM sends them, over real sockets, and what a follower can make of them."""

import random
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from hypothesis import settings

from replica.cache.blocks import BlockLedger
from replica.cache.prefix import BlockRun, Key, Prefix, Scope

pytest.importorskip("msgpack")
pytest.importorskip("zmq")

import msgpack
import zmq

from replica.cache.kv_events import (
    END,
    EndpointError,
    EventsConfig,
    KvEventPublisher,
    block_hash,
    cleared,
    encode,
    endpoint_of,
    removed,
    stored,
)
from tests.replica.cache.test_blocks import Follower, LedgerMachine

# What msgspec makes of vLLM's own classes: a batch at 1.5 s of a BlockStored, a BlockRemoved and an AllBlocksCleared.
MAPS = """
93cb3ff8000000000000938ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf0123456789abcdefcffedcba9876543210
b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647398010203040506ce0001f400ce00011170aa626c6f636b5f73697a6504
a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c0c0a967726f75705f69647800
b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e84a474797065ac426c6f636b52656d6f766564
ac626c6f636b5f68617368657391cf0123456789abcdefa66d656469756da3475055a967726f75705f6964780081a474797065
b0416c6c426c6f636b73436c656172656400
"""
ARRAYS = """
93cb3ff8000000000000939cab426c6f636b53746f72656492cf0123456789abcdefcffedcba9876543210c098010203040506ce0001f400ce00011170
04c0a3475055c092c0c000ae66756c6c5f617474656e74696f6ec094ac426c6f636b52656d6f76656491cf0123456789abcdefa34750550091
b0416c6c426c6f636b73436c656172656400
"""
FIELDS = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)


def golden(text: str) -> bytes:
    return bytes.fromhex(text.replace("\n", ""))


def decoded(payload: bytes) -> list[dict[str, Any]]:
    """The events of a batch, of either form, as far as a follower needs them."""
    _, events, *_ = msgpack.unpackb(payload, strict_map_key=False)
    return [event if isinstance(event, dict) else dict(zip(FIELDS, event, strict=False)) for event in events]


class Hashes:
    """A follower that knows nothing but the wire."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def take(self, payload: bytes) -> None:
        for event in decoded(payload):
            match event["type"]:
                case "BlockStored":
                    assert event["parent_block_hash"] is None or event["parent_block_hash"] in self.held
                    assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
                    self.held.update(event["block_hashes"])
                case "BlockRemoved":
                    self.held.difference_update(event["block_hashes"])
                case "AllBlocksCleared":
                    self.held.clear()


class OverTheWire(Follower):
    """Follows the ledger's events directly, and again from what both forms make of them."""

    def __init__(self) -> None:
        super().__init__()
        self.wires = {"map": Hashes(), "array": Hashes()}

    def publish(self, event: dict[str, Any]) -> None:
        for form, wire in self.wires.items():
            wire.take(encode(1.5, [event], form))  # type: ignore[arg-type]
            assert wire.held == {block_hash(key) for key in self.held}

    def stored(self, run: BlockRun) -> None:
        super().stored(run)
        self.publish(stored(run, len(run.tokens) // len(run.keys)))

    def removed(self, key: Key) -> None:
        super().removed(key)
        self.publish(removed(key))

    def cleared(self) -> None:
        super().cleared()
        self.publish(cleared())


class WireMachine(LedgerMachine):
    """Whatever happens to the ledger, the wire reports exactly what it holds (the parent compares it after each step)."""

    def __init__(self) -> None:
        super().__init__(OverTheWire())


TestWireMachine = WireMachine.TestCase
TestWireMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_our_bytes_are_vllms() -> None:
    keys = tuple(bytes(8) + bytes.fromhex(low) for low in ("0123456789abcdef", "fedcba9876543210"))
    run = BlockRun(keys, None, array("I", [1, 2, 3, 4, 5, 6, 128000, 70000]), Scope())
    events = [stored(run, 4), removed(keys[0]), cleared()]
    assert encode(1.5, events, "map") == golden(MAPS)
    assert encode(1.5, events, "array") == golden(ARRAYS)


def test_the_first_block_names_its_salt() -> None:
    scope = Scope(salt="tenant-a")
    prefix = Prefix(range(8), 4, scope)
    first = stored(BlockRun(tuple(prefix.keys), None, prefix.tokens, scope), 4)
    assert first["extra_keys"] == [["tenant-a"], None]
    later = stored(BlockRun((prefix.keys[1],), prefix.keys[0], prefix.tokens[4:], scope), 4)
    assert (later["parent_block_hash"], later["extra_keys"]) == (block_hash(prefix.keys[0]), [None])


@contextmanager
def publishing(folder: Path, **options: Any) -> Iterator[KvEventPublisher]:
    events = KvEventPublisher(EventsConfig(f"ipc://{folder}/events", f"ipc://{folder}/replay", **options), 2)
    try:
        yield events
    finally:
        events.close()


@contextmanager
def connected(kind: int, endpoint: str | None) -> Iterator["zmq.Socket[bytes]"]:
    with zmq.Context() as context, context.socket(kind) as end:
        end.setsockopt(zmq.RCVTIMEO, 10_000)
        end.setsockopt(zmq.LINGER, 0)
        if kind == zmq.SUB:
            end.setsockopt(zmq.SUBSCRIBE, b"kv@")
        end.connect(str(endpoint))
        yield end


def replayed(events: KvEventPublisher, start: int) -> list[tuple[int, bytes]]:
    with connected(zmq.DEALER, events.replay_endpoint) as end:
        end.send_multipart([b"", start.to_bytes(8, "big")])
        batches = []
        while (frames := end.recv_multipart())[-1]:
            assert frames[:2] == [b"", b"kv@here"]
            batches.append((int.from_bytes(frames[2], "big"), frames[3]))
        assert frames == [b"", b"", END, b""]
    return batches


def fill(ledger: BlockLedger, seed: int) -> None:
    """Some requests, more than fit."""
    chance = random.Random(seed)
    for _ in range(40):
        prefix = Prefix([chance.randrange(3) for _ in range(chance.randrange(20))], 2)
        lease = ledger.reserve(prefix, len(prefix.keys), 0.0)
        assert lease is not None
        ledger.commit(lease, len(prefix.keys))
        ledger.release(lease, 0.0)


def named(ledger: BlockLedger) -> set[int]:
    return {block_hash(idle.key) for idle in ledger.idle()}


def test_a_follower_from_the_start_one_that_came_late_and_a_restart(tmp_path: Path) -> None:
    with publishing(tmp_path, topic="kv@here") as events:
        ledger = BlockLedger(12, 2, (events,))
        fill(ledger, 1)
        late = Hashes()
        with connected(zmq.SUB, events.endpoint) as live:
            # A subscription takes a moment to be in place: until it is, the follower asks for a replay.
            numbers: list[int] = []
            while not live.poll(10):
                fill(ledger, len(numbers))
                numbers.append(0)
            ledger.clear()
            fill(ledger, 99)
            expected, followed = named(ledger), Hashes()
            batches = replayed(events, 0)
            assert [number for number, _ in batches] == list(range(len(batches)))
            for _, payload in batches:
                followed.take(payload)
            assert followed.held == expected
            # What came live is byte by byte what is replayed.
            topic, number, payload = live.recv_multipart()
            assert topic == b"kv@here"
            assert dict(batches)[int.from_bytes(number, "big")] == payload
        middle = len(batches) // 2
        for _, payload in [*batches[:middle], *replayed(events, middle)]:
            late.take(payload)
        assert late.held == expected
        assert replayed(events, len(batches)) == []
        seconds = msgpack.unpackb(batches[0][1])[0]
        assert seconds == pytest.approx(struct.unpack(">d", batches[0][1][2:10])[0])
    with publishing(tmp_path, topic="kv@here") as again:
        fill(BlockLedger(12, 2, (again,)), 5)
        while not (batches := replayed(again, 0)):
            pass
        assert batches[0][0] == 0, "a restart begins at 0 again"


def test_only_the_last_batches_are_kept_and_nonsense_is_not_answered(tmp_path: Path) -> None:
    with publishing(tmp_path, topic="kv@here", buffer_steps=3) as events:
        for number in range(10):
            events.removed(bytes([number] * 16))
            while (batches := replayed(events, number)) == []:
                pass
            assert [at for at, _ in batches] == [number]
        with connected(zmq.DEALER, events.replay_endpoint) as end:
            for nonsense in ([b""], [b"", b"1"], [b"x", bytes(8)], [b"", bytes(8), b""]):
                end.send_multipart(nonsense)
            end.send_multipart([b"", bytes(8)])
            assert [int.from_bytes(end.recv_multipart()[2], "big") for _ in range(3)] == [7, 8, 9]
            assert end.recv_multipart()[2] == END
        assert repr(events).endswith("10 batches, 3 kept, 0 events waiting>")


def test_what_waits_is_published_before_the_end(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as follower:
        follower.setsockopt(zmq.RCVTIMEO, 10_000)
        follower.setsockopt(zmq.SUBSCRIBE, b"")
        follower.bind("tcp://127.0.0.1:*")
        endpoint = follower.getsockopt_string(zmq.LAST_ENDPOINT)
        events = KvEventPublisher(EventsConfig(endpoint, form="array"), 2)  # it connects: one router, many engines
        assert events.replay_endpoint is None
        held = Hashes()
        while not follower.poll(10):
            events.cleared()
        for number in range(1000):
            events.stored(BlockRun((number.to_bytes(16, "big"),), None, array("I", [1, 2]), Scope()))
        events.close()
        while len(held.held) < 1000:
            held.take(follower.recv_multipart()[2])


def test_an_event_is_in_the_queue_or_in_a_counted_batch(tmp_path: Path) -> None:
    """Whoever compares both sees it, while its batch is made as well."""
    seen, made = list[str](), Event()

    def clock() -> float:
        seen.append(repr(events))
        made.set()
        return 0.0

    events = KvEventPublisher(EventsConfig(f"ipc://{tmp_path}/events"), 2, clock)
    try:
        events.cleared()
        assert made.wait(40)
    finally:
        events.close()
    assert seen[0].endswith("1 batches, 0 kept, 0 events waiting>")


def test_an_endpoint_that_cannot_be_had_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EndpointError, match=r"cannot bind KV events to ipc:///no/such/folder/x"):
        KvEventPublisher(EventsConfig("ipc:///no/such/folder/x"), 16)
    with pytest.raises(EndpointError, match="cannot bind KV events"):
        KvEventPublisher(EventsConfig(f"ipc://{tmp_path}/a", "ipc:///no/such/folder/x"), 16)


def test_the_source_of_events_has_vllms_form(tmp_path: Path) -> None:
    with publishing(tmp_path, topic="kv@here") as events:
        assert events.source() == {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{tmp_path}/events",
            "replay_endpoint": f"ipc://{tmp_path}/replay",
            "buffer_steps": 10_000,
            "hwm": 100_000,
            "topic": "kv@here",
        }


@pytest.mark.parametrize(
    ("endpoint", "third"),
    [
        ("tcp://*:5557", "tcp://*:5559"),
        ("tcp://[::1]:5557", "tcp://[::1]:5559"),
        ("tcp://collector:5557", "tcp://collector:5559"),
        ("tcp://*:0", "tcp://*:0"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("ipc:///run/kv", "ipc:///run/kv-2"),
    ],
)
def test_each_replica_of_a_process_has_its_own_endpoint(endpoint: str, third: str) -> None:
    assert endpoint_of(endpoint, 0) == endpoint
    assert endpoint_of(endpoint, 2) == third
