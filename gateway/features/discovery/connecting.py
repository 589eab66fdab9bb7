"""Options of discovered replicas, from their source."""

from __future__ import annotations

from dataclasses import replace

from gateway.config.schema import AUTO_ENGINE, TlsConfig
from gateway.features.discovery.section import DiscoveryConfig
from gateway.fleet.membership import REPLICA, Member


def connected_as(member: Member, source: DiscoveryConfig) -> Member:
    """The member with the options that its source sets for its members; its own engine and role stay."""
    tls = source.tls if isinstance(source.tls, TlsConfig) and member.url.startswith("https:") else None
    engine = source.engine if member.engine == AUTO_ENGINE else member.engine
    role = member.role or source.role or REPLICA
    if (source.key, tls, engine, role) == (*member.connection, member.role):
        return member
    return replace(member, key=source.key, tls=tls, engine=engine, role=role)
