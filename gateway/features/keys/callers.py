"""Identifies callers by API keys and by tokens of OIDC issuers.

    Authorization: Bearer KEY ─┐
                               ├─ both: the only one of our form ──► sha256 ──► key ──► Caller with the key's tenant
    X-Api-Key: KEY ────────────┘
    a token (JWT) of an issuer in place of a key ──► Caller with the token's tenant (`features/keys/tokens/`)
    no credentials ──► 401, or a caller without a tenant if keys are optional

Clients that are logged in with their vendor send that login beside our key. Two different credentials are refused if both have
the form of ours.

With keys, headers cannot set the tenant. If keys are optional, clients may send any string as a key, because SDKs require one.
Only strings in the form of our keys, or of tokens of our issuers, must then be valid, so that a client notices a revoked key.

All refusals are identical, except to the holder of a key that was valid once. A look-up is one step, by digest.
"""

from __future__ import annotations

from typing import Final

from gateway.errors import GatewayError
from gateway.features.keys.grant import Grant
from gateway.features.keys.keys import Keys
from gateway.features.keys.limit_phases import LimitPhases
from gateway.features.keys.metrics import KeyMetrics
from gateway.features.keys.secret import MAX_CHARS, PREFIX, digest_of
from gateway.features.keys.tokens.tokens import looks_like_a_token
from gateway.features.keys.tokens.verdict import Verdict
from gateway.request.callers import Callers
from gateway.request.client import Caller, ClientRequest, Headers

INVALID: Final = "invalid_api_key"
_BEARER: Final = "bearer"
_SEND: Final = "Send one as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."
NOT_VALID: Final = f"The API key is not valid. {_SEND}"


class KeyHolders(Callers):
    """required: every request needs a key."""

    def __init__(self, keys: Keys, limit_phases: LimitPhases, metrics: KeyMetrics, *, required: bool = True) -> None:
        super().__init__()
        self.looks_up = keys.tokens is not None
        self._keys = keys
        self._limit_phases = limit_phases
        self._metrics = metrics
        self._required = required

    def of(self, request: ClientRequest) -> Caller:
        caller = request.caller()
        if caller.ambiguous:
            raise self._refused("ambiguous", ambiguous())
        credentials = self._credentials(request.headers)
        if credentials:
            grant = self._grant(credentials)
            if grant is not None:
                return caller.holding(grant.tenant, grant.number, grant)
            if self._required or credentials.startswith(PREFIX):
                raise self._refused("unknown", GatewayError(401, INVALID, NOT_VALID))
        elif self._required:
            raise self._refused("missing", GatewayError(401, INVALID, f"An API key is needed. {_SEND}"))
        return caller.holding("", 0, None)

    def named(self, tenant: str, key_id: str) -> Caller:
        keys = self._keys
        if not key_id:
            if self._required:
                raise self._refused("missing", GatewayError(401, INVALID, "The run was begun without an API key."))
            return Caller("", 0, "")
        keys.require_ready()
        grant = keys.ring.grant(key_id)
        if grant is None:  # a token was not stored, and is like a key that was removed
            raise self._refused("unknown", GatewayError(401, INVALID, f"The key {key_id} is not valid any more."))
        grant.require_valid(keys.wall_clock())
        return Caller(grant.tenant, grant.number, "", "", grant)

    async def look_up(self, headers: Headers) -> None:
        tokens = self._keys.tokens
        if tokens is not None:
            for credentials in credentials_of(headers):
                if looks_like_a_token(credentials):
                    await tokens.look_up(credentials)

    def count(self, caller: Caller) -> None:
        if isinstance(caller.grant, Grant):
            self._limit_phases.count(caller.grant)

    def require_welcome(self, caller: Caller) -> None:
        if isinstance(caller.grant, Grant):
            self._limit_phases.require(caller.grant)

    def _grant(self, credentials: str) -> Grant | None:
        """The grant of a key or token; None for an unknown key. Raises GatewayError 401 or 503."""
        keys = self._keys
        tokens = keys.tokens
        if tokens is not None and looks_like_a_token(credentials):
            verdict = tokens.verdict(credentials, keys.wall_clock())
            if verdict is not None and verdict.grant is not None:
                return verdict.grant
            if verdict is not None:
                raise self._refusal_of(verdict)
        keys.require_ready()
        return self._find(keys, credentials)

    def _refusal_of(self, verdict: Verdict) -> GatewayError:
        if verdict.retry_s:
            text = "The gateway cannot read the public keys of the token's issuer. See its log. Retry."
            return self._refused(verdict.reason, GatewayError(503, "issuer_unavailable", text, retry_after_s=verdict.retry_s))
        return self._refused(verdict.reason, GatewayError(401, INVALID, verdict.text or NOT_VALID))

    def _find(self, keys: Keys, credentials: str) -> Grant | None:
        """The grant of a key. Raises GatewayError 401 for a revoked or expired key."""
        if len(credentials) > MAX_CHARS:
            return None
        digest, now = digest_of(credentials), keys.wall_clock()
        grant = keys.ring.find(digest, now)
        if grant is None:
            return None
        try:
            grant.require_valid(now)
        except GatewayError as error:
            raise self._refused("revoked" if grant.revoked else "expired", error) from None
        return grant

    def _credentials(self, headers: Headers) -> str:
        """The credentials in the headers; "" if there are none. Raises GatewayError 400 for two that may be ours."""
        found = credentials_of(headers)
        if len(found) > 1:
            found = [each for each in found if self._may_be_ours(each)] or found[:1]
        if len(found) > 1:
            raise self._refused("ambiguous", ambiguous())
        return found[0] if found else ""

    def _may_be_ours(self, credentials: str) -> bool:
        """True for the form of our keys, for known keys (a keys file may have any), and for tokens of our issuers."""
        keys = self._keys
        if credentials.startswith(PREFIX) or (keys.tokens is not None and keys.tokens.may_be_ours(credentials)):
            return True
        return len(credentials) <= MAX_CHARS and keys.ring.find(digest_of(credentials), keys.wall_clock()) is not None

    def _refused(self, reason: str, error: GatewayError) -> GatewayError:
        self._metrics.refused.add((reason,))
        return error


def credentials_of(headers: Headers) -> list[str]:
    """The credentials in the headers: none, one, or two different ones."""
    authorization, key = headers.get("Authorization"), headers.get("X-Api-Key")
    if authorization is None:
        return [key] if key else []
    scheme, _, credentials = authorization.partition(" ")
    credentials = credentials.strip() if scheme.lower() == _BEARER else authorization
    if key and credentials and key != credentials:
        return [credentials, key]
    return [credentials or key or ""]


def ambiguous() -> GatewayError:
    text = "The request has two different API keys. Send one, in 'Authorization' or in 'x-api-key'."
    return GatewayError(400, "ambiguous_api_key", text)
