"""Tokens without sockets: bounds, texts of any kind, times; and their configuration."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gateway.commands.surroundings import require_libraries
from gateway.config.json_schema import editor_schema
from gateway.config.parse import ConfigError
from gateway.features.keys.section import OidcConfig
from gateway.features.keys.tokens.fetching import FetchFailed
from gateway.features.keys.tokens.issuer import AGAIN_S, MAX_RETRY_S, Issuer
from gateway.features.keys.tokens.jwks import JwksError, PublicKey, keys_of
from gateway.features.keys.tokens.tokens import TokenClaims, Tokens, unverified_claims
from gateway.features.table import WholeConfig
from tests.gateway.conftest import config_over
from tests.support.issuer import AUDIENCE, FakeIssuer, encoded, public_jwk
from tests.support.paths import ROOT

NOW = 1.8e9
URL = "https://login.example.org"
ASYMMETRIC = {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}


def signer(algorithm: str = "EdDSA") -> FakeIssuer:
    made = FakeIssuer()
    made.url, made.keys = URL, {"k1": (algorithm, 0)}
    return made


def config(**changed: Any) -> OidcConfig:
    return OidcConfig(**{"issuer": URL, "audience": (AUDIENCE,), "tenant_claim": "tenant", **changed})


MAX_GRANTS = 50


async def tokens_with(*listed: dict[str, Any], **changed: Any) -> Tokens:
    """That have read these keys."""

    async def fetch(_config: OidcConfig) -> list[PublicKey]:
        return keys_of(json.dumps({"keys": listed}).encode())

    tokens = Tokens([config(**changed)], fetch, lambda: 1.0, lambda: None, MAX_GRANTS)
    await tokens.issuers[0].look_up()
    return tokens


@given(
    st.text() | st.binary().map(lambda raw: f"eyJ{base64.urlsafe_b64encode(raw).decode()}") | st.from_regex(r"\AeyJ[\w.-]*\Z")
)
def test_any_text_is_read(text: str) -> None:
    named = unverified_claims(text)
    assert named is None or isinstance(named, TokenClaims)


JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3))


@given(JSON | st.dictionaries(st.sampled_from(["alg", "kid", "typ"]), JSON), JSON | st.dictionaries(st.just("iss"), JSON))
def test_any_head_and_claims_are_read(head: object, claims: object) -> None:
    named = unverified_claims(f"{encoded(head)}.{encoded(claims)}.AA")
    if named is not None:
        assert isinstance(head, dict)
        assert isinstance(claims, dict)
        assert named == (claims["iss"], head.get("kid", ""), head["alg"])


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["kty", "n", "e", "x", "y", "crv", "alg", "kid", "use", "key_ops", "d", "k"]),
            st.sampled_from(
                [
                    "RSA",
                    "EC",
                    "OKP",
                    "oct",
                    "P-256",
                    "Ed25519",
                    "RS256",
                    "HS256",
                    "none",
                    "sig",
                    "AQAB",
                    "",
                    7,
                    None,
                    ["verify"],
                ]
            ),
        )
    )
)
def test_any_keys_are_read(listed: list[dict[str, Any]]) -> None:
    good = public_jwk("EdDSA", "good")
    found = keys_of(json.dumps({"keys": [*listed, good]}).encode())
    assert any(key.kid == "good" for key in found)
    assert all(key.algorithms <= ASYMMETRIC for key in found)


@pytest.mark.parametrize(
    "changed",
    [
        {"kty": "oct", "k": "c2VjcmV0"},
        {"use": "enc"},
        {"key_ops": ["encrypt"]},
        {"d": "AAAA"},
        {"alg": "HS256"},
        {"alg": "none"},
        {"n": "A" * 1500},
        {"n": "AQAB"},  # of 17 bits
        {"kid": "k" * 300},
        {"kid": 7},
        {"e": None},
    ],
)
def test_keys_that_are_not_taken(changed: dict[str, Any]) -> None:
    with pytest.raises(JwksError, match="none of its 1 keys"):
        keys_of(json.dumps({"keys": [{**public_jwk("RS256", "k"), **changed}]}).encode())


async def test_a_key_is_used_for_its_own_algorithms_only() -> None:
    tokens = await tokens_with({**public_jwk("RS256", "k1"), "alg": "RS512"}, public_jwk("ES256", "k2"))
    issuer = tokens.issuers[0]
    assert issuer.key("k1", "RS512")
    for kid, algorithm in (("k1", "RS256"), ("k1", "HS512"), ("k1", "none"), ("k2", "RS256"), ("k2", "ES384"), ("", "EdDSA")):
        assert issuer.key(kid, algorithm) is None
    assert issuer.key("", "ES256")  # the only one


async def test_keys_of_one_name_and_tokens_without_a_name() -> None:
    tokens = await tokens_with(public_jwk("ES256", "k"), public_jwk("EdDSA", "k"), public_jwk("ES256", "other", 5))
    issuer = tokens.issuers[0]
    assert issuer.key("k", "EdDSA") is not issuer.key("k", "ES256")
    assert issuer.key("", "ES256") is None  # there are two


async def test_grants_are_kept_until_the_token_expires_and_no_more_than_the_bound() -> None:
    issuer = signer()
    tokens = await tokens_with(public_jwk("EdDSA", "k1"))
    token = issuer.token(exp=NOW + 600, iat=NOW)
    verdict = tokens.verdict(token, NOW)
    assert verdict is not None
    assert verdict.grant is not None
    again = tokens.verdict(token, NOW + 629)
    assert again is not None
    assert again.grant is verdict.grant
    late = tokens.verdict(token, NOW + 630)
    assert late is not None
    assert (late.grant, late.reason, len(tokens)) == (None, "expired", 0)
    for number in range(MAX_GRANTS + 5):
        tokens.verdict(issuer.token(exp=NOW + 600, iat=NOW, jti=str(number)), NOW)
    assert len(tokens) == MAX_GRANTS


async def test_refused_tokens_are_not_kept() -> None:
    issuer, tokens = signer(), await tokens_with(public_jwk("EdDSA", "k1"))
    for token in (issuer.token(exp=1), issuer.token(aud="x"), issuer.unsigned() + "A", issuer.token("k9")):
        verdict = tokens.verdict(token, NOW)
        assert verdict is not None
        assert verdict.grant is None
    assert len(tokens) == 0


async def test_times_of_reading() -> None:
    """One at a time, AGAIN_S apart; after failures ever later; the last good keys stay."""
    now, fails, asked = 0.0, False, 0

    async def fetch(_config: OidcConfig) -> list[PublicKey]:
        nonlocal asked
        asked += 1
        if fails:
            raise FetchFailed("it is down")
        return keys_of(json.dumps({"keys": [public_jwk("EdDSA", "k1")]}).encode())

    failures = list[None]()
    issuer = Issuer(config(), fetch, lambda: now, lambda: failures.append(None), lambda _name: None)
    await asyncio.gather(*(issuer.look_up() for _ in range(100)))
    assert asked == 1
    now = AGAIN_S - 0.1
    await issuer.look_up()
    assert asked == 1
    fails = True
    waits = []
    for _ in range(9):
        now = issuer.next_at
        await issuer.look_up()
        waits.append(issuer.next_at - now)
    assert waits == [1, 2, 4, 8, 16, 32, MAX_RETRY_S, MAX_RETRY_S, MAX_RETRY_S]
    assert (asked, len(failures), issuer.uncertain) == (10, 9, True)
    assert issuer.key("k1", "EdDSA")
    fails, now = False, issuer.next_at
    await issuer.look_up()
    assert not issuer.uncertain


async def test_limits_are_found_by_the_id_of_a_grant() -> None:
    tokens = await tokens_with(public_jwk("EdDSA", "k1"), name="idp", requests_per_minute=7)
    verdict = tokens.verdict(signer().token(exp=NOW + 600, iat=NOW), NOW)
    assert verdict is not None
    assert verdict.grant is not None
    assert tokens.limits_of(verdict.grant.id) is verdict.grant.limits
    assert verdict.grant.limits is not None
    assert verdict.grant.limits.requests == 7
    assert tokens.limits_of("abcdefgh") is None


# -- configuration

GOOD = {"issuer": URL, "audience": "a", "tenant_claim": "tenant"}


def test_names_of_issuers() -> None:
    issuers = config_over(
        "http://127.0.0.1:1", keys={"oidc": [GOOD, {**GOOD, "issuer": "https://[::1]:7/x", "audience": ["a", "b"]}]}
    )
    assert [(each.name, each.audience) for each in issuers.keys.oidc] == [("login.example.org", ("a",)), ("--1", ("a", "b"))]
    assert issuers.keys.on


@pytest.mark.parametrize(
    ("oidc", "expected"),
    [
        ([{**GOOD, "issuer": "http://login.example.org"}], "https URL"),
        ([{**GOOD, "issuer": ""}], "issuer"),
        ([{**GOOD, "issuer": "https://user:secret@h"}], "credentials"),
        ([{**GOOD, "issuer": "https://h/?a=1"}], "issuer"),
        ([{**GOOD, "issuer": "file:///etc/passwd"}], "issuer"),
        ([{**GOOD, "jwks_url": "http://10.0.0.1/keys"}], "https URL"),
        ([{**GOOD, "jwks_url": "https://h/keys?\r\nX: y"}], "https URL"),
        ([{**GOOD, "audience": []}], "audience"),
        ([{**GOOD, "tenant_claim": ""}], "tenant_claim"),
        ([{"issuer": URL, "tenant_claim": "t"}], "audience"),
        ([{**GOOD, "name": "a b"}], "name"),
        ([{**GOOD, "ca_file": "relative.pem"}], "ca_file"),
        ([{**GOOD, "priority": 101}], "priority"),
        ([{**GOOD, "algorithms": ["HS256"]}], "algorithms"),
        ([GOOD, {**GOOD, "issuer": f"{URL}/other"}], "give each issuer its own"),
        ([GOOD, {**GOOD, "name": "x"}], "`audience` takes a list"),
        ([{**GOOD, "name": f"n{number}", "issuer": f"{URL}/{number}"} for number in range(17)], "oidc"),
    ],
)
def test_configurations_that_are_refused(oidc: list[dict[str, Any]], expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_over("http://127.0.0.1:1", keys={"oidc": oidc})
    assert expected in str(refused.value)
    assert "secret" not in str(refused.value)


def test_one_audience_stands_alone_in_the_schema_for_editors() -> None:
    schema = Draft202012Validator(editor_schema(WholeConfig))
    for audience, good in (("a", True), (["a", "b"], True), ([], False), (7, False)):
        raw = {"pools": [{"replicas": ["http://a:1"]}], "keys": {"oidc": [{**GOOD, "audience": audience}]}}
        assert schema.is_valid(raw) is good


def test_without_the_library_the_start_says_what_to_install() -> None:
    code = f"""
import sys
sys.modules["jwt"] = None
from gateway.commands.surroundings import require_libraries
from tests.support.configs import load
require_libraries(load(None, {{"pools": [{{"replicas": ["http://127.0.0.1:1"]}}], "keys": {{"oidc": [{GOOD}]}}}}, env={{}}))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert "keys.oidc needs a library that is not installed here: pip install 'warmroute[auth]'" in done.stderr
    require_libraries(config_over("http://127.0.0.1:1", keys={"oidc": [GOOD]}))


def test_nothing_is_imported_where_there_are_no_issuers() -> None:
    code = "import sys, gateway.app; print([name for name in sys.modules if name.startswith(('jwt', 'cryptography'))])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
