"""The section `workflows`: who may run which workflow, and the bounds of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from gateway.config.addresses import AddressError, parse_base_url
from gateway.config.hints import EXPECTED, FIXED, READ
from gateway.config.kinds import ConfigSection, Name, Seconds, about
from gateway.config.sections import Section

AUTO: Final = "auto"
GateMode = Literal["auto", "on", "off"] | bool
Count = Annotated[int, Meta(ge=1, le=1 << 31)]
MODEL_PREFIX: Final = "workflow:"  # of a workflow that is requested as a model
_CONNECTOR_URL: Final = "http(s)://HOST[:PORT]/PATH"
_QUERY: Final = re.compile(r"[!-~]{0,1024}")


def _connector_url(url: str) -> str:
    """Raises AddressError."""
    parts = urlsplit(url)
    parse_base_url(f"{parts.scheme}://{parts.netloc}{parts.path}")
    if parts.fragment or not _QUERY.fullmatch(parts.query):
        raise AddressError(f"{_CONNECTOR_URL} is expected, without a fragment")
    return url


def _gate_mode(mode: GateMode) -> GateMode:
    """YAML reads `on` and `off` without quotes as true and false."""
    return {"on": True, "off": False}.get(mode, mode) if isinstance(mode, str) else mode


class ConnectorConfig(ConfigSection, frozen=True):
    """A service that workflows may call beside models: POST with JSON, answered with JSON."""

    url: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=2048,
            extra={READ: _connector_url, EXPECTED: _CONNECTOR_URL},
            extra_json_schema={"pattern": r"^https?://[^\s#]+$"},
        ),
        about("Where it is."),
    ]
    key_env: Annotated[
        str,
        Meta(pattern=r"^([A-Za-z_][A-Za-z0-9_]{0,254})?$"),
        about("The environment variable with its key, sent as a bearer token; empty: it has none."),
    ] = ""
    timeout_s: Annotated[Seconds, about("Seconds until its answer is complete.")] = 10.0
    retries: Annotated[bool, about("It may be called again after a failure: the same Idempotency-Key does no harm.")] = False
    tenants: Annotated[tuple[Name, ...], Meta(max_length=1000), about("Tenants whose workflows may use it; none: all.")] = ()


class WorkflowsConfig(ConfigSection, frozen=True):
    """Workflows: the whole graph of model calls in one request."""

    enabled: Annotated[bool, about("Serve /v1/workflows, and models named workflow:NAME. Off: neither exists.")] = True
    inline: Annotated[bool, about("Run documents and programs in requests. Off: only named workflows.")] = True
    directory: Annotated[
        str, about("A folder with *.yaml and *.py files: named workflows, read at the start and at each reload.")
    ] = ""
    connectors: Annotated[
        Mapping[Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,62}$")], ConnectorConfig],
        Meta(max_length=100),
        about("What workflows may call that is not a model, by name."),
    ] = {}
    gate: Annotated[
        GateMode,
        Meta(extra={READ: _gate_mode, EXPECTED: "auto, on or off"}),
        about(
            "Calls of a run wait for the call that computes their common prefix, until its first token. auto: where an engine"
            " does not share prompts in flight."
        ),
    ] = "auto"
    max_calls: Annotated[Count, about("Calls of models and connectors that a run may have.")] = 256
    max_output_tokens: Annotated[Count, about("Tokens that all calls of a run may generate together.")] = 65_536
    max_tokens: Annotated[Count, about("Tokens that a step may generate if its document has no max_tokens.")] = 1024
    max_s: Annotated[float, Meta(gt=0, le=86_400), about("Seconds that a run may take.")] = 600.0


WORKFLOWS: Final = Section(
    "workflows", Annotated[WorkflowsConfig, Meta(extra={FIXED: ("enabled", "directory")})], WorkflowsConfig()
)
