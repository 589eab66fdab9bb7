"""Parses the public keys of an issuer (a JSON Web Key Set, RFC 7517). Not compiled, because of PyJWT's types.

Only asymmetric keys are accepted, each for certain algorithms. So a token cannot select an algorithm with a shared secret, with
a public key as the secret, and no key accepts "none".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

MAX_KEYS: Final = 100  # per issuer; further keys are ignored
MAX_KID_CHARS: Final = 256
_RSA: Final = frozenset(["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"])
_BY_CURVE: Final = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512", "Ed25519": "EdDSA"}
_RSA_BITS: Final = range(2048, 8193)
_MAX_NUMBER_CHARS: Final = 1400  # enough for 8,192 bits in base64; longer numbers are slow to parse

LIBRARY: Final = "warmroute[auth]"


def is_installed() -> bool:
    """True if PyJWT and cryptography can be imported."""
    try:
        import cryptography
        import jwt  # noqa: F401
    except ImportError:
        return False
    return bool(cryptography.__version__)


class JwksError(ValueError):
    """The document is not a key set. The message says why."""


class PublicKey:
    """A public key. kid: its id, "" if it has none. algorithms: permitted algorithms. key: PyJWT's object. fingerprint: equal
    for equal keys.
    """

    __slots__ = ("algorithms", "fingerprint", "key", "kid")

    def __init__(self, kid: str, algorithms: frozenset[str], key: Any, fingerprint: bytes) -> None:
        self.kid = kid
        self.algorithms = algorithms
        self.key = key
        self.fingerprint = fingerprint

    def __repr__(self) -> str:
        return f"<PublicKey {self.kid!r} for {', '.join(sorted(self.algorithms))}>"


def keys_of(document: bytes) -> list[PublicKey]:
    """The usable keys of a key set, at most MAX_KEYS. Not for the event loop: it takes 0.1 ms per key, and first imports the
    library. Raises JwksError if there is no usable key.
    """
    listed = parsed(document).get("keys")
    if not isinstance(listed, list):
        raise JwksError("it has no list of keys")
    found = list(_usable(listed[:MAX_KEYS]))
    if not found:
        kinds = "RSA of 2,048 to 8,192 bits, P-256, P-384, P-521 or Ed25519"
        raise JwksError(f"none of its {len(listed)} keys is a public key for signatures ({kinds})")
    return found


def parsed(document: bytes) -> dict[str, Any]:
    """The document as a JSON object. Raises JwksError."""
    try:
        value = orjson.loads(document)
    except orjson.JSONDecodeError as error:
        raise JwksError("it is not JSON") from error
    if not isinstance(value, dict):
        raise JwksError("it is no JSON object")
    return value


def _usable(listed: list[Any]) -> Iterator[PublicKey]:
    from jwt import PyJWK, PyJWTError

    for each in listed:
        if not isinstance(each, dict) or not (algorithms := _algorithms(each)):
            continue
        kid = each.get("kid", "")
        try:
            key = PyJWK(each, next(iter(algorithms))).key
        except (PyJWTError, ValueError, TypeError, KeyError, OverflowError):
            continue  # skip a defective key like a key of an unknown type
        if each["kty"] != "RSA" or key.key_size in _RSA_BITS:
            yield PublicKey(kid, algorithms, key, orjson.dumps(each, option=orjson.OPT_SORT_KEYS))


def _algorithms(each: Mapping[str, Any]) -> frozenset[str]:
    """The permitted algorithms of a key; none if it is not a signature key."""
    kid, kind, numbers = each.get("kid", ""), each.get("kty"), [each.get(name, "") for name in ("n", "e", "x", "y")]
    if not isinstance(kid, str) or len(kid) > MAX_KID_CHARS or "d" in each:  # "d": a published private key is worthless
        return frozenset()
    if any(not isinstance(number, str) or len(number) > _MAX_NUMBER_CHARS for number in numbers):
        return frozenset()
    uses = each.get("key_ops", ["verify"])
    if each.get("use", "sig") != "sig" or not isinstance(uses, list) or "verify" not in uses:
        return frozenset()
    if kind == "RSA":
        able = _RSA
    else:
        curve = each.get("crv")
        fits = kind == ("OKP" if curve == "Ed25519" else "EC")
        able = frozenset([_BY_CURVE[curve]]) if fits and isinstance(curve, str) and curve in _BY_CURVE else frozenset()
    return able & {each["alg"]} if isinstance(each.get("alg"), str) else able
