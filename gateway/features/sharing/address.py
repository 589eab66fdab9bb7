"""Addresses of a store: a Valkey or Redis server, sentinels, a cluster. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from gateway.config.addresses import AddressError, is_host, parse_port, shown

STORE_URL: Final = "redis://[USER@]HOST[:PORT][/DB], or rediss://, redis+sentinel://, redis+cluster://, or off"
_HOSTS = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?"
# Patterns are for editors and the chart; `parse_store_url` checks more.
STORE_URL_PATTERN: Final = (
    rf"off|rediss?(\+sentinel|\+cluster)?://([^\s@/:]+@)?{_HOSTS}(,{_HOSTS})*(/[A-Za-z0-9_.-]+)?(/[0-9]{{1,5}})?"
)
_STORE_URL = re.compile(
    r"redis(?P<tls>s?)(\+(?P<kind>sentinel|cluster))?://((?P<user>[^\s@/:]+)@)?(?P<hosts>[^\s@/?#]+)(?P<path>(/[A-Za-z0-9_.-]+)*)/?"
)
_PORTS: Final = {"": 6379, "cluster": 6379, "sentinel": 26379}


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The address of a Valkey or Redis server. kind: "", "sentinel" (hosts: of the sentinels; service: the watched one) or
    "cluster" (hosts: some of its nodes).
    """

    kind: str
    tls: bool
    user: str
    hosts: tuple[tuple[str, int], ...]
    service: str
    db: int


def parse_store_url(url: str) -> StoreAddress:
    """Raises AddressError, without credentials."""
    if "@" in url and ":" in url.partition("://")[2].rpartition("@")[0]:
        raise AddressError("a password does not belong in a URL; set WARMROUTE_SHARING_PASSWORD")
    match = _STORE_URL.fullmatch(url)
    if not match:
        raise AddressError(f"{STORE_URL} is expected, got {shown(url.rpartition('@')[2])}")
    kind, path = match["kind"] or "", match["path"].split("/")[1:]
    service = path.pop(0) if kind == "sentinel" and path else ""
    if kind == "sentinel" and not service:
        raise AddressError("the name of the service that the sentinels watch is missing: redis+sentinel://HOST,HOST/SERVICE")
    if path and (kind == "cluster" or len(path) > 1 or not re.fullmatch("[0-9]{1,5}", path[0])):
        raise AddressError(
            f"{shown('/'.join(path))} is not the number of a database" if kind != "cluster" else "a cluster has one database"
        )
    hosts = tuple([_store_host(host, _PORTS[kind]) for host in match["hosts"].split(",")])
    if len(hosts) > 1 and not kind:
        raise AddressError("several hosts are those of a cluster or of sentinels: redis+cluster:// or redis+sentinel://")
    return StoreAddress(kind, bool(match["tls"]), match["user"] or "", hosts, service, int(path[0]) if path else 0)


def _store_host(text: str, otherwise: int) -> tuple[str, int]:
    """(host without brackets, port)"""
    match = re.fullmatch(r"(?P<host>\[[^\]]+\]|[^\[\]:]+)(:(?P<port>[0-9]{1,5}))?", text)
    port = parse_port(match["port"]) if match and match["port"] else otherwise
    if not match or not is_host(match["host"]) or not port:
        raise AddressError(f"{shown(text)} is not HOST or HOST:PORT")
    return match["host"].strip("[]"), port


def store_url(url: str) -> str:
    """The checked URL. Raises AddressError."""
    if url != "off":
        parse_store_url(url)
    return url
