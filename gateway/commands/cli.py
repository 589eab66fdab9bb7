"""The `warmroute` command: its subcommands, and the exit status of all of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import chain
from typing import Final

from gateway import __version__
from gateway.commands.streams import OutputError, escaped, guarded, messaging
from gateway.config.parse import ConfigError
from gateway.features.declaring import Command
from gateway.features.table import FEATURES

_REPLICA: Final = "replica"
COMMANDS: Final = [
    Command("serve", "run the gateway", "gateway.commands.serve"),
    Command(_REPLICA, "run an inference server with a real or a simulated engine", ""),
    Command("demo", "two replicas, a gateway, two conversations, a table", "gateway.commands.demo"),
    Command("simulate", "compare routing policies on a recorded or generated workload", "gateway.commands.simulate"),
    Command("convert", "convert published traces of coding agents for `simulate`", "gateway.commands.replaying.convert"),
    Command("check", "validate a configuration file", "gateway.commands.check"),
    Command("status", "show the replicas of a running gateway, or watch it", "gateway.commands.status"),
    Command("drain", "send no new requests to a replica of running gateways", "gateway.commands.drain"),
]
"""The commands of the core."""


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
        except BrokenPipeError:  # the reader of the output (`head`) has closed it
            return 1


def _run(arguments: Sequence[str]) -> int:
    if arguments[:1] == [_REPLICA]:
        # The inference server has its own imports (torch, transformers).
        from replica.cli import main as replica_main

        return replica_main(list(arguments[1:]))
    options, unknown = _parser(arguments).parse_known_args(arguments)
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


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands, by name; only the command in these arguments is imported."""
    parser = argparse.ArgumentParser(
        prog="warmroute", description="A prefix-cache-aware load-balancing gateway for LLM replicas.", allow_abbrev=False
    )
    parser.set_defaults(parser=parser)  # until a command has set its own
    parser.add_argument("--version", action="version", version=f"warmroute {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    called = next((argument for argument in arguments if not argument.startswith("-")), "")
    for name, text, place in chain(COMMANDS, *(feature.commands for feature in FEATURES.values())):
        command = commands.add_parser(name, help=text, allow_abbrev=False)
        if name == called and place:
            module = import_module(place)
            command.description = module.DESCRIPTION
            command.set_defaults(command=module.run, parser=command)
            module.add_arguments(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
