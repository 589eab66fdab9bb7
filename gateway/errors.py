"""Errors: their cause, their status, and the use of another attempt.

Two families: `GatewayError` is an answer to the client (each dialect writes it in its own shape); `ReplicaFailure` is one
attempt on one replica that failed before any byte was sent to the client, so that another replica may be tried.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from typing import Any, Final

from router.native import mypyc_attr

# Errors of an OSError by which the gateway itself lacks file descriptors or memory.
OUT_OF_RESOURCES: Final = frozenset([errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])

RETRY_S: Final = 2  # a Retry-After while replicas are probed
NAMED: Final = 20  # models, replicas or pools in a text that lists them, of possibly thousands

INSUFFICIENT_QUOTA: Final = "insufficient_quota"  # a spent budget: 429, but repeating the request is useless
REPLICA_FAILED: Final = "replica_failed"  # no replica could answer, or complete its answer
TIMEOUT: Final = "timeout"  # of a replica that is up: 504, but a repetition would take as long
DEADLINE: Final = "deadline_exceeded"  # of the client: 504, and a repetition would come later still
_PASSING: Final = frozenset([408, 425, 429])  # errors of the client that a repetition may cure
_CONFLICT: Final = 409  # likewise, if it says when

CLIENT_LEFT: Final = 499  # nginx's status of a request whose client disconnected before its answer; never sent


class GatewayError(Exception):
    """An error as an answer. message: includes advice. code, param: machine-readable, with OpenAI's names.

    public: the message for clients that are no operators, if `message` names replicas, addresses or their error messages.
    members: further members beside the code, which every dialect then writes; None: none.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        public: str | None = None,
        members: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.members = members
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.public = public

    def redacted(self, request_id: str) -> GatewayError:
        """The same error for a client that is no operator: without internal details, with the id that finds them in the log."""
        if self.public is None:
            return self
        text = f"{self.public} The gateway's log has the details, by the request id {request_id}."
        return GatewayError(
            self.status, self.code, text, param=self.param, retry_after_s=self.retry_after_s, members=self.members
        )

    def again(self) -> GatewayError:
        """A copy of the error, to be raised while the caller keeps this one. A raised exception refers to the frames that it
        passed; if one of these frames refers to the exception, it is a cycle that only the garbage collector frees.
        """
        return GatewayError(
            self.status,
            self.code,
            self.message,
            param=self.param,
            retry_after_s=self.retry_after_s,
            public=self.public,
            members=self.members,
        )

    @property
    def permanent(self) -> bool:
        """True if the same request would get the same answer again."""
        if self.code in (TIMEOUT, DEADLINE):
            return True
        if self.status == _CONFLICT:
            return self.retry_after_s is None
        return self.status < 500 and (self.status not in _PASSING or self.code == INSUFFICIENT_QUOTA)

    @property
    def retry_headers(self) -> dict[str, str]:
        """Headers that tell clients when to repeat the request, or that this is useless. Claude Code repeats a plain 401 ten
        times.
        """
        headers = {"x-should-retry": "false"} if self.permanent else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        return headers

    @property
    def retry_lines(self) -> bytes:
        """`retry_headers` as lines of a head."""
        return "".join([f"{name}: {value}\r\n" for name, value in self.retry_headers.items()]).encode("ascii")

    @property
    def fault(self) -> str:
        """The party at fault: "client" or "server"."""
        return "client" if self.status < 500 else "server"


def first_names(names: Sequence[str], where: str = "") -> str:
    """The first NAMED names, and the number of the others. where: place of the full list. O(1)."""
    more = f" and {len(names) - NAMED} more {where}".rstrip() if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def bad_request(message: str, param: str | None = None, code: str = "invalid_request") -> GatewayError:
    return GatewayError(400, code, message, param=param)


def named_model(model: str, alias: str = "") -> str:
    """The model in messages. alias: the client's name for the model, if the configuration has replaced it."""
    stands = f", for which {alias[:100]!r} stands (model_aliases)," if alias and alias != model else ""
    return f"The model {model[:100]!r}{stands}"


def unknown_model(model: str, known: Sequence[str], *, listed: bool, alias: str = "") -> GatewayError:
    """The error for an unknown model. known: sorted names of the models in GET /v1/models. listed: replicas list some. O(1),
    even for many models.

    alias: as in `named_model`.
    """
    nothing = "no model that a replica lists fits its pool (pools[].models)" if listed else "no replica lists any model"
    have = f"this gateway serves: {first_names(known, 'in GET /v1/models')}" if known else nothing
    return GatewayError(404, "model_not_found", f"{named_model(model, alias)} does not exist here; {have}.", param="model")


def out_of_resources(message: str) -> GatewayError:
    """The gateway itself lacks a resource; no replica is at fault."""
    text, public = f"The gateway has run out of resources ({message}).", "The gateway has run out of resources. Retry."
    return GatewayError(503, "gateway_overloaded", text, retry_after_s=1, public=public)


def head_too_large(limit: int) -> GatewayError:
    return GatewayError(431, "head_too_large", f"The request's line and headers are larger than {limit >> 10} KiB together.")


def line_too_long(limit: int) -> GatewayError:
    """limit: maximum bytes of the request line, and of any header line."""
    return GatewayError(431, "head_too_large", f"The request's line, or one of its headers, is longer than {limit:,} bytes.")


def over_budget(size: int, largest: int, body: int = 0) -> GatewayError:
    """The error for a request that needs `size` bytes, for which there is no room. largest: maximum bytes of one client.

    body: bytes of its body, if `size` is the memory for parsing it.
    """
    if size > largest:
        parsed = f"The body has {_mib(body)} and needs {_mib(size)} while it is parsed"
        need = parsed if 0 < body < size else f"The request needs {_mib(size)} of memory"
        share = f"one client's share of this gateway process's memory for requests is {_mib(largest)}"
        text = f"{need}; {share} (limits.inflight_mb, workers). Send or ask for less, or raise the limit."
        return GatewayError(413, "request_too_large", text)
    text = "The gateway holds as many bytes of requests as it may (limits.inflight_mb). Retry the request."
    return GatewayError(503, "gateway_overloaded", text, retry_after_s=1)


def _mib(size: int) -> str:
    return f"{size / 2**20:.3g} MiB"


def internal_error() -> GatewayError:
    return GatewayError(500, "internal_error", "The gateway failed on this request; see its log.")


def too_many_connections(limit: int) -> GatewayError:
    text = f"All {limit} connections of this gateway process are in use, or this address's share of them (limits.connections)."
    return GatewayError(503, "too_many_connections", f"{text} Retry, or reuse connections.", retry_after_s=1)


def supervisor_silent() -> GatewayError:
    text = "The supervisor of the workers does not answer, so no command reached them and nothing was changed. Retry."
    return GatewayError(503, "supervisor_silent", text, retry_after_s=1)


def workers_silent(workers: Sequence[int]) -> GatewayError:
    """workers: numbers of the workers that have not confirmed a command."""
    silent = ", ".join(map(str, workers))
    text = f"Not all workers have done this: {silent} did not answer in time. A silent worker executes it when it continues."
    return GatewayError(503, "workers_silent", f"{text} Look at the state, and retry.", retry_after_s=1)


def shutting_down() -> GatewayError:
    return GatewayError(503, "shutting_down", "The gateway is shutting down. Retry the request.", retry_after_s=1)


def no_replica(message: str, public: str) -> GatewayError:
    return GatewayError(503, "no_replica_available", message, retry_after_s=RETRY_S, public=public)


@mypyc_attr(native_class=False)  # compiled, a native class has no such base
class ClientStalled(ConnectionError):
    """The client has not read its answer for too long. The replica is not at fault: the gateway treats the client as
    disconnected.
    """


def timed_out(replica: str, happened: str) -> GatewayError:
    """A time limit ended the request at a replica that is up. happened: what, with the limit's key."""
    why = "The request is not sent to another replica, which would need as long: raise the limit, or send less."
    text = f"The replica {replica} is up, but {happened}. {why}"
    return GatewayError(504, TIMEOUT, text, public=f"The model is up, but {happened}. {why}")


REFUSED, UNREACHABLE, UNKNOWN_PATH = "refused", "unreachable", "unknown_path"
LOADING: Final = "loading"  # the engine loads its model: it has just started
NO_ACCESS, UNFIT = "no_access", "unfit"
HUNG: Final = "hung"  # it answers probes, and generates nothing


class ReplicaFailure(Exception):
    """An attempt that failed before its first byte reached the client.

    reason: "refused" (no process listens: it is gone, and its cache with it), "loading" (it has just started), "unreachable"
    (no connection for another reason: a timeout, a name that does not resolve), "reset" (the connection broke), "timeout"
    (silence), "garbage" (no valid answer of an engine), "status" (an unexpected status), "unknown_path" (it does not have this
    endpoint), "no_access" (the gateway's own key or certificate for it cannot be read, or the key is refused), "unfit" (its
    engine lacks a requested capability), "hung" (it answers probes, and generates nothing).
    reached: number of times that the request was sent, so that a replica may have begun to work on it, and it may have killed
    the replica. blameless: it shows nothing about the replica: a limit of the gateway ended it, or it ended while it was paused
    for a client that did not read. limit: the key of the time limit that ended it, or "".
    """

    def __init__(
        self, reason: str, message: str, *, reached: int | None = None, blameless: bool = False, limit: str = ""
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.blameless = blameless
        self.limit = limit
        self.reached = int(reason not in (REFUSED, UNREACHABLE)) if reached is None else reached
