"""What is used of aiohttp's insides is there, and where it is not, that is found and logged once."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gateway.server.aiohttp_seam import METHODS, PARSER, AiohttpConnection, Seam, attribute, moved
from gateway.server.http.bounded_parser import BoundedParser


class Renamed(AiohttpConnection):
    waiter = attribute("_waiter_of_tomorrow")


class RenamedInPublic(AiohttpConnection):
    writing_paused = attribute("writing_paused_of_tomorrow")


class Unpaused(AiohttpConnection):
    def pause_writing(self) -> None:
        """Another release's, which notes it elsewhere."""


class Greedy(AiohttpConnection):
    def pause_reading(self) -> None:
        """Another release's, which leaves its parser going."""


class Patient(AiohttpConnection):
    def resume_reading(self, resume_parser: bool = True) -> None:
        """Another release's, which feeds its parser later."""


class Upgrading(AiohttpConnection):
    async def finish_response(self, request: web.BaseRequest, resp: Any, start_time: float | None) -> tuple[Any, bool]:
        """Another release's, which knows no upgrade that is declined."""
        await resp.prepare(request)
        await resp.write_eof()
        return resp, False


class Curious(AiohttpConnection):
    def data_received(self, data: bytes) -> None:
        """Another release's, which wants more of its parser than `BoundedParser` has."""
        if not hasattr(self.parser, "tail"):
            super().data_received(data)


class Deaf(AiohttpConnection):
    def data_received(self, data: bytes) -> None:
        """Another release's, which works otherwise."""


async def test_this_release_has_all() -> None:
    assert moved() == []


async def test_what_a_release_has_renamed_is_named() -> None:
    methods = {**METHODS, (web.Application, "_handle"): ("request", "more"), (web.Server, "stop"): ()}
    assert moved(Renamed, methods) == ["RequestHandler._waiter_of_tomorrow", "Application._handle", "Server.stop"]


async def test_a_name_without_an_underscore_is_looked_for_as_well() -> None:
    assert moved(RenamedInPublic) == ["RequestHandler.writing_paused_of_tomorrow"]


@pytest.mark.parametrize("kind", [Deaf, Unpaused, Greedy, Patient, Upgrading, Curious])
async def test_what_has_its_names_and_works_otherwise_is_found(kind: type[AiohttpConnection]) -> None:
    assert moved(kind)


def test_the_parser_that_is_put_between_has_all_that_is_asked_of_it() -> None:
    assert {name for name in vars(BoundedParser) if name in PARSER} == PARSER


async def test_it_is_checked_once_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
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


async def test_nothing_is_logged_where_nothing_has_moved(caplog: pytest.LogCaptureFixture) -> None:
    assert Seam().holds
    assert not caplog.records
