"""The event publishers of a replica, as it names them itself.

vLLM and our replica have them at /kv_event_sources, by data-parallel rank; SGLang in the arguments at /server_info. An endpoint
that is bound to all addresses is at the replica's own host. Others are not followed: nothing makes the gateway connect to hosts
that only a replica names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import orjson

from gateway.config.kinds import MAX_RANKS
from gateway.errors import GatewayError, ReplicaFailure
from gateway.features.kv_events.stream import Source
from gateway.fleet.state import ReplicaState
from gateway.upstream.client import ReplicaCall, UpstreamClient
from gateway.upstream.headers import parse_address

TIMEOUT_S: Final = 5.0
_MOST_BYTES: Final = 1 << 20
_MAX_TOPIC: Final = 512
_NUMBER: Final = re.compile(r"\d{1,5}")
_BOUND: Final = re.compile(r"tcp://(?:\*|0\.0\.0\.0|\[?::\]?):(\d{1,5})")
_HEADERS: Final = b"Accept: application/json\r\nAccept-Encoding: identity\r\n"


async def sources_of(upstream: UpstreamClient, state: ReplicaState) -> list[Source]:
    """The publishers, of a rank only its own; empty if none can be followed. Raises ReplicaFailure, GatewayError."""
    host, own = parse_address(state.url).host, state.member.rank
    named = await _named(upstream, state)
    found = (_source(state, host, rank, about, shift) for rank, about, shift in named if own is None or rank == own)
    return [source for source in found if source is not None]


async def _named(upstream: UpstreamClient, state: ReplicaState) -> list[tuple[int, Mapping[str, Any], int]]:
    """(rank, the arguments of its publisher, the distance of its ports from the ones there) of each rank; empty if there are
    too many.
    """
    named: Any = await _ask(upstream, state.url, "/kv_event_sources")
    if isinstance(named, dict):
        ranks = named.items() if len(named) <= MAX_RANKS else ()
        return [(int(rank), each, 0) for rank, each in ranks if _NUMBER.fullmatch(rank) and isinstance(each, dict)]
    if state.engine.name != "sglang":
        return []
    about: Any = await _ask(upstream, state.url, "/server_info") or await _ask(upstream, state.url, "/get_server_info")
    config = about.get("kv_events_config") if isinstance(about, dict) else None
    if isinstance(config, str):
        try:
            config = orjson.loads(config)
        except orjson.JSONDecodeError:
            return []
    if not isinstance(config, dict):
        return []
    size = about.get("dp_size", 1)
    return [(rank, config, rank) for rank in range(size)] if type(size) is int and size <= MAX_RANKS else []


def _source(state: ReplicaState, host: str, rank: int, about: Mapping[str, Any], shift: int) -> Source | None:
    """A publisher; None: it is off, or cannot be followed. shift: added to its ports."""
    if about.get("enable_kv_cache_events") is False or about.get("publisher") != "zmq":
        return None
    topic = about.get("topic") or ""
    events = _endpoint(host, about.get("endpoint"), shift)
    if not events or not isinstance(topic, str) or len(topic) > _MAX_TOPIC:
        return None
    return Source(state.name, rank, events, _endpoint(host, about.get("replay_endpoint"), shift), topic, state.engine.salts)


def _endpoint(host: str, bound: object, shift: int) -> str:
    """The address to connect to; "" if it is not bound to all addresses, over TCP."""
    found = _BOUND.fullmatch(bound) if isinstance(bound, str) else None
    if found is None or not 0 < (port := int(found[1]) + shift) < 65536:
        return ""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


async def _ask(upstream: UpstreamClient, url: str, path: str) -> object:
    """The JSON at a path; None if there is none."""
    answer = await upstream.open(url, ReplicaCall("GET", path, _HEADERS, b"", probe=True), TIMEOUT_S)
    try:
        if answer.status != 200:
            return None
        body = await answer.read(_MOST_BYTES)
    finally:
        answer.close()
    try:
        found: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return found


FAILURES: Final = (ReplicaFailure, GatewayError, TimeoutError)
