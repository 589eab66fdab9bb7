"""The places for connections against a simple oracle, and what they promise each client; then on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from yarl import URL

from gateway.admission.connection_limit import SHARE, ConnectionLimit
from gateway.cluster.process import connection_limit
from gateway.config.schema import Config, PoolConfig, ReplicaConfig
from tests.gateway.conftest import Running, eventually, running
from tests.support.fakes import FakeReplica
from tests.support.limits import open_files
from tests.support.machines import STEPS, CountedMachine, steps_of

HEALTH = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"


class Machine(CountedMachine):
    """Random connections beside a list of whose each is."""

    def __init__(self) -> None:
        super().__init__()
        self.places = ConnectionLimit(20)
        self.open: list[str] = []

    @rule(client=st.sampled_from("abcd"))
    def connect(self, client: str) -> None:
        admitted = self.open.count(client) < SHARE * (self.places.limit - len(self.open))
        assert self.places.admit(client) is admitted
        self.open += [client] * admitted

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def disconnect(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.open))
        self.open.remove(client)
        self.places.release(client)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), taker=st.sampled_from("abcd"))
    def hand_over(self, data: st.DataObject, taker: str) -> None:
        giver = data.draw(st.sampled_from(self.open))
        self.open.remove(giver)
        self.open.append(taker)
        self.places.replace(giver, taker)

    @rule(limit=st.integers(1, 40))
    def change_the_limit(self, limit: int) -> None:
        self.places.limit = limit

    @invariant()
    def sums_agree(self) -> None:
        self.places.check()
        assert self.places.open == len(self.open)
        assert {client: self.places.of(client) for client in "abcd" if self.places.of(client)} == Counter(self.open)


def test_the_places_agree_with_their_oracle() -> None:
    assert steps_of(Machine, examples=280, steps=50) >= STEPS


@pytest.mark.parametrize("clients", [1, 2, 10])
def test_what_clients_get_that_take_all_they_can_at_the_same_time(clients: int) -> None:
    places, names = ConnectionLimit(10_000), [f"client {number}" for number in range(clients)]
    while sum(places.admit(name) for name in names):
        pass
    each = places.limit * SHARE / (1 + clients * SHARE)
    assert all(abs(places.of(name) - each) <= SHARE for name in names)
    assert places.admit("another one")


@pytest.mark.parametrize("limit", [1, 2, 5, 10, 100])
def test_one_client_alone_gets_nearly_all_of_any_limit(limit: int) -> None:
    places = ConnectionLimit(limit)
    while places.admit("a"):
        pass
    assert places.of("a") >= limit - limit // 10 - 1
    assert places.of("a") >= 1


# -- on real sockets


async def greedy(run: Running, address: str) -> AsyncIterator[asyncio.StreamWriter]:
    """Open connections from this address, one request on each, until one is refused."""
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(run.url).port, local_addr=(address, 0))
        writer.write(HEALTH)
        status = (await reader.readline())[9:12]
        if status == b"503":
            writer.close()
            assert b"this address's share" in await reader.read()
            return
        assert status == b"200"
        yield writer


async def test_one_address_that_takes_all_connections_it_can_leaves_some_to_others() -> None:
    async with FakeReplica() as replica, running(replica, limits={"connections": 50, "drain_timeout_s": 1}) as run:
        async with asyncio.timeout(60):
            first = [writer async for writer in greedy(run, "127.0.0.2")]
            assert len(first) == 45
            second = [writer async for writer in greedy(run, "127.0.0.3")]
            assert len(second) == 5
            assert not [writer async for writer in greedy(run, "127.0.0.4")], "no place is left"
            first.pop().close()
            third: list[asyncio.StreamWriter] = []
            while not third:  # until the gateway has seen that end
                third = [writer async for writer in greedy(run, "127.0.0.4")]
            assert len(third) == 1
            for writer in (*first, *second, *third):
                writer.close()
        places = run.gateway.served.connections
        await eventually(lambda: places.open < 40)
        shown = await run.metrics()
        assert shown["warmroute_client_connections"] >= 1, "the one that asks"
        assert shown["warmroute_client_connections_limit"] == 50
        assert shown["warmroute_client_connections_rejected_total"] == places.refused >= 4


async def test_there_are_no_more_connections_than_file_descriptors_for_their_requests() -> None:
    limits = {"connections": 120, "drain_timeout_s": 1}
    async with contextlib.AsyncExitStack() as stack:
        replica = await stack.enter_async_context(FakeReplica())
        with open_files(256):
            run = await stack.enter_async_context(running(replica, limits=limits))
        opened = [writer async for writer in greedy(run, "127.0.0.2")]
        assert 85 <= len(opened) <= 87  # nine tenths of 96
        assert (await run.post())[0] == 200
        for writer in opened:
            writer.close()


@pytest.mark.parametrize(("files", "limit"), [(256, 96), (1024, 384), (4096, 1792), (1 << 20, 10_000)])
def test_how_many_connections_an_open_files_limit_allows(files: int, limit: int) -> None:
    if files > resource.getrlimit(resource.RLIMIT_NOFILE)[1]:
        pytest.skip("the hard limit is lower")
    with open_files(files):
        assert connection_limit(Config(pools=(PoolConfig((ReplicaConfig("http://a"),)),))) == limit
