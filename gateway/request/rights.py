"""What a caller may do, where a feature knows: the base class of its grants."""

from __future__ import annotations

from router.native import mypyc_attr


@mypyc_attr(allow_interpreted_subclasses=True)
class Rights:
    """See the top of this file. id: what logs and the ledger name the caller by. priority: the highest one that its requests
    may have. models, pools: the lists of those that it may use; empty: all.
    """

    __slots__ = ("id", "models", "pools", "priority")

    id: str
    priority: int
    models: tuple[str, ...]
    pools: frozenset[str]

    def allows(self, model: str) -> bool:
        """Whether this model may be used. "": the request names none."""
        raise NotImplementedError

    def allows_pool(self, pool: str) -> bool:
        raise NotImplementedError

    def require_endpoint(self, path: str, *, known: bool, counted: bool) -> None:
        """known: what is done there is, by the gateway. counted: what is used there is. Raises GatewayError 403."""
        raise NotImplementedError

    def require_model(self, model: str) -> None:
        """Raises GatewayError 403, whether there is such a model or not."""
        raise NotImplementedError

    def require_pool(self, pool: str) -> None:
        """Raises GatewayError 403."""
        raise NotImplementedError
