"""The thread that receives, over real sockets: gaps, restarts, floods, noise."""

from __future__ import annotations

import contextlib
import random
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from gateway.features.kv_events.ordering import LIVE
from gateway.features.kv_events.prompt_tokens import KnownTokens
from gateway.features.kv_events.receiver import BLOCK_BYTES, EventReceiver
from gateway.features.kv_events.residency import DOUBT_S, WATCHED, Agreement, EngineResidency
from gateway.features.kv_events.stream import EventStream, Source
from replica.cache.kv_events import EventsConfig, KvEventPublisher
from replica.cache.prefix import BlockRun, Prefix, Scope
from router.residency import HeldPrefix
from tests.gateway.conftest import eventually

SIZE = 16


class Publisher:
    """Our replica's publisher on any port, and the source that names it."""

    def __init__(self, port: str = "0", **options: Any) -> None:
        self.events = KvEventPublisher(EventsConfig(f"tcp://*:{port}", "tcp://*:0", **options), SIZE)
        ends = [(each or "").replace("0.0.0.0", "127.0.0.1") for each in (self.events.endpoint, self.events.replay_endpoint)]
        self.source = Source("r", 0, ends[0], ends[1], "", salted=True)

    def store(self, first: int, blocks: int) -> Prefix:
        prefix = Prefix(range(first, first + blocks * SIZE), SIZE)
        self.events.stored(BlockRun(tuple(prefix.keys), None, prefix.tokens, Scope()))
        return prefix


@contextlib.contextmanager
def receiver(most_bytes: int = 64 << 20, lost: Callable[[Source], None] = lambda _source: None) -> Iterator[EventReceiver]:
    made = EventReceiver(lost, most_bytes)
    try:
        yield made
    finally:
        made.close()
        assert not made._thread.is_alive()


async def followed(made: EventReceiver, source: Source) -> EventStream:
    made.follow(source)
    await eventually(lambda: source in made.streams and made.streams[source].ordering.state == LIVE)
    return made.streams[source]


def held(stream: EventStream, first: int, tokens: int) -> HeldPrefix | None:
    data = array("I", range(first, first + tokens)).tobytes()
    return stream.holdings.held(KnownTokens(data, "p", "m", "", whole=True))


@pytest.mark.parametrize("form", ["map", "array"])
async def test_events_of_our_replica_are_followed_from_their_beginning(form: Any) -> None:
    publisher = Publisher(form=form)
    with contextlib.closing(publisher.events), receiver() as made:
        publisher.store(0, 8)
        stream = await followed(made, publisher.source)
        await eventually(lambda: held(stream, 0, 200) == HeldPrefix(128, 128, certain=True))
        prefix = publisher.store(1000, 4)
        await eventually(lambda: held(stream, 1000, 100) == HeldPrefix(64, 64, certain=True))
        publisher.events.removed(prefix.keys[2])
        await eventually(lambda: held(stream, 1000, 100) == HeldPrefix(32, 32, certain=True))


async def test_a_cleared_cache_is_told() -> None:
    publisher, lost = Publisher(), list[Source]()
    with contextlib.closing(publisher.events), receiver(lost=lost.append) as made:
        publisher.store(0, 8)
        stream = await followed(made, publisher.source)
        publisher.events.cleared()
        await eventually(lambda: lost == [publisher.source])
        assert held(stream, 0, 200) == HeldPrefix(0, 0, certain=True)
        await eventually(lambda: not stream.holdings._forgotten)


async def test_the_blocks_of_a_publisher_that_is_left_are_freed() -> None:
    publisher = Publisher()
    with contextlib.closing(publisher.events), receiver() as made:
        publisher.store(0, 8)
        stream = await followed(made, publisher.source)
        await eventually(lambda: stream.holdings.blocks == 8)
        made.leave(publisher.source)
        await eventually(lambda: not made.streams and not stream.holdings.blocks and not stream.holdings._forgotten)


async def test_too_many_blocks_are_not_kept() -> None:
    large, small = Publisher(), Publisher()
    with contextlib.closing(large.events), contextlib.closing(small.events), receiver(5000 * BLOCK_BYTES) as made:
        other = await followed(made, small.source)
        flooded = await followed(made, large.source)
        small.store(0, 100)
        chance = random.Random(1)
        for _ in range(60):
            large.store(chance.randrange(1 << 31), 200)
        await eventually(lambda: flooded.full and flooded.messages and not large.events._queue)
        assert flooded.holdings.blocks == 0
        await eventually(lambda: held(other, 0, 100) == HeldPrefix(96, 96, certain=True))


async def test_noise_on_the_socket_is_counted() -> None:
    context = zmq.Context()
    noise = context.socket(zmq.PUB)
    port = noise.bind_to_random_port("tcp://127.0.0.1")
    try:
        with receiver() as made:
            source = Source("r", 0, f"tcp://127.0.0.1:{port}", "", "", salted=True)
            made.follow(source)
            await eventually(lambda: source in made.streams)
            stream = made.streams[source]

            def is_refused() -> bool:
                for frames in ([b""], [b"", b"short", b"x"], [b"", bytes(8), b"x", b"more"], [b"", bytes(8), b"\xc1"]):
                    noise.send_multipart(frames)
                return stream.refused >= 4

            await eventually(is_refused)
            assert held(stream, 0, 100) in (None, HeldPrefix(0, 0, certain=False))
    finally:
        context.destroy(linger=0)


async def test_as_many_publishers_are_followed_as_a_large_fleet_has() -> None:
    publisher = Publisher()
    sources = [publisher.source._replace(replica=f"r{number}") for number in range(520)]
    with contextlib.closing(publisher.events), receiver() as made:
        for source in sources:
            made.follow(source)
        await eventually(lambda: len(made.streams) == len(sources))
        await eventually(lambda: all(stream.ordering.state == LIVE for stream in made.streams.values()))
        await eventually(lambda: not any(each.replay for each in made._followed.values()))


async def test_endpoints_that_cannot_be_connected_to_are_no_error() -> None:
    with receiver() as made:
        made.follow(Source("r", 0, "tcp://no such host:1", "", "", salted=True))
        publisher = Publisher()
        with contextlib.closing(publisher.events):
            await followed(made, publisher.source)
            assert [source.replica for source in made.streams] == ["r"]


class SetClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_lying_publisher_moves_only_beliefs_about_its_own_replica_and_only_for_a_while() -> None:
    publisher, clock = Publisher(), SetClock()
    with contextlib.closing(publisher.events), receiver() as made:
        publisher.store(0, 8)
        stream = await followed(made, publisher.source)
        await eventually(lambda: held(stream, 0, 200) == HeldPrefix(128, 128, certain=True))
        residency = EngineResidency(lambda name: "pool" if name in ("r", "other") else "", clock)
        residency.renew(made.streams)
        tokens = KnownTokens(array("I", range(200)).tobytes(), "pool", "m", "", whole=True)
        assert residency.held(tokens, "r") == HeldPrefix(128, 128, certain=True)
        assert residency.held(tokens, "other") is None
        elsewhere = KnownTokens(tokens.data, "another pool", "m", "", whole=True)
        assert residency.held(elsewhere, "r") is None, "its tokens are another tokenizer's"
        doubted = [residency.answered("r", 1, 128, 0) for _ in range(WATCHED)]
        assert doubted == [False] * (WATCHED - 1) + [True]
        assert residency.held(tokens, "r") is None
        clock.now += DOUBT_S + 1
        assert residency.held(tokens, "r") is not None
        assert not any(residency.answered("r", 1, 128, 96) for _ in range(3 * WATCHED))


def test_one_client_of_several_ends_no_belief_however_many_answers_it_gets() -> None:
    """Its bodies may have other tokens at the engine than at its /tokenize, as with `truncate_prompt_tokens`."""
    agreement = Agreement()
    honest = [agreement.learn(client, 128, 128, 0.0) for client in (1, 2)]
    assert not any([*honest, *(agreement.learn(3, 10_000, 0, 0.0) for _ in range(100 * WATCHED))])
    assert any(agreement.learn(client, 128, 0, 0.0) for _ in range(5 * WATCHED) for client in (1, 2)), "all of them do"


def test_far_more_cached_tokens_than_promised_end_the_belief_too() -> None:
    """Its prompts were tokenized by a replica with another template."""
    agreement = Agreement()
    assert any(agreement.learn(client, 0, 1000, 0.0) for _ in range(WATCHED) for client in (1, 2))


async def test_of_ranks_that_cannot_be_chosen_the_mean_counts() -> None:
    left, right = Publisher(), Publisher()
    with contextlib.closing(left.events), contextlib.closing(right.events), receiver() as made:
        second = right.source._replace(rank=1)
        left.store(0, 8)
        streams = [await followed(made, left.source), await followed(made, second)]
        await eventually(lambda: held(streams[0], 0, 200) == HeldPrefix(128, 128, certain=True))
        residency = EngineResidency(lambda _name: "pool", SetClock())
        residency.renew(made.streams)
        tokens = KnownTokens(array("I", range(200)).tobytes(), "pool", "m", "", whole=True)
        assert residency.held(tokens, "r") == HeldPrefix(64, 64, certain=True)
