"""Kinds of values in the configuration: types with their bounds, patterns and expected forms, for sections of the core
(`schema.py`) and of features.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, get_args

from msgspec import Meta, Struct

from gateway.config.addresses import dns_name, parse_base_url, shown
from gateway.config.aliases import MAX_NAME_CHARS, alias_name, model_name
from gateway.config.hints import DATABASE, EXPECTED, FALSE, MAX_NUMBER, NAME, READ, UNSHOWN
from gateway.config.listen import OFF

MATCH_ALL = "*"
MAX_PRICE = 1e6  # USD for a million tokens, or for an image
# As `fleet/engines.py` names them; a test compares.
SteeringField = Literal[
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "kv_router_hint",
    "priority",
]
TranslatedApi = Literal["messages", "responses"]
Role = Literal["prefill", "decode"]
ROLES: Final[tuple[str, ...]] = get_args(Role)
BOOTSTRAP_PORT = 8998  # SGLang's default
KeyHeader = Literal["authorization", "x-api-key"]
EngineName = Literal["auto", "vllm", "warmroute", "sglang", "llamacpp", "tgi", "ollama", "distributed-llama"]

DATABASE_URL_PATTERN = r"off|sqlite|sqlite:///[^\s?#]+|postgres(ql)?://[^\s]+"
_PASSWORD = re.compile(r"postgres(ql)?://([^\s/?#]*:[^\s/?#]*@|.*[?&]password=)")
DATABASE_URL = "sqlite, sqlite:///PATH, postgresql://USER@HOST/NAME or off"
URL_PATTERN = r"^https?://(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9_.-]+)(:[1-9][0-9]{0,4})?(/[^?#\s]*)?$"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
NAME_PATTERN = re.compile(r"[!#-&(-~]{0,100}")  # printable ASCII without the space and the two quotes
DATE = "a date such as 2026-10-07, or 2026-10-07T16:00:00Z,"


class ConfigSection(Struct, frozen=True, forbid_unknown_fields=True):
    """A section of the configuration."""


def about(text: str, **extra: Any) -> Meta:
    """A description for editors. extra: see `parse.py`."""
    return Meta(description=text, extra=extra)


def _base_url(url: str) -> str:
    """Normalize a base URL. Raises AddressError."""
    return parse_base_url(url)[0]


def database_url(url: str) -> str:
    """Check a database URL. Raises ValueError, without credentials."""
    if _PASSWORD.match(url):
        raise ValueError("a password does not belong in a URL; set PGPASSWORD, or PGPASSFILE to a file in the form of .pgpass")
    if re.fullmatch(DATABASE_URL_PATTERN, url):
        return url
    written = url.partition(":")[0] if "@" in url or "password" in url.lower() else url
    raise ValueError(f"{DATABASE_URL} is expected, got {shown(written)}")


def unix_time(text: str) -> float:
    """The Unix time of a date, or a date and time; without a time zone it is in UTC. Raises ValueError."""
    begins = datetime.fromisoformat(text)
    return (begins if begins.tzinfo else begins.replace(tzinfo=UTC)).timestamp()


def _variable(name: str) -> str:
    """Check a variable's name. Raises ValueError without the text, which may be the secret itself."""
    if name and not _VARIABLE.fullmatch(name):
        raise ValueError("the name of an environment variable is expected, such as VLLM_API_KEY, not the key itself")
    return name


def _key_file(path: str) -> str:
    """Check the path of a key. Raises ValueError without the text, which may be the secret itself."""
    if not _is_absolute(path):
        raise ValueError("the absolute path of a file is expected, not the key itself")
    return path


def _file(path: str) -> str:
    """Check a path. Raises ValueError."""
    if not _is_absolute(path):
        raise ValueError(f"the absolute path of a file is expected, got {shown(path)}")
    return path


def _is_absolute(path: str) -> bool:
    """True for an absolute path, or none. A relative path would depend on the working directory."""
    return not path or (path.startswith("/") and "\0" not in path)


def _server_name(name: str) -> str:
    """Check a server's name. Raises AddressError."""
    return dns_name(name) if name else ""


def is_name(name: str) -> bool:
    """True if a replica or a pool may have this name."""
    return bool(name and NAME_PATTERN.fullmatch(name))


def _name(name: str) -> str:
    """Check a name. Raises ValueError."""
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(f"1 to 100 printable ASCII characters, no spaces and no quotes, are expected, got {shown(name)}")
    return name


Positive = Annotated[int, Meta(gt=0, le=MAX_NUMBER)]
MAX_WEIGHT = 100
Weight = Annotated[int, Meta(ge=1, le=MAX_WEIGHT)]
MAX_RANKS = 64  # of one server: each is a replica of its own for the router
Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_NUMBER)]
Dollars = Annotated[float, Meta(gt=0, le=MAX_NUMBER)]
Price = Annotated[float, Meta(ge=0, le=MAX_PRICE)]
# Patterns are for editors and the chart, which have no other check.
DatabaseUrl = Annotated[
    str,
    Meta(
        extra={READ: database_url, FALSE: OFF, EXPECTED: DATABASE_URL, DATABASE: True},
        extra_json_schema={"pattern": f"^({DATABASE_URL_PATTERN})$"},
    ),
]
BaseUrl = Annotated[str, Meta(extra={READ: _base_url}, extra_json_schema={"pattern": URL_PATTERN})]
Name = Annotated[str, Meta(extra={READ: _name}, extra_json_schema={"pattern": f"^{NAME_PATTERN.pattern}$"})]
ModelPrefix = Annotated[str, Meta(min_length=1, extra={EXPECTED: f'a model name or its beginning ("{MATCH_ALL}": any model)'})]
ModelAlias = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_NAME_CHARS,
        extra={
            READ: alias_name,
            EXPECTED: f"a name of 1 to {MAX_NAME_CHARS} characters, with a star at its end or none",
            NAME: True,
        },
    ),
]
ModelName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_NAME_CHARS,
        extra={READ: model_name, EXPECTED: f"the name of one model, of 1 to {MAX_NAME_CHARS} characters,", NAME: True},
    ),
]
Port = Annotated[int, Meta(ge=1, le=65535)]
DnsName = Annotated[
    str,
    Meta(
        max_length=253,
        extra={READ: dns_name, EXPECTED: "a DNS name such as vllm.models.svc.cluster.local"},
        extra_json_schema={"pattern": "^[A-Za-z0-9_.-]+$"},
    ),
]
_ABSOLUTE = {"pattern": "^(/.*)?$"}
FilePath = Annotated[
    str, Meta(max_length=1024, extra={READ: _file, EXPECTED: "the absolute path of a file"}, extra_json_schema=_ABSOLUTE)
]
Variable = Annotated[
    str, Meta(extra={READ: _variable, UNSHOWN: True}, extra_json_schema={"pattern": f"^({_VARIABLE.pattern})?$"})
]
KeyFile = Annotated[str, Meta(max_length=1024, extra={READ: _key_file, UNSHOWN: True}, extra_json_schema=_ABSOLUTE)]
ServerName = Annotated[
    str,
    Meta(
        max_length=253, extra={READ: _server_name, EXPECTED: "a DNS name"}, extra_json_schema={"pattern": "^[A-Za-z0-9_.-]*$"}
    ),
]
