"""Sends the state of all workers of this gateway to watchers, once a second. One poller serves all watchers.

    workers ◄── question, every FRAME_S ── poll ──► frame, encoded once ──► each watcher's queue ──► its connection
            ──► rows, samples ──────────────┘

A watcher first gets the whole state (`hello`), then changes (`frame`). It has a queue of QUEUED frames. A watcher that does not
read for longer is disconnected, and gets the whole state again when it reconnects. Without watchers the workers are not asked.
The state at the last watcher's end is kept for QUIET_S. A worker with a late answer is missing in one frame. Its previous
answer stays, so that its next answer counts only the difference.

Bounds: MAX_WATCHERS in this process; RECENT rows of requests, UNDER_WAY of running ones; SHOWN_REPLICAS rows of replicas, with
SHOWN_MODELS models each; MAX_PROCESSES, by their last answers.
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
from gateway.features.live_page.sample_merger import SampleMerger
from gateway.features.live_page.sums import STEP_S
from gateway.features.live_page.view import TOPIC
from gateway.server.replica_rows import ReplicaRows

log = logging.getLogger("warmroute.gateway")

FRAME_S: Final = 1.0
MAX_WATCHERS: Final = 32
QUEUED: Final = 10  # frames
RECENT: Final = 200  # requests
UNDER_WAY: Final = 100  # requests that have not ended
SHOWN_REPLICAS: Final = 256
SHOWN_MODELS: Final = 8
MAX_PROCESSES: Final = 256  # workers, including ended ones

Json = dict[str, Any]


class PageWatcher:
    """The queue of one connection. `next` returns encoded events; None: the end. slow: it was disconnected because it did not
    read.
    """

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
    """The last answer of a process. last: version of its last row. ended, hidden: requests that have ended, and ended requests
    without a row, since its ring began. replicas: tokens by name, since the process began.
    """

    ring: str
    last: int
    ended: int
    hidden: int
    replicas: dict[str, list[float]]


@dataclass(slots=True)
class _State:
    """The state according to the workers' answers. answered: last answers by process, the latest last."""

    merger: SampleMerger
    at: float
    answered: OrderedDict[str, _WorkerAnswers] = field(default_factory=OrderedDict)
    requests: OrderedDict[str, Json] = field(default_factory=OrderedDict)
    replicas: dict[str, list[float]] = field(default_factory=dict)
    pools: dict[str, list[int]] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    under_way: list[Json] = field(default_factory=list)
    workers: int = 0

    @property
    def cursors(self) -> dict[str, int]:
        return {each.ring: each.last for each in self.answered.values()}


class Broadcast:
    """Polls the workers and feeds the watchers. wall_clock: Unix seconds."""

    def __init__(
        self, local: LocalControl, control: ControlPlane, wall_clock: Callable[[], float], every_s: float = FRAME_S
    ) -> None:
        self._local = local
        self._control = control
        self._wall_clock = wall_clock
        self._every_s = every_s
        self._rows = ReplicaRows(local)
        self._watchers = set[PageWatcher]()
        self._known: _State | None = None
        self._poll_lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def snapshot(self) -> Json:
        """The whole state. Raises GatewayError 503."""
        async with self._poll_lock:
            known = self._known
            if known is None or self._task is None or self._local.clock() - known.at > 2 * self._every_s:
                await self._poll()
            return self._hello()

    async def explain(self, key: str) -> Json | None:
        """Why the replica of a request was chosen. None: no worker has its row. Raises GatewayError 503."""
        answers = await self._control.ask(TOPIC, msgspec.msgpack.encode({"explain": key}))
        found: list[Json | None] = [msgspec.msgpack.decode(answer) for answer in answers.values()]
        return next(filter(None, found), None)

    async def watch(self) -> PageWatcher:
        """Adds a watcher, with its first event. Raises GatewayError 503."""
        self._require_room()
        hello = _event("hello", await self.snapshot())
        self._require_room()
        watcher = PageWatcher()
        watcher.put(hello)
        self._watchers.add(watcher)  # without an await since the snapshot, so that no frame is missed
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return watcher

    def _require_room(self) -> None:
        """Raises GatewayError 503."""
        if len(self._watchers) >= MAX_WATCHERS:
            text = f"{MAX_WATCHERS} watchers are connected to this worker, which is the maximum: close a page, or try again."
            raise GatewayError(503, "too_many_watchers", text, retry_after_s=5)

    def leave(self, watcher: PageWatcher) -> None:
        """Removes a watcher. Idempotent."""
        self._watchers.discard(watcher)

    def close(self) -> None:
        """Ends all watchers, because the gateway shuts down."""
        for watcher in self._watchers:
            watcher.end()

    async def _run(self) -> None:
        """Sends frames while there are watchers."""
        try:
            while self._watchers:
                await asyncio.sleep(self._every_s)
                frame = await self._frame()
                for watcher in tuple(self._watchers):
                    watcher.put(frame)
        except Exception:  # a bug must not look like an idle gateway
            log.exception("the live page failed: its watchers are disconnected")
            self.close()
        finally:
            self._task = None

    async def _frame(self) -> bytes:
        try:
            async with self._poll_lock:
                return _event("frame", await self._poll())
        except GatewayError as error:
            return _event("problem", {"problem": str(error)})

    # -- asking the workers

    async def _poll(self) -> Json:
        """The changes since the last poll. Raises GatewayError 503."""
        now = self._local.clock()
        if self._known is None or now - self._known.at > QUIET_S:
            self._known = _State(SampleMerger(self._local.metrics.ttft_seconds.bounds), now)
        known = self._known
        question = {"cursors": known.cursors, "after": known.merger.last()}
        answers = await self._control.ask(TOPIC, msgspec.msgpack.encode(question))
        pages: list[Json] = [msgspec.msgpack.decode(answer) for answer in answers.values()]
        known.at, known.workers = self._local.clock(), len(pages)
        changed, ended, hidden = self._update(known, pages)
        known.replicas = _summed([each.replicas for each in known.answered.values()])
        known.pools = _summed([page["pools"] for page in pages])
        known.under_way = sorted([row for page in pages for row in page["under_way"]], key=lambda row: float(row["time"]))
        known.limits = {name: load[2] for page in pages for name, load in page["pools"].items()}
        points = self._dated(known.merger.advance())
        return {**self._state(known), "points": points, "requests": changed, "ended": ended, "hidden": hidden}

    def _update(self, known: _State, pages: list[Json]) -> tuple[list[Json], int, int]:
        """(changed rows, by time; requests that have ended since the last poll; ended requests without a row)"""
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
            known.merger.add(process, page["samples"])
        while len(known.answered) > MAX_PROCESSES:
            known.answered.popitem(last=False)
        changed.sort(key=lambda row: row["time"])
        for row in changed:
            known.requests[row["key"]] = row
            known.requests.move_to_end(row["key"])
        while len(known.requests) > RECENT:
            known.requests.popitem(last=False)
        return changed, ended, hidden

    # -- events

    def _hello(self) -> Json:
        known = self._known
        assert known is not None, "it was polled"
        points, requests = self._dated(known.merger.points), list(known.requests.values())
        return {**self._state(known), "points": points, "requests": requests, "ended": 0, "hidden": 0}

    def _dated(self, points: Any) -> list[Json]:
        """The points with times in Unix seconds."""
        offset = self._wall_clock() - self._local.clock()
        return [{**point, "time": round(point["time"] + offset, 3)} for point in points]

    def _state(self, known: _State) -> Json:
        """The current state."""
        trie, fleet = self._local.router.trie, self._local.fleet
        rows = list(islice(self._rows.all(), SHOWN_REPLICAS))
        for row in rows:
            models = row.pop("models")
            row["models"], row["further_models"] = models[:SHOWN_MODELS], max(0, len(models) - SHOWN_MODELS)
            row["prompt_tokens"], row["cached_tokens"] = known.replicas.get(row["name"], [0.0, 0.0])
        total = sum([len(pool.replicas) for pool in fleet.pools]) + len(list(fleet.leaving))
        return {
            "now": self._wall_clock(),
            "version": __version__,
            "workers": known.workers,
            "policy": self._local.router.policy_name,
            "step_s": STEP_S,
            "replicas": rows,
            "further_replicas": max(0, total - len(rows)),
            "pools": [
                {"name": name, "waiting": load[0], "running": load[1], "limit": known.limits[name]}
                for name, load in known.pools.items()
            ],
            "under_way": known.under_way[:UNDER_WAY],
            "index": {"bytes": trie.size_bytes, "most_bytes": trie.max_bytes, "blocks": trie.blocks, "evicted": trie.evicted},
        }

    def __repr__(self) -> str:
        return f"<Broadcast to {len(self._watchers)}>"


def _summed(values: Iterable[dict[str, list[Any]]]) -> dict[str, Any]:
    """The sums over all workers, by name."""
    sums: dict[str, list[float]] = {}
    for one in values:
        for key, amounts in one.items():
            known = sums.get(key)
            sums[key] = list(amounts) if known is None else [each + other for each, other in zip(known, amounts, strict=True)]
    return sums


def _event(name: str, value: Json) -> bytes:
    """A server-sent event. JSON contains no line ends."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(value))
