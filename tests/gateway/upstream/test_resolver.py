"""Names are looked up in threads of their own: what one name server does not answer delays nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ReplicaFailure
from gateway.upstream.client import ReplicaCall, UpstreamClient
from gateway.upstream.resolver import MAX_ADDRESSES, MAX_NAMES, REFRESH_S, RETRY_S, Resolver, system_look_up
from tests.gateway.conftest import eventually, running
from tests.gateway.servers import live_of
from tests.support.fakes import FakeReplica

Answer = Iterable[str] | Exception


@dataclass(slots=True)
class NameServer:
    """Answers from `answers` (an unknown name: an error); look-ups of the names in `hung` wait until `go_on`."""

    answers: dict[str, Answer] = field(default_factory=dict)
    hung: dict[str, threading.Event] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    running: Counter[str] = field(default_factory=Counter)
    most: int = 0  # look-ups at a time
    most_of_one: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def look_up(self, host: str) -> Iterable[str]:
        with self.lock:
            self.asked[host] += 1
            self.running[host] += 1
            self.most = max(self.most, self.running.total())
            self.most_of_one = max(self.most_of_one, *self.running.values())
        if event := self.hung.get(host):
            event.wait()
        with self.lock:
            self.running[host] -= 1
        answer = self.answers.get(host, socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def hang(self, *hosts: str) -> None:
        self.hung.update((host, threading.Event()) for host in hosts)

    def go_on(self, *hosts: str) -> None:
        for host in hosts or list(self.hung):
            self.hung.pop(host).set()


@dataclass(slots=True)
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def asking(clock: Clock | None = None, **threads: int) -> AsyncIterator[tuple[NameServer, Resolver]]:
    """At the end no look-up is left."""
    server = NameServer()
    resolver = Resolver(server.look_up, clock or Clock(), **threads)
    try:
        async with asyncio.timeout(20):
            yield server, resolver
    finally:
        server.go_on()
        await eventually(lambda: repr(resolver).endswith("0 look-ups running, 0 waiting>"))


async def test_the_last_good_answer_is_used_while_a_new_look_up_takes_long_and_when_it_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with asking(clock := Clock()) as (server, resolver):
        server.answers["a.test"] = ["10.0.0.1"]
        assert await resolver.addresses("a.test") == ("10.0.0.1",)
        assert await resolver.addresses("a.test") == ("10.0.0.1",)
        assert server.asked["a.test"] == 1
        server.hang("a.test")
        clock.now += REFRESH_S
        for _ in range(10):
            assert await resolver.addresses("a.test") == ("10.0.0.1",)
        await eventually(lambda: server.running["a.test"])
        assert server.asked["a.test"] == 2, "one look-up at a time"
        server.answers["a.test"] = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        server.go_on()
        await eventually(lambda: "0 look-ups" in repr(resolver))
        assert await resolver.addresses("a.test") == ("10.0.0.1",)
        assert await resolver.renewed("a.test") == ("10.0.0.1",)
        (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert "does not resolve" in record.message
        assert vars(record)["last_known_addresses"] == ("10.0.0.1",)


async def test_a_refreshed_answer_takes_the_place_of_the_old_one() -> None:
    async with asking(clock := Clock()) as (server, resolver):
        server.answers["a.test"] = ["10.0.0.1"]
        await resolver.addresses("a.test")
        server.answers["a.test"] = ["10.0.0.2"]
        assert await resolver.renewed("a.test") == ("10.0.0.1",), "it is new enough"
        clock.now += RETRY_S
        assert await resolver.renewed("a.test") == ("10.0.0.2",)
        assert await resolver.addresses("a.test") == ("10.0.0.2",)


async def test_an_unknown_name_is_an_error_and_is_not_looked_up_again_at_once() -> None:
    async with asking(clock := Clock()) as (server, resolver):
        for _ in range(3):
            with pytest.raises(OSError, match=r"^name does not resolve: b.test: Name or service not known$"):
                await resolver.addresses("b.test")
        assert server.asked["b.test"] == 1
        server.answers["b.test"] = ["10.0.0.1"]
        clock.now += RETRY_S
        assert await resolver.addresses("b.test") == ("10.0.0.1",)


async def test_many_waiters_for_one_name_share_one_look_up() -> None:
    async with asking() as (server, resolver):
        server.hang("a.test")
        server.answers["a.test"] = ["10.0.0.1"]
        waiting = [asyncio.create_task(resolver.addresses("a.test")) for _ in range(100)]
        await eventually(lambda: server.running["a.test"])
        waiting[0].cancel()
        server.go_on()
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert answers[1:] == [("10.0.0.1",)] * 99
        assert server.asked["a.test"] == 1


async def test_names_that_do_not_resolve_never_delay_the_others() -> None:
    """However many of them there are, and however long each takes."""
    async with asking(clock := Clock(), threads=2, failing_threads=1) as (server, resolver):
        dead = [f"dead-{number}.test" for number in range(50)]
        server.answers["live.test"] = ["10.0.0.1"]
        for host in dead:
            with pytest.raises(OSError, match="does not resolve"):
                await resolver.addresses(host)
        server.hang(*dead)
        clock.now += REFRESH_S
        waiting = [asyncio.create_task(resolver.addresses(host)) for host in dead]
        await eventually(lambda: server.running.total() == 1)
        assert await resolver.addresses("live.test") == ("10.0.0.1",)
        assert "1 look-ups running, 49 waiting" in repr(resolver)
        server.go_on()
        assert {type(answer) for answer in await asyncio.gather(*waiting, return_exceptions=True)} == {OSError}


async def test_threads_are_bounded() -> None:
    async with asking(threads=3) as (server, resolver):
        hosts = [f"{number}.test" for number in range(40)]
        server.hang(*hosts)
        waiting = [asyncio.create_task(resolver.addresses(host)) for host in hosts]
        await eventually(lambda: server.running.total() == 3)
        server.go_on()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert server.most == 3
        assert server.asked == Counter(hosts)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UnicodeError("label empty or too long"), "label empty or too long"),
        (ValueError("embedded null character"), "embedded null character"),
        (RuntimeError(), "RuntimeError"),
        (OSError("x" * 10_000), "x" * 200),
    ],
)
async def test_whatever_a_look_up_raises_becomes_a_short_message(error: Exception, text: str) -> None:
    async with asking() as (server, resolver):
        server.answers["a.test"] = error
        with pytest.raises(OSError, match="does not resolve") as caught:
            await resolver.addresses("a.test")
        assert str(caught.value) == f"name does not resolve: a.test: {text}"


async def test_our_own_lack_of_files_is_no_fault_of_the_name() -> None:
    async with asking() as (server, resolver):
        server.answers["a.test"] = OSError(errno.EMFILE, "Too many open files")
        with pytest.raises(OSError, match="Too many open files") as caught:
            await resolver.addresses("a.test")
        assert caught.value.errno == errno.EMFILE


async def test_a_name_server_cannot_fill_the_memory() -> None:
    async with asking() as (server, resolver):
        server.answers["a.test"] = [f"10.0.{high}.{low}" for high in range(20) for low in range(200)]
        assert len(await resolver.addresses("a.test")) == MAX_ADDRESSES
        server.answers["b.test"] = ["10.0.0.1"] * 1000
        assert await resolver.addresses("b.test") == ("10.0.0.1",)
        server.answers["c.test"] = []
        with pytest.raises(OSError, match=r"c\.test: it has no address"):
            await resolver.addresses("c.test")


async def test_only_so_many_names_are_kept() -> None:
    async with asking() as (server, resolver):
        server.answers.update((f"{number}.test", ["10.0.0.1"]) for number in range(MAX_NAMES + 10))
        for host in server.answers:
            await resolver.addresses(host)
        assert repr(resolver).startswith(f"<Resolver of {MAX_NAMES} names, ")
        assert not resolver.knows("0.test")
        assert resolver.knows("10.test")


async def test_a_waiter_for_a_name_that_is_forgotten_gets_an_error() -> None:
    async with asking(threads=1) as (server, resolver):
        server.hang("a.test", "b.test")
        waiting = [asyncio.create_task(resolver.addresses(host)) for host in ("a.test", "b.test")]
        await eventually(lambda: server.running["a.test"] and repr(resolver).endswith("1 waiting>"))
        resolver.forget("b.test")
        with pytest.raises(OSError, match="no longer in use"):
            await waiting[1]
        resolver.forget("a.test")
        server.answers["a.test"] = ["10.0.0.1"]
        server.go_on()
        assert await waiting[0] == ("10.0.0.1",)
        assert repr(resolver).startswith("<Resolver of 0 names")
        assert not server.asked["b.test"]


async def test_a_name_is_forgotten_with_the_last_replica_that_has_it() -> None:
    async with FakeReplica() as replica, asking() as (server, resolver):
        server.answers["a.test"] = ["127.0.0.1"]
        relay = UpstreamClient(live_of(), resolver)
        urls = [f"http://a.test:{replica.port}", f"http://a.test:{replica.port}/other"]
        for url in urls:
            (await relay.open(url, ReplicaCall("GET", "/v1/models", b"", b""))).close()
        assert server.asked["a.test"] == 1
        relay.forget(urls[0])
        assert resolver.knows("a.test")
        relay.forget(urls[1])
        assert repr(resolver).startswith("<Resolver of 0 names")


async def test_a_name_without_an_answer_is_an_unreachable_replica() -> None:
    async with asking() as (server, resolver):
        server.hang("a.test")
        relay = UpstreamClient(live_of(), resolver)
        with pytest.raises(ReplicaFailure, match=r"does not resolve: a\.test: no answer within 0\.01 s") as caught:
            await relay.open("http://a.test", ReplicaCall("GET", "/", b"", b""), 0.01)
        assert (caught.value.reason, caught.value.reached) == ("unreachable", False)


def test_the_systems_look_up_knows_the_hosts_file_and_literals() -> None:
    assert set(system_look_up("localhost")) <= {"127.0.0.1", "::1"}
    assert system_look_up("127.0.0.1") == ["127.0.0.1"]
    assert system_look_up("::1") == ["::1"]
    assert system_look_up("fe80::1%1") == ["fe80::1%1"]
    with pytest.raises((OSError, UnicodeError)):
        system_look_up("x" * 300)


# -- any order of uses, answers, failures and time


class Walk:
    """Random steps; the oracle is what each name answered last."""

    def __init__(self, server: NameServer, resolver: Resolver, clock: Clock) -> None:
        self.server, self.resolver, self.clock = server, resolver, clock
        self.good: dict[str, tuple[str, ...]] = {}
        self.answered = 0

    async def step(self, kind: str, host: str) -> None:
        """All look-ups that a step begins have ended after it."""
        match kind:
            case "good":
                self.answered += 1
                self.server.answers[host] = [f"10.0.0.{self.answered}"]
            case "bad":
                self.server.answers.pop(host, None)
            case "forget":
                self.resolver.forget(host)
                self.good.pop(host, None)
            case "later":
                self.clock.now += REFRESH_S
            case _:
                await self._use(kind, host)

    async def _use(self, kind: str, host: str) -> None:
        before, asked = self.good.get(host), self.server.asked[host]
        ask = self.resolver.addresses if kind == "use" else self.resolver.renewed
        try:
            result: tuple[str, ...] | None = tuple(await ask(host))
        except OSError:
            result = None
        await eventually(lambda: "0 look-ups running, 0 waiting" in repr(self.resolver))
        if self.server.asked[host] > asked and (now := self.server.answers.get(host)):
            assert not isinstance(now, Exception)
            self.good[host] = tuple(now)
        assert result == (before if kind == "use" and before else self.good.get(host))


steps = st.tuples(st.sampled_from(["use", "use", "renew", "good", "bad", "forget", "later"]), st.sampled_from(["a", "b", "c"]))


@given(st.lists(steps, max_size=25))
def test_a_name_always_gives_its_last_good_answer(walk: list[tuple[str, str]]) -> None:
    async def take() -> None:
        async with asking(clock := Clock(), threads=1, failing_threads=1) as (server, resolver):
            steps = Walk(server, resolver, clock)
            for kind, host in walk:
                await steps.step(kind, host)
            assert server.most_of_one <= 1

    asyncio.run(take())


# -- the whole gateway


async def test_requests_pass_beside_replicas_whose_names_hang() -> None:
    """More of them than libuv has threads. The gateway starts without waiting for them."""
    async with FakeReplica() as replica, asking() as (server, resolver):
        dead = [f"http://hang-{number}.test:8000" for number in range(8)]
        server.answers["live.test"] = ["127.0.0.1"]
        server.hang(*(f"hang-{number}.test" for number in range(8)))
        begun = asyncio.get_running_loop().time()
        health = {"timeout_s": 600, "interval_s": 60}
        async with running(f"http://live.test:{replica.port}", *dead, resolver=resolver, health=health) as run:
            assert asyncio.get_running_loop().time() - begun < 15
            for _ in range(10):
                assert (await run.post())[0] == 200
                run.gateway.upstream.close()  # so that the next one needs a new connection
            assert (await run.get("/ready"))[0] == 200
        server.go_on()
