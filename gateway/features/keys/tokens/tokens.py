"""Callers with a token (JWT) of an issuer, in place of a key.

    token ── sha256 ──► verdict that is known, until the token expires: one look-up for a request
               └─ else: issuer and key that it names ──► signature, claims (`verifying.py`) ──► grant, kept

A token is verified in the event loop, once in each worker: 0.1 to 0.4 ms. A key that is not known is looked up at its issuer,
and the request waits for that (`look_up`); no other does.

Invariants: MAX_VERDICTS grants are kept, by digests, never tokens; those of an issuer are forgotten when it withdraws a
key. Of a token that is not proven nothing is kept, shown or logged.
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
from gateway.features.keys.tokens.verdict import FORGED, UNDECIDED, Verdict
from gateway.features.keys.tokens.verifying import verdict_of

MAX_VERDICTS: Final = 10_000
_BEGIN: Final = "eyJ"  # of a JSON object in base64
_SHAPE: Final = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+")

Fetch = Callable[[OidcConfig], Awaitable[list[PublicKey]]]


class TokenClaims(NamedTuple):
    """What a token says of itself; nothing is proven yet."""

    issuer: str
    kid: str
    algorithm: str


class Tokens:
    """See the top of this file. fetch: the keys of an issuer. clock: monotonic seconds. failed: counts failures of that."""

    def __init__(
        self, configs: Sequence[OidcConfig], fetch: Fetch, clock: Callable[[], float], failed: Callable[[], None]
    ) -> None:
        self.issuers = [Issuer(config, fetch, clock, failed, self._withdrawn) for config in configs]
        self._by_issuer = {issuer.config.issuer: issuer for issuer in self.issuers}
        self._by_name = {issuer.config.name: issuer for issuer in self.issuers}
        self._known: OrderedDict[bytes, tuple[Grant, str]] = OrderedDict()  # with the names of their issuers

    def __len__(self) -> int:
        return len(self._known)

    def verdict(self, token: str, now: float) -> Verdict | None:
        """now: Unix seconds. None: it is no token of these issuers. O(1) for one that is known."""
        digest = digest_of(token)
        found = self._known.get(digest)
        if found is not None:
            if now < found[0].expires_at:
                self._known.move_to_end(digest)
                return Verdict(found[0])
            del self._known[digest]
        named = named_in(token)
        issuer = self._by_issuer.get(named.issuer) if named is not None else None
        if named is None or issuer is None:
            return None
        key = issuer.key(named.kid, named.algorithm)
        if key is None:
            return Verdict(None, UNDECIDED, retry_s=int(issuer.retry_s) + 1) if issuer.undecided else FORGED
        verdict = verdict_of(token, key, named.algorithm, issuer, now)
        if verdict.grant is not None:
            self._known[digest] = verdict.grant, issuer.config.name
            if len(self._known) > MAX_VERDICTS:
                self._known.popitem(last=False)
        return verdict

    async def look_up(self, token: str) -> None:
        """Wait for the key that this token needs, if it is not known."""
        if digest_of(token) in self._known:
            return
        named = named_in(token)
        issuer = self._by_issuer.get(named.issuer) if named is not None else None
        if named is not None and issuer is not None and issuer.key(named.kid, named.algorithm) is None:
            await issuer.look_up()

    def limits_of(self, id_: str) -> KeyLimits | None:
        """Of a grant's id."""
        issuer = self._by_name.get(id_.partition(":")[0])
        return issuer.limits if issuer is not None else None

    def _withdrawn(self, name: str) -> None:
        """O(tokens)."""
        for digest in [digest for digest, known in self._known.items() if known[1] == name]:
            del self._known[digest]

    async def close(self) -> None:
        for issuer in self.issuers:
            await issuer.close()

    def __repr__(self) -> str:
        return f"<Tokens of {self.issuers!r}, {len(self._known)} known>"


def looks_like_a_token(credentials: str) -> bool:
    """Whether it could be one."""
    return credentials.startswith(_BEGIN) and len(credentials) <= MAX_CHARS


def named_in(token: str) -> TokenClaims | None:
    """None: it is no token. O(characters)."""
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
