"""The section `kv_events`: cache events of engines, and the tokens of prompts."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from gateway.config.hints import FIXED
from gateway.config.kinds import ConfigSection, about
from gateway.config.sections import Section


class KvEventsConfig(ConfigSection, frozen=True):
    """The cache events of engines."""

    follow: Annotated[
        bool,
        about("Route by the cache events that engines publish over ZMQ (needs the extra `events`)."),
    ] = False
    wait_ms: Annotated[
        float,
        Meta(ge=0, le=10_000),
        about("The longest time that a request waits for the token ids of its prompt; then the gateway's own history decides."),
    ] = 20.0
    memory_mb: Annotated[int, Meta(ge=1, le=1 << 20), about("Memory for the blocks that engines report, in each worker.")] = 256


KV_EVENTS: Final = Section("kv_events", Annotated[KvEventsConfig, Meta(extra={FIXED: True})], KvEventsConfig())
