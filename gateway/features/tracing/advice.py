"""Problems of tracing: a missing library."""

from __future__ import annotations

from gateway.config.listen import OFF
from gateway.config.parse import ConfigError
from gateway.config.schema import Config
from gateway.features.declaring import Advice
from gateway.features.tracing.section import TRACING


class TracingAdvice(Advice):
    """Advice on the section `tracing`."""

    def require(self, config: Config) -> None:
        """Raises ConfigError."""
        if TRACING.of(config).endpoint != OFF:
            from gateway.features.tracing.otlp import LIBRARY, is_installed

            if not is_installed():
                raise ConfigError(f"tracing.endpoint needs a library that is not installed here: pip install '{LIBRARY}'")
