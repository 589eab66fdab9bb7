"""What is used of aiohttp's insides is there, and where it is not, that is found and said once."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web

from gateway.server.aiohttp_seam import METHODS, Connection, Seam, attribute, moved


class Renamed(Connection):
    waiter = attribute("_waiter_of_tomorrow")


class Deaf(Connection):
    def data_received(self, data: bytes) -> None:
        """Another release's, which works otherwise."""


async def test_this_release_has_all() -> None:
    assert moved() == []


async def test_what_a_release_has_renamed_is_named() -> None:
    methods = {**METHODS, (web.Application, "_handle"): ("request", "more"), (web.Server, "stop"): ()}
    assert moved(Renamed, methods) == ["RequestHandler._waiter_of_tomorrow", "Application._handle", "Server.stop"]


async def test_what_has_its_names_and_works_otherwise_is_found() -> None:
    assert moved(Deaf)


async def test_it_is_looked_at_once_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    looks = 0

    def look() -> list[str]:
        nonlocal looks
        looks += 1
        return ["RequestHandler._waiter"]

    seam = Seam(look)
    assert [seam.holds, seam.holds] == [False, False]
    assert looks == 1
    (record,) = caplog.records
    assert (record.levelname, vars(record)["aiohttp"]) == ("WARNING", aiohttp.__version__)
    assert vars(record)["moved"] == ["RequestHandler._waiter"]


async def test_nothing_is_said_where_nothing_has_moved(caplog: pytest.LogCaptureFixture) -> None:
    assert Seam().holds
    assert not caplog.records
