"""Which sources a configuration asks for, beside itself and the operators. None is built in yet: a new one gets a line here."""

from __future__ import annotations

from gateway.config.schema import Config
from gateway.fleet.sources.source import MemberSource


def sources_of(_config: Config) -> tuple[MemberSource, ...]:
    return ()
