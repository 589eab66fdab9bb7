"""Connection options of discovered replicas, from their source."""

from __future__ import annotations

from dataclasses import replace

from gateway.config.schema import AUTO_ENGINE, TlsConfig
from gateway.features.discovery.section import DiscoveryConfig
from gateway.fleet.membership import Member


def connected_as(member: Member, source: DiscoveryConfig) -> Member:
    """The member with the options that its source sets for all its members."""
    tls = source.tls if isinstance(source.tls, TlsConfig) and member.url.startswith("https:") else None
    engine = source.engine if member.engine == AUTO_ENGINE else member.engine
    return member if (source.key, tls, engine) == member.connection else replace(member, key=source.key, tls=tls, engine=engine)
