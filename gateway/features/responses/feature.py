"""Stored responses and conversations, and background responses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from gateway.config.listen import OFF
from gateway.core import Core
from gateway.features.histories.histories import Histories
from gateway.features.histories.items import StoredItems
from gateway.features.histories.lazy import LazyStore
from gateway.features.responses.background.response_runs import ResponseRuns
from gateway.features.responses.metrics import ResponsesMetrics
from gateway.features.responses.recall import Recall
from gateway.features.responses.section import STATE
from gateway.features.responses.stored_objects import StoredObjects
from gateway.features.runs.event_log import LOGS_SHARE, MAX_LOGS, Logs
from gateway.features.runs.following import Followers
from gateway.features.runs.runs import Runs
from gateway.request.extensions import Answerer, Preparer

if TYPE_CHECKING:
    from gateway.database.database import Database
    from gateway.features.runs.stored_runs import RunStore

_FORMAT: Final = ResponseRuns()


def install(core: Core) -> None:
    store, runs, recall = _recall_of(core)

    stored_objects = StoredObjects(core.live, core.fleet, recall, core.objects, core.replies, core.clock)
    if store is not None:
        core.extensions.answerers.append(
            Answerer(stored_objects.owns, lambda exchange: stored_objects.answer_own(exchange, core.lifecycle))
        )
        core.work.tasks += [store.run, runs.run]
        core.work.closes.append(store.close)
        core.put(store)
    core.extensions.preparers.append(Preparer(stored_objects.concerns, stored_objects.prepare))
    core.work.finishes.append(runs.close)
    core.put(runs)


def _recall_of(core: Core) -> tuple[LazyStore[RunStore] | None, Runs, Recall]:
    state, wall_clock, metrics = STATE.of(core.config), core.wall_clock, core.metrics.of(ResponsesMetrics)
    load = partial(_load, state.max_mb << 20, state.owner_mb << 20, core.around.late_s)
    lazy = LazyStore(load, state.url, state.ttl_s, metrics.file_lost.add, wall_clock, core.clock, core.around.late_s)
    store = lazy if state.url != OFF else None
    histories = Histories(store, StoredItems(core.parsing), metrics.kept, metrics.histories, wall_clock)
    logs = Logs(max_logs=min(MAX_LOGS, core.memory.limit // LOGS_SHARE))
    runs = Runs(_FORMAT, lazy.get, core.running, metrics.runs, wall_clock, core.clock, logs)
    followers = Followers(runs, core.running)
    return store, runs, Recall(core.live, core.parsing, histories, runs, followers, wall_clock)


def _load(max_bytes: int, owner_bytes: int, late_s: float) -> Callable[[Database, float, Callable[[], float]], RunStore]:
    from gateway.features.histories.sizes import StoredSizes
    from gateway.features.runs.stored_runs import RunStore

    def made(database: Database, ttl_s: float, clock: Callable[[], float]) -> RunStore:
        store = RunStore(database, ttl_s, clock, _FORMAT, StoredSizes(max_bytes, owner_bytes))
        store.late_s = late_s
        return store

    return made
