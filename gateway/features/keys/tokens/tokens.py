"""Authenticates callers by tokens (JWT) of OIDC issuers, in place of keys.

    token ── sha256 ──► cached grant, until the token expires: one look-up per request
               └─ else: issuer and key named by the token ──► signature, claims (`verifying.py`) ──► grant, cached

A token is verified in the event loop, once per worker: 0.1 to 0.4 ms. An unknown key is looked up at its issuer, and only the
requests that need it wait (`look_up`).

Invariants: at most max_grants grants are cached, by digest; tokens are not stored. The grants of an issuer are dropped when
it withdraws a key. An unverified token is never stored, shown or logged.
"""

from __future__ import annotations

import base64
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import orjson

from gateway.features.keys.grant import Grant
from gateway.features.keys.limits.account import KeyLimits
from gateway.features.keys.secret import MAX_CHARS, digest_of
from gateway.features.keys.section import OidcConfig
from gateway.features.keys.tokens.issuer import Issuer
from gateway.features.keys.tokens.jwks import MAX_KID_CHARS, PublicKey
from gateway.features.keys.tokens.verdict import FORGED, ISSUER, Verdict
from gateway.features.keys.tokens.verifying import verdict_of

MAX_GRANTS: Final = 10_000
_PREFIX: Final = "eyJ"  # a JSON object in base64 begins so
_SHAPE: Final = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+")

Fetch = Callable[[OidcConfig], Awaitable[list[PublicKey]]]


class TokenClaims(NamedTuple):
    """Unverified contents of a token."""

    issuer: str
    kid: str
    algorithm: str


class Tokens:
    """The tokens of all issuers. fetch: reads the keys of an issuer. clock: monotonic seconds. failed: called at each failed
    fetch.
    """

    def __init__(
        self,
        configs: Sequence[OidcConfig],
        fetch: Fetch,
        clock: Callable[[], float],
        failed: Callable[[], None],
        max_grants: int = MAX_GRANTS,
    ) -> None:
        self.issuers = [Issuer(config, fetch, clock, failed, self._withdrawn) for config in configs]
        self._by_issuer = {issuer.config.issuer: issuer for issuer in self.issuers}
        self._by_name = {issuer.config.name: issuer for issuer in self.issuers}
        self._max_grants = max_grants
        self._grants: OrderedDict[bytes, tuple[Grant, str]] = OrderedDict()  # by digest: grant and name of the issuer

    def __len__(self) -> int:
        return len(self._grants)

    def verdict(self, token: str, now: float) -> Verdict | None:
        """The verdict on a token. None: it is not a token of these issuers. now: Unix seconds. O(1) for a cached token."""
        digest = digest_of(token)
        found = self._grants.get(digest)
        if found is not None:
            if now < found[0].expires_at:
                self._grants.move_to_end(digest)
                return Verdict(found[0])
            del self._grants[digest]
        token_claims = unverified_claims(token)
        issuer = self._by_issuer.get(token_claims.issuer) if token_claims is not None else None
        if token_claims is None or issuer is None:
            return None
        key = issuer.key(token_claims.kid, token_claims.algorithm)
        if key is None:
            return Verdict(None, ISSUER, retry_s=int(issuer.retry_s) + 1) if issuer.uncertain else FORGED
        verdict = verdict_of(token, key, token_claims.algorithm, issuer, now)
        if verdict.grant is not None:
            self._grants[digest] = verdict.grant, issuer.config.name
            if len(self._grants) > self._max_grants:
                self._grants.popitem(last=False)
        return verdict

    def may_be_ours(self, credentials: str) -> bool:
        """True for a token that names one of these issuers, valid or not. O(characters)."""
        token_claims = unverified_claims(credentials)
        return token_claims is not None and token_claims.issuer in self._by_issuer

    async def look_up(self, token: str) -> None:
        """Waits for the key of this token if the key is unknown."""
        if digest_of(token) in self._grants:
            return
        token_claims = unverified_claims(token)
        issuer = self._by_issuer.get(token_claims.issuer) if token_claims is not None else None
        if token_claims is not None and issuer is not None and issuer.key(token_claims.kid, token_claims.algorithm) is None:
            await issuer.look_up()

    def limits_of(self, id_: str) -> KeyLimits | None:
        """The limits of a grant's id."""
        issuer = self._by_name.get(id_.partition(":")[0])
        return issuer.limits if issuer is not None else None

    def _withdrawn(self, name: str) -> None:
        """Drops all grants of the issuer. O(tokens)."""
        for digest in [digest for digest, known in self._grants.items() if known[1] == name]:
            del self._grants[digest]

    async def close(self) -> None:
        for issuer in self.issuers:
            await issuer.close()

    def __repr__(self) -> str:
        return f"<Tokens of {self.issuers!r}, {len(self._grants)} cached>"


def looks_like_a_token(credentials: str) -> bool:
    """True if the credentials have the form of a token."""
    return credentials.startswith(_PREFIX) and len(credentials) <= MAX_CHARS


def unverified_claims(token: str) -> TokenClaims | None:
    """Parses a token. None: it is not a token. O(characters)."""
    match = _SHAPE.fullmatch(token) if looks_like_a_token(token) else None
    if match is None:
        return None
    try:
        header, claims = orjson.loads(_decoded(match[1])), orjson.loads(_decoded(match[2]))
    except ValueError:
        return None
    if not isinstance(header, dict) or not isinstance(claims, dict):
        return None
    issuer, kid, algorithm = claims.get("iss"), header.get("kid", ""), header.get("alg")
    if not isinstance(issuer, str) or not isinstance(kid, str) or not isinstance(algorithm, str) or len(kid) > MAX_KID_CHARS:
        return None
    return TokenClaims(issuer, kid, algorithm)


def _decoded(part: str) -> bytes:
    """Raises ValueError."""
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
