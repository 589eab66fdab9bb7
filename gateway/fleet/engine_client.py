"""Requests to a replica: its model list, which decides if it is up, and its engine's facts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import orjson

from gateway.dialects.api_request import MAX_MODEL_CHARS
from gateway.errors import LOADING, NO_ACCESS, GatewayError, ReplicaFailure
from gateway.fleet import engines
from gateway.fleet.engines import EngineProfile, Facts, Page
from gateway.upstream.client import ReplicaCall, UpstreamClient
from gateway.upstream.loop_guard import LOOP_DETECTED


class ModelEntry(NamedTuple):
    """One entry of a replica's model list. root: its source, "" if it does not say that (vLLM: a path). parent: the model of
    which it is an adapter, "" if it is none.

    shown: JSON for clients. whole: False if the entry is too large or too deep, and `shown` has only the fields that OpenAI
    defines. owner: `owned_by`, "" without one. context_tokens: `max_model_len`, None without one.
    """

    shown: bytes
    whole: bool
    owner: str
    context_tokens: int | None
    root: str = ""
    parent: str = ""


Models = Mapping[str, ModelEntry]
"""The entries of a replica's model list, by id."""

# A model list is stored, shown to clients and searched, so its size is bounded.
MAX_MODELS = 4096
MAX_ENTRY_BYTES: Final = 16 << 10  # vLLM's have 500 bytes
_MAX_OWNER_CHARS: Final = 256
_MAX_ROOT_CHARS: Final = 4096
_LOADS: Final = b"Loading model"  # llama.cpp's words
_MAX_ERROR_BYTES: Final = 1024
_MAX_MODELS_BYTES = 4 << 20
# Brackets and commas of an answer, an object counting six times: parsing takes 15 ms. vLLM's list has 35 for each model.
_MAX_STRUCTURE: Final = 160_000
_ENTRIES_AT_ONCE: Final = 128  # read without giving the event loop back: 1 ms


async def models_of(upstream: UpstreamClient, url: str, timeout_s: float) -> Models | None:
    """The replica's models, at most MAX_MODELS; None if the list needs a key that the gateway does not have.

    Ids longer than MAX_MODEL_CHARS are omitted. Raises ReplicaFailure, or GatewayError if the gateway lacks resources.
    """
    answer = await upstream.open(url, _call("/v1/models"), timeout_s)
    try:
        if answer.status == 401 and upstream.has_key(url):
            raise ReplicaFailure(
                NO_ACCESS, "it refuses the key that the gateway has for it (GET /v1/models answers 401)", reached=0
            )
        if answer.status in (401, 403):
            return None
        body = await answer.read(_MAX_MODELS_BYTES)
    finally:
        answer.close()
    if answer.status == LOOP_DETECTED:
        text = "it is this gateway itself, or a gateway that leads back here (GET /v1/models answers 508)"
        raise ReplicaFailure("status", text)
    if answer.status == 503 and _LOADS in body[:_MAX_ERROR_BYTES]:
        raise ReplicaFailure(LOADING, "it loads its model (GET /v1/models answers 503)")
    if answer.status != 200:
        raise ReplicaFailure("status", f"GET /v1/models answers {answer.status}")
    entries, models = _listed(body), dict[str, ModelEntry]()
    for at in range(0, len(entries), _ENTRIES_AT_ONCE):
        models.update((name, _entry(name, entry)) for name, entry in entries[at : at + _ENTRIES_AT_ONCE])
        await asyncio.sleep(0)
    return models


def _listed(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The first MAX_MODELS entries, with their ids. Raises ReplicaFailure."""
    try:
        entries = orjson.loads(_bounded(body))["data"]
        named = ((entry["id"], entry) for entry in entries)
        known = ((name, entry) for name, entry in named if isinstance(name, str) and len(name) <= MAX_MODEL_CHARS)
        return list(itertools.islice(known, MAX_MODELS))
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise ReplicaFailure("garbage", "the answer to GET /v1/models is no OpenAI model list") from error


def _entry(name: str, entry: Mapping[str, Any]) -> ModelEntry:
    """One entry. Never raises, for any content."""
    owner, context, created = entry.get("owned_by"), entry.get("max_model_len"), entry.get("created")
    owner = owner if isinstance(owner, str) and len(owner) <= _MAX_OWNER_CHARS else ""
    context_tokens = context if type(context) is int and context > 0 else None
    shown = _dumped(entry)
    whole = shown is not None and len(shown) <= MAX_ENTRY_BYTES
    if shown is None or not whole:
        created = created if type(created) is int else 0
        shown = orjson.dumps({"id": name, "object": "model", "created": created, "owned_by": owner})
    root, parent = entry.get("root"), entry.get("parent")
    root = root[:_MAX_ROOT_CHARS] if isinstance(root, str) else ""
    parent = parent if isinstance(parent, str) and len(parent) <= MAX_MODEL_CHARS else ""
    return ModelEntry(shown, whole, owner, context_tokens, root, parent)


def adapter_of(models: Models, name: str) -> str:
    """The adapter that a request for the model `name` uses; "": none. The model list names its parent, which is listed, too;
    or the name is MODEL:ADAPTER (SGLang).
    """
    base, _, last = name.rpartition(":")
    adapter = name if name in models else last
    entry = models.get(adapter)
    if entry is None or not entry.parent or entry.parent == adapter or entry.parent not in models:
        return ""
    return adapter if adapter == name or entry.parent == base else ""


def _dumped(entry: Mapping[str, Any]) -> bytes | None:
    """The entry as JSON; None: it is nested too deeply."""
    try:
        return orjson.dumps(entry)
    except orjson.JSONEncodeError:
        return None


def _bounded(body: bytes) -> bytes:
    """The body, if it can be parsed in a short time. Raises ReplicaFailure otherwise."""
    if 6 * body.count(b"{") + body.count(b"[") + body.count(b",") > _MAX_STRUCTURE:
        raise ReplicaFailure("garbage", "an answer to a probe has too many brackets and commas")
    return body


async def facts_of(
    upstream: UpstreamClient,
    url: str,
    timeout_s: float,
    models: Models,
    known: Facts,
    named: EngineProfile | None = None,
    *,
    inquire: bool,
) -> tuple[Facts, bool]:
    """(its engine's facts, True if the engine has a page of metrics). Raises nothing for an error of the replica.

    known: its earlier facts; their KV size is kept, because it cannot change while the replica is up. named: the configured
    engine, which need not be recognised. inquire: send further requests if the page does not have that size.
    """
    page: Page = {}
    told, asleep = known.tells_sleep, known.tells_sleep and known.asleep
    facts = _with_known_settings(Facts(named or known.engine, known.kv_tokens, tells_sleep=told, asleep=asleep), known)
    engine = named or engines.recognise((entry.owner for entry in models.values()), page)
    if not engine.pages:
        return Facts(engine), False
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            page = await _page_of(await _get(upstream, url, "/metrics"))
            engine = named or engines.recognise((entry.owner for entry in models.values()), page)
            facts = _with_known_settings(engines.read(engine, page), known)
            if facts.kv_tokens is None:
                facts = replace(facts, kv_tokens=known.kv_tokens)
            for path in engine.inquiries if inquire else ():
                if facts.kv_tokens is None:
                    facts = replace(facts, kv_tokens=engines.kv_of(engine, _json(await _get(upstream, url, path))))
            if engine.sleeps and not page.get(engine.sleeping) and (inquire or told):
                says = _json(await _get(upstream, url, engine.sleeps))
                if isinstance(says, dict) and isinstance(says.get("is_sleeping"), bool):
                    told, asleep = True, says["is_sleeping"]
                facts = replace(facts, tells_sleep=told, asleep=asleep)
            for path in engine.settings if inquire else ():
                if isinstance(answer := _json(await _get(upstream, url, path)), dict):
                    facts = engines.with_settings(facts, answer)
                    break
            if inquire or known.version:  # an engine that has named none is asked rarely
                facts = replace(facts, version=await _version_of(upstream, url, engine.versions))
    return facts, bool(page)


def _with_known_settings(facts: Facts, known: Facts) -> Facts:
    """The facts with the known ones of its settings, which are asked for rarely."""
    if not facts.engine.settings:
        return replace(facts, priority=facts.engine.priority)
    return replace(facts, priority=known.priority, role=known.role, bootstrap_port=known.bootstrap_port)


async def _version_of(upstream: UpstreamClient, url: str, paths: Iterable[str]) -> str:
    """The version of an engine's weights; "" if it names none."""
    for path in paths:
        if version := engines.version_of(_json(await _get(upstream, url, path))):
            return version
    return ""


async def _page_of(text: bytes) -> Page:
    """Parses a page of metrics, in steps between which the event loop runs."""
    reader = engines.PageReader()
    for lines in engines.slices(text):
        reader.feed(lines)
        await asyncio.sleep(0)
    return reader.page


def _call(path: str) -> ReplicaCall:
    return ReplicaCall("GET", path, b"Accept-Encoding: identity\r\n", b"", probe=True)


async def _get(upstream: UpstreamClient, url: str, path: str) -> bytes:
    """The body of a successful answer of reasonable size, else b""."""
    try:
        answer = await upstream.open(url, _call(path))
        try:
            return await answer.read(engines.MAX_PAGE_BYTES) if answer.status == 200 else b""
        finally:
            answer.close()
    except (ReplicaFailure, GatewayError):
        return b""


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(_bounded(body))
    except (orjson.JSONDecodeError, ReplicaFailure):
        return None
