"""What the holder of a key may do. Pure.

A model is allowed by its name, or by a beginning of it that ends with a star. No list at all allows everything. What a client
calls a model by an alias counts as the model that the alias stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

from gateway.errors import GatewayError, first_names
from gateway.features.keys.limits.account import KeyLimits
from gateway.request.rights import Rights

_OF_OPERATORS: Final = frozenset(["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])


def _not_allowed(text: str) -> GatewayError:
    return GatewayError(403, "endpoint_not_allowed", text)


class Grant(Rights):
    """id: of the key, for logs. number: of the caller, the same in all processes, not 0.
    expires_at: Unix seconds, 0: never. revoked: no more requests; those that run finish.
    """

    __slots__ = (
        "_beginnings",
        "_names",
        "expires_at",
        "limits",
        "number",
        "revoked",
        "tenant",
    )

    def __init__(
        self,
        id_: str,
        tenant: str,
        models: Sequence[str] = (),
        pools: Sequence[str] = (),
        *,
        priority: int = 0,
        expires_at: float = 0.0,
        limits: KeyLimits | None = None,
    ) -> None:
        self.id = id_
        self.tenant = tenant
        self.models = tuple(models)
        self.pools = frozenset(pools)
        self.priority = priority
        self.expires_at = expires_at
        self.limits = limits
        self.revoked = False
        self.number = xxh3_64_intdigest(f"{id_}\0{tenant}".encode("utf-8", "surrogatepass")) or 1
        self._names = frozenset([model for model in models if not model.endswith("*")])
        self._beginnings = tuple([model[:-1] for model in models if model.endswith("*")])

    def allows(self, model: str) -> bool:
        """Whether this model may be used. "": the request names none."""
        if not self.models:
            return True
        return bool(model) and (model in self._names or model.startswith(self._beginnings))

    def allows_pool(self, pool: str) -> bool:
        return not self.pools or pool in self.pools

    def require_model(self, model: str) -> None:
        """Raises GatewayError 403, whether there is such a model or not."""
        if self.allows(model):
            return
        may = f"it may use: {first_names(self.models)}"
        if not model:
            text = f"The key {self.id} is for some models only, and the request names none; {may}."
        else:
            text = f"The key {self.id} may not use the model {model[:100]!r}; {may}."
        raise GatewayError(403, "model_not_allowed", text, param="model")

    def require_endpoint(self, path: str, *, known: bool, counted: bool) -> None:
        """known: what is done there is, by the gateway. counted: what is used there is. A key with lists or limits may not do
        what these would not hold for. No key may change what a replica serves. Raises GatewayError 403.
        """
        if path in _OF_OPERATORS:
            raise _not_allowed(f"No API key may use {path}: it is for operators, at the replica itself.")
        limits = self.limits
        if (self.models or self.pools or limits) and not known:
            what = "a list of models or pools, or limits, which would not hold there"
            raise _not_allowed(f"The key {self.id} may not use {path[:100]}: it has {what}.")
        if limits is not None and (limits.tokens or limits.day or limits.month) and not counted:
            what = "a budget or a limit of tokens, and nothing is counted there"
            raise _not_allowed(f"The key {self.id} may not use {path[:100]}: it has {what}.")

    def require_pool(self, pool: str) -> None:
        """Raises GatewayError 403."""
        if not self.allows_pool(pool):
            text = f"The key {self.id} may not use the pool {pool!r}, which serves this model."
            public = f"The key {self.id} may not use the pool that serves this model."
            raise GatewayError(403, "pool_not_allowed", text, param="model", public=public)

    def require_valid(self, now: float) -> None:
        """now: Unix seconds. Raises GatewayError 401, which only the holder of the secret can have."""
        if self.revoked:
            raise GatewayError(401, "invalid_api_key", f"The key {self.id} was revoked.")
        if self.expires_at and now >= self.expires_at:
            raise GatewayError(401, "invalid_api_key", f"The key {self.id} has expired.")

    def __repr__(self) -> str:
        return f"<Grant {self.id} of {self.tenant!r}{', revoked' if self.revoked else ''}>"
