"""The section `keys`: who may use the API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

from msgspec import Meta
from msgspec.structs import force_setattr

from gateway.config.addresses import shown
from gateway.config.checks import repeated
from gateway.config.hints import ALONE, CLASHES, DATABASE, EXPECTED, FALSE, FIXED, NAME, READ
from gateway.config.kinds import (
    DATABASE_URL,
    DATABASE_URL_PATTERN,
    URL_PATTERN,
    ConfigSection,
    Dollars,
    FilePath,
    Positive,
    about,
    database_url,
)
from gateway.config.listen import OFF
from gateway.config.parse import Key, Problem, key_name
from gateway.config.sections import Section
from gateway.features.keys.urls import ISSUER_URL, host_name, issuer_url, jwks_url

MAX_GRANTED = 100  # models, or pools, that a key names
MAX_ISSUERS = 16  # of tokens: each has its keys read by each worker
MAX_AUDIENCES = 16
LEDGER = "ledger"  # of `keys.url`

_KEYS_URL_PATTERN = rf"ledger|/[^\0]+|{DATABASE_URL_PATTERN}"
_KEYS_URL = "ledger, sqlite, sqlite:///PATH, postgresql://USER@HOST/NAME, the absolute path of a YAML file or off"


def _keys_url(url: str) -> str:
    """Raises ValueError, without credentials."""
    if url == LEDGER or (url.startswith("/") and "\0" not in url and len(url) > 1):
        return url
    try:
        return database_url(url)
    except ValueError as error:
        raise ValueError(str(error).replace(DATABASE_URL, _KEYS_URL)) from None


def _granted(text: str) -> str:
    """Raises ValueError."""
    if "*" in text[:-1]:
        raise ValueError(f"a name, or the beginning of names with a star at its end, is expected, got {shown(text)}")
    return text


Granted = Annotated[str, Meta(min_length=1, max_length=256, extra={READ: _granted})]
GrantedPool = Annotated[str, Meta(min_length=1, max_length=256)]  # a pool of all models is called * itself
ClaimText = Annotated[str, Meta(min_length=1, max_length=256, extra={NAME: True})]
IssuerName = Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{0,64}$", extra={NAME: True})]
IssuerUrl = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=1024,
        extra={READ: issuer_url, EXPECTED: ISSUER_URL},
        extra_json_schema={"pattern": URL_PATTERN},
    ),
]
JwksUrl = Annotated[
    str,
    Meta(
        max_length=2048, extra={READ: jwks_url, EXPECTED: ISSUER_URL}, extra_json_schema={"pattern": r"^$|^https?://[^\s#]+$"}
    ),
]


class OidcConfig(ConfigSection, frozen=True):
    """Callers with a JWT of an issuer (OpenID Connect), in place of a key. The limits apply to each of its tenants."""

    issuer: Annotated[IssuerUrl, about("Its URL, as in the claim `iss` of its tokens: https, or http on this machine.")]
    audience: Annotated[
        tuple[ClaimText, ...],
        Meta(min_length=1, max_length=MAX_AUDIENCES, extra={ALONE: True}),
        about("What the claim `aud` has to be, or to contain; of several, one of them."),
    ]
    tenant_claim: Annotated[
        ClaimText, about("The claim that names the tenant; a path such as /kubernetes.io/namespace goes into objects.")
    ]
    name: Annotated[
        IssuerName, about("Its name in logs and lists, where a caller is NAME:TENANT; empty: the host of its URL.")
    ] = ""
    jwks_url: Annotated[JwksUrl, about("Where its public keys are; empty: as its discovery document says.")] = ""
    ca_file: Annotated[FilePath, about("Certificates of the authorities to trust; empty: the system's.")] = ""
    tenants: Annotated[
        tuple[Granted, ...],
        Meta(max_length=MAX_GRANTED),
        about("Tenants that it may name, or beginnings of them that end with a star; none: all."),
    ] = ()
    models: Annotated[
        tuple[Granted, ...], Meta(max_length=MAX_GRANTED), about("Models that its callers may use, likewise; none: all.")
    ] = ()
    pools: Annotated[
        tuple[GrantedPool, ...], Meta(max_length=MAX_GRANTED), about("Pools that its callers may use; none: all.")
    ] = ()
    budget_usd_day: Annotated[Dollars | None, about("USD for each tenant and day (UTC); null: no limit.")] = None
    budget_usd_month: Annotated[Dollars | None, about("USD for each tenant and month (UTC); null: no limit.")] = None
    requests_per_minute: Annotated[Positive | None, about("Of each tenant; null: no limit.")] = None
    uncached_tokens_per_minute: Annotated[
        Positive | None, about("Prompt tokens that replicas have to compute, of each tenant; null: no limit.")
    ] = None
    priority: Annotated[
        int, Meta(ge=-100, le=100), about("Of its callers in the queue, and the most that they may ask for.")
    ] = 0

    def __post_init__(self) -> None:
        if not self.name:
            force_setattr(self, "name", host_name(self.issuer))


class KeysConfig(ConfigSection, frozen=True):
    """Who may use the API: keys, each of a tenant."""

    url: Annotated[
        str,
        Meta(
            extra={READ: _keys_url, FALSE: OFF, EXPECTED: _KEYS_URL, DATABASE: True},
            extra_json_schema={"pattern": f"^({_KEYS_URL_PATTERN})$"},
        ),
        about(
            "ledger (the database of `ledger.url`), sqlite (a file in the user's state folder), sqlite:///PATH,"
            " postgresql://USER@HOST/NAME, the absolute path of a YAML file with digests of keys, or off: there are no keys."
        ),
    ] = OFF
    required: Annotated[
        bool, about("Requests without a valid key are refused; false: those without one are served, as of no tenant.")
    ] = True
    oidc: Annotated[
        tuple[OidcConfig, ...],
        Meta(max_length=MAX_ISSUERS),
        about("Issuers whose tokens are taken as well; with or without keys."),
    ] = ()

    @property
    def on(self) -> bool:
        return self.url != OFF or bool(self.oidc)


def _wrong(values: Mapping[Key, Any]) -> Iterator[Problem]:
    if values.get(("keys", "url")) == LEDGER and values.get(("ledger", "url"), OFF) == OFF:
        yield Problem(("keys", "url"), "there is no ledger to keep them in: set ledger.url, or name a database of their own")
    issuers = {key: value for key, value in values.items() if isinstance(value, OidcConfig)}
    for key, first in repeated((key, issuer.name) for key, issuer in issuers.items()):
        text = f"the name {issuers[key].name!r} is that of {key_name(first)} already; give each issuer its own `name`"
        yield Problem((*key, "name"), text)
    for key, first in repeated((key, issuer.issuer) for key, issuer in issuers.items()):
        yield Problem((*key, "issuer"), f"it is that of {key_name(first)} already: `audience` takes a list")


KEYS: Final = Section(
    "keys",
    Annotated[
        KeysConfig,
        Meta(
            extra={
                FALSE: {"url": OFF},
                EXPECTED: "a mapping such as {url: sqlite}, or off for none,",
                FIXED: True,
                CLASHES: _wrong,
            }
        ),
    ],
    KeysConfig(),
)
