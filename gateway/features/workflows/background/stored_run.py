"""Background runs as they are stored: values, and their forms as JSON. Without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import orjson
from xxhash import xxh3_128_hexdigest

from gateway.features.workflows.language.compiling import compile_document
from gateway.features.workflows.language.plan import RunAllowance, plan_of
from gateway.features.workflows.running.messages import CallUsage, ModelAnswer, StepFailure
from gateway.features.workflows.running.recorded import RecordedStep
from gateway.features.workflows.running.run_order import RunOrder

QUEUED, RUNNING, FAILED, CANCELLED, DELETED = "queued", "running", "failed", "cancelled", "deleted"
LIVE: Final = (QUEUED, RUNNING)
CALLED, ANSWERED, CONNECTED = "called", "answered", "connected"  # of steps, beside FAILED
EVENTS_SHIFT: Final = 20  # events after an adoption go on at the next multiple of 2 ** 20

_ANY: Final = 1 << 40  # the plan of a stored run was within the bounds of its time

RunKey = tuple[str, str]
"""(owner, id)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A row of the table of runs (`tables.py`). key_id, tenant: of its caller; "": none. result: b"": it has not ended."""

    owner: str
    id: str
    workflow: str
    digest: str
    tenant: str
    key_id: str
    status: str = QUEUED
    created_at: float
    alive_until: float = 0.0
    runner: str = ""
    adoptions: int = 0
    cancelled: int = 0
    sequence: int = 0
    document: bytes
    spec: bytes
    receipt: bytes = b""
    result: bytes = b""

    @property
    def key(self) -> RunKey:
        return self.owner, self.id

    @property
    def size(self) -> int:
        return len(self.document) + len(self.spec)


class IdempotentRequest(NamedTuple):
    """key: the header Idempotency-Key; "": there is none. digest: of the request's body."""

    key: str
    digest: str


def stored_run(key: RunKey, order: RunOrder, created_at: int, caller: tuple[str, str]) -> StoredRun:
    """A queued run. caller: its tenant, and the id of its key."""
    document = orjson.dumps(order.workflow.source)
    spec = {
        "inputs": order.inputs,
        "max_tokens": order.max_tokens,
        "seconds": order.seconds,
        "cost_usd": order.cost_usd,
        "version": order.version,
        "see_replicas": order.see_replicas,
        "defined": order.defined,
        "metadata": order.metadata,
    }
    return StoredRun(
        owner=key[0],
        id=key[1],
        workflow=order.workflow.name,
        digest=xxh3_128_hexdigest(document),
        tenant=caller[0],
        key_id=caller[1],
        created_at=created_at,
        document=document,
        spec=orjson.dumps(spec),
    )


def order_of(run: StoredRun) -> RunOrder:
    """Raises DocumentError if this release does not know the document."""
    workflow, spec = compile_document(orjson.loads(run.document)), orjson.loads(run.spec)
    return RunOrder(workflow, plan_of(workflow, RunAllowance(_ANY, _ANY, spec["max_tokens"], float(_ANY))), **spec)


def unfinished(run: StoredRun, status: str, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A run as JSON, as far as its row has it."""
    spec = orjson.loads(run.spec)
    return {
        "id": run.id,
        "object": "workflow.run",
        "status": status,
        "workflow": run.workflow,
        "version": spec["version"],
        "created_at": int(run.created_at),
        "outputs": {},
        "provisional": [],
        "error": error,
        "usage": orjson.loads(run.receipt) if run.receipt else None,
        "metadata": spec["metadata"],
    }


class StepRow(NamedTuple):
    """A recorded step as a row. usage: b"": none. position: among the records of its run, once it is stored."""

    name: str
    status: str
    result: bytes = b""
    usage: bytes = b""
    position: int = 0

    @property
    def size(self) -> int:
        return len(self.name) + len(self.result) + len(self.usage)


def row_of(step: RecordedStep) -> StepRow:
    outcome = step.outcome
    usage = orjson.dumps(asdict(step.usage)) if step.usage is not None else b""
    if isinstance(outcome, ModelAnswer):
        return StepRow(step.name, ANSWERED, orjson.dumps(asdict(outcome)), usage)
    if isinstance(outcome, StepFailure):
        return StepRow(step.name, FAILED, orjson.dumps(asdict(outcome) | {"repeat": False, "waits": False}), usage)
    return StepRow(step.name, CONNECTED, orjson.dumps(outcome), usage)


def step_of(row: StepRow) -> RecordedStep:
    """row: not of a connector that was called."""
    found = orjson.loads(row.result)
    usage = CallUsage(**orjson.loads(row.usage)) if row.usage else None
    if row.status == ANSWERED:
        return RecordedStep(row.name, ModelAnswer(**found), usage)
    return RecordedStep(row.name, StepFailure(**found) if row.status == FAILED else found, usage)
