"""What watchers get, once a second, of all workers of this gateway: one poller for any number of watchers.

    workers ◄── question, every FRAME_S ── poll ──► frame, encoded once ──► each watcher's queue ──► its connection
            ──► rows, samples ──────────────┘

A watcher begins with everything that is known (`hello`), and then gets what is new (`frame`). It has a queue of QUEUED frames;
one that does not read for longer is let go, and begins anew when it connects again. Without watchers nothing is asked. What
there was when the last one left is kept for QUIET_S. A worker that is late with an answer is left out of one frame; what it had
answered before stands, so that its next answer counts only what has come since.

Bounds: MOST_WATCHERS in this process; RECENT rows of requests; SHOWN_REPLICAS rows of replicas, with SHOWN_MODELS models each;
MOST_PROCESSES, of which those that have answered last are kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from gateway import __version__
from gateway.cluster.commands import ControlPlane, LocalControl
from gateway.errors import GatewayError
from gateway.features.live_page.feed import QUIET_S
from gateway.features.live_page.merging import Merging
from gateway.features.live_page.sums import STEP_S
from gateway.features.live_page.view import TOPIC
from gateway.server.replica_rows import ReplicaRows

log = logging.getLogger("warmroute.gateway")

FRAME_S: Final = 1.0
MOST_WATCHERS: Final = 32
QUEUED: Final = 10  # frames
RECENT: Final = 200  # requests
SHOWN_REPLICAS: Final = 256
SHOWN_MODELS: Final = 8
MOST_PROCESSES: Final = 256  # workers, those that have ended included

Json = dict[str, Any]


class PageWatcher:
    """One connection. `next` returns encoded events; None: it is over."""

    def __init__(self) -> None:
        self.slow = False
        self._events: deque[bytes] = deque()
        self._over = False
        self._ready = asyncio.Event()

    def put(self, event: bytes) -> None:
        if len(self._events) >= QUEUED:
            self.slow = True
            self._events.clear()
            self.end()
        elif not self._over:
            self._events.append(event)
            self._ready.set()

    def end(self) -> None:
        self._over = True
        self._ready.set()

    async def next(self) -> bytes | None:
        await self._ready.wait()
        event = self._events.popleft() if self._events else None
        if not self._events and not self._over:
            self._ready.clear()
        return event


class _WorkerAnswers(NamedTuple):
    """Of a process's last answer. last: the version of its last row. ended, hidden: requests that have ended, and those without
    a row, since its ring began. replicas: tokens by name, since the process began.
    """

    ring: str
    last: int
    ended: int
    hidden: int
    replicas: dict[str, list[float]]


@dataclass(slots=True)
class _KnownRows:
    """What the workers have answered until now. answered: by process, the last one last."""

    merging: Merging
    at: float
    answered: OrderedDict[str, _WorkerAnswers] = field(default_factory=OrderedDict)
    requests: OrderedDict[str, Json] = field(default_factory=OrderedDict)
    replicas: dict[str, list[float]] = field(default_factory=dict)
    pools: dict[str, list[int]] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    workers: int = 0

    @property
    def cursors(self) -> dict[str, int]:
        return {each.ring: each.last for each in self.answered.values()}


class Broadcast:
    """See the top of this file. wall_clock: Unix seconds."""

    def __init__(
        self, local: LocalControl, control: ControlPlane, wall_clock: Callable[[], float], every_s: float = FRAME_S
    ) -> None:
        self._local = local
        self._control = control
        self._wall_clock = wall_clock
        self._every_s = every_s
        self._rows = ReplicaRows(local)
        self._watchers = set[PageWatcher]()
        self._known: _KnownRows | None = None
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def snapshot(self) -> Json:
        """All that is known. Raises GatewayError 503."""
        async with self._one_at_a_time:
            known = self._known
            if known is None or self._task is None or self._local.clock() - known.at > 2 * self._every_s:
                await self._poll()
            return self._hello()

    async def explain(self, key: str) -> Json | None:
        """Why the replica of a request was chosen; None: no worker knows it any more. Raises GatewayError 503."""
        answers = await self._control.ask(TOPIC, msgspec.msgpack.encode({"explain": key}))
        found: list[Json | None] = [msgspec.msgpack.decode(answer) for answer in answers.values()]
        return next(filter(None, found), None)

    async def watch(self) -> PageWatcher:
        """A new one, with its first event. Raises GatewayError 503."""
        self._require_room()
        hello = _event("hello", await self.snapshot())
        self._require_room()
        watcher = PageWatcher()
        watcher.put(hello)
        self._watchers.add(watcher)  # in the same step as what it begins with was made: it misses nothing
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return watcher

    def _require_room(self) -> None:
        """Raises GatewayError 503."""
        if len(self._watchers) >= MOST_WATCHERS:
            text = f"{MOST_WATCHERS} watchers are connected to this worker, which is the most: close a page, or try again."
            raise GatewayError(503, "too_many_watchers", text, retry_after_s=5)

    def leave(self, watcher: PageWatcher) -> None:
        """It is gone. Idempotent."""
        self._watchers.discard(watcher)

    def close(self) -> None:
        """The gateway goes down."""
        for watcher in self._watchers:
            watcher.end()

    async def _run(self) -> None:
        """While there are watchers."""
        try:
            while self._watchers:
                await asyncio.sleep(self._every_s)
                frame = await self._frame()
                for watcher in tuple(self._watchers):
                    watcher.put(frame)
        except Exception:  # a bug here must not look like a gateway where nothing happens
            log.exception("the live page's watchers are let go")
            self.close()
        finally:
            self._task = None

    async def _frame(self) -> bytes:
        try:
            async with self._one_at_a_time:
                return _event("frame", await self._poll())
        except GatewayError as error:
            return _event("problem", {"problem": str(error)})

    # -- asking the workers

    async def _poll(self) -> Json:
        """What is new. Raises GatewayError 503."""
        now = self._local.clock()
        if self._known is None or now - self._known.at > QUIET_S:
            self._known = _KnownRows(Merging(self._local.metrics.ttft_seconds.bounds), now)
        known = self._known
        question = {"cursors": known.cursors, "after": known.merging.last()}
        answers = await self._control.ask(TOPIC, msgspec.msgpack.encode(question))
        pages: list[Json] = [msgspec.msgpack.decode(answer) for answer in answers.values()]
        known.at, known.workers = self._local.clock(), len(pages)
        changed, ended, hidden = self._take(known, pages)
        known.replicas = _summed([each.replicas for each in known.answered.values()])
        known.pools = _summed([page["pools"] for page in pages])
        known.limits = {name: load[2] for page in pages for name, load in page["pools"].items()}
        points = self._dated(known.merging.advance())
        return {**self._state(known), "points": points, "requests": changed, "ended": ended, "hidden": hidden}

    def _take(self, known: _KnownRows, pages: list[Json]) -> tuple[list[Json], int, int]:
        """(rows that have changed, in the order of time; requests that have ended since the last time; those without a row)"""
        changed: list[Json] = []
        ended = hidden = 0
        for page in pages:
            process = page["process"]
            now = _WorkerAnswers(page["ring"], page["last"], page["ended"], page["hidden"], page["replicas"])
            before = known.answered.pop(process, None)
            if before is None or before.ring != now.ring:
                before = now._replace(ended=0, hidden=0)
            known.answered[process] = now
            ended, hidden = ended + now.ended - before.ended, hidden + now.hidden - before.hidden
            changed += page["rows"]
            known.merging.add(process, page["samples"])
        while len(known.answered) > MOST_PROCESSES:
            known.answered.popitem(last=False)
        changed.sort(key=lambda row: row["time"])
        for row in changed:
            known.requests[row["key"]] = row
            known.requests.move_to_end(row["key"])
        while len(known.requests) > RECENT:
            known.requests.popitem(last=False)
        return changed, ended, hidden

    # -- what is shown

    def _hello(self) -> Json:
        known = self._known
        assert known is not None, "it was polled"
        points, requests = self._dated(known.merging.points), list(known.requests.values())
        return {**self._state(known), "points": points, "requests": requests, "ended": 0, "hidden": 0}

    def _dated(self, points: Any) -> list[Json]:
        """With Unix seconds."""
        offset = self._wall_clock() - self._local.clock()
        return [{**point, "time": round(point["time"] + offset, 3)} for point in points]

    def _state(self, known: _KnownRows) -> Json:
        """What is the case now."""
        trie, fleet = self._local.router.trie, self._local.fleet
        rows = list(islice(self._rows.all(), SHOWN_REPLICAS))
        for row in rows:
            models = row.pop("models")
            row["models"], row["further_models"] = models[:SHOWN_MODELS], max(0, len(models) - SHOWN_MODELS)
            row["prompt_tokens"], row["cached_tokens"] = known.replicas.get(row["name"], [0.0, 0.0])
        whole = sum([len(pool.replicas) for pool in fleet.pools]) + len(list(fleet.leaving))
        return {
            "now": self._wall_clock(),
            "version": __version__,
            "workers": known.workers,
            "policy": self._local.router.policy_name,
            "step_s": STEP_S,
            "replicas": rows,
            "further_replicas": max(0, whole - len(rows)),
            "pools": [
                {"name": name, "waiting": load[0], "running": load[1], "limit": known.limits[name]}
                for name, load in known.pools.items()
            ],
            "index": {"bytes": trie.size_bytes, "most_bytes": trie.max_bytes, "blocks": trie.blocks, "evicted": trie.evicted},
        }

    def __repr__(self) -> str:
        return f"<Broadcast to {len(self._watchers)}>"


def _summed(values: Iterable[dict[str, list[Any]]]) -> dict[str, Any]:
    """Those of all workers added up, by name."""
    sums: dict[str, list[float]] = {}
    for one in values:
        for key, amounts in one.items():
            known = sums.get(key)
            sums[key] = list(amounts) if known is None else [each + other for each, other in zip(known, amounts, strict=True)]
    return sums


def _event(name: str, value: Json) -> bytes:
    """A server-sent event. JSON has no line ends in it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(value))
