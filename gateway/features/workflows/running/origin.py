"""The request behind the steps of a background run: its client has left, or was a client of another gateway."""

from __future__ import annotations

from gateway.admission.memory import MemoryLease
from gateway.request.client import Caller, ClientReply, ClientRequest, Headers, InternalRequest


class RunOrigin(InternalRequest):
    """asked: the request that has begun the run; the steps have its headers. lease: of the run."""

    def __init__(self, asked: ClientRequest, id_: str, lease: MemoryLease) -> None:
        super().__init__(asked, id_, _unanswered, lease)
        self._caller = asked.caller()

    def caller(self) -> Caller:
        return self._caller


class AdoptedRunOrigin(ClientRequest):
    """The origin of a run of another gateway: no secret was stored, so its caller is known by name only.

    tenant, key_id: of the caller, "": none.
    """

    def __init__(self, path: str, tenant: str, key_id: str, lease: MemoryLease) -> None:
        super().__init__("POST", path, path, _NoHeaders(), lease)
        self.tenant = tenant
        self.key_id = key_id

    def upstream_headers(self) -> bytes:
        return b""


class _NoHeaders(Headers):
    def get(self, name: str, /) -> str | None:
        return None


def _unanswered() -> ClientReply:
    raise AssertionError("the request of a run has its answer")
