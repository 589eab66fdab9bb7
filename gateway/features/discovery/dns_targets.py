"""Addresses of the targets of SRV records, asked of the name servers that returned the targets.

Only those servers may know the targets (Consul's, on its own port), so the system's resolver is not asked. An answer is used
for its TTL, at most MAX_TTL_S. Without a new answer the last good one stays. A target that never had one is left to the
system's resolver.
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
MAX_ADDRESSES: Final = 8  # per target
MAX_QUESTIONS: Final = 32  # at the same time


@dataclass(slots=True)
class _Answer:
    """until: time of the next question."""

    addresses: tuple[str, ...] = ()
    until: float = -math.inf


class TargetAddresses:
    """clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answers: dict[str, _Answer] = {}

    def of(self, host: str) -> tuple[str, ...]:
        """The known addresses of a host; (): none, or the host is an address itself."""
        answer = self._answers.get(host)
        return answer.addresses if answer else ()

    async def look_up(self, resolver: aiodns.DNSResolver, hosts: Collection[str], within_s: float) -> None:
        """Asks for addresses whose TTL has passed, and forgets other hosts. Failures of servers raise nothing."""
        names = sorted(host for host in hosts if address_of(host) is None)
        self._answers = {host: self._answers.get(host) or _Answer() for host in names[:MAX_REPLICAS]}
        now, free = self._clock(), asyncio.Semaphore(MAX_QUESTIONS)

        async def renew(host: str, answer: _Answer) -> None:
            async with free:
                addresses, ttl_s = await _addresses_of(resolver, host)
            if addresses:
                answer.addresses, answer.until = addresses, now + min(ttl_s, MAX_TTL_S)

        tasks = [asyncio.ensure_future(renew(host, answer)) for host, answer in self._answers.items() if answer.until <= now]
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=within_s)
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def __repr__(self) -> str:
        known = sum(bool(answer.addresses) for answer in self._answers.values())
        return f"<TargetAddresses of {known} of {len(self._answers)} targets>"


async def _addresses_of(resolver: aiodns.DNSResolver, host: str) -> tuple[tuple[str, ...], float]:
    """(addresses, TTL): IPv4 addresses, or IPv6 addresses if there are none; () without an answer."""
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
