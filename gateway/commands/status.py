"""`warmroute status`: the replicas of running gateways, once or repeatedly."""

from __future__ import annotations

import argparse
import json
from typing import Any, Final

from gateway.commands.operate import (
    DEFAULT_ADMIN,
    LISTENER,
    OperatorError,
    ReplicasAnswer,
    SharingAnswer,
    admins_of,
    ask,
    failed,
    picture,
    read,
    whole,
)

DESCRIPTION: Final = (
    "Show the replicas of running gateways, where they are found, and whether each gateway shares with others. The exit status "
    "is 1 if one of them cannot be asked."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--admin", metavar="URL[,URL...]", default=DEFAULT_ADMIN, help=f"one or more URLs, each {LISTENER}")
    form = parser.add_mutually_exclusive_group()
    answers = "print what GET /warmroute/replicas answers; of several gateways, an object with the answer of each by its URL"
    form.add_argument("--json", action="store_true", help=answers)
    again = "show it every SECONDS (default: %(const)g), with requests/s, cached tokens and money, until Ctrl-C"
    form.add_argument("--watch", metavar="SECONDS", nargs="?", type=_seconds, const=2.0, help=again)


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status."""
    if options.watch:
        from gateway.commands.watching.watch import watch

        watch(admins_of(options), options.watch)
    result, answers, admins = 0, dict[str, Any](), admins_of(options)
    for admin in admins:
        try:
            raw = ask(admin, "GET", "/warmroute/replicas")
            replicas, answers[admin] = read(admin, raw, ReplicasAnswer), whole(admin, raw)
            if not options.json:
                from gateway.commands.tables import console

                sharing = read(admin, ask(admin, "GET", "/warmroute/sharing"), SharingAnswer)
                if len(admins) > 1:
                    print(f"{admin}:")
                for part in picture(replicas, sharing):
                    console().print(part)
        except OperatorError as error:
            result = failed(error)
    if options.json and (answers or len(admins) > 1):
        print(json.dumps(answers if len(admins) > 1 else answers[admins[0]], indent=2))
    return result


def _seconds(text: str) -> float:
    if not 0.1 <= (seconds := float(text)) <= 86_400:
        raise argparse.ArgumentTypeError(f"{text}: from 0.1 to 86,400 seconds are possible")
    return seconds
