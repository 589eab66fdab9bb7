"""The request of a run, with the headers of the client's request that started it."""

from __future__ import annotations

from functools import partial

from gateway.admission.memory import MemoryLease
from gateway.dialects.api_request import ApiRequest
from gateway.features.runs.run import Run
from gateway.features.runs.run_reply import RunReply
from gateway.request.client import ClientRequest, InternalRequest


class RunRequest(InternalRequest):
    """Has the id of the run's object. To be closed."""

    def __init__(self, origin: ClientRequest, run: Run, api: ApiRequest, lease: MemoryLease) -> None:
        super().__init__(origin, run.id, partial(RunReply, run, lease), lease)
        self.any_form = True
        self.run = run
        self._api: ApiRequest | None = api

    @property
    def cancelled(self) -> bool:
        return self.run.stopped

    def parsed(self) -> ApiRequest:
        """The request; may be called once. No reference is kept, because its body is dropped early."""
        api, self._api = self._api, None
        assert api is not None
        return api

    def close(self) -> None:
        """Idempotent."""
        self._api = None
        self.lease.close()

    def __repr__(self) -> str:
        return f"<RunRequest {self.run!r}>"
