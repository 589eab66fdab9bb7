"""The section `sharing`: the store through which gateways share their prefix indexes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

from msgspec import Meta

from gateway.config.hints import CLASHES, EXPECTED, FALSE, FIXED, READ
from gateway.config.kinds import ConfigSection, FilePath, Name, about
from gateway.config.listen import OFF
from gateway.config.parse import Key, Problem
from gateway.config.sections import Section
from gateway.features.sharing.address import STORE_URL, STORE_URL_PATTERN, store_url


class SharingConfig(ConfigSection, frozen=True):
    """A Valkey or Redis server through which several gateways share their prefix indexes."""

    url: Annotated[
        str,
        Meta(
            max_length=2048,
            extra={READ: store_url, FALSE: OFF, EXPECTED: STORE_URL},
            extra_json_schema={"pattern": f"^({STORE_URL_PATTERN})$"},
        ),
        about(
            "redis://[USER@]HOST[:PORT][/DB], rediss:// over TLS, redis+sentinel://HOST,HOST/SERVICE, redis+cluster://HOST,HOST,"
            " or off. The password is in WARMROUTE_SHARING_PASSWORD."
        ),
    ] = OFF
    cluster: Annotated[
        Name, about("Gateways with the same name here share; others may use the same server, and are apart.")
    ] = "default"
    ca_file: Annotated[FilePath, about("Certificates to trust; empty: the system's.")] = ""
    cert_file: Annotated[FilePath, about("Certificate of this gateway, where the server wants one.")] = ""
    key_file: Annotated[FilePath, about("Its key; empty: it is in cert_file.")] = ""


def _wrong(values: Mapping[Key, Any]) -> Iterator[Problem]:
    """Certificates without TLS: the operator probably expects an encrypted connection."""
    sharing = values.get(("sharing",))
    if not isinstance(sharing, SharingConfig):
        return
    for name in ("ca_file", "cert_file", "key_file"):
        if getattr(sharing, name) and not sharing.url.startswith("rediss"):
            yield Problem(("sharing", name), f"TLS needs a URL that begins with rediss, got {sharing.url}")
    if sharing.key_file and not sharing.cert_file:
        yield Problem(("sharing", "key_file"), "it is the key of a cert_file, which is missing")


SHARING: Final = Section(
    "sharing",
    Annotated[
        SharingConfig,
        Meta(
            extra={
                FALSE: {"url": OFF},
                EXPECTED: "a mapping such as {url: redis://valkey:6379}, or off",
                FIXED: True,
                CLASHES: _wrong,
            }
        ),
    ],
    SharingConfig(),
)
