"""Serving until a signal: in this process, or by a feature that the configuration turns on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from gateway.cluster.side_sockets import SideSockets
from gateway.commands.ending import ServingEnd, ServingGateway
from gateway.config.schema import Config
from gateway.config.source import ConfigSource
from gateway.features.declaring import imported
from gateway.features.table import FEATURES
from gateway.telemetry.request_log import RequestLog


class StartError(Exception):
    """The processes of a gateway cannot start; the text is the reason."""


@dataclass(frozen=True, slots=True)
class ServeResources:
    """The resources that `warmroute serve` has opened. started: called with the gateway, a list of its replicas' URLs, and its
    own URL, once it answers requests.
    """

    config: Config
    requests: RequestLog
    source: ConfigSource[Config]
    sides: SideSockets
    ending: ServingEnd
    started: Callable[[ServingGateway, Callable[[], list[str]], str], None]


def serving_of(config: Config) -> Callable[[ServeResources], Awaitable[None]]:
    """The function that serves a gateway with this configuration."""
    places = (feature.serving(config) for feature in FEATURES.values())
    serving: Callable[[ServeResources], Awaitable[None]] = next((imported(place) for place in places if place), _serve_alone)
    return serving


async def _serve_alone(what: ServeResources) -> None:
    """Serves in this process."""
    from gateway.app import compose, serve
    from gateway.core import Surroundings

    gateway = compose(what.config, what.requests, Surroundings(source=what.source, lasts=True))
    started = partial(what.started, gateway, gateway.fleet.urls)
    await serve(gateway, what.ending.stop, what.ending.hurry, started, sides=what.sides)
