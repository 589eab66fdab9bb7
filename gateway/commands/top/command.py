"""`warmroute top`: asks the gateway once, and then either prints what it has said, or shows it live.

That first answer decides what a user reads who is wrong about the URL, the key or the release: an error in plain text, before a
screen is drawn. An admin key that is missing is asked for on the screen.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import Final

from gateway.commands.operate import DEFAULT_ADMIN, KEY, OperatorError, ask, whole
from gateway.commands.top.feed import refused
from gateway.commands.top.state import Live
from gateway.commands.top.values import text

SNAPSHOT: Final = "/warmroute/live"
_ERROR_CHARS: Final = 1000
DESCRIPTION: Final = (
    "Show a running gateway live: its replicas, requests as they happen and why each went where it went, the prefix index, hits"
    " and money, keys. Without a terminal, or with --once, print what is the case now. Needs pip install 'warmroute[top]' for"
    " the live screens. The exit status is 1 if the gateway cannot be asked."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    listener = f"of an admin listener, as of `warmroute status` (default: %(default)s). With an admin key, set {KEY} to it"
    parser.add_argument("--admin", metavar="URL", default=DEFAULT_ADMIN, help=listener)
    parser.add_argument("--once", action="store_true", help="print what is the case now as text, and end")


def run(options: argparse.Namespace) -> int:
    """Returns the exit status."""
    once = options.once or not (sys.stdin.isatty() and sys.stdout.isatty())
    if not once and importlib.util.find_spec("textual") is None:
        return _failed("the live screens need textual: pip install 'warmroute[top]'. `warmroute top --once` works without")
    live = Live()
    try:
        live.take("hello", whole(options.admin, ask(options.admin, "GET", SNAPSHOT)))
        if not live.version:
            raise refused(options.admin, 200, b"", has_key=False)
    except OperatorError as error:
        if error.status == 404:
            error = refused(options.admin, 404, b"", has_key=False)
        if once or error.status != 401:
            return _failed(str(error))
    if once:
        from gateway.commands.top.plain import print_live

        print_live(options.admin, live)
        return 0
    from gateway.commands.top.screens.app import show

    return show(options.admin, os.environ)


def _failed(message: str) -> int:
    print(f"warmroute: {text(message, _ERROR_CHARS)}", file=sys.stderr)
    return 1
