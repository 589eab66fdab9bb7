"""What signals do: leave first, then stop, then hurry."""

from __future__ import annotations

import asyncio
import signal

import pytest

from gateway.commands.ending import ServingEnd
from gateway.config.schema import Config
from tests.support.configs import load


class Served:
    """A gateway that serves."""

    def __init__(self, accept_s: float) -> None:
        self.config: Config = load(
            None, {"pools": [{"replicas": ["http://a:1"]}], "limits": {"drain_accept_s": accept_s}}, env={}
        )
        self.left = 0

    def begin_leaving(self) -> None:
        self.left += 1


def state(ending: ServingEnd) -> tuple[bool, bool]:
    return ending.stop.is_set(), ending.hurry.is_set()


async def test_sigterm_leaves_first_and_then_stops() -> None:
    ending = ServingEnd()
    ending.serving = served = Served(0.05)
    ending.on_signal(signal.SIGTERM)
    assert (served.left, *state(ending)) == (1, False, False)
    async with asyncio.timeout(40):
        await ending.stop.wait()
    assert not ending.hurry.is_set()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_all_waiting(second: signal.Signals) -> None:
    ending = ServingEnd()
    ending.serving = served = Served(600)
    ending.on_signal(signal.SIGTERM)
    ending.on_signal(second)
    assert (served.left, *state(ending)) == (1, True, True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_who_is_at_a_terminal_or_has_no_balancer_does_not_wait(number: signal.Signals) -> None:
    ending = ServingEnd()
    ending.serving = Served(600 if number == signal.SIGINT else 0)
    ending.on_signal(number)
    assert state(ending) == (True, False)


async def test_what_does_not_serve_yet_stops_at_once() -> None:
    ending = ServingEnd()
    ending.on_signal(signal.SIGTERM)
    assert state(ending) == (True, False)
