"""The section `workflows`: bounds of a run."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from gateway.config.kinds import ConfigSection, about
from gateway.config.sections import Section

Count = Annotated[int, Meta(ge=1, le=1 << 31)]


class WorkflowsConfig(ConfigSection, frozen=True):
    """Bounds of a run, for `warmroute workflow check`."""

    max_calls: Annotated[Count, about("Calls of models and connectors that a run may have.")] = 256
    max_output_tokens: Annotated[Count, about("Tokens that all calls of a run may generate together.")] = 65_536
    max_tokens: Annotated[Count, about("Tokens that a step may generate if its document has no max_tokens.")] = 1024
    max_s: Annotated[float, Meta(gt=0, le=86_400), about("Seconds that a run may take.")] = 600.0


WORKFLOWS: Final = Section("workflows", WorkflowsConfig, WorkflowsConfig())
