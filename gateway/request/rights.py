"""Rights of a caller: the base class of a feature's grants."""

from __future__ import annotations

from gateway.dialects.api_request import ApiRequest
from router.native import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Rights:
    """The rights of a caller. id: its name in logs and the ledger. priority: the highest one for its requests. models, pools:
    the allowed ones; empty: all. requests: of a minute; 0: no limit. priced: the price of requests is limited.
    """

    __slots__ = ("id", "models", "pools", "priced", "priority", "requests")

    id: str
    priority: int
    models: tuple[str, ...]
    pools: frozenset[str]
    requests: int
    priced: bool

    def allows(self, model: str) -> bool:
        """True if this model is allowed. "": the request names none."""
        raise NotImplementedError

    def allows_pool(self, pool: str) -> bool:
        raise NotImplementedError

    def require_endpoint(self, path: str, *, listed: bool, metered: bool) -> None:
        """Checks the use of an endpoint. listed: lists of models and limits apply to requests on this path. metered: their
        tokens are counted. Raises GatewayError 403.
        """
        raise NotImplementedError

    def require_model(self, model: str) -> None:
        """Raises GatewayError 403 for a model that is not allowed, even if it does not exist."""
        raise NotImplementedError

    def require_models_of(self, api: ApiRequest) -> None:
        """Raises GatewayError 403 for a request whose model or adapter is not allowed."""
        self.require_model(api.model)
        if api.adapter:
            self.require_model(f"{api.model}:{api.adapter}")

    def require_pool(self, pool: str) -> None:
        """Raises GatewayError 403 for a pool that is not allowed."""
        raise NotImplementedError

    def unrestricted(self) -> Rights:
        """The same caller, with its limits, and with all models and pools: for requests that an operator has defined."""
        raise NotImplementedError
