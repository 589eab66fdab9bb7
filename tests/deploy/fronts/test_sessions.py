"""Sessions through real fronts over several real gateways: which gateway each turn reaches, and what it finds there.

A conversation's text is its own, so a gateway predicts cached tokens for a turn only where it has seen the turn before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.request.client import SESSION_HEADERS
from tests.clients.sdk.engines import simulated
from tests.deploy.fronts.stage import FRONTS, Site, blocks, front, gateways_of
from tests.support.tiers import gate

pytestmark = [pytest.mark.tools, gate("nginx*", reason="how the others hash: two of them agree")]

NOT_HASHED = "X-Correlation-Id"  # the page says why
HASHED = [name for name in SESSION_HEADERS if name != NOT_HASHED]
SESSIONS, TURNS = 24, 3
KNOWN = {"warm", "spill"}  # why a replica was chosen where the prefix is known; spill: its holder is too busy


@contextlib.asynccontextmanager
async def site(name: str, count: int, folder: Path, **options: str) -> AsyncIterator[Site]:
    async with (
        simulated(kv_tokens=1_000_000) as replica,
        simulated(kv_tokens=1_000_000) as another,
        gateways_of(folder, [replica, another], count) as gateways,
        front(name, gateways.ports, folder, **options) as (url, tls),
    ):
        yield Site(url, gateways, tls)


def client_of(at: Site) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(http2=True, verify=at.tls.trusted(), base_url=at.url, timeout=120)


async def post(client: httpx2.AsyncClient, body: Mapping[str, Any], headers: Mapping[str, str]) -> httpx2.Response:
    """Under concurrent requests httpcore2 (2.16) now and then fails by itself, before it sends anything: once more then."""
    for _ in range(5):
        with contextlib.suppress(httpx2.LocalProtocolError):
            return await client.post("/v1/chat/completions", json=body, headers=headers)
    raise AssertionError("the client cannot send")


class Conversation:
    """Turns of a few hundred tokens. headers: what names it, or its client."""

    def __init__(self, name: str, headers: Mapping[str, str]) -> None:
        self.name = name
        self.headers = dict(headers)
        self.ids: list[str] = []
        self._messages: list[dict[str, Any]] = []

    async def turn(self, client: httpx2.AsyncClient) -> str:
        """The request's id."""
        id_ = f"{self.name}.{len(self.ids)}"
        self._messages.append({"role": "user", "content": f"{self.name}, question {len(self.ids)}: " + f"{self.name} " * 150})
        body = {"model": "m", "messages": self._messages, "max_tokens": 8}
        answer = await post(client, body, {**self.headers, "X-Request-Id": id_, NOT_HASHED: id_})
        assert answer.status_code == 200, answer.text
        assert answer.http_version == "HTTP/2"
        assert answer.headers["x-request-id"] == id_
        self._messages.append(answer.json()["choices"][0]["message"])
        self.ids.append(id_)
        return id_


def conversations() -> list[Conversation]:
    """With every header that is hashed, in turn."""
    names = itertools.cycle(HASHED)
    return [Conversation(f"s{number}", {next(names): f"session-{number}"}) for number in range(SESSIONS)]


async def all_turn(at: Site, client: httpx2.AsyncClient, each: Sequence[Conversation]) -> dict[str, int]:
    """One turn of all, at once; the gateway that each reached, by conversation."""
    ids = await asyncio.gather(*(one.turn(client) for one in each))
    found = await asyncio.to_thread(at.gateways.where, ids)
    return {one.name: found[id_][0] for one, id_ in zip(each, ids, strict=True)}


@pytest.mark.parametrize(
    ("name", "count"), [*((name, count) for name in FRONTS for count in (2, 4)), ("envoy gateway", 4)], ids=str
)
@gate("nginx-2", reason="how the others hash: two of them agree")
async def test_all_turns_of_a_session_reach_one_gateway_and_its_death_moves_only_its_own(
    name: str, count: int, tmp_path: Path
) -> None:
    async with site(name, count, tmp_path) as at, client_of(at) as client:
        each = conversations()
        home = await all_turn(at, client, each)
        assert len(set(home.values())) > 1, "the sessions are spread"
        for _ in range(TURNS - 1):
            assert await all_turn(at, client, each) == home
        lines = at.gateways.lines()
        later = [lines[id_][1] for one in each for id_ in one.ids[1:]]
        assert {line["reason"] for line in later} <= KNOWN, "every gateway knows where its sessions' prefixes are"
        assert sum(line["cached_tokens_reported"] > 0 for line in later) > len(later) / 2

        lost = Counter(home.values()).most_common(1)[0][0]
        await asyncio.to_thread(at.gateways.kill, lost)
        moved = await all_turn(at, client, each)
        assert all(place != lost for place in moved.values())
        stayed = {one: place for one, place in home.items() if place != lost}
        assert {one: moved[one] for one in stayed} == stayed

        await asyncio.to_thread(at.gateways.start, lost)
        one_of_its = next(one for one in each if home[one.name] == lost)
        async with asyncio.timeout(120):
            while await all_turn(at, client, [one_of_its]) != {one_of_its.name: lost}:
                pass  # the front tries it again after a while
        assert await all_turn(at, client, each) == home


@pytest.mark.parametrize("name", FRONTS)
@gate("haproxy", "envoy", reason="nginx: all turns of a session")
async def test_two_fronts_agree(name: str, tmp_path: Path) -> None:
    """They know nothing of each other, and have the same list of gateways."""
    (second := tmp_path / "second").mkdir()
    async with site(name, 4, tmp_path) as at, front(name, at.gateways.ports, second) as (url, tls):
        other = Site(url, at.gateways, tls)
        async with client_of(at) as client, client_of(other) as another:
            each = conversations()
            assert await all_turn(at, client, each) == await all_turn(other, another, each)


async def test_without_the_line_that_hashes_turns_are_scattered(tmp_path: Path) -> None:
    """So it is the hash that the test above sees."""
    async with site("nginx", 2, tmp_path, balance="random;") as at, client_of(at) as client:
        each = conversations()
        places = defaultdict(set)
        for _ in range(TURNS):
            for one, place in (await all_turn(at, client, each)).items():
                places[one].add(place)
        assert sum(len(where) > 1 for where in places.values()) > SESSIONS / 4
        lines = at.gateways.lines()
        assert {lines[id_][1]["reason"] for one in each for id_ in one.ids[1:]} - KNOWN, (
            "what another gateway knows is not found"
        )


@pytest.mark.parametrize("name", FRONTS)
async def test_without_a_session_a_client_stays_and_clients_are_spread(name: str, tmp_path: Path) -> None:
    async with site(name, 4, tmp_path) as at, client_of(at) as client:
        keys = [{"Authorization": f"Bearer k{number}"} for number in range(12)] + [{"X-Api-Key": f"k{n}"} for n in range(12)]
        each = [Conversation(f"c{number}", headers) for number, headers in enumerate(keys)]
        home = await all_turn(at, client, each)
        assert len(set(home.values())) > 1
        assert await all_turn(at, client, each) == home


@pytest.mark.parametrize("name", FRONTS)
async def test_huge_and_empty_session_headers_harm_nobody_else(name: str, tmp_path: Path) -> None:
    async with site(name, 2, tmp_path) as at, client_of(at) as client:
        good = Conversation("good", {"X-Session-Id": "good"})
        home = await all_turn(at, client, [good])
        for size in (4_000, 20_000, 200_000):
            with contextlib.suppress(
                httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError
            ):  # it is cut off, or refused
                async with client_of(at) as hostile:
                    answer = await hostile.get("/v1/models", headers={"X-Session-Id": "x" * size})
                    assert answer.status_code == 200 or 400 <= answer.status_code < 500 or size > 60_000, (
                        size,
                        answer.status_code,
                    )
        empty = [Conversation(f"e{number}", {"X-Session-Id": "", "Authorization": "Bearer k"}) for number in range(4)]
        assert len(set((await all_turn(at, client, empty)).values())) == 1, "an empty one is none"
        for _ in range(2):
            assert await all_turn(at, client, [good]) == home


def test_every_front_hashes_the_headers_that_the_gateway_reads() -> None:
    (nginx,), (haproxy,), (envoy, policy) = (blocks(language) for language in ("nginx", "haproxy", "yaml"))
    for language, text in (("nginx", nginx), ("haproxy", haproxy), ("envoy", envoy), ("policy", policy)):
        for name in SESSION_HEADERS:
            spelt = rf"\$http_{name.lower().replace('-', '_')}" if language == "nginx" else rf"(?<![\w-]){name.lower()}"
            found = re.search(rf"{spelt}(?![\w-])", text.lower())
            assert bool(found) == (name != NOT_HASHED), (language, name)
