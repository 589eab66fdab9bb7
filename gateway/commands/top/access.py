"""A gateway's operator endpoints, from an event loop: each call in a thread of its own, which ends with the process.

A call may wait for 45 s (`operate.ANSWER_S`). Who leaves does not wait for it, so these are no threads of an executor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from typing import Any, Final

from gateway.commands.operate import KEY, OperatorError, ask, whole
from gateway.commands.top.values import Json

AT_ONCE: Final = 4  # calls; further ones wait


class Access:
    """See the top of this file. env: may have the admin key; `key` is one that was asked for."""

    def __init__(self, admin: str, env: Mapping[str, str]) -> None:
        self.admin = admin
        self._env = dict(env)
        self._few = asyncio.Semaphore(AT_ONCE)

    @property
    def env(self) -> Mapping[str, str]:
        """With the key, as `operate.ask` takes it."""
        return self._env

    def use(self, key: str) -> None:
        """From now on. Raises OperatorError: it is none."""
        if not (key.isascii() and key.isprintable()):
            raise OperatorError("the admin key has a character that a header cannot have")
        self._env = {**self._env, KEY: key}

    async def call(self, method: str, path: str, body: Any = None) -> Json:
        """A good answer. Raises OperatorError."""
        async with self._few:
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[Json] = loop.create_future()
            thread = threading.Thread(target=self._ask, args=(loop, answer, method, path, body), daemon=True)
            thread.start()
            return await answer

    def _ask(self, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Json], method: str, path: str, body: Any) -> None:
        error, found = None, dict[str, Any]()
        try:
            found = self.asked(method, path, body)
        except OperatorError as refused:
            error = refused

        def tell() -> None:
            if answer.done():
                return  # nobody waits any more
            if error is None:
                answer.set_result(found)
            else:
                answer.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell)

    def asked(self, method: str, path: str, body: Any = None) -> Json:
        """The same, in this thread."""
        found = whole(self.admin, ask(self.admin, method, path, body, self._env))
        if not isinstance(found, dict):
            raise OperatorError(f"{self.admin} is no admin listener of a gateway of this release")
        return found
