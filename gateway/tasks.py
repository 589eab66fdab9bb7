"""Several concurrent asyncio tasks: waiting for the first, and ending the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, Final, TypeVar

AGAIN_S: Final = 1.0
CANCEL_S: Final = 0.1

T = TypeVar("T")


class CancelledWithin(Exception):
    """Work ended with a CancelledError of a library (redis-py 8.1 raises some), and was not cancelled by the gateway."""


def is_cancelled() -> bool:
    """True if this task was cancelled from outside; else a CancelledError comes from within it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def first_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs coroutines concurrently until one ends; then the others are cancelled. Raises its error; CancelledWithin if it was
    cancelled.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.cancelled():
                raise CancelledWithin
            task.result()
    finally:
        await _end(tasks)


async def _end(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancels the tasks until they have ended: redis-py (8.1) sometimes loses a cancellation."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=CANCEL_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # several may fail for the same cause; one of them is reported


async def for_ever(run: Callable[[], Awaitable[None]], log: logging.Logger, what: str) -> None:
    """Runs until cancelled: work that ends by a bug is started again after AGAIN_S. what: text of the log line."""
    while True:
        try:
            await run()
        except Exception:
            log.exception(what)
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            log.exception(what)
        await asyncio.sleep(AGAIN_S)


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of the work; None if the event is set first, which cancels the work."""
    task, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        waiting.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
