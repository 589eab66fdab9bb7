"""The configuration in force.

Parts that use the configuration share the one `Live` of their process and read it at each use. A reload replaces its values,
without notifying the parts; a request that reads it twice may see both configurations.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.config.aliases import Aliases
from gateway.config.schema import ALL, TENANT, Config, PriceConfig, TimeoutConfig


class Live:
    """config: the present one; `take` replaces it.

    The other attributes cache values that every request needs: compiled code reads them directly, but a Struct's by a lookup.
    blocks: block lengths in bytes and in token ids. patience_s: time limit for a client to read. max_body: in bytes.
    client_fields: fields that steer engines, and that clients may send. aliases: of models, None without any. cors_origins: of
    web pages that may read answers. keepalive_s: longest silence towards a client that waits for a stream, 0: no limit.
    logs_clients: their addresses and user agents are recorded.
    """

    def __init__(self, config: Config) -> None:
        self.take(config)

    def take(self, config: Config) -> None:
        """Set the configuration."""
        routing = config.routing
        self.config = config
        self.blocks: tuple[int, int] = (routing.block_bytes, routing.block_tokens)
        self.client_fields: frozenset[str] = frozenset(routing.client_fields)
        self.isolates_tenants: bool = routing.isolation == TENANT
        self.shows_routing: bool = routing.expose_headers == ALL
        self.patience_s: float = config.timeouts.idle_s
        self.keepalive_s: float = config.limits.keepalive_s
        self.logs_clients: bool = config.log_clients
        self.max_body: int = config.limits.body_mb << 20
        self.timeouts: TimeoutConfig = config.timeouts
        self.cors_origins: frozenset[str] = frozenset(config.cors_origins)
        self.aliases = Aliases(config.model_aliases) if config.model_aliases else None
        self.prices: Mapping[str, tuple[PriceConfig, ...]] = config.prices

    def __repr__(self) -> str:
        return f"<Live configuration, {len(self.config.pools)} pools>"
