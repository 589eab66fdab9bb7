"""`warmroute drain`: stops or resumes new requests for a replica.

Each gateway knows only its own drains, so a drain is sent to all named gateways.
"""

from __future__ import annotations

import argparse
from typing import Final

from gateway.commands.operate import DEFAULT_ADMIN, LISTENER, DrainAnswer, OperatorError, admins_of, ask, failed, read, shown

DESCRIPTION: Final = (
    "Send no new requests to a replica, at each named gateway; its running requests finish. The exit status is 1 "
    "if one of the gateways does not do it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the replica's name, as `warmroute status` shows it")
    parser.add_argument("--off", action="store_true", help="end the drain: the replica gets requests again")
    parser.add_argument("--admin", metavar="URL[,URL...]", default=DEFAULT_ADMIN, help=f"one or more URLs, each {LISTENER}")


def run(options: argparse.Namespace) -> int:
    """Run the command. Returns the exit status."""
    result = 0
    for admin in admins_of(options):
        try:
            path = "/warmroute/undrain" if options.off else "/warmroute/drain"
            answer = read(admin, ask(admin, "POST", path, {"name": options.name}), DrainAnswer)
        except OperatorError as error:
            result = failed(error)
            continue
        done = "gets no new requests" if answer.draining else "gets requests"
        if options.off and answer.draining:  # its pod is not ready, for example
            done = "still gets no new requests, for the source that found it drains it"
        print(shown(f"{admin}: {answer.name} {done}; running there: {answer.inflight}"))
    return result
