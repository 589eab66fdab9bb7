"""Who sends a request. Without a feature that knows callers: whoever its headers name, with all rights."""

from __future__ import annotations

from gateway.errors import GatewayError
from gateway.request.client import Caller, ClientRequest, Headers
from router.native import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Callers:
    """See the top of this file. looks_up: whether requests have to be given to `look_up` before `of`."""

    def __init__(self) -> None:
        self.looks_up = False

    def of(self, request: ClientRequest) -> Caller:
        """Raises GatewayError 400, 401 or 503."""
        return request.caller()

    def known(self, request: ClientRequest) -> Caller:
        """The same for a request that is refused anyway: one that is nobody's has no tenant."""
        try:
            return self.of(request)
        except GatewayError:
            return Caller("", 0, "")

    async def look_up(self, headers: Headers) -> None:
        """Wait for what `of` needs and this process does not know. It raises nothing."""

    def require_welcome(self, caller: Caller) -> None:
        """Before something is opened, or begun, whose requests come later. Raises GatewayError 429."""
