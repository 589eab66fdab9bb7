"""Whether a token is good, and what it grants. Pure, but for the library. Not compiled: PyJWT's types.

Checked, in this order: the signature, by the key and with an algorithm of that key; `iss`, `aud`; `exp`, which must be there,
`nbf` and `iat`, with LEEWAY_S; then the tenant. A tenant's name is taken as it is or not at all: one that was made to fit could
be another's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.features.keys.grant import Grant
from gateway.features.keys.record import is_tenant
from gateway.features.keys.section import OidcConfig
from gateway.features.keys.tokens.issuer import Issuer
from gateway.features.keys.tokens.jwks import PublicKey
from gateway.features.keys.tokens.verdict import EXPIRED, FORGED, UNFIT, Verdict

LEEWAY_S: Final = 30.0  # by which clocks may differ
_FAR: Final = 1e12  # Unix seconds; neither infinite nor NaN is less
_OPTIONS: Final = {
    "require": ["iss", "aud", "exp"],
    "verify_exp": False,  # times are checked here, against the gateway's clock
    "verify_nbf": False,
    "verify_iat": False,
    "verify_sub": False,
    "verify_jti": False,
}


def verdict_of(token: str, key: PublicKey, algorithm: str, issuer: Issuer, now: float) -> Verdict:
    """now: Unix seconds. It takes 0.1 to 0.4 ms, by the algorithm."""
    import jwt

    config = issuer.config
    try:
        claims = jwt.decode(
            token,
            key.key,
            algorithms=[algorithm] if algorithm in key.algorithms else [],
            audience=list(config.audience),
            issuer=config.issuer,
            options=_OPTIONS,  # type: ignore[arg-type]  # PyJWT's TypedDict
        )
    except (jwt.InvalidAudienceError, jwt.InvalidIssuerError, jwt.MissingRequiredClaimError):
        return Verdict(None, UNFIT, "The token is good, but not for here: its claims aud, iss and exp have to fit (keys.oidc).")
    except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
        return FORGED
    return _timely(claims, now) or _granted(claims, config, issuer)


def _timely(claims: Mapping[str, Any], now: float) -> Verdict | None:
    """What is wrong with its times. None: nothing."""
    times = {name: claims[name] for name in ("exp", "nbf", "iat") if name in claims}
    if not all(type(value) in (int, float) and abs(value) < _FAR for value in times.values()):
        return Verdict(None, UNFIT, "The token's claims exp, nbf and iat have to be numbers.")
    if now >= times["exp"] + LEEWAY_S:
        return Verdict(None, EXPIRED, "The token has expired.")
    if now < max(times.get("nbf", 0), times.get("iat", 0)) - LEEWAY_S:
        return Verdict(None, UNFIT, "The token is not valid yet.")
    return None


def _granted(claims: Mapping[str, Any], config: OidcConfig, issuer: Issuer) -> Verdict:
    tenant = _claim(claims, config.tenant_claim)
    if not isinstance(tenant, str) or not is_tenant(tenant):
        which = f"claim {config.tenant_claim!r}"
        text = f"The token's {which} has to name a tenant: 1 to 64 printable ASCII characters without quotes, not 'none'."
        return Verdict(None, UNFIT, text)
    if config.tenants and not Grant("", "", config.tenants).allows(tenant):
        return Verdict(None, UNFIT, f"This gateway takes no tokens of the tenant {tenant!r} from this issuer.")
    grant = Grant(
        f"{config.name}:{tenant}",
        tenant,
        config.models,
        config.pools,
        priority=config.priority,
        expires_at=claims["exp"] + LEEWAY_S,
        limits=issuer.limits,
    )
    return Verdict(grant)


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """name: of a claim; with a slash at its beginning a JSON pointer (RFC 6901). None: it is not there."""
    if not name.startswith("/"):
        return claims.get(name)
    value: Any = claims
    for part in name[1:].split("/"):
        value = value.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
    return value
