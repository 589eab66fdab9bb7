"""Replicas found by DNS: with a real name server, and with one that says what a test wants."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import aiodns
import pytest
from msgspec.structs import replace

from gateway.app import compose
from gateway.config.schema import MAX_REPLICAS
from gateway.features.discovery.dns import EMPTY_S, REFRESH_S, RETRY_S, DnsSource, DnsTarget, LookUpFailed, look_up_of
from gateway.features.discovery.dns_targets import MAX_ADDRESSES, MAX_TTL_S, TargetAddresses
from gateway.features.discovery.section import DiscoveryConfig, DnsConfig
from gateway.fleet.membership import Member
from gateway.server.endpoints import clients_runner
from tests.gateway.conftest import LOGGED, config_over, eventually, serving_runner
from tests.gateway.upstream.certificates import Authority
from tests.support.dns import NameServer, name_server
from tests.support.fakes import FakeReplica

CONFIG = DiscoveryConfig(dns=DnsConfig("vllm.test", 8000))
Answer = Iterable[DnsTarget] | LookUpFailed


class Script:
    """Answers of a name server, one after the other, 5 s apart."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.now = 0.0

    async def look_up(self) -> Iterable[DnsTarget]:
        answer = self._answers.pop(0)
        if isinstance(answer, LookUpFailed):
            raise answer
        return answer


async def after(
    *answers: Answer,
    config: DiscoveryConfig = CONFIG,
    expects: bool = False,
    pauses: list[float] | None = None,
    refresh_s: float = REFRESH_S,
) -> tuple[list[list[Member]], DnsSource]:
    """What the source yields. pauses: gets those between look-ups."""
    script = Script(*answers)
    found = list[list[Member]]()
    done = asyncio.Event()

    async def look_up() -> Iterable[DnsTarget]:
        if not script._answers:
            done.set()
            await asyncio.Event().wait()
        return await script.look_up()

    async def sleep(seconds: float) -> None:
        script.now += seconds
        if pauses is not None:
            pauses.append(seconds)

    source = DnsSource(config, look_up, lambda: script.now, sleep, refresh_s)

    async def watch() -> None:
        async for members in source.watch(expects=expects):
            found.append(list(members))

    task = asyncio.create_task(watch())
    await done.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return found, source


def names(found: list[list[Member]]) -> list[list[str]]:
    return [[member.name for member in members] for members in found]


async def test_each_target_is_a_member_whatever_their_order() -> None:
    one, two = DnsTarget("10.0.0.1", 8000), DnsTarget("fd00::2", 8000)
    found, _ = await after([two, one], [one, two, two], [two])
    assert found == [
        [Member("10.0.0.1:8000", "http://10.0.0.1:8000", ""), Member("[fd00::2]:8000", "http://[fd00::2]:8000", "")],
        [Member("[fd00::2]:8000", "http://[fd00::2]:8000", "")],
    ]


async def test_over_tls() -> None:
    found, _ = await after([DnsTarget("a.test", 443)], config=replace(CONFIG, tls=True))
    assert found == [[Member("a.test:443", "https://a.test:443", "")]]


async def test_an_answer_that_fails_changes_nothing_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    one = DnsTarget("10.0.0.1", 8000)
    found, source = await after([one], LookUpFailed("SERVFAIL"), LookUpFailed("SERVFAIL"))
    assert names(found) == [["10.0.0.1:8000"]]
    assert source.problem == "SERVFAIL"
    assert [record.message for record in caplog.records] == ["name look-up failed"]
    found, source = await after(LookUpFailed("SERVFAIL"), [one])
    assert names(found) == [["10.0.0.1:8000"]]
    assert source.problem == ""


async def test_after_a_failure_it_looks_again_soon() -> None:
    pauses, failure = list[float](), LookUpFailed("late")
    await after([DnsTarget("10.0.0.1", 8000)], failure, failure, [], pauses=pauses)
    assert pauses == [5, RETRY_S, RETRY_S, 5]
    pauses.clear()
    await after(failure, pauses=pauses, refresh_s=1.0)
    assert pauses == [1]


async def test_that_there_is_nothing_is_believed_after_a_while() -> None:
    one = DnsTarget("10.0.0.1", 8000)
    often = int(EMPTY_S / 5) + 1
    assert names((await after([]))[0]) == [[]], "at first, at once"
    assert names((await after([one], *[[]] * (often - 1), [one]))[0]) == [["10.0.0.1:8000"]]
    assert names((await after([one], *[[]] * often))[0]) == [["10.0.0.1:8000"], []]
    failures = [LookUpFailed("late")] * often
    assert names((await after([one], *failures, []))[0]) == [["10.0.0.1:8000"]], "a server that has just come back"
    assert names((await after([one], *[[]] * (often - 1), failures[0], []))[0]) == [["10.0.0.1:8000"]]


async def test_that_there_is_nothing_is_noted_and_no_problem(caplog: pytest.LogCaptureFixture) -> None:
    """A headless Service without a ready pod has the answer of a name that does not exist."""
    one, often = DnsTarget("10.0.0.1", 8000), int(EMPTY_S / 5) + 1
    _, source = await after([], [])
    assert (source.problem, source.note) == ("", "the name has no address: it does not exist, or none of its replicas is ready")
    assert [record.message for record in caplog.records] == ["no replica behind the name"], "once"
    _, source = await after([one], [])
    assert source.note == "", "it is not believed yet"
    _, source = await after([one], *[[]] * often)
    assert source.note
    _, source = await after([], [one])
    assert source.note == ""
    _, source = await after([], config=DiscoveryConfig(dns=DnsConfig("_http._tcp.vllm.test")))
    assert source.note.startswith("the name has no SRV records: ")


async def test_a_source_that_begins_while_there_are_replicas_does_not_believe_an_empty_answer_at_once() -> None:
    often = int(EMPTY_S / 5) + 1
    assert names((await after(*[[]] * (often - 1), expects=True))[0]) == []
    assert names((await after(*[[]] * often, expects=True))[0]) == [[]]
    assert names((await after([DnsTarget("10.0.0.1", 8000)], expects=True))[0]) == [["10.0.0.1:8000"]]


async def test_what_a_name_server_says_has_bounds(caplog: pytest.LogCaptureFixture) -> None:
    flood = [DnsTarget(f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}", 8000) for number in range(100_000)]
    found, _ = await after(flood)
    assert len(found[0]) == MAX_REPLICAS
    assert "too many targets" in caplog.text


async def test_targets_that_are_no_hosts_are_left_out_and_long_names_cut() -> None:
    long = ".".join(["x" * 60] * 4)
    wrong = [DnsTarget("a b", 1), DnsTarget("", 2), DnsTarget("a\nb", 3)]
    found, _ = await after([*wrong, DnsTarget("ok", 4), DnsTarget(long, 8000), DnsTarget(long[:-1] + "y", 8000)])
    (members,) = found
    assert members[0].name == "ok:4"
    assert [len(member.name) for member in members[1:]] == [100, 100]
    assert len({member.name for member in members}) == 3
    assert members[1].url == f"http://{long}:8000"


# -- a real name server


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NameServer]:
    async with name_server(tmp_path) as started:
        yield started


def config_for(server: NameServer, name: str, port: int | None = None) -> DnsConfig:
    return DnsConfig(name, port, (f"127.0.0.1:{server.port}",))


async def targets_of(server: NameServer, name: str, port: int | None = None) -> list[DnsTarget]:
    return sorted(await look_up_of(config_for(server, name, port))())


@pytest.mark.tools
async def test_records_of_a_real_name_server(server: NameServer) -> None:
    await server.serve(
        "a.test. 1 IN A 10.0.0.1",
        "a.test. 1 IN A 10.0.0.2",
        "both.test. 1 IN A 10.0.0.3",
        "both.test. 1 IN AAAA fd00::3",
        "six.test. 1 IN AAAA fd00::4",
        "alias.test. 1 IN CNAME a.test.",
        "_http._tcp.s.test. 1 IN SRV 0 1 8001 one.test.",
        "_http._tcp.s.test. 1 IN SRV 0 1 8002 two.test.",
        "_http._tcp.s.test. 1 IN SRV 5 1 8003 spare.test.",
        "_http._tcp.s.test. 1 IN SRV 0 1 8004 .",
        "_http._tcp.s.test. 1 IN SRV 0 1 8001 ONE.test.",
        *[f"many.test. 1 IN A 10.1.{number // 250}.{number % 250}" for number in range(1500)],
    )
    expected: dict[tuple[str, int | None], list[DnsTarget]] = {
        ("a.test", 9): [DnsTarget("10.0.0.1", 9), DnsTarget("10.0.0.2", 9)],
        ("both.test", 9): [DnsTarget("10.0.0.3", 9)],
        ("six.test", 9): [DnsTarget("fd00::4", 9)],
        ("none.test", 9): [],
        ("_http._tcp.s.test", None): [DnsTarget("one.test", 8001), DnsTarget("two.test", 8002)],
        ("a.test", None): [],
    }
    for (name, port), targets in expected.items():
        assert sorted(set(await targets_of(server, name, port))) == targets, name
    assert len(await targets_of(server, "many.test", 9)) == 1500


@pytest.mark.tools
async def test_targets_come_with_their_addresses(server: NameServer) -> None:
    await server.serve(
        *[f"_http._tcp.s.test. 1 IN SRV 0 1 80 {name}.test." for name in ("a", "both", "six", "many", "none")],
        "a.test. 1 IN A 10.0.0.1",
        "both.test. 1 IN A 10.0.0.3",
        "both.test. 1 IN AAAA fd00::3",
        "six.test. 1 IN AAAA fd00::4",
        *[f"many.test. 1 IN A 10.1.0.{number}" for number in range(100)],
    )
    found = {host: addresses for host, _, addresses in await targets_of(server, "_http._tcp.s.test")}
    assert len(found.pop("many.test")) == MAX_ADDRESSES
    assert found == {
        "a.test": ("10.0.0.1",),
        "both.test": ("10.0.0.3",),
        "none.test": (),
        "six.test": ("fd00::4",),
    }


@pytest.mark.tools
async def test_addresses_of_targets_are_kept_for_their_ttl_and_while_there_is_no_answer(server: NameServer) -> None:
    now = [0.0]
    known = TargetAddresses(lambda: now[0])

    async def of(*hosts: str) -> list[tuple[str, ...]]:
        resolver = aiodns.DNSResolver(servers=[f"127.0.0.1:{server.port}"], timeout=0.2, tries=1)
        try:
            await known.look_up(resolver, hosts, 2)
        finally:
            await resolver.close()
        return [known.of(host) for host in hosts]

    await server.serve("short.test. 5 IN A 10.0.0.1", "long.test. 3600 IN A 10.0.0.2")
    assert await of("short.test", "long.test", "10.0.0.9") == [("10.0.0.1",), ("10.0.0.2",), ()]
    await server.serve("short.test. 5 IN A 10.0.0.3", "long.test. 3600 IN A 10.0.0.4")
    now[0] = 4.9
    assert await of("short.test", "long.test") == [("10.0.0.1",), ("10.0.0.2",)]
    now[0] = 5.0
    assert await of("short.test", "long.test") == [("10.0.0.3",), ("10.0.0.2",)]
    await server.serve()
    now[0] = MAX_TTL_S
    assert await of("short.test", "long.test") == [("10.0.0.3",), ("10.0.0.2",)], "the last good answer"
    await server.stop()
    assert await of("short.test", "long.test") == [("10.0.0.3",), ("10.0.0.2",)]
    await server.serve("long.test. 3600 IN A 10.0.0.4")
    assert await of("long.test", "short.test") == [("10.0.0.4",), ("10.0.0.3",)]
    assert await of("long.test") == [("10.0.0.4",)]
    assert known.of("short.test") == (), "it is no target any more"


@pytest.mark.tools
@pytest.mark.parametrize("secure", [False, True])
async def test_replicas_that_only_the_named_server_knows_are_reached_by_their_names(
    secure: bool, server: NameServer, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "ca")
    certificate = authority.certificate("replica", san="DNS:r1.test")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    async with FakeReplica(tls=context if secure else None) as replica:

        async def serve(address: str) -> None:
            await server.serve(f"_http._tcp.s.test. 0 IN SRV 0 1 {replica.port} r1.test.", f"r1.test. 0 IN A {address}")

        await serve("127.0.0.2")  # where nothing listens
        dns = {"name": "_http._tcp.s.test", "servers": [f"127.0.0.1:{server.port}"]}
        source = {"dns": dns, "tls": {"ca_file": str(authority.ca)} if secure else False}
        gateway = compose(config_over(pools=[{"name": "default"}], discovery=[source]), LOGGED)
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            (state,) = gateway.fleet.replicas
            assert not state.up
            await serve("127.0.0.1")
            await eventually(lambda: state.up)
            assert (await run.post())[0] == 200
            assert list(gateway.fleet.replicas) == [state], "it has moved, and is the same one"
            assert state.name == replica.requests[0].headers["host"] == f"r1.test:{replica.port}"


@pytest.mark.tools
async def test_each_look_up_asks_the_name_server(server: NameServer) -> None:
    """Answers live for an hour there, also that there is nothing."""
    hour = "test. 3600 IN SOA ns.test. admin.test. 1 3600 3600 3600 3600"
    look_up = look_up_of(config_for(server, "a.test", 9))
    await server.serve(hour, "b.test. 3600 IN A 10.0.0.2")
    assert list(await look_up()) == []
    await server.serve(hour, "a.test. 3600 IN A 10.0.0.1")
    assert list(await look_up()) == [DnsTarget("10.0.0.1", 9)]
    await server.serve(hour, "a.test. 3600 IN A 10.0.0.3")
    assert list(await look_up()) == [DnsTarget("10.0.0.3", 9)]
    await server.stop()
    with pytest.raises(LookUpFailed):
        await look_up()


@pytest.mark.tools
async def test_a_gateway_follows_a_real_name_server_and_outlives_it(
    server: NameServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeReplica() as one, FakeReplica() as two:
        await server.serve(f"_http._tcp.s.test. 0 IN SRV 0 1 {one.port} localhost.")
        dns = {"name": "_http._tcp.s.test", "servers": [f"127.0.0.1:{server.port}"]}
        gateway = compose(config_over(pools=[{"name": "default"}], discovery=[{"dns": dns}]), LOGGED)
        async with serving_runner(gateway, clients_runner(gateway.served)) as run:
            assert (await run.post())[0] == 200
            assert len(one.requests) == 1
            await server.serve(f"_http._tcp.s.test. 0 IN SRV 0 1 {two.port} localhost.")
            await eventually(
                lambda: [state.url for state in gateway.fleet.replicas if state.up] == [f"http://localhost:{two.port}"]
            )
            assert (await run.post())[0] == 200
            assert len(two.requests) == 1
            await server.stop()
            (watch,) = gateway.local.membership.watches.all
            await eventually(lambda: watch.problem)
            assert (await run.post())[0] == 200
            await server.serve(f"_http._tcp.s.test. 0 IN SRV 0 1 {one.port} localhost.")
            await eventually(lambda: not watch.problem)
            await eventually(
                lambda: [state.url for state in gateway.fleet.replicas if state.up] == [f"http://localhost:{one.port}"]
            )
        assert "name look-up failed" in caplog.text
