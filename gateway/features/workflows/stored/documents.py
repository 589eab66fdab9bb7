"""The workflows that tenants have stored: read for runs, listed, changed.

A found document is held for HELD_S, so that a busy workflow costs one query a second in each process; a change by this process
is seen at once. Unknown names and names of other owners are one case: the query has the owner in its key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import orjson

from gateway.database.failures import StoreFailed
from gateway.errors import GatewayError
from gateway.features.histories.histories import RETRY_S, full
from gateway.features.histories.lazy import LazyStore
from gateway.features.histories.records import StoreFullError
from gateway.features.workflows.compiler import CACHED_BYTES, WorkflowCompiler
from gateway.features.workflows.directory import TENANT, NamedWorkflow
from gateway.features.workflows.language.workflow import Workflow
from gateway.features.workflows.stored.entries import change_warnings, entry_of, listed
from gateway.features.workflows.stored.records import MAX_NAMES, StoredDocument, TooManyWorkflowsError

if TYPE_CHECKING:
    from gateway.features.workflows.stored.store import DocumentStore

HELD_S: Final = 1.0
MAX_HELD: Final = 256  # documents

Held = tuple[str, str, int | None]  # owner, name, version


class StoredWorkflows:
    """Stored workflows by owner. store: None: nothing is stored here. clock: monotonic seconds. wall_clock: Unix seconds."""

    def __init__(
        self,
        store: LazyStore[Any] | None,
        compiler: WorkflowCompiler,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._lazy = store
        self._compiler = compiler
        self._clock, self._wall_clock = clock, wall_clock
        self._held: OrderedDict[Held, tuple[float, NamedWorkflow]] = OrderedDict()

    @property
    def on(self) -> bool:
        return self._lazy is not None

    async def find(self, owner: str, name: str, version: int | None) -> NamedWorkflow | None:
        """The workflow to run; version None: the latest. Raises GatewayError 503, and DocumentError for a document that this
        release does not accept.
        """
        held = self._held.get((owner, name, version))
        if held is not None and self._clock() < held[0]:
            return held[1]
        now = self._clock()
        found = await self.document(owner, name, version)
        if found is None:
            return None
        named = NamedWorkflow(await self._compiler.document(found.document), TENANT, found.version)
        if len(found.document) <= CACHED_BYTES:
            self._held[owner, name, version] = now + HELD_S, named
            self._held.move_to_end((owner, name, version))
            if len(self._held) > MAX_HELD:
                self._held.popitem(last=False)
        return named

    async def document(self, owner: str, name: str, version: int | None) -> StoredDocument | None:
        """Raises GatewayError 503."""
        async with self._opened() as store:
            return await store.get(owner, name, version)

    async def listed(self, owner: str, charge: Callable[[int], None]) -> list[dict[str, Any]]:
        """Items of GET /v1/workflows. charge: charges bytes of memory. Raises GatewayError 503, and the errors of `charge`."""
        async with self._opened() as store:
            charge(await store.entries_size(owner))
            found = await store.entries(owner)
        return [listed(entry, version) for version, entry in found]

    async def put(self, owner: str, workflow: Workflow) -> dict[str, Any]:
        """Store a document as the latest version of its name. Returns the answer: its version, and warnings.

        Raises GatewayError 400, 413, 503 or 507.
        """
        name, entry = workflow.name, entry_of(workflow)
        self._require_on()
        async with self._opened() as store:
            stored = await store.put(owner, StoredDocument(name, 0, orjson.dumps(workflow.source), entry))
        self._forget(owner, name)
        warnings = [] if stored.equal else change_warnings(stored.before, entry)
        return {"name": name, "version": stored.version, "warnings": warnings}

    async def delete(self, owner: str, name: str) -> bool:
        """Delete all versions of a workflow. False: there are none. Raises GatewayError 400 or 503."""
        self._require_on()
        async with self._opened() as store:
            deleted = await store.delete(owner, name)
        self._forget(owner, name)
        return deleted

    def _forget(self, owner: str, name: str) -> None:
        for key in [key for key in self._held if key[:2] == (owner, name)]:
            del self._held[key]

    def _require_on(self) -> None:
        if self._lazy is None:
            text = "Workflows cannot be stored here (state.url is off); send the document with each run."
            raise GatewayError(400, "state_off", text)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[DocumentStore]:
        """The store; its errors are raised as GatewayError."""
        assert self._lazy is not None
        try:
            histories = await self._lazy.get()
            from gateway.features.workflows.stored.store import DocumentStore

            yield DocumentStore(histories.database, histories.sizes, self._wall_clock)
        except TooManyWorkflowsError:
            text = f"{MAX_NAMES} workflows are stored, which is the maximum. Delete some of them."
            raise GatewayError(413, "too_many_stored", text) from None
        except StoreFullError as failure:
            raise full(failure) from None
        except StoreFailed as failure:
            text = f"Stored workflows cannot be read or written: {failure}. Retry; see the log, and state.url."
            public = "The gateway's store does not answer. Retry."
            raise GatewayError(503, "state_unavailable", text, retry_after_s=RETRY_S, public=public) from None
