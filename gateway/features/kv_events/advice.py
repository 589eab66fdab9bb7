"""Checks of the section `kv_events`."""

from __future__ import annotations

from importlib.util import find_spec

from gateway.config.parse import ConfigError
from gateway.config.schema import Config
from gateway.features.declaring import Advice
from gateway.features.kv_events.section import KV_EVENTS


class KvEventsAdvice(Advice):
    """See the module."""

    def require(self, config: Config) -> None:
        if KV_EVENTS.of(config).follow and find_spec("zmq") is None:
            raise ConfigError("kv_events.follow needs pyzmq, which is not installed: pip install 'warmroute[events]'")
