"""The `warmroute` command: its subcommands, and the exit status of all of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from gateway import __version__
from gateway.commands import check, operate, serve, simulate
from gateway.commands.replaying import convert
from gateway.commands.streams import OutputError, escaped, guarded, messaging
from gateway.config.parse import ConfigError
from gateway.features.doctor import command as doctor
from gateway.features.keys import command as keys
from gateway.features.ledger.command import usage
from gateway.features.recording.command import record

_DEMO = (
    "Start two replicas and a gateway, play two conversations over one long document, and print a table: predicted and reported"
    " cached tokens, TTFT and cost, compared with round robin."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status (0 done, 1 failed, 2 unusable arguments or configuration)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is not None:  # not a process of its own
        return _run(arguments)
    with messaging():
        try:
            with guarded():
                return _run(arguments)
        except OutputError as error:
            print(f"warmroute: {error}", file=sys.stderr)
            return 1
        except BrokenPipeError:  # the reader of our output (`head`) has closed it
            return 1


def _run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["replica"]:
        # The inference server has its own imports (torch, transformers).
        from replica.cli import main as replica_main

        return replica_main(list(arguments[1:]))
    options, unknown = _parser().parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")  # with the usage of its command
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except ConfigError as error:
        for problem in error.problems:
            print(f"warmroute: {escaped(str(problem))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="warmroute", description="A prefix-cache-aware load-balancing gateway for LLM replicas.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"warmroute {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, text: str, description: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=description, allow_abbrev=False)
        command.set_defaults(command=run, parser=command)
        return command

    serve.add_arguments(add("serve", "run the gateway", serve.DESCRIPTION, serve.run))
    commands.add_parser("replica", help="run an inference server with a real or a simulated engine")  # see `_run`
    _add_demo_arguments(add("demo", "two replicas, a gateway, two conversations, a table", _DEMO, _demo))
    text = "compare routing policies on a recorded or generated workload"
    simulate.add_arguments(add("simulate", text, simulate.DESCRIPTION, simulate.run))
    text = "record a running gateway's traffic for `simulate`, without texts and names"
    record.add_arguments(add("record", text, record.DESCRIPTION, record.run))
    text = "convert published traces of coding agents for `simulate`"
    convert.add_arguments(add("convert", text, convert.DESCRIPTION, convert.run))
    check.add_arguments(add("check", "validate a configuration file", check.DESCRIPTION, check.run))
    text = "show the replicas of a running gateway, or watch it"
    operate.add_status_arguments(add("status", text, operate.STATUS, _status))
    text = "find where prefixes break, why, what that costs, and what to change"
    doctor.add_arguments(add("doctor", text, doctor.DESCRIPTION, doctor.run))
    text = "send no new requests to a replica of running gateways"
    operate.add_drain_arguments(add("drain", text, operate.DRAIN, operate.drain))
    keys.add_arguments(add("keys", "make, list, rotate and revoke API keys", keys.DESCRIPTION, keys.run))
    usage.add_arguments(add("usage", "show what was used and what it cost", usage.DESCRIPTION, usage.run))
    return parser


def _add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--once", action="store_true", help="exit after the table; status 0 if every turn but the first ones hit the cache"
    )
    text = "engine of the replicas: real or simulated (default: %(default)s)"
    parser.add_argument("--engine", choices=["transformers", "sim"], default="transformers", help=text)


def _status(options: argparse.Namespace) -> int:
    if options.watch:
        from gateway.commands.watching.watch import watch

        watch(operate.admins_of(options), options.watch)
    return operate.status(options)


def _demo(options: argparse.Namespace) -> int:
    from gateway.commands.demo import run

    return run(engine=options.engine, once=options.once)


if __name__ == "__main__":
    sys.exit(main())
