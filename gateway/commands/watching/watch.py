"""`warmroute status --watch`: the status and activity of gateways, repeatedly.

A terminal is refreshed in place; otherwise each answer is printed below the previous one. An error of one gateway hides no
other one; without a terminal it goes to standard error. The gateway is asked again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Annotated, Final, Never

from msgspec import Meta, Struct
from rich.console import Group, RenderableType
from rich.live import Live

from gateway.commands.operate import OperatorError, ReplicasAnswer, SharingAnswer, ask, failed, failure, picture, read, shown
from gateway.commands.tables import console, line

RECENT_S: Final = 10.0  # requests/s are the mean over this time


class Point(Struct, frozen=True):
    """The activity in a step of time."""

    requests: float
    errors: float
    refused: float
    prompt_tokens: float
    cached_tokens: float
    cost_usd: float
    saved_usd: float
    waiting: float
    running: float


class Activity(Struct, frozen=True):
    """GET /warmroute/live. points: the last quarter of an hour, oldest first; other fields are omitted."""

    step_s: Annotated[float, Meta(gt=0)]
    points: list[Point]


def watch(admins: Sequence[str], every_s: float) -> Never:
    """Watch until interrupted."""
    terminal = console(width=None)
    in_place = terminal.is_terminal and not terminal.is_dumb_terminal
    live = Live(console=terminal, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with live if in_place else contextlib.nullcontext():
        while True:
            if in_place:
                live.update(Group(*[part for admin in admins for part in _part(admin)]), refresh=True)
            else:
                for admin in admins:
                    _print(admin)
            time.sleep(every_s)


def _print(admin: str) -> None:
    try:
        console().print(Group(*_asked(admin)))
    except OperatorError as error:
        failed(error)


def _part(admin: str) -> list[RenderableType]:
    """The part of the screen for a gateway."""
    try:
        return _asked(admin)
    except OperatorError as error:
        return [line(_head(admin)), failure(error)]


def _asked(admin: str) -> list[RenderableType]:
    """The screen of a gateway. Raises OperatorError."""
    replicas = read(admin, ask(admin, "GET", "/warmroute/replicas"), ReplicasAnswer)
    sharing = read(admin, ask(admin, "GET", "/warmroute/sharing"), SharingAnswer)
    activity = read(admin, ask(admin, "GET", "/warmroute/live"), Activity)
    return [line(_head(admin)), *map(line, _doing(activity)), *picture(replicas, sharing)]


def _head(admin: str) -> str:
    return shown(f"{time.strftime('%H:%M:%S')} {admin}")


def _doing(activity: Activity) -> list[str]:
    points = activity.points
    if not points:
        return ["no figures yet"]
    recent = points[-max(1, round(RECENT_S / activity.step_s)) :]
    rate = sum([point.requests for point in recent]) / len(recent) / activity.step_s
    prompt, cached = sum([point.prompt_tokens for point in points]), sum([point.cached_tokens for point in points])
    cost, saved = sum([point.cost_usd for point in points]), sum([point.saved_usd for point in points])
    errors, refused = sum([point.errors for point in points]), sum([point.refused for point in points])
    minutes = len(points) * activity.step_s / 60
    return [
        f"{rate:,.1f} requests/s, {points[-1].running:,.0f} running, {points[-1].waiting:,.0f} waiting",
        f"in {minutes:.1f} minutes: {cached / max(prompt, 1):.1%} of {prompt:,.0f} prompt tokens cached, "
        f"USD {cost:,.4f} spent, USD {saved:,.4f} saved, {errors:,.0f} errors, {refused:,.0f} refused",
    ]
