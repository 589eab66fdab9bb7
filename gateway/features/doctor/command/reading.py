"""Reads observed requests from a file. It may contain lines of four formats:

    {"path": "/v1/messages", "body": {...}, "headers": {...}, "time": 12.5, "outcome": {...}}   a request; only body is required
    {"model": ..., "messages": [...], ...}                                                      a body; its API is recognised
    {"timestamp": ..., "input_length": ..., "hash_ids": [...]}                                  a row in Mooncake's format
    {"tool_tokens": ..., "requests": [...], ...}                                                a session in the agents' format

A line that cannot be parsed is counted and reported, and the others are read. Requests that continue stored objects
(`previous_response_id`) are counted, too, because the file lacks their history.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson
from msgspec import Struct

from gateway.config.schema import RoutingConfig
from gateway.dialects.api_request import ApiRequest, router_prompt
from gateway.dialects.json_structure import exceeds
from gateway.dialects.prompt.outline import Outliner
from gateway.dialects.table import DIALECTS, Dialects
from gateway.errors import GatewayError
from gateway.features.doctor.command.lines import MAX_LINE, FileError, lines_of
from gateway.features.doctor.observed import ObservedOutcome, ObservedRequest
from gateway.features.doctor.prices import DoctorPrices
from gateway.request.client import caller_of
from router.simulation.workloads import SimulatedRequest, TraceError, agents, mooncake

_SINCE_2001: Final = 1e9  # Unix seconds; a smaller time is relative
_ANY_LENGTH: Final = 1 << 60  # tokens of a prompt
_MAX_VALUES: Final = 4_000_000  # per line; a session of a trace has many
MAX_PROBLEMS: Final = 5  # described problems; all are counted
_BILLED: Final = (
    "{} requests of Messages begin with Claude Code's billing line, which changes with every request. The gateway removes it"
    " (`strip_billing_header`), so it is not counted here; otherwise no prefix could be reused."
)
_REFERRING: Final = (
    "{} requests continue objects stored by a server (`previous_response_id`, `conversation`). The file lacks their history, so"
    " they are left out. `warmroute doctor --live` examines such requests."
)
_PROMPTLESS: Final = "{} requests have no readable prompt, and are left out."


class LineError(Exception):
    """A line cannot be parsed. The message says why."""


class _LineOutcome(Struct, frozen=True):
    """The `outcome` of a line."""

    replica: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    available_tokens: int | None = None
    reason: str = ""
    up: list[str] | None = None
    first_byte: float | None = None


class _Headers:
    """Headers with case-insensitive names."""

    def __init__(self, headers: Any) -> None:
        if headers is not None and not isinstance(headers, dict):
            raise LineError("'headers' must be an object")
        self._values = {str(name).lower(): value for name, value in (headers or {}).items() if isinstance(value, str)}

    def get(self, name: str, /) -> str | None:
        return self._values.get(name.lower())


class Reader:
    """Reads files. skipped: number of lines that could not be parsed. problems: descriptions of the first ones."""

    def __init__(self, prices: DoctorPrices, *, text: bool = False, now: float = 0.0) -> None:
        """now: Unix seconds, for prices that change. text: prompts store their texts, so that these can be shown."""
        self._prices = prices
        self._text = text
        self._now = now
        self._outliner = Outliner()
        self._dialects = Dialects()
        self._blocks = RoutingConfig().block_bytes, RoutingConfig().block_tokens
        self.skipped = 0
        self.billed = 0
        self.referring = 0
        self.promptless = 0
        self.problems = list[str]()

    @property
    def notes(self) -> list[str]:
        counts = (self.billed, _BILLED), (self.referring, _REFERRING), (self.promptless, _PROMPTLESS)
        return [text.format(count) for count, text in counts if count]

    def read(self, path: Path) -> Iterator[ObservedRequest]:
        """Raises FileError if the file, or its rest, cannot be read."""
        sessions = _Sessions()
        for number, line in lines_of(path):
            try:
                row = _row(line)
                if "hash_ids" in row:
                    yield self._from_mooncake(row, number)
                elif "requests" in row and "model" not in row:
                    for request in sessions.of(row):
                        yield self._from_trace(request, number, request.session)
                elif (found := self._from_request(row, number)) is not None:
                    yield found
            except (LineError, TraceError, GatewayError) as error:
                self._skip(number, error)

    def _skip(self, number: int, error: Exception) -> None:
        self.skipped += 1
        if len(self.problems) < MAX_PROBLEMS:
            text = error.message if isinstance(error, GatewayError) else str(error)
            self.problems.append(f"line {number}: {text}")

    def _from_mooncake(self, row: dict[str, Any], number: int) -> ObservedRequest:
        """A request without a session."""
        try:
            ((time, request),) = mooncake([row], random.Random(0))
        except TraceError as error:
            raise LineError(str(error).removeprefix("row 1 ")) from error
        found = self._from_trace(request, number, "")
        found.time = time
        return found

    def _from_trace(self, request: SimulatedRequest, number: int, session: str) -> ObservedRequest:
        prompt = request.prompt
        found = ObservedRequest("", prompt.keys, prompt.units, prompt.block_units, exact=True)
        found.session, found.thread = session, request.thread
        found.place = f"line {number}"
        found.price = self._price(found)
        return found

    def _from_request(self, row: dict[str, Any], number: int) -> ObservedRequest | None:
        """None: its prompt is not in the file."""
        path, body, headers = _request_in(row)
        dialect, caller = self._dialects.known(path), caller_of(headers)
        if exceeds(body):
            raise LineError("the body has too many values")
        api = dialect.parse(body)
        if api.refers or _refers(body):
            self.referring += 1
            return None
        if api.prompt is None:
            self.promptless += 1
            return None
        self.billed += bool(api.billing)
        found = self._observed(api)
        found.tenant, found.session = caller.tenant, caller.session or api.session
        found.thread = caller.agent
        found.place, found.time = f"line {number}", _time(row.get("time"))
        found.outcome = _outcome(row.get("outcome"))
        found.price = self._price(found)
        return found

    def _price(self, found: ObservedRequest) -> tuple[float, float] | None:
        """The price at its time if that is a date, otherwise today's."""
        now = found.time if found.time > _SINCE_2001 else self._now
        return self._prices.of(found.model, found.tokens(found.units), now)

    def _observed(self, api: ApiRequest) -> ObservedRequest:
        text = api.prompt if isinstance(api.prompt, bytes) else b""
        outline = self._outliner.outline(text) if text else ()
        made = router_prompt(api, self._blocks)
        found = ObservedRequest(api.model, made.keys, made.units, made.block_units, exact=not made.scale, outline=outline)
        found.salt = api.salt
        found.text = text if self._text else b""
        return found


class _Sessions:
    """Sessions of agents' traces, by number: the block ids of each session are distinct."""

    def __init__(self) -> None:
        self._number = 0

    def of(self, row: dict[str, Any]) -> list[SimulatedRequest]:
        """Raises LineError."""
        self._number += 1
        try:
            return [request for session in agents([row], _ANY_LENGTH, self._number) for _, request in session]
        except TraceError as error:
            raise LineError(str(error).removeprefix(f"row {self._number} ")) from error
        except RecursionError as error:
            raise LineError("its requests are nested too deeply") from error


def _row(line: bytes | None) -> dict[str, Any]:
    if line is None:
        raise LineError(f"longer than {MAX_LINE >> 20} MiB")
    if exceeds(line, _MAX_VALUES):
        raise LineError("too many values")
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise LineError(f"not JSON in UTF-8: {error}") from error
    if not isinstance(row, dict):
        raise LineError("not a JSON object")
    return row


def _request_in(row: dict[str, Any]) -> tuple[str, bytes, _Headers]:
    """(path, body, headers). Raises LineError."""
    if "body" not in row:
        return _path_of(row), _encoded(row), _Headers(None)
    body, path = row["body"], row.get("path")
    if isinstance(body, str):
        raw = body.encode()
    elif isinstance(body, dict):
        raw = _encoded(body)
        path = _path_of(body) if path is None else path
    else:
        raise LineError("'body' must be an object")
    if not isinstance(path, str):
        raise LineError("'path' must be a string such as '/v1/chat/completions'")
    return path, raw, _Headers(row.get("headers"))


def _encoded(body: dict[str, Any]) -> bytes:
    """Raises LineError, because orjson parses deeper nesting than it writes."""
    try:
        return orjson.dumps(body)
    except TypeError as error:
        raise LineError("nested too deep") from error


def _path_of(body: Mapping[str, Any]) -> str:
    """The path of the API with bodies of this form. Raises LineError."""
    if "messages" in body:
        tools = body.get("tools")
        named = isinstance(tools, list) and any(isinstance(tool, dict) and "input_schema" in tool for tool in tools)
        return "/v1/messages" if named or "system" in body or "anthropic_version" in body else "/v1/chat/completions"
    if "input" in body or "instructions" in body:
        return "/v1/responses"
    if "prompt" in body:
        return "/v1/completions"
    known = ", ".join(path for path, dialect in DIALECTS.items() if dialect.strict and not path.endswith("/"))
    raise LineError(f"neither a request ('path' and 'body'; paths: {known}), nor a body, nor a row of a trace")


def _refers(body: bytes) -> bool:
    """True if the body continues an object stored by a server, in any dialect."""
    if b'"previous_response_id"' not in body and b'"conversation"' not in body:
        return False
    fields = orjson.loads(body)
    return any(fields.get(name) is not None for name in ("previous_response_id", "conversation"))


def _time(value: Any) -> float:
    """Seconds, or a time in ISO 8601. Raises LineError."""
    if value is None:
        return 0.0
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value).timestamp()
        except (ValueError, OverflowError, OSError) as error:
            raise LineError(f"'time' is not in ISO 8601: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise LineError("'time' must be seconds, or a time in ISO 8601")
    return float(value)


def _outcome(value: Any) -> ObservedOutcome | None:
    """Raises LineError."""
    if value is None:
        return None
    try:
        fields = msgspec.convert(value, _LineOutcome)
    except msgspec.ValidationError as error:
        raise LineError(f"'outcome': {error}") from error
    counts = fields.prompt_tokens, fields.cached_tokens, fields.available_tokens
    if any(count is not None and not 0 <= count < 1 << 53 for count in counts):
        raise LineError("'outcome': tokens must be 0 or more")
    up = None if fields.up is None else frozenset(fields.up)
    return ObservedOutcome(fields.replica, *counts, fields.reason, up, fields.first_byte)


__all__ = ["FileError", "LineError", "Reader"]
