"""The `warmroute` command."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gateway import __version__, logs, process, simulate
from gateway.config import DEFAULT_LISTEN, DEFAULT_WORKERS, Config, LimitConfig, Loaded, RoutingConfig, read
from gateway.config_warnings import warnings_of
from gateway.request_log import RequestLog
from gateway.typed import ConfigError
from router import POLICIES

if TYPE_CHECKING:
    from gateway.reload import Source

log = logging.getLogger("warmroute.gateway")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status (0 done, 1 failed, 2 unusable arguments or configuration)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["replica"]:
        # The inference server is a world of its own (torch, transformers), loaded only where it is wanted.
        from replica.cli import main as replica_main

        return replica_main(arguments[1:])
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except ConfigError as error:
        for problem in error.problems:
            print(f"warmroute: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute", description="A prefix-cache-aware load-balancing gateway for LLM replicas.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"warmroute {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the gateway", description=_SERVE, allow_abbrev=False)
    serve.add_argument("--config", metavar="FILE", type=Path, help="YAML configuration (default: $WARMROUTE_CONFIG, or none)")
    serve.add_argument("--replica", metavar="URL", action="append", help="base URL of a replica; repeat for more")
    serve.add_argument("--host", help=f"address to listen on (default: {DEFAULT_LISTEN.rpartition(':')[0]})")
    serve.add_argument(
        "--port", type=int, help=f"port to listen on, 0 for any free one (default: {DEFAULT_LISTEN.rpartition(':')[2]})"
    )
    serve.add_argument("--workers", type=int, metavar="N", help=f"processes that serve together (default: {DEFAULT_WORKERS})")
    serve.add_argument("--policy", choices=list(POLICIES), help=f"routing policy (default: {RoutingConfig().policy})")
    serve.set_defaults(command=_serve)

    commands.add_parser("replica", help="run an inference server: a real engine, or a simulated one (see replica --help)")

    demo = commands.add_parser("demo", help="two real replicas, a gateway, two conversations, a table", allow_abbrev=False)
    demo.add_argument("--once", action="store_true", help="exit after the table: 0 if every later turn hit the cache")
    demo.add_argument("--engine", choices=["transformers", "sim"], default="transformers", help="default: %(default)s")
    demo.set_defaults(command=_demo)

    simulation = commands.add_parser(
        "simulate", help="replay a trace through policies", description=_SIMULATE, allow_abbrev=False
    )
    simulate.add_arguments(simulation)
    simulation.set_defaults(command=simulate.run)

    check = commands.add_parser("check", help="validate a configuration file", description=_CHECK, allow_abbrev=False)
    check.add_argument("file", metavar="FILE", type=Path)
    check.add_argument("--strict", action="store_true", help="exit with 1 if there are warnings")
    check.set_defaults(command=_check)
    return parser


_SERVE = (
    "Run the gateway. Flags win over the environment (WARMROUTE_CONFIG, WARMROUTE_LISTEN, WARMROUTE_ADMIN_KEY), which wins "
    "over the file. A changed file is taken when it is seen, or on SIGHUP; an invalid one changes nothing, and the log says "
    f"why. SIGTERM lets running requests finish for {LimitConfig().drain_timeout_s:g} s (limits.drain_timeout_s); "
    "a second one does not wait."
)

_CHECK = (
    "Validate a configuration file. All errors are told at once, with file and line; the exit status is then 2. What can be"
    " used but hardly be meant (a pattern where a prefix is expected, a price for a model that no pool serves) is a warning."
)

_SIMULATE = (
    "Replay a recorded or made-up workload through the production router on a simulated fleet, and print what users would feel:"
    " token hit ratio, time to first token, end-to-end time (seconds), load skew (the busiest replica's prefill over the mean)."
)


def _serve(options: argparse.Namespace) -> int:
    from gateway.reload import Source
    from gateway.sockets import ListenError
    from gateway.workers.supervisor import StartError

    source = Source(_path_of(options), lambda: _noted(_config_of(options)))
    loaded = _config_of(options)
    config = loaded.config
    requests = logs.configure(config.log_level)
    _noted(loaded)
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


def _noted(loaded: Loaded) -> Config:
    """The configuration; the log tells what in it cannot be meant."""
    for problem in warnings_of(loaded):
        log.warning("the configuration can hardly be meant so", extra={"warning": str(problem)})
    return loaded.config


def _config_of(options: argparse.Namespace) -> Loaded:
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


async def _serve_until_signal(config: Config, requests: RequestLog, source: Source) -> None:
    from gateway.app import compose, serve
    from gateway.replicas import LOGGED
    from gateway.sockets import side_sockets
    from gateway.workers.supervisor import Supervisor

    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, source.asked.set)
    replicas = [replica.url for pool in config.pools for replica in pool.replicas]

    with side_sockets(config) as sides:

        def started(url: str) -> None:
            budget = process.budget_bytes(config) * config.workers
            about = {**logs.first_of("replicas", replicas, LOGGED), "workers": config.workers, "inflight_limit_bytes": budget}
            log.info("listening", extra={"url": url, **sides.urls, **about})

        if config.workers > 1:
            await Supervisor(config, source, sides=sides).run(stop, hurry, started)
        else:
            await serve(compose(config, requests, source=source), stop, hurry, started, sides=sides)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # one that comes now must not end it with another status
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    log.info("stopped")


def _demo(options: argparse.Namespace) -> int:
    from gateway.demo import run

    return run(engine=options.engine, once=options.once)


def _check(options: argparse.Namespace) -> int:
    loaded = read(options.file, {})
    warnings = warnings_of(loaded)
    for problem in warnings:
        print(f"warmroute: warning: {problem}", file=sys.stderr)
    config = loaded.config
    replicas = sum(len(pool.replicas) for pool in config.pools)
    print(f"{options.file}: good: {len(config.pools)} pools, {replicas} replicas, policy {config.routing.policy}")
    return 1 if options.strict and warnings else 0


if __name__ == "__main__":
    sys.exit(main())
