"""Watches the member sources of the present configuration, each in its own task.

A source that ends or raises is watched again after a pause; its members stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.cluster.member_source import AnnotatedSource, MemberSource, SourceError
from gateway.fleet.membership import Member

log = logging.getLogger("warmroute.discovery")

RETRY_S: Final = 5.0  # before a source that has ended or failed is watched again
NOT_ANSWERED: Final = "it has not answered yet"


@dataclass(slots=True, eq=False)
class Watch:
    """One watched source. members: its known members, None before the first answer. failed: the reason why it is not watched at
    present. answered: set when the running watch has named its members.
    """

    source: MemberSource
    members: tuple[Member, ...] | None = None
    failed: str = ""
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def problem(self) -> str:
        """The reason why its members may be out of date; "": they are up to date."""
        return self.failed or self.source.problem or ("" if self.answered.is_set() else NOT_ANSWERED)

    @property
    def note(self) -> str:
        """A remark of its source, although it works."""
        return self.source.note if isinstance(self.source, AnnotatedSource) else ""


class Watches:
    """Watches the sources (see the module). found: called with a watch and all members of its source, in the event loop.
    expects: True if an answer of this watch's source without members would be unexpected.
    """

    def __init__(
        self,
        found: Callable[[Watch, Collection[Member]], Awaitable[None]],
        expects: Callable[[Watch], bool],
        retry_s: float,
    ) -> None:
        self._found = found
        self._expects = expects
        self._retry_s = retry_s
        self._watches: dict[str, Watch] = {}
        self._running: asyncio.TaskGroup | None = None

    @property
    def all(self) -> Collection[Watch]:
        return self._watches.values()

    def prepared(self, sources: Iterable[MemberSource]) -> Mapping[str, Watch]:
        """Watches of these sources, by name, for `change`. A watch with equal settings keeps running; new ones begin, beside
        the watches that they will replace.
        """
        prepared: dict[str, Watch] = {}
        for source in sources:
            known = self._watches.get(source.name)
            if known and known.source.settings == source.settings:
                prepared[source.name] = known
            else:
                prepared[source.name] = Watch(source, known.members if known else None)
                self._begin(prepared[source.name])
        return prepared

    def change(self, prepared: Mapping[str, Watch]) -> None:
        """Set the watches."""
        former, self._watches = self._watches, dict(prepared)
        self.end(former.values())
        for watch in self._watches.values():
            self._begin(watch)  # for watches that were prepared before `run`

    def end(self, watches: Iterable[Watch]) -> None:
        """Stop these watches, except for present ones."""
        for watch in watches:
            if watch.task and self._watches.get(watch.name) is not watch:
                watch.task.cancel()

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._running = group
            for watch in self._watches.values():
                self._begin(watch)
            try:
                await asyncio.Event().wait()
            finally:
                self._running = None

    def _begin(self, watch: Watch) -> None:
        if self._running and watch.task is None:
            watch.task = self._running.create_task(self._keep_watching(watch))

    async def _keep_watching(self, watch: Watch) -> None:
        while True:
            try:
                async for members in watch.source.watch(expects=self._expects(watch)):
                    watch.failed = ""
                    await self._found(watch, tuple(members))
                    watch.answered.set()
                self._failed(watch, "it has ended")
            except SourceError as error:
                self._failed(watch, str(error))
            except Exception as bug:  # its members stay, and the other sources continue
                about = {"source": watch.name, "retry_s": self._retry_s}
                log.exception("source of replicas failed: it is tried again", extra=about)
                watch.failed = str(bug)[:200] or type(bug).__name__
            await asyncio.sleep(self._retry_s)

    def _failed(self, watch: Watch, why: str) -> None:
        """Log a failure; each reason once."""
        if why != watch.failed:
            about = {"source": watch.name, "error": why, "retry_s": self._retry_s}
            log.warning("source of replicas does not work: it is tried again", extra=about)
        watch.failed = why

    def __repr__(self) -> str:
        rows = [f"{watch.name}: {watch.problem or 'well'}" for watch in self.all]
        return f"<Watches of {', '.join(rows) or 'no source'}>"


async def answered(watches: Iterable[Watch]) -> None:
    """Wait until each has answered."""
    await asyncio.gather(*(watch.answered.wait() for watch in watches))
