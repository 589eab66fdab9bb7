"""Descriptions of store failures for the log, with advice for the operator."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from typing import Final

from gateway.config.schema import TlsConfig
from gateway.errors import ReplicaFailure
from gateway.features.sharing.address import parse_store_url
from gateway.features.sharing.section import SharingConfig
from gateway.upstream.access.credentials import context_of

PASSWORD: Final = "WARMROUTE_SHARING_PASSWORD"
SENTINEL_PASSWORD: Final = "WARMROUTE_SHARING_SENTINEL_PASSWORD"

DENIED: Final = "AuthenticationError"  # a failure class in errors of sentinels

_MAX_CHARS: Final = 300  # characters of the library's text
_SENTINEL_FAILURE: Final = re.compile(r">\)> - (?:\w+:)?(\w+)")  # matches a client and the class of its failure
_TOO_FEW_RIGHTS: Final = "the user lacks a right: docs/scaling.md lists the rights of a gateway"
# Without and with TLS in the URL: a part of the library's text -> advice.
_HINTS: Final[Mapping[bool, Mapping[str, str]]] = {
    False: dict.fromkeys(
        ("reset by peer", "closed by server", "Broken pipe"), "if the server requires TLS, sharing.url must begin with rediss"
    ),
    True: {
        " mismatch": "its certificate is for another host than sharing.url names",
        "CERTIFICATE_VERIFY_FAILED": "sharing.ca_file must contain the authority that issued its certificate",
        **dict.fromkeys(
            ("Timeout connecting", "WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "UNEXPECTED_EOF"),
            "if the server does not speak TLS, sharing.url must begin with redis",
        ),
        "CERTIFICATE_REQUIRED": "it requires a certificate of this gateway: sharing.cert_file",
    },
}


def check_files(sharing: SharingConfig) -> None:
    """Checks the TLS files. Raises OSError with the name of an unusable file."""
    try:
        tls_context(sharing)
    except ReplicaFailure as failure:
        raise OSError(f"sharing: {failure.message}") from failure


def tls_context(sharing: SharingConfig) -> ssl.SSLContext | None:
    """The TLS context of the configured files; None: no files. Raises ReplicaFailure."""
    tls = TlsConfig(ca_file=sharing.ca_file, cert_file=sharing.cert_file, key_file=sharing.key_file)
    return context_of(tls) if tls != TlsConfig() else None


def explained(error: Exception, sharing: SharingConfig, env: Mapping[str, str] = os.environ, *, worked: bool = False) -> str:
    """The failure with advice, without passwords. worked: this URL has worked before."""
    from redis import exceptions

    sentinels = sentinel_failures(error)
    if sentinels is not None:
        return _explain_sentinels(sentinels, parse_store_url(sharing.url).service, env)
    text = f"{type(error).__name__}: {error}"[:_MAX_CHARS]
    hints = {} if worked else _HINTS[parse_store_url(sharing.url).tls]
    hint = next((hint for part, hint in hints.items() if part in text), "")
    cause = error.__cause__ or error
    if isinstance(cause, exceptions.NoPermissionError):
        hint = _TOO_FEW_RIGHTS
    elif isinstance(cause, exceptions.AuthenticationError):
        hint = _explain_refusal(PASSWORD, str(cause), env)
    return f"{text}; {hint}" if hint else text


def sentinel_failures(error: Exception) -> list[str] | None:
    """The class of each sentinel's failure. None: not a failure of sentinels."""
    from redis.asyncio.sentinel import MasterNotFoundError

    return _SENTINEL_FAILURE.findall(str(error)) if isinstance(error, MasterNotFoundError) else None


def _explain_sentinels(failures: list[str], service: str, env: Mapping[str, str]) -> str:
    if not failures:
        return f"no sentinel knows a healthy server named {service!r}, the name in sharing.url"
    text = f"the sentinels in sharing.url do not say where the server is: {', '.join(dict.fromkeys(failures))}"
    return f"{text}; {_explain_refusal(SENTINEL_PASSWORD, '', env)}" if DENIED in failures else text


def _explain_refusal(variable: str, text: str, env: Mapping[str, str]) -> str:
    if "without any password configured" in text:
        return f"{variable} is set, but the server has no password"
    if env.get(variable):
        user = ": does it belong to the user in sharing.url?" if variable == PASSWORD else ""
        return f"the password in {variable} is refused{user}"
    return f"it requires a password: set {variable}"
