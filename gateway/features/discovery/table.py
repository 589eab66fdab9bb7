"""The sources of a configuration. A new kind of source gets a line here."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from gateway.cluster.member_source import MemberSource
from gateway.config.schema import Config
from gateway.features.discovery.dns import DnsSource
from gateway.features.discovery.file import FileSource
from gateway.features.discovery.section import DISCOVERY, DiscoveryConfig


def sources_of(config: Config) -> Sequence[MemberSource]:
    only = config.pools[0].name if len(config.pools) == 1 else ""
    return [_source_of(replace(each, pool=each.pool or only)) for each in DISCOVERY.of(config)]


def _source_of(config: DiscoveryConfig) -> MemberSource:
    if config.dns:
        return DnsSource(config)
    if config.kubernetes:
        from gateway.features.discovery.kubernetes.source import KubernetesSource  # imports TLS and aiohttp's client

        return KubernetesSource(config)
    return FileSource(config)
