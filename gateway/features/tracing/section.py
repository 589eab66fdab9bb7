"""The section `tracing`: where traces go, and which requests are traced."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from gateway.config.addresses import parse_base_url
from gateway.config.hints import EXPECTED, FALSE, FIXED, READ
from gateway.config.kinds import URL_PATTERN, ConfigSection, about
from gateway.config.listen import OFF
from gateway.config.sections import Section

_TRACES_PATH = "/v1/traces"  # that collectors' documents write, and the gateway adds itself


def _collector(url: str) -> str:
    """Raises AddressError."""
    return url if url == OFF else parse_base_url(url.rstrip("/").removesuffix(_TRACES_PATH))[0]


class TracingConfig(ConfigSection, frozen=True):
    """OpenTelemetry traces. What the collector asks for, such as a key, is in the variables OTEL_EXPORTER_OTLP_*."""

    endpoint: Annotated[
        str,
        Meta(
            max_length=2048,
            extra={READ: _collector, FALSE: OFF, EXPECTED: "the base URL of a collector (OTLP over HTTP), or off"},
            extra_json_schema={"pattern": f"^off$|{URL_PATTERN}"},
        ),
        about("Base URL of a collector for OTLP over HTTP, such as http://otel-collector:4318, or off."),
    ] = OFF
    sample: Annotated[
        float, Meta(ge=0, le=1), about("Share of the requests to trace, of those that belong to no trace yet.")
    ] = 0.01
    follow_parents: Annotated[
        bool,
        about("Requests of a trace (traceparent) are traced if their sender traces them; false: `sample` holds for them, too."),
    ] = True


TRACING: Final = Section(
    "tracing",
    Annotated[
        TracingConfig,
        Meta(
            extra={
                FALSE: {"endpoint": OFF},
                EXPECTED: "a mapping such as {endpoint: http://otel-collector:4318}, or off",
                FIXED: ("endpoint",),
            }
        ),
    ],
    TracingConfig(),
)
