"""A run in the background as a request of the gateway: with the headers of the request that has asked for it."""

from __future__ import annotations

from gateway.admission.memory import MemoryLease
from gateway.features.runs.run import Run
from gateway.features.runs.run_reply import RunReply
from gateway.request.client import REQUEST_ID_HEADER, Caller, ClientReply, ClientRequest, Headers


class RunHeaders:
    """Those of the request that has asked for it; the id of the response stands for that of the request."""

    def __init__(self, asked: Headers, id_: str) -> None:
        self._asked = asked
        self._id = id_

    def get(self, name: str, /) -> str | None:
        return self._id if name == REQUEST_ID_HEADER else self._asked.get(name)


class RunRequest(ClientRequest):
    """See the top of this file. `close` it."""

    def __init__(self, asked: ClientRequest, caller: Caller, run: Run, body: bytes, lease: MemoryLease) -> None:
        """asked: the request that has asked for it. lease: of its own, with the body charged."""
        super().__init__("POST", asked.path, asked.target, RunHeaders(asked.headers, run.id), lease)
        self.any_form = True
        self.run = run
        self._caller = caller
        self._lines = asked.upstream_headers()
        self._body = body

    def caller(self) -> Caller:
        return self._caller

    def upstream_headers(self) -> bytes:
        return self._lines

    @property
    def here(self) -> bool:
        return True

    @property
    def complete(self) -> bool:
        return True

    @property
    def cancelled(self) -> bool:
        return self.run.stopped

    def take(self) -> bytes:
        body, self._body = self._body, b""
        return body

    def reply(self, *, keep_alive: bool, patience_s: float) -> ClientReply:
        return RunReply(self.run, self.lease)

    def close(self) -> None:
        """Idempotent."""
        self._body = b""
        self.lease.close()

    def __repr__(self) -> str:
        return f"<RunRequest {self.run!r}>"
