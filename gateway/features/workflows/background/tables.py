"""The tables of background runs, in the schema of stored responses."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Index, Table

from gateway.database.columns import blobs, floats, integers, keys, small_integers, texts
from gateway.features.histories.tables import schema

# status: queued and running: runner has the run until alive_until; else it has ended, and is kept until expires_at. deleted:
# the row stays for a while, so that a repeated DELETE gets the same answer. adoptions: gateways that went on with it after its
# runner had stopped. cancelled: its client has asked for the end. sequence: number of its next event at the last write.
# digest: of the document. spec: bounds and inputs, JSON. receipt: usage so far, JSON. result: the run as JSON, once it has
# ended. size: bytes of the row and its steps, as counted for the owner.
workflow_runs: Final = Table(
    "warmroute_workflow_runs",
    schema,
    *keys("owner", "id"),
    *texts("workflow", "digest", "tenant", "key_id", "runner", "status"),
    *floats("created_at", "alive_until", "expires_at"),
    *small_integers("adoptions", "cancelled"),
    *integers("sequence", "size"),
    *blobs("document", "spec", "receipt", "result"),
    Index("warmroute_workflow_runs_by_runner", "runner", "status"),
    Index("warmroute_workflow_runs_by_life", "status", "alive_until"),
    Index("warmroute_workflow_runs_by_expiry", "expires_at"),
)

# position: order of the records of a run. status: called: a connector, which has not answered so far; answered, failed.
workflow_steps: Final = Table(
    "warmroute_workflow_steps",
    schema,
    *keys("owner", "run", "step"),
    *small_integers("position"),
    *texts("status"),
    *blobs("result", "usage"),
)

# digest: of the body of the request with this Idempotency-Key.
workflow_keys: Final = Table(
    "warmroute_workflow_keys",
    schema,
    *keys("owner", "key"),
    *texts("run", "digest"),
    *floats("expires_at"),
    Index("warmroute_workflow_keys_by_expiry", "expires_at"),
)
