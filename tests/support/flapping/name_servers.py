"""Pods in DNS, as a headless Service has them: those that should get requests, and no others.

    authority (in this process, knows the pods) ◄── unbound (a real resolver, with a cache) ◄── gateway

The pool "addresses" is found by A records, "targets" by SRV records.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, cast

from gateway.cluster.member_source import MemberSource
from gateway.config.schema import Config
from gateway.features.discovery.dns import EMPTY_S, DnsSource
from tests.support.dns import NameServer, name_server
from tests.support.flapping.pods import Place, Pod, at_addresses, at_ports

ADDRESSES, TARGETS = POOLS = "addresses", "targets"
NAMELESS: Final = "no such name"
HOSTS, SERVICE = "pods.test", "_http._tcp.pods.test"
REFRESH_S: Final = 1.0
TTL_S: Final = 1
_A, _SOA, _SRV = 1, 6, 33
_NXDOMAIN = 3


def _encoded(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def _record(owner: bytes, kind: int, data: bytes) -> bytes:
    return owner + struct.pack("!HHIH", kind, 1, TTL_S, len(data)) + data


class Authority(asyncio.DatagramProtocol):
    """Answers for test. records: data by name and type. gone: there is no such name, whatever is asked for."""

    def __init__(self) -> None:
        self.records: Mapping[tuple[str, int], Sequence[bytes]] = {}
        self.gone = False
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, address: Any) -> None:
        assert self._transport
        self._transport.sendto(self._answer(data), address)

    def _answer(self, query: bytes) -> bytes:
        labels, at = list[str](), 12
        while length := query[at]:
            labels.append(query[at + 1 : at + 1 + length].decode().lower())
            at += 1 + length
        question, kind = query[12 : at + 5], struct.unpack("!H", query[at + 1 : at + 3])[0]
        name = ".".join(labels)
        found = [] if self.gone else self.records.get((name, kind), [])
        exists = not self.gone and any(each for (known, _), each in self.records.items() if known == name)
        head = struct.pack("!HHHHH", 0x8400 | (0 if exists else _NXDOMAIN), 1, len(found), not found, 0)
        negative = _record(_encoded("test"), _SOA, _encoded("ns.test") * 2 + struct.pack("!5I", 1, 1, 1, 1, TTL_S))
        rest = b"".join(_record(b"\xc0\x0c", kind, each) for each in found) or negative
        return query[:2] + head + question + rest


class Dns:
    """See the top of this file. clock: of the gateway's sources."""

    def __init__(self, authority: Authority, resolver: NameServer, clock: Callable[[], float], chance: Random) -> None:
        self.pools: tuple[str, ...] = POOLS
        self.most_s: Mapping[str, float] = {NAMELESS: EMPTY_S / 2}  # then it is believed
        self._port = 0
        self._authority = authority
        self._resolver = resolver
        self._clock = clock
        self._chance = chance
        self._pods = dict[str, Pod]()

    @property
    def discovery(self) -> Sequence[dict[str, Any]]:
        about = {"servers": [f"127.0.0.1:{self._resolver.port}"]}
        return (
            {"dns": {"name": HOSTS, "port": self._port, **about}, "pool": ADDRESSES},
            {"dns": {"name": SERVICE, **about}, "pool": TARGETS},
        )

    def places(self, number: int, clock: Callable[[], float]) -> Mapping[str, Sequence[Place]]:
        found = {ADDRESSES: at_addresses(number, ADDRESSES, clock, self._chance), TARGETS: at_ports(number, TARGETS, clock)}
        self._port = found[ADDRESSES][0].port
        return found

    def expected(self, pods: Sequence[Pod]) -> Mapping[str, str]:
        serving = [pod for pod in pods if pod.serving]
        return {
            f"{pod.place.host if pod.pool == ADDRESSES else 'localhost'}:{pod.place.port}": "up" if pod.place.runs else "down"
            for pod in serving
        }

    def sources(self, config: Config) -> Sequence[MemberSource]:
        return [DnsSource(each, clock=self._clock) for each in config.discovery]

    @property
    def outages(self) -> Mapping[str, Callable[[], contextlib.AbstractAsyncContextManager[None]]]:
        return {"killed": self._killed, "stopped": self._stopped, NAMELESS: self._nameless}

    @property
    def disturbances(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        return {}

    @contextlib.asynccontextmanager
    async def _killed(self) -> AsyncIterator[None]:
        await self._resolver.stop()
        try:
            yield
        finally:
            await self._resolver.again()

    @contextlib.asynccontextmanager
    async def _stopped(self) -> AsyncIterator[None]:
        self._resolver.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self._resolver.send(signal.SIGCONT)

    @contextlib.asynccontextmanager
    async def _nameless(self) -> AsyncIterator[None]:
        self._authority.gone = True
        try:
            yield
        finally:
            self._authority.gone = False

    async def show(self, pod: Pod) -> None:
        self._pods[pod.name] = pod
        self._publish()

    async def remove(self, pod: Pod) -> None:
        if self._pods.get(pod.name) is pod:
            del self._pods[pod.name]
        self._publish()

    def _publish(self) -> None:
        serving = [pod for pod in self._pods.values() if pod.serving]
        hosts = sorted({socket.inet_aton(each.place.host) for each in serving if each.pool == ADDRESSES})
        ports = sorted({each.place.port for each in serving if each.pool == TARGETS})
        targets = [struct.pack("!HHH", 0, 1, port) + _encoded("localhost") for port in ports]
        self._authority.records = {(HOSTS, _A): hosts, (SERVICE, _SRV): targets}


@contextlib.asynccontextmanager
async def dns_of_pods(folder: Path, clock: Callable[[], float], chance: Random) -> AsyncIterator[Dns]:
    loop = asyncio.get_running_loop()
    transport, authority = await loop.create_datagram_endpoint(Authority, ("127.0.0.1", 0))
    try:
        async with name_server(folder) as resolver:
            await resolver.forward("test.", transport.get_extra_info("sockname")[1])
            yield Dns(authority, resolver, clock, chance)
    finally:
        transport.close()
