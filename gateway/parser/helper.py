"""Main program of the parser process: reads a job, runs it, writes its result, until its socket is closed.

It runs the same functions of the dialects as the event loop does for small bodies, and computes the prompt's block keys. The
cost of a body is bounded: its structure before it is parsed, the address space, the time.

It is a process and not a thread, because parsing holds the GIL. Signals of a terminal or a service manager are ignored: a
draining gateway still needs its parser.
"""

from __future__ import annotations

import contextlib
import gc
import json
import marshal
import resource
import signal
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from gateway.config.aliases import Aliases
from gateway.dialects.api_request import ApiRequest, router_prompt
from gateway.dialects.dialect import Dialect
from gateway.dialects.json_edits import Edit, read_object
from gateway.dialects.json_structure import exceeds, too_complex
from gateway.dialects.models.rename import rename
from gateway.dialects.prompt.outline import Outliner
from gateway.dialects.steering import cuts_of
from gateway.dialects.table import Dialects
from gateway.errors import GatewayError
from gateway.parser import wire

# Address space per byte of a job's body. The worst body is one text with an emoji in it: four bytes per character, beside the
# body itself, the JSON parser's tree and the canonical prompt.
_MEMORY_PER_BYTE: Final = 12
_DIALECTS: Final = Dialects()
_OUTLINER: Final = Outliner(2048, 1 << 14)  # each request of a conversation repeats its turns: a few MiB
Operation = Callable[..., tuple[Any, ...]]


def main(arguments: Sequence[str]) -> None:
    """arguments: the socket's file descriptor, the time limit of a job in seconds, its base address space in MiB, and the
    operations of features (`ParserProcess.operations`) as JSON.
    """
    sock, limit_s, memory = socket.socket(fileno=int(arguments[0])), int(arguments[1]), int(arguments[2]) << 20
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # the OOM killer takes this process before a serving one
    operations = {**_OPERATIONS, **{name: _imported(path) for name, path in json.loads(arguments[3]).items()}}
    gc.disable()  # parsing makes no cycles
    with contextlib.suppress(ConnectionError), sock, sock.makefile("rb") as stream:
        while len(head := stream.read(wire.JOB.size)) == wire.JOB.size:
            packed, length = wire.JOB.unpack(head)
            _bound_memory(memory + _MEMORY_PER_BYTE * length)
            job, body = stream.read(packed), stream.read(length)
            if len(body) < length:
                return
            signal.alarm(limit_s)  # kills the process, even within a C function
            result = answer(marshal.loads(job), body, operations)
            signal.alarm(0)
            del body
            sock.sendall(result)


def _bound_memory(size: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size if most == resource.RLIM_INFINITY else min(size, most), most))


def _imported(path: str) -> Operation:
    module, _, name = path.partition(":")
    operation: Operation = getattr(import_module(module), name)
    return operation


def answer(job: tuple[Any, ...], body: bytes, operations: Mapping[str, Operation] | None = None) -> bytes:
    """The encoded result of one job. operations: by name; default: the core's."""
    operation, *arguments = job
    try:
        return wire.result(wire.DONE, *(operations or _OPERATIONS)[operation](body, *arguments))
    except GatewayError as error:
        return wire.refusal(error)
    except MemoryError:
        text = "Parsing the body takes more memory than the gateway has for it. Send less."
        return wire.refusal(GatewayError(413, "request_too_large", text))
    except Exception:  # noqa: BLE001  (outermost handler: the parent logs it)
        return wire.result(wire.FAILED, traceback.format_exc())


def _parse(
    body: bytes,
    name: str,
    block_bytes: int,
    block_tokens: int,
    scope: tuple[str, ...],
    aliases: dict[str, str],
    outlined: bool = False,
) -> wire.ParsedBody:
    api = _read(_DIALECTS.named(name), body)
    if aliases:
        rename(api, body, Aliases(aliases), at_once=False)
    if outlined and isinstance(api.prompt, bytes):
        api.outline = _OUTLINER.outline(api.prompt)
    if api.prompt is not None:
        router_prompt(api, (block_bytes, block_tokens), scope=scope)  # sets `api.made`
    return wire.parsed_body(api)


def _read(dialect: Dialect, body: bytes) -> ApiRequest:
    if not exceeds(body):
        return dialect.parse(body)
    api = dialect.parse_complex(body)
    if api is None:
        raise too_complex()
    return api


def _continue(body: bytes, name: str, text: str, tokens: int) -> tuple[str, list[Edit]]:
    continuation = _DIALECTS.named(name).continuation
    assert continuation is not None
    return continuation.request(body, text, tokens)


def _members(body: bytes) -> tuple[dict[str, tuple[int, int]], int]:
    members = read_object(body)
    return members.spans, members.end


def _cuts(body: bytes, names: Sequence[str]) -> tuple[list[Edit]]:
    return (cuts_of(body, names),)


_OPERATIONS: Final[Mapping[str, Operation]] = {
    wire.PARSE: _parse,
    wire.CONTINUE: _continue,
    wire.MEMBERS: _members,
    wire.CUTS: _cuts,
}
