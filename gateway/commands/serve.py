"""`warmroute serve`: runs the gateway, in one process or as a supervisor of workers, until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from gateway.cluster import process
from gateway.commands.advice import warnings_of
from gateway.commands.ending import ServingEnd, ServingGateway
from gateway.config.schema import DEFAULT_LISTEN, DEFAULT_WORKERS, Config, LimitConfig, RoutingConfig
from gateway.config.source import ConfigSource, LoadedConfig, read
from gateway.telemetry import logs
from gateway.telemetry.request_log import RequestLog
from router import POLICIES

log = logging.getLogger("warmroute.gateway")

DESCRIPTION = (
    "Run the gateway. Flags override environment variables (WARMROUTE_CONFIG, WARMROUTE_LISTEN, WARMROUTE_ADMIN_KEY), which "
    "override the file. Passwords of the store in sharing.url are in WARMROUTE_SHARING_PASSWORD and "
    "WARMROUTE_SHARING_SENTINEL_PASSWORD. A changed "
    "file is reloaded within seconds, or on SIGHUP; an invalid one changes nothing and is logged. "
    f"On SIGTERM, new connections are accepted for {LimitConfig().drain_accept_s:g} s more (limits.drain_accept_s; not on "
    f"SIGINT), then running requests have {LimitConfig().drain_timeout_s:g} s to finish (limits.drain_timeout_s); a second "
    "signal ends them at once."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    host, _, port = DEFAULT_LISTEN.rpartition(":")
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML configuration (default: $WARMROUTE_CONFIG, or none)")
    parser.add_argument("--replica", metavar="URL", action="append", help="base URL of a replica; repeat for more")
    parser.add_argument("--host", metavar="ADDRESS", help=f"address to listen on (default: {host})")
    parser.add_argument("--port", type=int, metavar="N", help=f"port to listen on, 0 for any free one (default: {port})")
    parser.add_argument("--workers", type=int, metavar="N", help=f"processes that serve together (default: {DEFAULT_WORKERS})")
    policies = f"routing policy: {', '.join(POLICIES)} (default: {RoutingConfig().policy})"
    parser.add_argument("--policy", metavar="NAME", choices=list(POLICIES), help=policies)


def run(options: argparse.Namespace) -> int:
    """Returns the exit status. Raises ConfigError."""
    from gateway.cluster.side_sockets import ListenError
    from gateway.commands.surroundings import require_libraries
    from gateway.features.workers.supervisor import StartError

    source = ConfigSource(_path_of(options), lambda: _with_warnings(_config_of(options)))
    loaded = _config_of(options)
    config = loaded.config
    require_libraries(config)
    requests = logs.configure(config.log_level, log_format=config.log_format)
    _with_warnings(loaded)
    process.raise_file_limit()
    try:
        if config.workers == 1:
            process.relax_garbage_collection()
        process.run(_serve_until_signal(config, requests, source))
    except OSError as error:
        print(f"warmroute: cannot listen on {config.listen}: {error.strerror or error}", file=sys.stderr)
        return 1
    except (StartError, ListenError) as error:
        print(f"warmroute: {error}", file=sys.stderr)
        return 1
    return 0


def _path_of(options: argparse.Namespace) -> Path | None:
    path: Path | None = options.config
    return path or (Path(os.environ["WARMROUTE_CONFIG"]) if os.environ.get("WARMROUTE_CONFIG") else None)


def _with_warnings(loaded: LoadedConfig) -> Config:
    """The configuration; its warnings are logged."""
    for problem in warnings_of(loaded):
        log.warning("probably a mistake in the configuration", extra={"warning": str(problem)})
    return loaded.config


def _config_of(options: argparse.Namespace) -> LoadedConfig:
    path = _path_of(options)
    overrides: dict[str, Any] = {}
    if options.replica:
        overrides["pools"] = [{"replicas": options.replica}]
    loaded = read(path, overrides)
    config = loaded.config
    host, port = config.address
    if options.host is not None or options.port is not None:
        host, port = options.host or host, port if options.port is None else options.port
        overrides["listen"] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if options.workers is not None:
        overrides["workers"] = options.workers
    if options.policy:
        overrides["routing"] = {**asdict(config.routing), "policy": options.policy}
    return read(path, overrides) if overrides else loaded


async def _serve_until_signal(config: Config, requests: RequestLog, source: ConfigSource[Config]) -> None:
    from gateway.app import compose, serve
    from gateway.cluster.side_sockets import side_sockets
    from gateway.core import Surroundings
    from gateway.features.sharing.single_process import single_process
    from gateway.features.snapshots.keeper import file_of
    from gateway.features.workers.supervisor import Supervisor
    from gateway.fleet.directory import LOGGED
    from router.index import trie

    loop, ending = asyncio.get_running_loop(), ServingEnd()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.on_signal, number)
    loop.add_signal_handler(signal.SIGHUP, source.asked.set)

    with side_sockets(config) as sides:

        def started(serving: ServingGateway, urls: Callable[[], list[str]], url: str) -> None:
            ending.serving = serving
            budget = process.budget_bytes(config) * config.workers
            about = {"workers": config.workers, "inflight_limit_bytes": budget, "compiled": not trie.__file__.endswith(".py")}
            log.info("listening", extra={"url": url, **sides.urls, **logs.first_of("replicas", urls(), LOGGED), **about})

        if config.workers > 1:
            supervisor = Supervisor(config, source, sides=sides, snapshot=file_of(config))
            await supervisor.run(ending.stop, ending.hurry, partial(started, supervisor, supervisor.hub.replica_urls))
        else:
            control_plane = partial(single_process, snapshot=file_of(config))
            gateway = compose(config, requests, Surroundings(source=source, control_plane=control_plane))
            await serve(gateway, ending.stop, ending.hurry, partial(started, gateway, gateway.fleet.urls), sides=sides)
    late = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # must not change the exit status
    signal.pthread_sigmask(signal.SIG_BLOCK, late)
    for number in late:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, late)
    log.info("stopped")
