"""Addresses of the targets of SRV records, asked of the name servers that named the targets.

Those servers may be the only ones that know the targets (Consul's, behind a port of its own), so the system is not asked. An
answer is kept for its TTL, MAX_TTL_S at most. Where there is none, the last good one stays; a target that never had one is left
to the system.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateway.config.addresses import address_of
from gateway.config.schema import MAX_REPLICAS

if TYPE_CHECKING:
    import aiodns

MAX_TTL_S: Final = 60.0
MAX_ADDRESSES: Final = 8  # of a target
AT_ONCE: Final = 32  # questions


@dataclass(slots=True)
class _Answer:
    """until: when it is asked for again."""

    addresses: tuple[str, ...] = ()
    until: float = -math.inf


class TargetAddresses:
    """See the top of this file. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answers: dict[str, _Answer] = {}

    def of(self, host: str) -> tuple[str, ...]:
        """Those that are known; (): none, or it is an address itself."""
        answer = self._answers.get(host)
        return answer.addresses if answer else ()

    async def look_up(self, resolver: aiodns.DNSResolver, hosts: Collection[str], within_s: float) -> None:
        """Ask for those whose TTL is over. Others than these hosts are forgotten. Never raises for what servers do."""
        names = sorted(host for host in hosts if address_of(host) is None)
        self._answers = {host: self._answers.get(host) or _Answer() for host in names[:MAX_REPLICAS]}
        now, free = self._clock(), asyncio.Semaphore(AT_ONCE)

        async def renew(host: str, answer: _Answer) -> None:
            async with free:
                addresses, ttl_s = await _addresses_of(resolver, host)
            if addresses:
                answer.addresses, answer.until = addresses, now + min(ttl_s, MAX_TTL_S)

        asking = [asyncio.ensure_future(renew(host, answer)) for host, answer in self._answers.items() if answer.until <= now]
        try:
            if asking:
                await asyncio.wait(asking, timeout=within_s)
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    def __repr__(self) -> str:
        known = sum(bool(answer.addresses) for answer in self._answers.values())
        return f"<TargetAddresses of {known} of {len(self._answers)} targets>"


async def _addresses_of(resolver: aiodns.DNSResolver, host: str) -> tuple[tuple[str, ...], float]:
    """(addresses, their TTL): of IPv6 only if it has no others; none if there is no answer."""
    import aiodns
    import pycares

    for kind, data in (("A", pycares.ARecordData), ("AAAA", pycares.AAAARecordData)):
        try:
            answer = (await resolver.query_dns(host, kind)).answer
        except aiodns.error.DNSError as error:
            if error.args[0] == aiodns.error.ARES_ENODATA:
                continue
            break
        addresses = {record.data.addr for record in answer if isinstance(record.data, data)}
        if addresses:
            return tuple(sorted(addresses))[:MAX_ADDRESSES], min(record.ttl for record in answer)
    return (), 0.0
