"""Databases that answer again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.database.failures import StoreFailed

T = TypeVar("T")


async def answered(operation: Callable[[], Awaitable[T]]) -> T:
    """The result of an operation that fails until the database answers; fails loudly if it never does."""
    async with asyncio.timeout(40):
        while True:
            try:
                return await operation()
            except StoreFailed:
                await asyncio.sleep(0.002)
