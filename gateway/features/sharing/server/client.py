"""Connects to a Valkey or Redis server, as configured: single, watched by sentinels, or a cluster.

The library is an extra (`store`), imported when a store is configured. It resolves names in the event loop's thread pool, where
a look-up cannot be cancelled, and delays other work and the end of the process. So each name is resolved here first, in a
thread of the resolver: while a name server does not answer, the library does not connect.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from gateway.config.parse import ConfigError
from gateway.features.sharing.address import StoreAddress, parse_store_url
from gateway.features.sharing.section import SharingConfig
from gateway.features.sharing.server.failures import DENIED, PASSWORD, SENTINEL_PASSWORD, check_files, sentinel_failures
from gateway.upstream.dialer import is_ip_address
from gateway.upstream.resolver import AddressSource

CONNECT_S = 2.0
ANSWER_S = 3.0  # time limit of a command; longer than a read waits for entries
SENTINEL_LIMITS = {"socket_connect_timeout": 0.7, "socket_timeout": 0.7}  # seconds; then the next sentinel is asked
LIBRARY = "redis[hiredis]>=8.1"  # as in the extra `store`


def require_library() -> None:
    """Raises ConfigError if the library is not installed."""
    try:
        import redis  # noqa: F401
    except ImportError:
        raise ConfigError(f"sharing.url needs a library that is not installed here: pip install '{LIBRARY}'") from None


@asynccontextmanager
async def connected(sharing: SharingConfig, resolver: AddressSource, env: Mapping[str, str] = os.environ) -> AsyncIterator[Any]:
    """Yields a client of redis-py. Its commands and this function raise `store_errors`. The library does not retry."""
    address = await _resolvable(parse_store_url(sharing.url), resolver)
    client, sentinel = _client(address, _options(sharing, address, env), env)
    try:
        yield client
    finally:
        await client.aclose()
        for each in sentinel.sentinels if sentinel else ():
            await each.aclose()


async def _resolvable(address: StoreAddress, resolver: AddressSource) -> StoreAddress:
    """The address, with only the hosts that resolve. Raises OSError if none does."""

    async def look_up(host: str) -> None:
        if not is_ip_address(host):
            async with asyncio.timeout(CONNECT_S):
                await resolver.renewed(host)

    failures = await asyncio.gather(*(look_up(host) for host, _ in address.hosts), return_exceptions=True)
    hosts = tuple(host for host, failure in zip(address.hosts, failures, strict=True) if failure is None)
    if not hosts:
        reason = str(failures[0]) or f"the name server does not answer: {address.hosts[0][0]}"
        raise OSError(reason) from failures[0]
    return replace(address, hosts=hosts)


def _options(sharing: SharingConfig, address: StoreAddress, env: Mapping[str, str]) -> dict[str, Any]:
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    options: dict[str, Any] = {
        "username": address.user or None,
        "password": env.get(PASSWORD) or None,
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": ANSWER_S,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if address.tls:
        check_files(sharing)  # because the library's errors do not name the files
        options["ssl"] = True
        files = {"ssl_ca_certs": sharing.ca_file, "ssl_certfile": sharing.cert_file}
        files["ssl_keyfile"] = sharing.key_file or sharing.cert_file
        options.update((name, path) for name, path in files.items() if path)
    return options


def _client(address: StoreAddress, options: dict[str, Any], env: Mapping[str, str]) -> tuple[Any, Any]:
    """(client, the sentinels or None)"""
    from redis.asyncio import Redis
    from redis.asyncio.cluster import ClusterNode, RedisCluster
    from redis.asyncio.sentinel import Sentinel

    if address.kind == "cluster":
        return RedisCluster(startup_nodes=[ClusterNode(host, port) for host, port in address.hosts], **options), None
    if address.kind == "sentinel":
        own = {**options, "username": None, "password": env.get(SENTINEL_PASSWORD) or None, **SENTINEL_LIMITS}
        sentinel = Sentinel(list(address.hosts), sentinel_kwargs=own, **options, db=address.db)  # type: ignore[no-untyped-call]
        return sentinel.master_for(address.service), sentinel
    (host, port), *_ = address.hosts
    return Redis(host=host, port=port, db=address.db, **options), None


class InvalidReplyError(Exception):
    """The server's answer is invalid."""


def store_errors() -> tuple[type[Exception], ...]:
    """The exceptions of a failing store."""
    from redis.exceptions import RedisClusterException, RedisError

    return RedisError, RedisClusterException, OSError, TimeoutError, InvalidReplyError


def reason_of(error: Exception) -> str:
    """The reason of a failure, for `sharing_errors_total`."""
    from redis import exceptions

    if DENIED in (sentinel_failures(error) or ()):
        return "denied"
    if isinstance(error, exceptions.RedisClusterException) and isinstance(error.__cause__, Exception):
        return reason_of(error.__cause__)
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError):
        return "denied"
    if isinstance(error, exceptions.OutOfMemoryError):
        return "full"
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError | TimeoutError):
        return "unreachable"
    text = str(error)
    if isinstance(error, InvalidReplyError) or text.startswith(("WRONGTYPE", "The ID specified in XADD")):
        return "garbage"
    return "full" if text.startswith(("OOM", "MISCONF")) else "other"


def is_late(error: Exception) -> bool:
    """True if the answer timed out."""
    from redis.exceptions import TimeoutError as Late

    return isinstance(error, Late | TimeoutError)


def is_exhausted(error: Exception) -> bool:
    """True if the stream has the last possible id, so that no entry can be added."""
    return "The ID specified in XADD" in str(error) or "exhausted the last possible ID" in str(error)
