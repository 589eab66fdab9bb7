"""Discovery by DNS: the replicas are the addresses of a name, or the targets of its SRV records, looked up periodically.

A headless Service of Kubernetes has an address for each ready pod, and needs no rights. Consul and others answer alike. With a
port, A records are used; AAAA records only if there are none, because a pod with both is one replica. Without a port, SRV
records with the best priority are used. If the configuration names name servers, these also resolve the targets
(`dns_targets.py`). A replica is named by its target; its address may change.

A failed look-up (no answer, SERVFAIL) changes nothing, and the next one comes sooner. An empty answer is applied after EMPTY_S
of empty answers, because a restarted name server may send one, and probes detect dead replicas in the meantime. It is reported
as a note, not as a problem: a headless Service without a ready pod has the same answer as a name that does not exist.

c-ares does the look-ups in its own thread, because getaddrinfo knows no SRV records. For addresses it uses /etc/hosts and the
search domains as getaddrinfo does. Each look-up has a new resolver: a permanent one would answer from its cache, and not detect
a lost name server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec.structs import replace

from gateway.cluster.member_source import SourceError
from gateway.config.addresses import AddressError, base_url, parse_base_url
from gateway.config.schema import MAX_REPLICAS
from gateway.features.discovery.connecting import connected_as
from gateway.features.discovery.dns_targets import TargetAddresses
from gateway.features.discovery.section import DiscoveryConfig, DnsConfig
from gateway.fleet.membership import Member, fitting

if TYPE_CHECKING:
    import aiodns

log = logging.getLogger("warmroute.discovery")

EMPTY_S: Final = 30.0
LOOK_UP_S: Final = 4.0
TARGETS_S: Final = 2.0  # time limit for the addresses of targets; missing ones follow with the next look-up
REFRESH_S: Final = 5.0  # a look-up is one packet; name servers cache answers for at least this time
RETRY_S: Final = 2.0  # after a failed look-up, so that a recovery is known within 5 s
_TRY_S: Final = 1.0  # first time limit of one name server


class DnsTarget(NamedTuple):
    """host: a name or an IP address. addresses: the known addresses of the host."""

    host: str
    port: int
    addresses: tuple[str, ...] = ()


LookUp = Callable[[], Awaitable[Iterable[DnsTarget]]]
"""Returns all targets of the name, possibly none. Raises LookUpFailed."""


class LookUpFailed(SourceError):
    """There was no usable answer."""


class DnsSource:
    """A MemberSource. config: with `dns`. look_up: default: asks name servers. clock: monotonic seconds. sleep: a parameter for
    tests.
    """

    def __init__(
        self,
        config: DiscoveryConfig,
        look_up: LookUp | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        refresh_s: float = REFRESH_S,
    ) -> None:
        assert config.dns
        self.name = config.source
        self.pool = config.pool
        self.problem = self.note = ""
        self.settings = replace(config, pool="")
        self._dns = config.dns
        self._look_up = look_up or look_up_of(config.dns)
        self._clock = clock
        self._sleep = sleep
        self._refresh_s = refresh_s

    async def watch(self, *, expects: bool) -> AsyncIterator[Iterable[Member]]:
        """See MemberSource."""
        known: list[DnsTarget] | None = None
        empty_since: float | None = None  # time of the first of the current series of empty answers
        while True:
            found = await self._targets()
            now = self._clock()
            empty_since = None if found or found is None else now if empty_since is None else empty_since
            suspicious = bool(known) or (known is None and expects)
            accepted = bool(found) or not suspicious or (empty_since is not None and now - empty_since >= EMPTY_S)
            if found is not None and accepted and found != known:
                known = found
                self._note(found)
                yield self._members(found)
            await self._sleep(self._refresh_s if found is not None else min(self._refresh_s, RETRY_S))

    async def _targets(self) -> list[DnsTarget] | None:
        """The targets, sorted. None: there was no usable answer."""
        try:
            found = sorted(set(await self._look_up()))
        except LookUpFailed as failure:
            if not self.problem:
                log.warning("name look-up failed", extra={"source": self.name, "error": str(failure)})
            self.problem = str(failure)
            return None
        if self.problem:
            log.info("name look-up works again", extra={"source": self.name, "targets": len(found)})
        self.problem = ""
        return found

    def _note(self, found: Sequence[DnsTarget]) -> None:
        records = "SRV records" if self._dns.port is None else "address"
        self.note = "" if found else f"the name has no {records}: it does not exist, or none of its replicas is ready"
        if not found:
            log.warning("no replica behind the name", extra={"source": self.name, "error": self.note})

    def _members(self, targets: Sequence[DnsTarget]) -> list[Member]:
        members = list[Member]()
        for target in targets[:MAX_REPLICAS]:
            try:
                url, name = parse_base_url(base_url(target.host, target.port, tls=bool(self.settings.tls)))
            except AddressError as error:
                log.warning("target is not a replica", extra={"source": self.name, "error": str(error)})
            else:
                member = Member(fitting(name), url, "", addresses=target.addresses)
                members.append(connected_as(member, self.settings))
        if len(targets) > MAX_REPLICAS:
            log.warning("too many targets", extra={"source": self.name, "targets": len(targets), "most": MAX_REPLICAS})
        return members


def look_up_of(dns: DnsConfig) -> LookUp:
    """The look-up of this configuration, by c-ares."""
    addresses = TargetAddresses() if dns.servers and dns.port is None else None

    async def look_up() -> Iterable[DnsTarget]:
        import aiodns  # imported here because it loads a shared library

        try:
            async with contextlib.aclosing(_Resolver(dns)) as resolver:
                async with asyncio.timeout(LOOK_UP_S):
                    targets = await _query(resolver.channel, dns)
                if addresses is None:
                    return targets
                await addresses.look_up(resolver.channel, {target.host for target in targets}, TARGETS_S)
                return [target._replace(addresses=addresses.of(target.host)) for target in targets]
        except aiodns.error.DNSError as error:
            if error.args[0] in (aiodns.error.ARES_ENOTFOUND, aiodns.error.ARES_ENODATA):
                return ()
            raise LookUpFailed(str(error.args[-1])) from error
        except TimeoutError as late:
            raise LookUpFailed(f"no answer within {LOOK_UP_S:g} s") from late

    return look_up


class _Resolver:
    """A new resolver. Raises LookUpFailed if c-ares cannot be set up. channel: of aiodns."""

    def __init__(self, dns: DnsConfig) -> None:
        import aiodns

        options: dict[str, Any] = {"servers": list(dns.servers)} if dns.servers else {}
        try:
            self.channel = aiodns.DNSResolver(timeout=_TRY_S, **options)
        except Exception as error:  # any error of c-ares on this machine
            raise LookUpFailed(f"no resolver: {error}") from error

    async def aclose(self) -> None:
        await self.channel.close()


async def _query(resolver: aiodns.DNSResolver, dns: DnsConfig) -> Sequence[DnsTarget]:
    """The targets. Raises DNSError."""
    import pycares

    if dns.port is not None:
        return [DnsTarget(address, dns.port) for address in await _addresses_of(resolver, dns.name)]
    answer = (await resolver.query_dns(dns.name, "SRV")).answer
    records = [record.data for record in answer if isinstance(record.data, pycares.SRVRecordData)]
    named = [record for record in records if record.port and record.target.strip(".")]
    best = min((record.priority for record in named), default=0)
    return sorted({DnsTarget(record.target.rstrip(".").lower(), record.port) for record in named if record.priority == best})


async def _addresses_of(resolver: aiodns.DNSResolver, name: str) -> Sequence[str]:
    """The IPv4 addresses of a name, or its IPv6 addresses if there are none. Raises DNSError."""
    import aiodns

    try:
        found = await resolver.getaddrinfo(name, family=socket.AF_INET)
    except aiodns.error.DNSError as error:
        if error.args[0] not in (aiodns.error.ARES_ENOTFOUND, aiodns.error.ARES_ENODATA):
            raise
        found = await resolver.getaddrinfo(name, family=socket.AF_INET6)
    return [node.addr[0].decode() for node in found.nodes]
