"""An issuer of tokens on loopback: a discovery document, its public keys, and signed tokens."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from functools import cache
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

AUDIENCE = "warmroute"


@cache
def private_key(algorithm: str, number: int = 0) -> Any:
    """The same key at each call. RSA takes a tenth of a second."""
    if algorithm.startswith(("RS", "PS")):
        return rsa.generate_private_key(65537, 2048)
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    curves: Mapping[str, ec.EllipticCurve] = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}
    return ec.generate_private_key(curves[algorithm])


def public_jwk(algorithm: str, kid: str, number: int = 0) -> dict[str, Any]:
    """The key in the published form."""
    public = private_key(algorithm, number).public_key()
    if algorithm == "EdDSA":
        made = OKPAlgorithm.to_jwk(public, as_dict=True)
    elif algorithm.startswith("ES"):
        made = ECAlgorithm.to_jwk(public, as_dict=True)
    else:
        made = RSAAlgorithm.to_jwk(public, as_dict=True)
    return {**{name: value for name, value in made.items() if name != "key_ops"}, "kid": kid, "use": "sig"}


def encoded(value: object) -> str:
    """A part of a token."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class FakeIssuer:
    """keys: by kid, (algorithm, number). requests: paths. answers: (status, headers, body) instead of a document, by path.

    hold: set while it answers; if cleared, requests wait.
    """

    def __init__(self) -> None:
        self.url = ""
        self.keys: dict[str, tuple[str, int]] = {"k1": ("RS256", 0)}
        self.requests: list[str] = []
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.discovery: dict[str, Any] = {}
        self.hold = asyncio.Event()
        self.hold.set()

    async def _answer(self, request: web.Request) -> web.Response:
        self.requests.append(request.path)
        await self.hold.wait()
        if request.path in self.answers:
            status, headers, body = self.answers[request.path]
            return web.Response(status=status, headers=headers, body=body)
        if request.path.endswith("/.well-known/openid-configuration"):
            return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys?v=1", **self.discovery})
        return web.json_response(
            {"keys": [public_jwk(algorithm, kid, number) for kid, (algorithm, number) in self.keys.items()]}
        )

    @contextlib.asynccontextmanager
    async def serving(self, tls: ssl.SSLContext | None = None, port: int = 0) -> AsyncIterator[FakeIssuer]:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
            self.url = f"{'https' if tls else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            self.hold.set()
            await runner.cleanup()

    def claims(self, **changed: Any) -> dict[str, Any]:
        """None removes a claim."""
        now = time.time()
        whole = {"iss": self.url, "aud": AUDIENCE, "exp": now + 600, "iat": now, "sub": "u", "tenant": "acme", **changed}
        return {name: value for name, value in whole.items() if value is not None}

    def token(self, kid: str = "k1", *, headers: Mapping[str, Any] | None = None, **changed: Any) -> str:
        """Signed by the key of that name, published or not."""
        algorithm, number = self.keys.get(kid, ("ES256", 99))
        return jwt.encode(self.claims(**changed), private_key(algorithm, number), algorithm, {"kid": kid, **(headers or {})})

    def unsigned(self, **changed: Any) -> str:
        """alg: none."""
        return f"{encoded({'alg': 'none', 'kid': 'k1', 'typ': 'JWT'})}.{encoded(self.claims(**changed))}."

    def signed_by_public_key(self, **changed: Any) -> str:
        """HS256, with the text of the public key for a secret."""
        public = private_key(*self.keys["k1"]).public_key()
        pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        signed = f"{encoded({'alg': 'HS256', 'kid': 'k1', 'typ': 'JWT'})}.{encoded(self.claims(**changed))}"
        return f"{signed}.{encoded(hmac.new(pem, signed.encode(), hashlib.sha256).digest())}"
