"""The rights of a key: models, pools, endpoints. Pure.

A list entry allows the model of that name; an entry that ends with a star allows all models whose names begin with it. Without
a list, every model is allowed. An alias is checked under the name of its model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

from gateway.errors import GatewayError, first_names
from gateway.features.keys.limits.account import KeyLimits
from gateway.request.rights import Rights

_OPERATOR_PATHS: Final = frozenset(["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])


def _not_allowed(text: str) -> GatewayError:
    return GatewayError(403, "endpoint_not_allowed", text)


class Grant(Rights):
    """The rights of one key. id: of the key, for logs. number: of the caller, nonzero and equal in all processes. expires_at:
    Unix seconds, 0: never. revoked: new requests are refused; running ones finish.
    """

    __slots__ = (
        "_names",
        "_prefixes",
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
        self.requests = limits.requests if limits is not None else 0
        self.priced = limits is not None and bool(limits.day or limits.month)
        self.revoked = False
        self.number = xxh3_64_intdigest(f"{id_}\0{tenant}".encode("utf-8", "surrogatepass")) or 1
        self._names = frozenset([model for model in models if not model.endswith("*")])
        self._prefixes = tuple([model[:-1] for model in models if model.endswith("*")])

    def allows(self, model: str) -> bool:
        """True if the key may use this model. "": the request names no model."""
        if not self.models:
            return True
        return bool(model) and (model in self._names or model.startswith(self._prefixes))

    def allows_pool(self, pool: str) -> bool:
        return not self.pools or pool in self.pools

    def require_model(self, model: str) -> None:
        """Raises GatewayError 403. The answer is the same for models that do not exist."""
        if self.allows(model):
            return
        allowed = f"it may use: {first_names(self.models)}"
        if not model:
            text = f"The key {self.id} is restricted to some models, and the request names none; {allowed}."
        else:
            text = f"The key {self.id} may not use the model {model[:100]!r}; {allowed}."
        raise GatewayError(403, "model_not_allowed", text, param="model")

    def require_endpoint(self, path: str, *, listed: bool, metered: bool) -> None:
        """Checks the use of an endpoint. listed: lists of models and limits apply to requests on this path. metered: their
        tokens are counted. A key with lists or limits may not use paths to which these do not apply. No key may change the
        models of a replica. Raises GatewayError 403.
        """
        if path in _OPERATOR_PATHS:
            raise _not_allowed(f"No API key may use {path}: only operators may, directly at the replica.")
        limits = self.limits
        if (self.models or self.pools or limits) and not listed:
            reason = "a list of models or pools, or limits, which do not apply to this path"
            raise _not_allowed(f"The key {self.id} may not use {path[:100]}: it has {reason}.")
        if limits is not None and (limits.tokens or limits.day or limits.month) and not metered:
            reason = "a budget or a token limit, and tokens are not counted on this path"
            raise _not_allowed(f"The key {self.id} may not use {path[:100]}: it has {reason}.")

    def require_pool(self, pool: str) -> None:
        """Raises GatewayError 403."""
        if not self.allows_pool(pool):
            text = f"The key {self.id} may not use the pool {pool!r}, which serves this model."
            public = f"The key {self.id} may not use the pool that serves this model."
            raise GatewayError(403, "pool_not_allowed", text, param="model", public=public)

    def unrestricted(self) -> Grant:
        made = Grant(self.id, self.tenant, priority=self.priority, expires_at=self.expires_at, limits=self.limits)
        made.revoked = self.revoked
        return made

    def require_valid(self, now: float) -> None:
        """now: Unix seconds. Raises GatewayError 401. The message is specific, because only the holder of the secret can get
        it.
        """
        if self.revoked:
            raise GatewayError(401, "invalid_api_key", f"The key {self.id} was revoked.")
        if self.expires_at and now >= self.expires_at:
            raise GatewayError(401, "invalid_api_key", f"The key {self.id} has expired.")

    def __repr__(self) -> str:
        return f"<Grant {self.id} of {self.tenant!r}{', revoked' if self.revoked else ''}>"
