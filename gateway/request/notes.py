"""Notes of one request while it runs: a feature that follows requests through their phases subclasses `Notes`.

`Exchange.notes` is None for nearly all requests: then nothing is called, and the clock is not read.
"""

from __future__ import annotations

from typing import Final

from gateway.fleet.state import ReplicaState
from gateway.upstream.client import ReplicaCall
from router.native import mypyc_attr

RECEIVE: Final = "receive"
PARSE: Final = "parse"
RECALL: Final = "recall"
ADMIT: Final = "admit"
CHOOSE: Final = "choose"
DELIVER: Final = "deliver"
RUN: Final = "run"


@mypyc_attr(allow_interpreted_subclasses=True)
class Notes:
    """Notes of one request (see the module). now: readings of the gateway's clock, in seconds."""

    __slots__ = ()

    def enter(self, phase: str, now: float) -> None:
        """A phase begins, and the previous one ends."""
        raise NotImplementedError

    def calls(self, call: ReplicaCall, replica: ReplicaState, now: float) -> ReplicaCall:
        """An attempt begins. Returns the call for the replica."""
        raise NotImplementedError

    def failed(self, reason: str, text: str, now: float) -> None:
        """The last attempt has failed. Idempotent."""
        raise NotImplementedError
