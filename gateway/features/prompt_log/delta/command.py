"""`warmroute sync`: a local gateway in front of another gateway, which keeps logs. Clients change their base URL only."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final, get_args

from gateway.commands.surroundings import notes_of
from gateway.config.kinds import MATCH_ALL
from gateway.config.listen import OFF
from gateway.config.parse import ConfigError, Key, Problem
from gateway.config.schema import Config, LogLevel
from gateway.config.source import ConfigSource
from gateway.features.table import read
from gateway.telemetry import logs

DESCRIPTION: Final = (
    "Run a local gateway whose requests go to another Warmroute gateway that keeps logs (state). Of a conversation that the"
    " other gateway knows, only the new turns are uploaded, and a name for the rest. Clients change their base URL only; their"
    " keys are passed on. No content is stored here. SIGTERM and SIGINT let running requests finish; a second signal ends them."
)
LISTEN: Final = "127.0.0.1:8700"
FIRST_BYTE_S: Final = 3600  # the other gateway has a limit of its own, and sends no pulses to Codex meanwhile
_POOL: Final = "upstream"
_LARGEST_BODY_MB: Final = 1024
_FILES: Final = ("ca_file", "cert_file", "key_file")
_REPLICA: Final[Key] = ("pools", 0, "replicas", 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--upstream", metavar="URL", required=True, help="base URL of the other gateway; /v1 at its end may be left out"
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default=LISTEN, help=f"address to listen on; port 0: any free one (default: {LISTEN})"
    )
    parser.add_argument("--ca-file", metavar="FILE", help="authorities to trust for an https URL (default: the system's)")
    parser.add_argument("--cert-file", metavar="FILE", help="a client certificate for an https URL")
    parser.add_argument("--key-file", metavar="FILE", help="its private key (default: in the certificate's file)")
    parser.add_argument("--log-level", choices=get_args(LogLevel), default="info", help="default: info")


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status. Raises ConfigError."""
    from gateway.commands.serve import serve_to_its_end

    config = config_of(options)
    requests = logs.configure(config.log_level, log_format=config.log_format)
    return serve_to_its_end(config, requests, ConfigSource(None, lambda: config))


def config_of(options: argparse.Namespace) -> Config:
    """The configuration of the gateway. Raises ConfigError that names the flags."""
    files = {name: str(Path(file).absolute()) for name in _FILES if (file := getattr(options, name))}
    replica: dict[str, Any] = {"url": options.upstream, "name": _POOL, **({"tls": files} if files else {})}
    pool = {"name": _POOL, "replicas": [replica], "delta": True, "strip_billing_header": False}
    pool["models"] = [MATCH_ALL]  # the other gateway may know more names than it lists: aliases of models
    values = {
        "listen": options.listen,
        "admin_listen": OFF,
        "log_level": options.log_level,
        "pools": [pool],
        "limits": {"body_mb": _LARGEST_BODY_MB},  # the other gateway has limits of its own, and answers for them
        "timeouts": {"first_byte_s": FIRST_BYTE_S},
        "prompt_log": False,  # the header of clients goes to the other gateway
        "snapshot": {"file": OFF},
        "state": {"url": OFF},
        "workflows": {"enabled": False},
    }
    try:
        loaded = read(None, values, {})
    except ConfigError as error:
        raise ConfigError(*map(_about_flag, error.problems)) from None
    if missing := notes_of(loaded):
        raise ConfigError(*map(_about_flag, missing))
    return loaded.config


def _about_flag(problem: Problem) -> str:
    """A problem with the flag in place of the key."""
    last = problem.key[-1] if problem.key else ""
    flag = "--upstream" if problem.key[: len(_REPLICA)] == _REPLICA else f"--{last}"
    if last in _FILES:
        flag = f"--{str(last).replace('_', '-')}"
    if last == "tls":
        flag = "--ca-file, --cert-file, --key-file"
    return f"{flag}: {problem.text}"
