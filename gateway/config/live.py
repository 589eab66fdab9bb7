"""The configuration in force.

Parts that read the configuration while requests run hold the one `Live` of their process and read it when they need a value. A
reload gives it another one: there is nobody to be notified, and a request that looks twice may see both.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.config.schema import ALL, TENANT, Config, PriceConfig, TimeoutConfig


class Live:
    """config: the one in force; `take` replaces it.

    The others are the values that every request needs: compiled code reads an attribute of this class at once, and has to look
    up each one of a Struct. blocks: the lengths of a block in bytes and in token ids. patience_s: for how long a client may
    leave an answer unread. max_body: bytes.
    """

    def __init__(self, config: Config) -> None:
        self.take(config)

    def take(self, config: Config) -> None:
        """This is in force from now on."""
        routing = config.routing
        self.config = config
        self.blocks: tuple[int, int] = (routing.block_bytes, routing.block_tokens)
        self.isolates_tenants: bool = routing.isolation == TENANT
        self.shows_routing: bool = routing.expose_headers == ALL
        self.patience_s: float = config.timeouts.idle_s
        self.max_body: int = config.limits.body_mb << 20
        self.timeouts: TimeoutConfig = config.timeouts
        self.prices: Mapping[str, PriceConfig] = config.prices

    def __repr__(self) -> str:
        return f"<Live configuration, {len(self.config.pools)} pools>"
