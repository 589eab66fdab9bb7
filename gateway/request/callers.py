"""The sender of a request. Without a feature for callers: as its headers name it, with all rights."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from gateway.errors import GatewayError
from gateway.request.client import Caller, ClientRequest, Headers
from router.native import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Callers:
    """Identifies callers (see the module). looks_up: `look_up` must be called before `of`."""

    def __init__(self) -> None:
        self.looks_up = False

    def of(self, request: ClientRequest) -> Caller:
        """The caller of a request. Raises GatewayError 400, 401 or 503."""
        return request.caller()

    def known(self, request: ClientRequest) -> Caller:
        """The caller of a request that is refused anyway; an unknown caller has no tenant."""
        try:
            return self.of(request)
        except GatewayError:
            return Caller("", 0, "")

    def named(self, tenant: str, key_id: str) -> Caller:
        """The caller of a request whose credentials are gone, by the names that were stored; "": none. Raises GatewayError 401
        or 503.
        """
        return Caller(tenant, xxh3_64_intdigest(tenant.encode("utf-8", "surrogatepass")) if tenant else 0, "")

    async def look_up(self, headers: Headers) -> None:
        """Fetch data that `of` needs and this process does not have. Raises nothing."""

    def count(self, caller: Caller) -> None:
        """Count a request that is answered without a lifecycle. Raises GatewayError 429."""

    def require_welcome(self, caller: Caller) -> None:
        """Check a caller before a connection, or work in the background, whose requests follow. Raises GatewayError 429."""
