"""`warmroute serve`: runs the gateway, in one process or as a supervisor of workers, until a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from gateway.cluster import process
from gateway.commands.advice import warnings_of
from gateway.commands.ending import ServingEnd, ServingGateway
from gateway.config.schema import DEFAULT_LISTEN, Config, LimitConfig, RoutingConfig
from gateway.config.sections import processes_of
from gateway.config.source import ConfigSource, LoadedConfig
from gateway.features.table import SECTIONS, read
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
    for section in SECTIONS:
        if section.flag:
            text = f"{section.flag} (default: {section.default})"
            parser.add_argument(f"--{section.name}", type=int, metavar="N", help=text)
    policies = f"routing policy: {', '.join(POLICIES)} (default: {RoutingConfig().policy})"
    parser.add_argument("--policy", metavar="NAME", choices=list(POLICIES), help=policies)


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status. Raises ConfigError."""
    from gateway.commands.surroundings import require_libraries

    source = ConfigSource(_path_of(options), lambda: _with_warnings(_config_of(options)))
    loaded = _config_of(options)
    config = loaded.config
    require_libraries(config)
    if config.tls.on:
        from gateway.cluster.listener_tls import context_of

        context_of(config.tls)
    requests = logs.configure(config.log_level, log_format=config.log_format)
    _with_warnings(loaded)
    return serve_to_its_end(config, requests, source)


def serve_to_its_end(config: Config, requests: RequestLog, source: ConfigSource[Config]) -> int:
    """Serves in this process, or in its workers, until a signal. Returns the exit status; the reason of a failed start goes to
    standard error.
    """
    from gateway.cluster.side_sockets import ListenError
    from gateway.commands.serving import StartError

    process.raise_file_limit()
    try:
        if processes_of(config) == 1:
            process.relax_garbage_collection()
        process.run(serve_until_signal(config, requests, source))
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
    for section in SECTIONS:
        if section.flag and (value := getattr(options, section.name)) is not None:
            overrides[section.name] = value
    if options.policy:
        overrides["routing"] = {**asdict(config.routing), "policy": options.policy}
    return read(path, overrides) if overrides else loaded


async def serve_until_signal(config: Config, requests: RequestLog, source: ConfigSource[Config]) -> None:
    """Serves until a signal has ended it. Raises OSError, StartError or ListenError."""
    from gateway.cluster.side_sockets import side_sockets
    from gateway.commands.serving import ServeResources, serving_of
    from gateway.fleet.directory import LOGGED
    from router.index import trie

    loop, ending = asyncio.get_running_loop(), ServingEnd()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.on_signal, number)
    loop.add_signal_handler(signal.SIGHUP, source.asked.set)

    with side_sockets(config) as sides:

        def started(serving: ServingGateway, urls: Callable[[], list[str]], url: str) -> None:
            ending.serving = serving
            workers, compiled = processes_of(config), not trie.__file__.endswith(".py")
            about = {"workers": workers, "inflight_limit_bytes": process.budget_bytes(config) * workers, "compiled": compiled}
            log.info("listening", extra={"url": url, **sides.urls, **logs.first_of("replicas", urls(), LOGGED), **about})

        await serving_of(config)(ServeResources(config, requests, source, sides, ending, started))
    await loop.shutdown_default_executor()  # the signals are blocked in this thread only
    late = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # signals that must not change the exit status
    signal.pthread_sigmask(signal.SIG_BLOCK, late)
    for number in late:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, late)
    log.info("stopped")
