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

from gateway.errors import GatewayError, ReplicaFailure
from gateway.features.kv_events.stream import Source
from gateway.fleet.state import ReplicaState
from gateway.upstream.client import ReplicaCall, UpstreamClient
from gateway.upstream.headers import parse_address

TIMEOUT_S: Final = 5.0
MAX_RANKS: Final = 256
_MOST_BYTES: Final = 1 << 20
_MAX_TOPIC: Final = 512
_BOUND: Final = re.compile(r"tcp://(?:\*|0\.0\.0\.0|\[?::\]?):(\d{1,5})")
_HEADERS: Final = b"Accept: application/json\r\nAccept-Encoding: identity\r\n"


async def sources_of(upstream: UpstreamClient, state: ReplicaState) -> list[Source]:
    """The publishers; empty if the replica names none that can be followed. Raises ReplicaFailure, GatewayError."""
    url, host = state.url, parse_address(state.url).host
    named: Any = await _ask(upstream, url, "/kv_event_sources")
    if isinstance(named, dict):
        ranks = [
            (int(rank), each) for rank, each in list(named.items())[:MAX_RANKS] if rank.isdecimal() and isinstance(each, dict)
        ]
        return [source for rank, each in ranks if (source := _source(state, host, rank, each, 0))]
    if state.engine.name != "sglang":
        return []
    about: Any = await _ask(upstream, url, "/server_info") or await _ask(upstream, url, "/get_server_info")
    config = about.get("kv_events_config") if isinstance(about, dict) else None
    if isinstance(config, str):
        try:
            config = orjson.loads(config)
        except orjson.JSONDecodeError:
            return []
    if not isinstance(config, dict):
        return []
    size = about.get("dp_size")
    ranks_count = size if type(size) is int and 0 < size <= MAX_RANKS else 1
    found = (_source(state, host, rank, config, rank) for rank in range(ranks_count))
    return [source for source in found if source]


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
