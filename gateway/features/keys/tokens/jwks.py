"""The public keys of an issuer, from its document (a JSON Web Key Set, RFC 7517). Not compiled: PyJWT's types.

Only asymmetric keys are taken, each with the algorithms that it may be used with. So the algorithm that a token names is never
one with a secret, which a public key could be mistaken for, and "none" is no key's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

MAX_KEYS: Final = 100  # of an issuer; further ones are left out
MAX_KID_CHARS: Final = 256
_RSA: Final = frozenset(["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"])
_BY_CURVE: Final = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512", "Ed25519": "EdDSA"}
_RSA_BITS: Final = range(2048, 8193)
_MAX_NUMBER_CHARS: Final = 1400  # of a number of 8,192 bits in base64; a longer one takes long to read
ALGORITHMS: Final = frozenset([*_RSA, *_BY_CURVE.values()])


LIBRARY: Final = "warmroute[auth]"


def is_installed() -> bool:
    """Whether the library is here, and the one that it has its algorithms from."""
    try:
        import cryptography
        import jwt  # noqa: F401
    except ImportError:
        return False
    return bool(cryptography.__version__)


class JwksError(ValueError):
    """The document is none; its text says why."""


class PublicKey:
    """kid: its name, "" without one. algorithms: that it may be used with. key: as the library takes it. known_as: equal for
    equal keys.
    """

    __slots__ = ("algorithms", "key", "kid", "known_as")

    def __init__(self, kid: str, algorithms: frozenset[str], key: Any, known_as: bytes) -> None:
        self.kid = kid
        self.algorithms = algorithms
        self.key = key
        self.known_as = known_as

    def __repr__(self) -> str:
        return f"<PublicKey {self.kid!r} for {', '.join(sorted(self.algorithms))}>"


def keys_of(document: bytes) -> list[PublicKey]:
    """Those that can be used, MAX_KEYS at most. It takes a tenth of a millisecond for each, and the first time loads the
    library: not for the event loop. Raises JwksError if there is none.
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
    """Raises JwksError if it is no JSON object."""
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
            continue  # as one of a kind that is not known: the others are good
        if each["kty"] != "RSA" or key.key_size in _RSA_BITS:
            yield PublicKey(kid, algorithms, key, orjson.dumps(each, option=orjson.OPT_SORT_KEYS))


def _algorithms(each: Mapping[str, Any]) -> frozenset[str]:
    """Those that this key may be used with; none if it is for something else."""
    kid, kind, numbers = each.get("kid", ""), each.get("kty"), [each.get(name, "") for name in ("n", "e", "x", "y")]
    if not isinstance(kid, str) or len(kid) > MAX_KID_CHARS or "d" in each:  # a private key that is public is nobody's
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
