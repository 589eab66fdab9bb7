"""What a look-up of credentials costs, and whether its time says anything about a key.

    python -m bench.identity [--lookups 20000] [--rounds 9]

Prints two tables: CPU of one look-up, by what is sent (the cases take turns in rounds, and the median counts), with tokens that
are known and tokens that are verified; and of wrong keys, by how many characters of theirs are right. In one process, without
sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from gateway.accounting.meter import Meter
from gateway.config.live import Live
from gateway.config.schema import Config, KeysConfig, OidcConfig, PoolConfig
from gateway.errors import GatewayError
from gateway.features.keys.callers import KeyHolders
from gateway.features.keys.grant import Grant
from gateway.features.keys.keys import Keys
from gateway.features.keys.limiting import Limiting
from gateway.features.keys.secret import digest_of, new_id, new_key
from gateway.features.keys.tokens.jwks import PublicKey, keys_of
from gateway.features.keys.tokens.tokens import Tokens
from gateway.request.client import Caller
from gateway.telemetry.metrics import Metrics

KEYS: Final = 10_000  # that are known
ISSUER: Final = "https://login.example.org"
FEW: Final = 100  # times fewer look-ups verify: they take that much longer

Look = Callable[[int], str]
"""The credentials of the look-up with this number."""


class Asking:
    """What of a request is read. It is its own headers."""

    def __init__(self) -> None:
        self.authorization = ""
        self.headers = self

    def get(self, name: str, /) -> str | None:
        return self.authorization if name == "Authorization" else None

    def caller(self) -> Caller:
        return Caller("", 0, "")


class Signer:
    """Private keys of each algorithm, and tokens that they sign."""

    def __init__(self) -> None:
        self._keys: dict[str, Any] = {
            "RS256": rsa.generate_private_key(65537, 2048),
            "ES256": ec.generate_private_key(ec.SECP256R1()),
            "EdDSA": ed25519.Ed25519PrivateKey.generate(),
        }

    def public(self) -> bytes:
        makers: Mapping[str, Callable[[Any], Any]] = {
            "RS256": RSAAlgorithm.to_jwk,
            "ES256": ECAlgorithm.to_jwk,
            "EdDSA": OKPAlgorithm.to_jwk,
        }
        listed = [{**json.loads(makers[name](key.public_key())), "kid": name} for name, key in self._keys.items()]
        for each in listed:
            each.pop("key_ops", None)
        return json.dumps({"keys": listed}).encode()

    def token(self, algorithm: str, number: int) -> str:
        claims = {"iss": ISSUER, "aud": "a", "exp": time.time() + 3600, "tenant": "acme", "jti": str(number)}
        return jwt.encode(claims, self._keys[algorithm], algorithm, {"kid": algorithm})


async def callers_with(signer: Signer) -> tuple[KeyHolders, str]:
    """And one of the keys."""
    oidc = (OidcConfig(ISSUER, ("a",), "tenant"),)
    config, metrics = Config((PoolConfig(()),), keys=KeysConfig(oidc=oidc)), Metrics()
    keys = Keys(config, metrics, time.time, time.monotonic)

    async def fetch(_issuer: OidcConfig) -> list[PublicKey]:
        return keys_of(signer.public())

    keys.tokens = Tokens(oidc, fetch, time.monotonic, lambda: None)
    await keys.tokens.issuers[0].look_up()
    key = ""
    for _ in range(KEYS):
        id_ = new_id()
        key = new_key(id_)
        keys.ring.put(Grant(id_, "acme"), ((digest_of(key), 0.0),))
    limiting = Limiting(keys, Meter(Live(config), metrics, time.time), metrics)
    return KeyHolders(keys, limiting, metrics), key


def microseconds(callers: KeyHolders, look: Look, lookups: int) -> float:
    """CPU of one."""
    presented = [f"Bearer {look(number)}" for number in range(lookups)]
    asking: Any = Asking()
    begun = time.process_time()
    for each in presented:
        asking.authorization = each
        with contextlib.suppress(GatewayError):
            callers.of(asking)
    return (time.process_time() - begun) / lookups * 1e6


def wrong(key: str, right: int) -> Look:
    """Keys with that many characters of this one at their beginning."""
    return lambda number: f"{key[:right]}{number:0{len(key) - right}d}"


def table(callers: KeyHolders, cases: Mapping[str, tuple[Look, int]], rounds: int) -> None:
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (look, lookups) in cases.items():
            found[name].append(microseconds(callers, look, lookups))
    print("| sent | us, median | least | most |\n|---|--:|--:|--:|")
    for name, values in found.items():
        print(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f} | {max(values):.2f} |")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lookups", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    signer = Signer()
    callers, key = await callers_with(signer)
    many = options.lookups
    known = signer.token("RS256", -1)
    cases: dict[str, tuple[Look, int]] = {
        "a key": (lambda _: key, many),
        "a token that is known": (lambda _: known, many),
    }
    fresh = count()

    def new(algorithm: str) -> Look:
        return lambda _: signer.token(algorithm, next(fresh))

    cases |= {f"a new token, {name}": (new(name), max(1, many // FEW)) for name in ("RS256", "ES256", "EdDSA")}
    table(callers, cases, options.rounds)
    print()
    guesses = {f"a wrong key, {right} of {len(key)} characters right": (wrong(key, right), many) for right in (0, 12, 30, 50)}
    table(callers, guesses, options.rounds)


if __name__ == "__main__":
    asyncio.run(main())
