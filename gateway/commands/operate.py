"""`warmroute status` and `warmroute drain`: the replicas of running gateways, by their operator endpoints.

Each gateway knows its own drains only, so a drain goes to all gateways that are named.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from gateway.config.listen import UNIX
from gateway.config.schema import ADMIN_PORT_OFFSET, DEFAULT_LISTEN

KEY: Final = "WARMROUTE_ADMIN_KEY"
TIMEOUT_S: Final = 10.0
ANSWERED: Final = {"replicas", "configured", "draining"}  # one of these keys is in each good answer
DEFAULT_ADMIN: Final = f"http://127.0.0.1:{int(DEFAULT_LISTEN.rpartition(':')[2]) + ADMIN_PORT_OFFSET}"

STATUS: Final = "Show the replicas of a running gateway, where they are found, and whether it shares with other gateways."
DRAIN: Final = (
    "Send no new requests to a replica, at each of the gateways that are named; what runs there finishes. The exit status is 1 "
    "if one of them does not do it."
)
_LISTENER: Final = (
    f"of an admin listener (admin_listen), or {UNIX}/PATH (default: %(default)s). With an admin key, set {KEY} to it"
)


class OperatorError(Exception):
    """A gateway does not do what was asked of it; its text says why."""


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--admin", metavar="URL", default=DEFAULT_ADMIN, help=f"URL {_LISTENER}")
    parser.add_argument("--json", action="store_true", help="print what GET /warmroute/replicas answers")


def add_drain_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the replica's name, as `warmroute status` shows it")
    parser.add_argument("--off", action="store_true", help="end the drain: the replica gets requests again")
    parser.add_argument("--admin", metavar="URL[,URL...]", default=DEFAULT_ADMIN, help=f"one or more URLs, each {_LISTENER}")


def status(options: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        answer = ask(options.admin, "GET", "/warmroute/replicas")
        if options.json:
            print(json.dumps(answer, indent=2))
        else:
            _print(answer, ask(options.admin, "GET", "/warmroute/sharing"))
    except OperatorError as error:
        return _failed(error)
    return 0


def drain(options: argparse.Namespace) -> int:
    """Returns the exit status."""
    result = 0
    for admin in map(str.strip, options.admin.split(",")):
        try:
            answer = ask(admin, "POST", "/warmroute/undrain" if options.off else "/warmroute/drain", {"name": options.name})
        except OperatorError as error:
            result = _failed(error)
            continue
        done = "gets no new requests" if answer["draining"] else "gets requests"
        if options.off and answer["draining"]:  # by a pod that is not ready, say
            done = "still gets no new requests, for the source that found it drains it"
        print(f"{admin}: {answer['name']} {done}; running there: {answer['inflight']}")
    return result


def ask(admin: str, method: str, path: str, body: Any = None, env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The answer, parsed. admin: URL of a gateway's admin listener, host:port, or unix:/path. Raises OperatorError."""
    key = env.get(KEY, "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        connection, prefix = _connection(admin)
        try:
            connection.request(method, prefix + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            code, raw = response.status, response.read()
        finally:
            connection.close()
    except OSError as error:
        where = f"Its log line `listening` has the URL of its admin listener as admin_url, and {DEFAULT_ADMIN} is the default."
        raise OperatorError(f"{admin} cannot be reached: {error.strerror or error}. Is the gateway running? {where}") from error
    except (http.client.HTTPException, ValueError) as error:
        raise OperatorError(f"{admin!r} is no URL of an admin listener: {type(error).__name__}: {error}") from error
    return _parsed(admin, code, raw, has_key=bool(key))


def _connection(admin: str) -> tuple[http.client.HTTPConnection, str]:
    """A connection that is not made yet, and what paths begin with. Raises ValueError."""
    if admin.startswith(UNIX):
        return _UnixConnection(admin.removeprefix(UNIX)), ""
    parts = urlsplit(admin if "://" in admin else f"http://{admin}")
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    if parts.scheme not in kinds or not parts.hostname:
        raise ValueError(f"http://HOST:PORT, https://HOST:PORT or {UNIX}/PATH is expected")
    return kinds[parts.scheme](parts.hostname, parts.port, timeout=TIMEOUT_S), parts.path.rstrip("/")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self._path)


def _parsed(admin: str, code: int, raw: bytes, *, has_key: bool) -> dict[str, Any]:
    """Raises OperatorError for an error, and for what no gateway answers."""
    try:
        answer: dict[str, Any] = json.loads(raw)
        text = "" if code < 300 and answer.keys() & ANSWERED else answer["error"]["message"]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise OperatorError(f"{admin} is no admin listener of a gateway: it answers {code}") from None
    if code == 401:
        text = f"{KEY} is not its admin key" if has_key else f"it has an admin key: set {KEY} to it"
    if text:
        raise OperatorError(f"{admin}: {text}")
    return answer


def _print(answer: Mapping[str, Any], sharing: Mapping[str, Any]) -> None:
    from gateway.commands.tables import number, print_table, text

    columns = [
        text("replica"),
        text("pool"),
        text("state"),
        number("in flight"),
        number("booked tokens"),
        number("held tokens"),
    ]
    rows = [
        [
            row["name"],
            row["pool"] or "",
            _state(row),
            *(f"{row[key]:,}" for key in ("inflight", "booked_tokens", "held_tokens")),
        ]
        for row in answer["replicas"]
    ]
    print_table(columns, rows)
    for source in answer["sources"]:
        problem = f", {source['problem']}" if source["problem"] else ""
        print(f"{source['name']}: {source['replicas']} replicas{problem}")
    if sharing["configured"]:
        up = f"other gateways: {len(sharing['gateways'])}" if sharing["up"] else f"the store is away: {sharing['problem']}"
        print(f"sharing as {sharing['cluster']}: {up}")


def _state(row: Mapping[str, Any]) -> str:
    words: Sequence[str] = [word for word in ("leaving", "draining") if row[word]]
    return ", ".join([*words, *(["up"] if row["up"] else [f"down ({row['error'] or 'not probed yet'})"])])


def _failed(error: OperatorError) -> int:
    print(f"warmroute: {error}", file=sys.stderr)
    return 1
